"""Which sessions begin a prompt: a hash chain over token ids.

A session can be continued from any of its tokens at or after its last compaction;
later tokens can be cut off. So it is filed under the digest of its owner and its
tokens up to there. A prompt is hashed once, and the chain is read off at every length
under which some session is filed.
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
        min_tokens: a session that was never compacted is filed under this many
            tokens; prompts that share fewer do not find it.
    """

    def __init__(self, min_tokens: int) -> None:
        self._min_tokens = min_tokens
        self._sessions: dict[str, Session] = {}
        self._num_added = 0
        # session -> how many were added before it
        self._number: dict[str, int] = {}
        # length -> digest of the first tokens -> sessions
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

    def _filed_length(self, session: Session) -> int:
        return max(session.compacted_at, min(self._min_tokens, len(session.tokens)))

    def add(self, session: Session) -> None:
        """File a session."""
        assert session.session_id not in self._sessions, "filed twice"
        length = self._filed_length(session)
        if length not in self._filed:
            self._filed[length] = {}
            insort(self._lengths, length)
        digest = _chain(session.owner, session.tokens, [length])[0]
        self._filed[length].setdefault(digest, []).append(session.session_id)
        self._sessions[session.session_id] = session
        self._number[session.session_id] = self._num_added
        self._num_added += 1

    def remove(self, session_id: str) -> Session:
        """Remove a session and return it."""
        session = self._sessions.pop(session_id)
        del self._number[session_id]
        length = self._filed_length(session)
        digest = _chain(session.owner, session.tokens, [length])[0]
        by_digest = self._filed[length]
        by_digest[digest].remove(session_id)
        if not by_digest[digest]:
            del by_digest[digest]
        if not by_digest:
            del self._filed[length]
            self._lengths.remove(length)
        return session

    def find(self, owner: str, prompt: Tokens) -> list[tuple[int, Session]]:
        """Sessions of an owner that the prompt continues or branches off from.

        Returns:
            How many first tokens session and prompt share, at least the session's
            ``compacted_at``, and the session; longest first, then newest first.

        Cost: one pass over the prompt, and one digest per distinct length filed.
        """
        lengths = [n for n in self._lengths if n <= len(prompt)]
        found: list[tuple[int, Session]] = []
        for length, digest in zip(lengths, _chain(owner, prompt, lengths), strict=True):
            for session_id in self._filed[length].get(digest, ()):
                session = self._sessions[session_id]
                shared = _num_shared(session.tokens, prompt)
                # digests may collide; owner and tokens decide
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


def _num_shared(first: Tokens, second: Tokens) -> int:
    """Length of the common prefix."""
    n = min(len(first), len(second))
    differs = np.flatnonzero(first[:n] != second[:n])
    return int(differs[0]) if len(differs) else n
