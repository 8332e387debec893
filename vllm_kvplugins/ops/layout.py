"""Pages of keys and values, and the order of elements in a page."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Plane:
    """One half of a page: all keys, or all values, of its slots.

    Args:
        offsets: int32 [block_size * head_dim]; entry ``s * head_dim + d`` is the
            offset of dimension ``d`` of slot ``s`` from the start of the page.
        base: offset of slot 0, dimension 0.
        strides: elements from slot to slot and from dimension to dimension; None if
            they vary or are negative, which a torch view cannot express.
    """

    offsets: torch.Tensor
    base: int
    strides: tuple[int, int] | None

    @property
    def row_stride(self) -> int:
        """Elements from one slot's row to the next; 0 if slots are not rows."""
        step, across = self.strides or (0, 0)
        return step if across == 1 else 0


@dataclass(frozen=True, slots=True, eq=False)
class PageLayout:
    """The order of elements in a page, as the attention kernel requires it.

    ::

        page:  [ keys: block_size * head_dim | values: block_size * head_dim ]

    Args:
        block_size: slots per page.
        head_dim: elements per key, and per value.
        k_offsets, v_offsets: int32 [block_size * head_dim], contiguous, on the
            device of the heap; together they list every element of a page once.

    Raises:
        ValueError: a size is not positive, a table has another dtype, shape or
            device, or the tables are not a permutation of the page.

    Cost: one sort of ``2 * block_size * head_dim`` offsets at construction, and
        a host sync if they are on an accelerator.
    """

    block_size: int
    head_dim: int
    k_offsets: torch.Tensor
    v_offsets: torch.Tensor
    keys: Plane = field(init=False, repr=False)
    values: Plane = field(init=False, repr=False)

    @property
    def digest(self) -> str:
        """A hash; equal for layouts with the same offsets."""
        tables = torch.cat([self.k_offsets, self.v_offsets]).cpu()
        raw = tables.contiguous().view(torch.uint8).numpy().tobytes()
        return hashlib.blake2b(raw, digest_size=8).hexdigest()

    def __post_init__(self) -> None:
        for name in ("block_size", "head_dim"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("k_offsets", "v_offsets"):
            _check_table(name, getattr(self, name), self.page_elems // 2)
        if self.k_offsets.device != self.v_offsets.device:
            raise ValueError(
                f"k_offsets is on {self.k_offsets.device}, "
                f"v_offsets on {self.v_offsets.device}"
            )
        seen = torch.cat([self.k_offsets, self.v_offsets]).sort().values
        wrong = (seen != torch.arange(self.page_elems, device=seen.device)).nonzero()
        if len(wrong):
            i = int(wrong[0])
            slot_offset = int(seen[i])
            raise ValueError(
                "k_offsets and v_offsets must list every element of a page once; "
                + (
                    f"element {i} is missing"
                    if slot_offset > i
                    else f"offset {slot_offset} is repeated or negative"
                )
            )
        object.__setattr__(self, "keys", self._plane(self.k_offsets))
        object.__setattr__(self, "values", self._plane(self.v_offsets))

    def _plane(self, offsets: torch.Tensor) -> Plane:
        base = int(offsets[0])
        table = (offsets - base).view(self.block_size, self.head_dim)
        return Plane(offsets, base, _strides(table))

    @property
    def page_elems(self) -> int:
        """Elements in a page, keys and values together."""
        return 2 * self.block_size * self.head_dim

    @classmethod
    def interleaved(cls, block_size: int, head_dim: int) -> PageLayout:
        """``[block_size, 2 * head_dim]``: each slot's key, then its value. vLLM's CUDA
        backends use it."""
        dim = torch.arange(head_dim, dtype=torch.int32)
        slot = torch.arange(block_size, dtype=torch.int32)
        keys = (slot[:, None] * 2 * head_dim + dim).reshape(-1)
        return cls(block_size, head_dim, keys, keys + head_dim)

    @classmethod
    def natural(cls, block_size: int, head_dim: int) -> PageLayout:
        """Keys and values both ``[block_size, head_dim]``."""
        elements = torch.arange(2 * block_size * head_dim, dtype=torch.int32)
        half = block_size * head_dim
        return cls(
            block_size, head_dim, elements[:half].clone(), elements[half:].clone()
        )

    @classmethod
    def transposed_keys(cls, block_size: int, head_dim: int) -> PageLayout:
        """Keys ``[head_dim, block_size]``, values natural: x86 CPUs without AMX."""
        elements = torch.arange(2 * block_size * head_dim, dtype=torch.int32)
        half = block_size * head_dim
        keys = elements[:half].view(head_dim, block_size).t().reshape(-1)
        return cls(block_size, head_dim, keys.clone(), elements[half:].clone())

    def to(self, device: torch.device | str) -> PageLayout:
        """This layout with its tables on ``device``; itself if they are there."""
        k_offsets = self.k_offsets.to(device)
        if k_offsets is self.k_offsets:
            return self
        return PageLayout(
            self.block_size, self.head_dim, k_offsets, self.v_offsets.to(device)
        )


@dataclass(frozen=True, slots=True, eq=False)
class PagedKV:
    """A heap of pages and their layout, which ops take: ``kvp::PagedKV`` in csrc.

    Args:
        pages: float32, float16, bfloat16 or uint8 (fp8 elements) [num_pages,
            page_elems], each page contiguous. Ops check it.
        layout: the order of elements in a page, on the device of the pages.
    """

    pages: torch.Tensor
    layout: PageLayout


def _strides(table: torch.Tensor) -> tuple[int, int] | None:
    """Strides of a table [block_size, head_dim] whose first entry is 0, if constant."""
    slots, dims = table.shape
    # A plane of one slot or one dimension has no step in that direction.
    step = int(table[1, 0]) if slots > 1 else dims
    across = int(table[0, 1]) if dims > 1 else 1
    slot = torch.arange(slots, device=table.device)
    dim = torch.arange(dims, device=table.device)
    even = torch.equal(table, slot[:, None] * step + dim * across)
    return (step, across) if even and min(step, across) > 0 else None


def _check_table(name: str, table: torch.Tensor, size: int) -> None:
    if table.dtype != torch.int32:
        raise ValueError(f"{name} must be int32, got {table.dtype}")
    if table.shape != (size,):
        raise ValueError(
            f"{name} must have shape [block_size * head_dim] = [{size}], "
            f"got {list(table.shape)}"
        )
    if not table.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {table.stride()}")
