"""Finds sessions that share their first tokens with a prompt, by a hash chain.

A request can continue a session from any token at or after its last compaction. The
index therefore contains the digest of each session's owner and tokens up to that
compaction. A lookup hashes the prompt once and compares the chain at each length that
occurs in the index.
"""

from __future__ import annotations

import hashlib
from bisect import insort
from collections.abc import Iterator

import numpy as np

from vllm_kvplugins.sessions.commands import Session, Tokens


class SessionIndex:
    """Sessions by their first tokens.

    Args:
        min_tokens: key length of sessions that were never compacted; prompts that share
            fewer tokens do not find them.
    """

    def __init__(self, min_tokens: int) -> None:
        self._min_tokens = min_tokens
        self._sessions: dict[str, Session] = {}
        self._num_added = 0
        # Session ID -> number of sessions added before.
        self._number: dict[str, int] = {}
        # Key length -> digest of the first tokens -> session IDs.
        self._by_key: dict[int, dict[bytes, list[str]]] = {}
        self._lengths: list[int] = []  # keys of _by_key, ascending

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._sessions

    def get(self, session_id: str) -> Session:
        """The session with this ID."""
        return self._sessions[session_id]

    def _key_length(self, session: Session) -> int:
        return max(session.compacted_at, min(self._min_tokens, len(session.tokens)))

    def add(self, session: Session) -> None:
        """Add a session."""
        assert session.session_id not in self._sessions, "added twice"
        length = self._key_length(session)
        if length not in self._by_key:
            self._by_key[length] = {}
            insort(self._lengths, length)
        digest = _chain(session.owner, session.tokens, [length])[0]
        self._by_key[length].setdefault(digest, []).append(session.session_id)
        self._sessions[session.session_id] = session
        self._number[session.session_id] = self._num_added
        self._num_added += 1

    def remove(self, session_id: str) -> Session:
        """Remove a session and return it."""
        session = self._sessions.pop(session_id)
        del self._number[session_id]
        length = self._key_length(session)
        digest = _chain(session.owner, session.tokens, [length])[0]
        by_digest = self._by_key[length]
        by_digest[digest].remove(session_id)
        if not by_digest[digest]:
            del by_digest[digest]
        if not by_digest:
            del self._by_key[length]
            self._lengths.remove(length)
        return session

    def find(self, owner: str, prompt: Tokens) -> list[tuple[int, Session]]:
        """Sessions of an owner that the prompt continues or branches off from.

        Returns:
            Pairs of the number of shared first tokens (at least ``compacted_at`` of the
            session) and the session; the longest first, then the newest.

        Cost: one pass over the prompt, and one digest per distinct key length.
        """
        lengths = [n for n in self._lengths if n <= len(prompt)]
        matches: list[tuple[int, Session]] = []
        for length, digest in zip(lengths, _chain(owner, prompt, lengths), strict=True):
            for session_id in self._by_key[length].get(digest, ()):
                session = self._sessions[session_id]
                shared = _num_shared(session.tokens, prompt)
                # Digests can collide, so compare owners and tokens.
                if session.owner == owner and shared >= length:
                    matches.append((shared, session))
        matches.sort(key=lambda item: (-item[0], -self._number[item[1].session_id]))
        return matches


def _chain(owner: str, tokens: Tokens, lengths: list[int]) -> list[bytes]:
    """Digests of the first ``lengths`` (ascending) tokens."""
    chain = hashlib.blake2b(owner.encode(), digest_size=16)
    digests, done = [], 0
    for length in lengths:
        chain.update(np.ascontiguousarray(tokens[done:length], np.int32).tobytes())
        digests.append(chain.digest())
        done = length
    return digests


def _num_shared(first: Tokens, second: Tokens) -> int:
    """Length of the common prefix."""
    n = min(len(first), len(second))
    differs = np.flatnonzero(first[:n] != second[:n])
    return int(differs[0]) if len(differs) else n
