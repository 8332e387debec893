"""Budgets of requests as users write them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_kvplugins.amounts import bytes_of, parse_bytes

__all__ = ["Budget", "parse_bytes"]


@dataclass(frozen=True, slots=True)
class Budget:
    """Tokens, a share of the prompt, or bytes per request; exactly one is set."""

    tokens: int | None = None
    fraction: float | None = None
    num_bytes: int | None = None

    @classmethod
    def parse(cls, value: Any) -> Budget:
        """Read a budget as users write it: ``512``, ``0.25`` or ``"64MiB"``.

        Raises:
            ValueError: the value has another form, or is not positive.
        """
        if isinstance(value, Budget):
            return value
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError(f"a budget is 512, 0.25 or '64MiB'; got {value!r}")
        if isinstance(value, int):
            if value < 1:
                raise ValueError(f"a budget of {value} tokens keeps nothing; give >= 1")
            return cls(tokens=value)
        if isinstance(value, float):
            if not 0 < value <= 1:
                raise ValueError(
                    f"a budget as a share of the prompt must be in (0, 1], got "
                    f"{value}; write a number of tokens without a decimal point"
                )
            return cls(fraction=value)
        num_bytes = bytes_of(value)
        if not num_bytes:
            raise ValueError(
                f"write a budget in bytes as '64MiB' (B, KiB, MiB, GiB); got {value!r}"
            )
        return cls(num_bytes=num_bytes)

    @classmethod
    def parse_optional(cls, value: Any) -> Budget | None:
        """``parse``, but None for None."""
        return None if value is None else cls.parse(value)

    def resolve(self, prompt_tokens: int, kv_bytes_per_token: int) -> int:
        """Tokens per KV head for a prompt of this length; at least 1."""
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
