"""IDs of sessions in a shared store, from which other replicas find them.

::

    <key>-<tokens>-<digest>-<random>

    key      digest of owner and the first ``bucket_start(tokens)`` token IDs
    tokens   number of tokens
    digest   of owner and all token IDs

A replica that gets a prompt computes the keys of all sessions that the prompt may
continue, from its token IDs alone, and asks the store for names with these beginnings.
There are four keys per doubling of the length, so there are few. Length and digest tell
whether the prompt continues the whole session, before anything is read. The random part
keeps two replicas from writing the same file.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

from vllm_kvplugins.sessions.commands import Tokens

_HEX = 24  # 96 bits
_ID = re.compile(
    r"(?P<key>[0-9a-f]{24})-(?P<tokens>[1-9]\d{0,9})-(?P<digest>[0-9a-f]{24})-[0-9a-f]{16}"
)


def new_id(owner: str, tokens: Tokens) -> str:
    """A unique ID for a session with these tokens."""
    n = len(tokens)
    first = bucket_start(n)
    digests = digests_at(owner, tokens, {first, n})
    return f"{digests[first]}-{n}-{digests[n]}-{uuid.uuid4().hex[:16]}"


@dataclass(frozen=True, slots=True)
class ParsedId:
    """What the ID of a session says about it."""

    session_id: str
    key: str
    num_tokens: int
    digest: str

    @staticmethod
    def of(session_id: str) -> ParsedId | None:
        """The parts of an ID; None: it is no ID of this kind."""
        parts = _ID.fullmatch(session_id)
        if parts is None:
            return None
        return ParsedId(session_id, parts["key"], int(parts["tokens"]), parts["digest"])


def bucket_start(num_tokens: int) -> int:
    """Length of the beginning whose digest is the key of a session.

    The three highest bits of the length: 1024, 1280, 1536, 1792, 2048, 2560, ...
    """
    step = 1 << max(num_tokens.bit_length() - 3, 0)
    return num_tokens // step * step


def bucket_starts(longest: int, shortest: int, count: int) -> list[int]:
    """Beginnings of the sessions with up to ``longest`` tokens, longest first.

    Args:
        shortest: leave out sessions that are shorter.
        count: at most so many.
    """
    starts: list[int] = []
    while longest >= max(shortest, 1) and len(starts) < count:
        starts.append(bucket_start(longest))
        longest = starts[-1] - 1
    return starts


def digests_at(owner: str, tokens: Tokens, lengths: Iterable[int]) -> dict[int, str]:
    """Digests of owner and first tokens, by number of tokens.

    Cost: O(longest); the GIL is free meanwhile.
    """
    digest = hashlib.blake2b(owner.encode(), digest_size=_HEX // 2)
    done, digests = 0, dict[int, str]()
    for length in sorted(lengths):
        digest.update(tokens[done:length].astype("<i4").data)
        digests[length], done = digest.copy().hexdigest(), length
    return digests
