"""Errors that a user can cause, and the stable code of each.

Every message that refuses something starts with a code, ``[KVP104] ...``. The code
stays the same when the text improves; ``docs/faq.md`` explains each one. Tests compare
codes, never texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# One line per code: what went wrong, without the value and without the remedy.
# Ranges: 001 engine and vLLM settings, 100 policies, budgets and plans, 200 worker and
# attention, 300 sessions, 400 native operations and indices, 500 requests and chats,
# 600 command line, models and training. Never reuse a number.
CODES: dict[str, str] = {
    # 001-099: engine and vLLM settings
    # 100-199: policies, budgets and plans
    # 200-299: worker and attention
    # 300-399: sessions
    # 400-499: native operations and indices
    # 500-599: requests and chats
    # 600-699: command line, models and training
}

_CODE = re.compile(r"\[(KVP\d{3})\]")


class KVPolicyError(ValueError):
    """A policy, its configuration or the engine's settings cannot be used.

    The message lists every reason that was found, each with its code, the offending
    value and the remedy.
    """

    @property
    def codes(self) -> tuple[str, ...]:
        """Codes of all reasons, in order."""
        return codes_in(str(self))


def coded(code: str, text: str) -> str:
    """A reason with its stable code in front: ``[KVP104] budget must be ...``.

    Args:
        code: a key of ``CODES``.
        text: what is wrong, with the offending value, and what to do about it.
    """
    assert code in CODES, f"{code} is not in errors.CODES"
    return f"[{code}] {text}"


def codes_in(message: str) -> tuple[str, ...]:
    """All codes in a message, in order, also in one that another process wrote."""
    return tuple(_CODE.findall(message))


def refuse(title: str, reasons: Iterable[str]) -> None:
    """Raise one error that lists all reasons; do nothing when there are none.

    Args:
        title: what cannot be done, without a full stop.
        reasons: one sentence each, with its code, ending in the remedy.

    Raises:
        KVPolicyError: ``reasons`` is not empty.
    """
    listed = list(reasons)
    if listed:
        lines = "".join(f"\n  {i}. {reason}" for i, reason in enumerate(listed, 1))
        raise KVPolicyError(f"{title}:{lines}")
