"""Which sessions begin a prompt: a hash chain over token ids.

A session can be continued from any of its tokens that lies behind its last
compaction: what came later can be cut off. So it is filed under the digest of its
owner and the tokens up to there, and a prompt is hashed once, with a stop at every
length under which anything is filed.
"""

from __future__ import annotations

import hashlib
from bisect import insort
from collections.abc import Iterator

import numpy as np

from vllm_kvplugins.sessions.commands import Session, Tokens


class SessionIndex:
    """Sessions by their beginnings.

    Args:
        least_tokens: sessions that are whole are filed under so many tokens, and
            not found by prompts that share fewer.
    """

    def __init__(self, least_tokens: int) -> None:
        self._least = least_tokens
        self._sessions: dict[str, Session] = {}
        self._added = 0  # sessions so far
        self._number: dict[str, int] = {}  # which of these a session was
        # length -> digest of so many tokens -> sessions
        self._filed: dict[int, dict[bytes, list[str]]] = {}
        self._lengths: list[int] = []  # ascending

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._sessions

    def get(self, session_id: str) -> Session:
        """The session of this id."""
        return self._sessions[session_id]

    def _filed_under(self, session: Session) -> int:
        return max(session.compacted_at, min(self._least, len(session.tokens)))

    def add(self, session: Session) -> None:
        """File a session."""
        assert session.session_id not in self._sessions, "filed twice"
        length = self._filed_under(session)
        if length not in self._filed:
            self._filed[length] = {}
            insort(self._lengths, length)
        digest = _chain(session.owner, session.tokens, [length])[0]
        self._filed[length].setdefault(digest, []).append(session.session_id)
        self._sessions[session.session_id] = session
        self._number[session.session_id] = self._added
        self._added += 1

    def remove(self, session_id: str) -> Session:
        """Forget a session."""
        session = self._sessions.pop(session_id)
        del self._number[session_id]
        length = self._filed_under(session)
        digest = _chain(session.owner, session.tokens, [length])[0]
        here = self._filed[length]
        here[digest].remove(session_id)
        if not here[digest]:
            del here[digest]
        if not here:
            del self._filed[length]
            self._lengths.remove(length)
        return session

    def find(self, owner: str, prompt: Tokens) -> list[tuple[int, Session]]:
        """Sessions of this owner that the prompt continues or branches off.

        Returns:
            How many first tokens they share with the prompt, at least
            ``compacted_at`` of them, and the session; longest first, then newest.

        Cost: one digest of the prompt, a digest more per distinct length filed.
        """
        lengths = [n for n in self._lengths if n <= len(prompt)]
        found: list[tuple[int, Session]] = []
        for length, digest in zip(lengths, _chain(owner, prompt, lengths), strict=True):
            for session_id in self._filed[length].get(digest, ()):
                session = self._sessions[session_id]
                shared = _shared(session.tokens, prompt)
                # the digest says so; the tokens themselves decide
                if session.owner == owner and shared >= length:
                    found.append((shared, session))
        found.sort(key=lambda item: (-item[0], -self._number[item[1].session_id]))
        return found


def _chain(owner: str, tokens: Tokens, lengths: list[int]) -> list[bytes]:
    """Digests of the first ``lengths`` (ascending) tokens."""
    chain = hashlib.blake2b(owner.encode(), digest_size=16)
    digests, done = [], 0
    for length in lengths:
        chain.update(np.ascontiguousarray(tokens[done:length], np.int32).tobytes())
        digests.append(chain.digest())
        done = length
    return digests


def _shared(first: Tokens, second: Tokens) -> int:
    """Length of the common beginning."""
    n = min(len(first), len(second))
    differs = np.flatnonzero(first[:n] != second[:n])
    return int(differs[0]) if len(differs) else n
