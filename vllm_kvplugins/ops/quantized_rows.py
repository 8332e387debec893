"""Rows of keys and values in host memory, quantized to 8 or 4 bits per element."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_kvplugins.ops.dispatch import call_compiled
from vllm_kvplugins.ops.extension import compiled_for

_CPU = torch.device("cpu")
# Bits per element, by the names that settings use.
BITS = {"int8": 8, "int4": 4}
# Elements per group, by bits.
_GROUP = {8: 64, 4: 32}
# A step (bfloat16) and a smallest multiple (int16).
_SCALE_BYTES = 4
_MAX_ELEMENT = 1e37
_MAX_MULTIPLE = 32767.0
# The bits of a bfloat16.
_NAN = 0x7FC0


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """The format of quantized rows, and the conversions to and from it.

    A row is a key or a value of one token and KV head. It is divided into groups of
    channels: 64 of 8 bits, 32 of 4 bits; the last group may be smaller. Each group has
    a step and a smallest multiple ``zero``::

        element = (code + zero) * step         code in [0, 2 ** bits)

    The multiples of a step are on a grid through 0. The error of an element is at most
    half a step, and a step is (largest - smallest) / (2 ** bits - 1), rounded up to
    bfloat16, or 1/32767 of the largest magnitude if that is more. A group with an
    element that is not finite, or beyond 1e37, becomes NaN; smaller groups than 1e-34
    may become 0. ``csrc/include/kvp/quantized_rows.hpp`` has the layout in bytes.

    Compiled if built, in torch otherwise; the results are equal bit for bit.

    Args:
        head_dim: elements per row, at least 2.
        bits: 8 or 4.
    """

    head_dim: int
    bits: int

    def __post_init__(self) -> None:
        if self.bits not in _GROUP or self.head_dim < 2:
            raise ValueError(
                "quantized rows have 8 or 4 bits and at least 2 elements, got "
                f"{self.bits} bits and {self.head_dim} elements"
            )

    @property
    def row_bytes(self) -> int:
        """Bytes of a row: codes and scales."""
        groups = -(-self.head_dim // _GROUP[self.bits])
        return self._code_bytes(self.head_dim) + _SCALE_BYTES * groups

    def quantized_bytes(self, num_bytes: int, element_bytes: int) -> int:
        """Bytes of rows that take ``num_bytes`` when they are not quantized."""
        return -(-num_bytes * self.row_bytes // (self.head_dim * element_bytes))

    def quantize(self, values: torch.Tensor) -> torch.Tensor:
        """Quantize rows.

        Args:
            values: float32 or bfloat16 [..., head_dim], on the CPU.

        Returns:
            uint8 [..., row_bytes].

        Cost: about 200 ns per row of 64 elements.
        """
        rows = values.reshape(-1, self.head_dim)
        if compiled_for(_CPU)[0]:
            quantized = call_compiled("quantize_rows", rows.contiguous(), self.bits)
        else:
            quantized = self._quantize_in_torch(rows.float())
        return quantized.view(*values.shape[:-1], self.row_bytes)

    def dequantize(
        self, rows: torch.Tensor, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """The values of rows.

        Args:
            rows: uint8 [..., row_bytes], on the CPU.
            dtype: float32 or bfloat16.

        Returns:
            [..., head_dim] of ``dtype``.

        Cost: about 10 ns per row of 64 elements.
        """
        out = torch.empty(*rows.shape[:-1], self.head_dim, dtype=dtype)
        self.dequantize_into(
            out.view(-1, self.head_dim), rows.reshape(-1, self.row_bytes)
        )
        return out

    def dequantize_into(
        self, out: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor | None = None
    ) -> None:
        """Write the values of some rows to ``out``.

        Args:
            out: float32 or bfloat16 [n, head_dim], contiguous, on the CPU.
            rows: uint8 [m, row_bytes], contiguous, on the CPU.
            ids: int64 [n], rows to read; None: the first n, and m is n.

        Raises:
            ValueError: an argument does not fit.
        """
        if compiled_for(_CPU)[0]:
            call_compiled("dequantize_rows", out, rows, ids)
            return
        wanted = rows if ids is None else rows[ids]
        out.copy_(self._dequantize_in_torch(wanted))

    def _code_bytes(self, elements: int) -> int:
        return elements if self.bits == 8 else -(-elements // 2)

    def _groups(self) -> list[slice]:
        size = _GROUP[self.bits]
        return [
            slice(first, min(first + size, self.head_dim))
            for first in range(0, self.head_dim, size)
        ]

    def _quantize_in_torch(self, values: torch.Tensor) -> torch.Tensor:
        """Quantize float32 [n, head_dim]: the definition of the format."""
        levels = 2**self.bits - 1
        codes, scales = [], []
        for group in self._groups():
            part = values[:, group]
            low, high = part.amin(1, keepdim=True), part.amax(1, keepdim=True)
            usable = (part.abs() <= _MAX_ELEMENT).all(1, keepdim=True)
            size = torch.maximum(-low, high)
            step = torch.maximum((high - low) / levels, size / _MAX_MULTIPLE)
            step = _rounded_up(step.where(usable, 0.0))
            nonzero = step > 0
            multiple = (part / step).round_().where(nonzero, 0.0)
            zero = (low / step).round_().where(nonzero, 0.0)
            code = (multiple - zero).clamp_(max=levels).to(torch.uint8)
            codes.append(code if self.bits == 8 else _packed(code))
            # a step is a bfloat16: the upper half of its bits
            bits = (step.view(torch.int32) >> 16).where(usable, _NAN)
            pair = torch.cat([bits, zero.to(torch.int32)], 1).to(torch.int16)
            scales.append(pair.view(torch.uint8))
        return torch.cat([*codes, *scales], 1)

    def _dequantize_in_torch(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 [n, head_dim]."""
        out = torch.empty(len(rows), self.head_dim)
        pairs = rows[:, self._code_bytes(self.head_dim) :].contiguous()
        pairs = pairs.view(torch.int16)
        for number, group in enumerate(self._groups()):
            size = group.stop - group.start
            at = self._code_bytes(group.start)
            codes = rows[:, at : at + self._code_bytes(size)]
            if self.bits == 4:
                codes = torch.cat([codes & 15, codes >> 4], 1)[:, :size]
            pair = pairs[:, 2 * number : 2 * number + 2].contiguous()
            step = pair[:, :1].view(torch.bfloat16).float()
            out[:, group] = (codes.float() + pair[:, 1:].float()) * step
        return out


def _rounded_up(step: torch.Tensor) -> torch.Tensor:
    """The smallest bfloat16 that is not below each step, as float32.

    Steps that a processor may flush to zero become 0.
    """
    bits = step.view(torch.int32) + 0xFFFF & ~0xFFFF
    return bits.view(torch.float32).where(step >= torch.finfo(torch.float32).tiny, 0.0)


def _packed(codes: torch.Tensor) -> torch.Tensor:
    """Codes of a group, uint8 [n, m], two per byte: [n, (m + 1) // 2]."""
    size = codes.shape[1]
    half = -(-size // 2)
    high = torch.nn.functional.pad(codes[:, half:], (0, 2 * half - size))
    return codes[:, :half] | high << 4
