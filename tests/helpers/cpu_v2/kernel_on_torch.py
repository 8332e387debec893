"""Runs the source of our Triton kernels on torch, one program after the other.

An interpreter like Triton's own, for the few operations that our kernels use. Without
Triton's types, builders and checks a program takes a tenth of the time or less, so
whole engines can run on it. The kernel test suite runs on both.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, SimpleNamespace
from typing import Any

import torch


def replace_kernels(paged_attention: Any) -> None:
    """Make a module launch its kernels on torch."""
    for name in ("attend", "merge"):
        kernel = getattr(paged_attention, name)
        setattr(paged_attention, name, Launcher(on_torch(kernel.fn)))


@dataclass(frozen=True, slots=True)
class Pointer:
    """A pointer: elements from a tensor's first one to the end of its storage."""

    memory: torch.Tensor
    offset: Any = 0

    @classmethod
    def to(cls, tensor: torch.Tensor) -> Pointer:
        first = tensor.storage_offset()
        size = tensor.untyped_storage().nbytes() // tensor.itemsize - first
        return cls(tensor.as_strided((size,), (1,), first))

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=self.memory.dtype)

    def __add__(self, elements: Any) -> Pointer:
        return Pointer(self.memory, self.offset + elements)


class Launcher:
    """``kernel[grid](...)``."""

    def __init__(self, program: Callable[..., None]) -> None:
        self._program = program

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **named: Any) -> None:
        named.pop("num_warps", None)
        positional = [_argument(value) for value in arguments]
        constants = {name: _argument(value) for name, value in named.items()}
        for place in itertools.product(*map(range, grid)):
            Language.place = tuple(torch.tensor(index) for index in place)
            self._program(*positional, **constants)


def _argument(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Pointer.to(value)
    name = getattr(value, "name", None)  # one of Triton's own types
    return _TYPES.get(name, value)


_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@functools.cache
def on_torch(function: FunctionType) -> FunctionType:
    """A copy of the function, and of its callees, that uses ``Language`` as ``tl``."""
    names = dict(function.__globals__)
    names |= {"tl": Language, "_INTERPRETED": True}
    rebound = FunctionType(function.__code__, names, function.__name__)
    for name in function.__code__.co_names:
        called = getattr(names.get(name), "fn", None)
        if isinstance(called, FunctionType):
            names[name] = on_torch(called)
    return rebound


def _tensors(*values: Any) -> list[torch.Tensor]:
    return [torch.as_tensor(value) for value in values]


class Language:
    """The operations of ``triton.language`` that the kernels use."""

    place: tuple[torch.Tensor, ...] = ()

    int16, int32, int64 = torch.int16, torch.int32, torch.int64
    float16, float32 = torch.float16, torch.float32
    arange = staticmethod(functools.cache(torch.arange))
    where, exp, log = map(staticmethod, (torch.where, torch.exp, torch.log))
    sigmoid = staticmethod(torch.sigmoid)

    @classmethod
    def program_id(cls, axis: int) -> torch.Tensor:
        return cls.place[axis]

    @staticmethod
    def load(pointer: Pointer, mask: Any = None, other: Any = None) -> torch.Tensor:
        at = torch.as_tensor(pointer.offset)
        if mask is None:
            return pointer.memory.take(_checked(pointer, at))
        loaded = pointer.memory.take(_checked(pointer, at.where(mask, 0)))
        return loaded.where(mask, torch.tensor(other, dtype=loaded.dtype))

    @staticmethod
    def store(pointer: Pointer, value: torch.Tensor, mask: Any = None) -> None:
        at = torch.as_tensor(pointer.offset)
        value = value.to(pointer.memory.dtype).expand(at.shape)
        if mask is not None:
            at, value = at[mask], value[mask]
        pointer.memory.put_(_checked(pointer, at), value)

    @staticmethod
    def cast(
        value: torch.Tensor, dtype: torch.dtype, bitcast: bool = False
    ) -> torch.Tensor:
        return value.view(dtype) if bitcast else value.to(dtype)

    @staticmethod
    def zeros(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    @staticmethod
    def full(shape: list[int], value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype)

    @staticmethod
    def max(values: torch.Tensor, axis: int) -> torch.Tensor:
        return values.amax(axis)

    @staticmethod
    def sum(values: torch.Tensor, axis: int) -> torch.Tensor:
        return values.sum(axis)

    @staticmethod
    def maximum(one: Any, other: Any) -> torch.Tensor:
        return torch.maximum(*_tensors(one, other))

    @staticmethod
    def minimum(one: Any, other: Any) -> torch.Tensor:
        return torch.minimum(*_tensors(one, other))

    @staticmethod
    def cdiv(one: Any, other: Any) -> Any:
        return -(-one // other)

    @staticmethod
    def dot(a: torch.Tensor, b: torch.Tensor, input_precision: str) -> torch.Tensor:
        assert input_precision == "ieee", "what the kernels ask for"
        return a @ b


def _checked(pointer: Pointer, at: torch.Tensor) -> torch.Tensor:
    """Check the index: torch accepts negative indices."""
    assert not at.numel() or int(at.min()) >= 0, "an element before the tensor"
    return at.long()
