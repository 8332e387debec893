"""The errors that a user can cause, and how several of them become one message."""

from __future__ import annotations

from collections.abc import Iterable


class KVPolicyError(ValueError):
    """A policy, its configuration or the engine's settings cannot be used.

    The message carries every reason that was found, each with the offending
    value and what to do about it.
    """


def refuse(title: str, reasons: Iterable[str]) -> None:
    """Raise one error that lists all reasons; do nothing when there are none.

    Args:
        title: What cannot be done, without a full stop.
        reasons: One sentence each, ending in what to do.

    Raises:
        KVPolicyError: ``reasons`` is not empty.
    """
    listed = list(reasons)
    if listed:
        lines = "".join(f"\n  {i}. {reason}" for i, reason in enumerate(listed, 1))
        raise KVPolicyError(f"{title}:{lines}")
