"""How much a request keeps: tokens, a share of the prompt, or bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

_UNITS = {"b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


def parse_bytes(value: Any) -> int | None:
    """Read an amount of memory: ``"8GiB"``, or bytes as a number; None stays.

    Raises:
        ValueError: anything else.
    """
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?i?b)\s*", str(value).lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError(
            f"an amount of memory looks like '8GiB' (B, KiB, MiB, GiB), got {value!r}"
        )
    return int(float(match[1]) * _UNITS[match[2]])


@dataclass(frozen=True, slots=True)
class Budget:
    """Tokens, a share of the prompt, or bytes per request; exactly one is set."""

    tokens: int | None = None
    fraction: float | None = None
    num_bytes: int | None = None

    @classmethod
    def parse(cls, value: Any) -> Budget:
        """Read a budget as a user writes it: ``512``, ``0.25`` or ``"64MiB"``.

        Raises:
            ValueError: anything else, or a budget of nothing.
        """
        if isinstance(value, Budget):
            return value
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError(f"a budget is 512, 0.25 or '64MiB', got {value!r}")
        if isinstance(value, int):
            if value < 1:
                raise ValueError(f"a budget of {value} tokens keeps nothing; give >= 1")
            return cls(tokens=value)
        if isinstance(value, float):
            if not 0 < value <= 1:
                raise ValueError(
                    f"a fractional budget must be in (0, 1], got {value}; for tokens "
                    "write a whole number"
                )
            return cls(fraction=value)
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?i?b)\s*", value.lower())
        if match is None or match[2] not in _UNITS or float(match[1]) <= 0:
            raise ValueError(
                "a budget in bytes looks like '64MiB' (B, KiB, MiB, GiB), got "
                f"{value!r}"
            )
        return cls(num_bytes=int(float(match[1]) * _UNITS[match[2]]))

    @classmethod
    def parse_optional(cls, value: Any) -> Budget | None:
        """As ``parse``, but None stays None."""
        return None if value is None else cls.parse(value)

    def resolve(self, prompt_tokens: int, kv_bytes_per_token: int) -> int:
        """Tokens per KV head for a prompt of ``prompt_tokens``; at least 1."""
        if self.tokens is not None:
            return self.tokens
        if self.fraction is not None:
            return max(int(self.fraction * prompt_tokens), 1)
        assert self.num_bytes is not None
        return max(self.num_bytes // kv_bytes_per_token, 1)

    def __str__(self) -> str:
        if self.tokens is not None:
            return f"{self.tokens} tokens"
        if self.fraction is not None:
            return f"{self.fraction:g} of the prompt"
        return f"{self.num_bytes} bytes"
