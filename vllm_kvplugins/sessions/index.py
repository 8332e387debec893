"""Finds the sessions that share most first tokens with a prompt, with a radix tree.

::

    one tree per owner            system prompt
                                 /             \\
                         question 1          question 2 ...
                          /      \\
                    answer 1    answer 2

Sessions with common first tokens share the nodes of these tokens. A look-up follows one
path. Where the path leaves a node, all other sessions below the node share exactly the
tokens up to there; there may be many, so each node keeps them in order.

Restoring one of them depends only on its compaction, on how many queries it stores and
on its length (``SchedulerSessions`` decides it). Those with equal compaction and number
of queries form a *kind*. Among a kind, the shortest session is never worse than
another: its stored queries begin first, and only a session without further tokens
undoes no observation. So the first session of each kind is enough.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator

import numpy as np

from vllm_kvplugins.plan.residency_plan import Compaction
from vllm_kvplugins.sessions.commands import Session, Tokens

# Last compaction and number of stored queries.
Kind = tuple[Compaction | None, int]

_NEWEST = (1 << 32) - 1
_ITEM = np.dtype(np.int32).itemsize


def index_bytes(num_tokens: int) -> int:
    """Memory for a session that is in the index, and not in memory or on the device.

    At most: its token IDs, twice, and its nodes.
    """
    return 2 * _ITEM * num_tokens + 2048


class _Node:
    """Tokens that several sessions share, or the last tokens of one.

    Attributes:
        edge: tokens between the parent and this node, as bytes.
        depth: number of tokens from the root to the end of the edge.
        ranks: of all sessions at and below this node, ascending.
    """

    __slots__ = ("children", "depth", "edge", "parent", "ranks")

    def __init__(self, parent: _Node | None, edge: bytes) -> None:
        self.parent = parent
        self.edge = edge
        self.depth: int = (parent.depth if parent else 0) + len(edge) // _ITEM
        self.children: dict[bytes, _Node] = {}  # by first token
        self.ranks: dict[Kind, array[int]] = {}

    @property
    def num_sessions(self) -> int:
        return sum(map(len, self.ranks.values()))


class SessionIndex:
    """Sessions by their first tokens.

    Args:
        min_tokens: prompts that share fewer tokens with a session do not find it,
            unless the session is shorter.
        rewinds: sessions can be continued before their last compaction, too.

    Memory: 4 bytes per token that is not shared, below 2 KiB per session, and 8 bytes
        per session and node above it. At most two nodes per session.
    """

    def __init__(self, min_tokens: int, rewinds: bool = False) -> None:
        self._min_tokens = min_tokens
        self._rewinds = rewinds
        self._sessions: dict[str, Session] = {}
        self._num_added = 0
        # A session's rank orders sessions by length; of equally long ones, the newest
        # comes first.
        self._rank: dict[str, int] = {}
        self._by_rank: dict[int, Session] = {}
        self._roots: dict[str, _Node] = {}  # by owner

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._sessions

    def get(self, session_id: str) -> Session:
        """The session with this ID."""
        return self._sessions[session_id]

    # -- look-up ------------------------------------------------------------------

    def find(self, owner: str, prompt: Tokens) -> Iterator[tuple[int, Session]]:
        """Sessions of an owner that the prompt continues or branches off from.

        Yields:
            Pairs of the number of shared first tokens (at least ``compacted_at`` of the
            session, unless sessions rewind) and the session. The longest first; of
            those that share equally many tokens, the first of each kind, the shortest
            and then the newest first.

        Cost: one comparison of the prompt. Then, per node of its path and kind of
            session, O(log(sessions)).
        """
        path, shared = self._path(owner, _as_bytes(prompt))
        below: _Node | None = None
        for node in reversed(path):
            common = min(shared, node.depth)
            compacted_by = None if self._rewinds else common
            for rank in sorted(_first_ranks(node, below, compacted_by)):
                session = self._by_rank[rank]
                if common >= min(self._min_tokens, len(session.tokens)):
                    yield common, session
            below = node

    def equal(self, owner: str, tokens: Tokens) -> Session | None:
        """The newest session with exactly these tokens."""
        path, shared = self._path(owner, _as_bytes(tokens))
        if not path or not len(tokens) == shared == path[-1].depth:
            return None
        first = min(ranks[0] for ranks in path[-1].ranks.values())
        session = self._by_rank[first]
        return session if len(session.tokens) == shared else None

    def _path(self, owner: str, wanted: bytes) -> tuple[list[_Node], int]:
        """Nodes below the root that share tokens with a prompt, from the root on.

        Returns:
            The nodes, and the number of shared tokens, which may end inside the edge of
            the last one.
        """
        node, path, done = self._roots.get(owner), [], 0
        while node is not None:
            node = node.children.get(wanted[done : done + _ITEM])
            if node is None:
                break
            path.append(node)
            same = _num_equal(node.edge, wanted, done)
            done += same
            if same < len(node.edge):
                break
        return path, done // _ITEM

    # -- changes ------------------------------------------------------------------

    def add(self, session: Session) -> None:
        """Add a session.

        Cost: O(tokens + sessions below the nodes of its path), of which the second part
            only moves memory.
        """
        assert session.session_id not in self._sessions, "added twice"
        rank = len(session.tokens) << 32 | (_NEWEST - self._num_added)
        self._num_added += 1
        self._sessions[session.session_id] = session
        self._rank[session.session_id] = rank
        self._by_rank[rank] = session
        if session.owner not in self._roots:
            self._roots[session.owner] = _Node(None, b"")
        wanted = _as_bytes(session.tokens)
        path, shared = self._path(session.owner, wanted)
        last = path[-1] if path else self._roots[session.owner]
        if shared < last.depth:
            path[-1] = last = _split(last, shared)
        if shared < len(session.tokens):
            leaf = _Node(last, wanted[shared * _ITEM :])
            last.children[leaf.edge[:_ITEM]] = leaf
            path.append(leaf)
        for node in path:
            insort(node.ranks.setdefault(_kind(session), array("q")), rank)

    def remove(self, session_id: str) -> Session:
        """Remove a session and return it."""
        session, rank = self._sessions.pop(session_id), self._rank.pop(session_id)
        del self._by_rank[rank]
        path, _ = self._path(session.owner, _as_bytes(session.tokens))
        kind = _kind(session)
        for node in reversed(path):
            ranks = node.ranks[kind]
            del ranks[bisect_left(ranks, rank)]
            if not ranks:
                del node.ranks[kind]
            _tidy(node)
        if not self._roots[session.owner].children:
            del self._roots[session.owner]
        return session

    def check_integrity(self) -> None:
        """Every session is below its nodes; no node is superfluous."""
        seen: set[int] = set()
        for root in self._roots.values():
            assert root.children, "an owner without sessions"
            for child in root.children.values():
                seen |= _check(child)
        assert seen == set(self._by_rank), "sessions and leaves differ"
        assert {self._rank[i] for i in self._sessions} == seen, "ranks differ"


def _kind(session: Session) -> Kind:
    return session.compaction, len(session.tokens) - session.first_query


def _first_ranks(
    node: _Node, below: _Node | None, compacted_by: int | None
) -> Iterator[int]:
    """The first rank of each kind below a node, without those below one child.

    Args:
        compacted_by: kinds that were compacted after more tokens are left out; None:
            none is.
    """
    for kind, ranks in node.ranks.items():
        compacted_at = kind[0].at_tokens if kind[0] is not None else 0
        if compacted_by is not None and compacted_at > compacted_by:
            continue
        others = below.ranks.get(kind, ()) if below is not None else ()
        # The child's ranks are a subset. The first ones are equal as long as the last
        # of them are.
        equal, differ = 0, len(others) + 1
        while equal + 1 < differ:
            middle = (equal + differ) // 2
            if others[middle - 1] == ranks[middle - 1]:
                equal = middle
            else:
                differ = middle
        if equal < len(ranks):
            yield ranks[equal]


def _split(node: _Node, depth: int) -> _Node:
    """Insert a node into the edge above ``node``, and return it."""
    assert node.parent is not None, "the root has no edge"
    at = (depth - node.parent.depth) * _ITEM
    upper = _Node(node.parent, node.edge[:at])
    upper.ranks = {kind: ranks[:] for kind, ranks in node.ranks.items()}
    node.parent.children[upper.edge[:_ITEM]] = upper
    node.parent, node.edge = upper, node.edge[at:]
    upper.children[node.edge[:_ITEM]] = node
    return upper


def _tidy(node: _Node) -> None:
    """Remove a node without sessions, or with one child and no session of its own."""
    parent = node.parent
    assert parent is not None, "the root stays"
    if not node.ranks:
        del parent.children[node.edge[:_ITEM]]
    elif len(node.children) == 1:
        (child,) = node.children.values()
        if child.num_sessions == node.num_sessions:
            child.edge = node.edge + child.edge
            child.parent = parent
            parent.children[child.edge[:_ITEM]] = child


def _check(node: _Node) -> set[int]:
    """Ranks at and below a node."""
    below: set[int] = set()
    for first, child in node.children.items():
        assert child.parent is node, "wrong parent"
        assert child.edge[:_ITEM] == first, "wrong child"
        below |= _check(child)
    ranks = [rank for ranks in node.ranks.values() for rank in ranks]
    own = set(ranks) - below
    assert below <= set(ranks), "a session is missing"
    assert {rank >> 32 for rank in own} <= {node.depth}, "a session ends elsewhere"
    assert own or len(node.children) > 1, "a superfluous node"
    assert all(list(r) == sorted(r) for r in node.ranks.values()), "not in order"
    return set(ranks)


def _as_bytes(tokens: Tokens) -> bytes:
    return np.ascontiguousarray(tokens, np.int32).tobytes()


def _num_equal(edge: bytes, wanted: bytes, start: int) -> int:
    """Number of equal first bytes of ``edge`` and ``wanted[start:]``, whole tokens."""
    part = wanted[start : start + len(edge)]
    if part == edge[: len(part)]:
        return len(part)
    first = np.frombuffer(edge, np.int32, len(part) // _ITEM)
    differs = first != np.frombuffer(part, np.int32)
    return int(differs.argmax()) * _ITEM
