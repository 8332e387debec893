"""Amounts of memory as users write and read them."""

from __future__ import annotations

import re
from typing import Any

_UNITS = {"b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmg]ib|b)\s*", re.IGNORECASE)


def parse_bytes(value: Any) -> int | None:
    """Read an amount of memory: ``"8GiB"``, or a number of bytes.

    Returns:
        Bytes; None for None.

    Raises:
        ValueError: the value has another form.
    """
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    num_bytes = bytes_of(str(value))
    if num_bytes is None:
        raise ValueError(
            f"write an amount of memory as '8GiB' (B, KiB, MiB, GiB); got {value!r}"
        )
    return num_bytes


def bytes_of(text: str) -> int | None:
    """Bytes of ``"8GiB"``; None if the text has another form."""
    match = _AMOUNT.fullmatch(text)
    return int(float(match[1]) * _UNITS[match[2].lower()]) if match else None


def amount(num_bytes: int) -> str:
    """Format bytes in the largest unit in which the value is at least 1."""
    for unit in ("GiB", "MiB", "KiB"):
        if num_bytes >= _UNITS[unit.lower()]:
            return f"{num_bytes / _UNITS[unit.lower()]:,.2f} {unit}"
    return f"{num_bytes:,} B"
