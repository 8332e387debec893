"""The fake engine with requests that are saved and continued."""

from __future__ import annotations

from typing import Any

import torch
from fake_engine import FakeEngine, Request

from vllm_kvplugins.engine.windows import first_saved
from vllm_kvplugins.plan.residency_plan import BlockSpan, Compaction
from vllm_kvplugins.sessions.settings import SessionDtype
from vllm_kvplugins.sessions.snapshot import CacheSnapshot
from vllm_kvplugins.sessions.transfer import PendingSave, Transfer


class SessionEngine(FakeEngine):
    """Saves the state of requests, and resumes from it.

    Args:
        session_dtype: how sessions are stored.
    """

    def __init__(
        self, *args: Any, session_dtype: SessionDtype = "auto", **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.session_dtype = session_dtype
        # request -> position from which on the worker has seen its queries
        self.known_from: dict[str, int] = {}
        # contents of blocks at their release, by block id
        self.left: dict[int, list[torch.Tensor]] = {}

    @property
    def transfer(self) -> Transfer:
        return Transfer(self.runtime, self.session_dtype)

    def _release(self, request: Request, indices: set[int]) -> None:
        for index in indices:
            block = request.table[index]
            self.left[block] = [pages[:, block].clone() for pages in self.pages]
        super()._release(request, indices)

    def _parked(self, blocks: tuple[int, ...]) -> list[int]:
        """The blocks that are free and unchanged since their release."""
        for block in blocks:
            self.free.remove(block)
            for pages, left in zip(self.pages, self.left[block], strict=True):
                pages[:, block] = left
        return list(blocks)

    def save(self, name: str, cut: int = 0) -> CacheSnapshot:
        """Copy a request's state, as at its end.

        Args:
            cut: computed tokens that were in flight when it ended.
        """
        return self.pending_save(name, cut).finish()

    def pending_save(self, name: str, cut: int = 0) -> PendingSave:
        """The same, without the copy."""
        request, plan = self.requests[name], self.plan(name)
        done = plan.num_done(request.computed)
        last = plan.compaction(done - 1) if done else None
        shared = request.shared
        compaction = last and Compaction(
            last.at_tokens,
            BlockSpan(shared, last.retained.stop),
            last.retained,
            shared_blocks=shared,
        )
        first = last.retained.start if last else 0
        tokens = request.computed - cut
        blocks = request.table[first : -(-tokens // self.block)]
        needed = self.runtime.policy.queries_needed
        at = last.at_tokens if last else 0
        query = first_saved(
            tokens, request.computed, needed, self.known_from.get(name, 0), at
        )
        return self.transfer.save(name, compaction, tokens, blocks, query)

    def resume(
        self,
        old: Request,
        saved: CacheSnapshot,
        prompt: int,
        answer: int,
        turn_ends: tuple[int, ...] = (),
        max_tokens: int | None = None,
        in_place: bool = False,
        moves: bool = True,
    ) -> Request:
        """A request that continues where ``old`` was saved.

        Retrievers go back to any token.

        Args:
            max_tokens: tokens that it can have in common with ``old``.
            in_place: its blocks are parked.
            moves: it takes what the session has on the host.
        """
        request = Request(
            old.name,
            prompt,
            answer,
            old.keys,
            old.values,
            old.queries,
            old.visible.clone(),
            kept=list(old.kept),
            turn_ends=turn_ends,
            restored=saved.compaction,
            patched=old.patched,
            prefix=old.prefix,
            shared=old.shared,
        )
        self.runtime.finish(self.gone)
        self.gone = set()
        self.requests[old.name] = request
        self.runtime.add_request(
            old.name, range(prompt), turn_ends, old.patched, old.shared
        )
        compaction, rewound = saved.compaction, None
        tokens = min(saved.tokens, prompt - 1, max_tokens or prompt)
        retrieval = self.runtime.policy.retrieval
        if compaction and tokens < compaction.at_tokens and retrieval is not None:
            rewound = retrieval.rewound(tokens, prompt, self.runtime.geometry)
            assert rewound is not None, "too few tokens to go back to"
            request.restored = compaction = rewound
        at = compaction.at_tokens if compaction else 0
        needed = self.runtime.policy.queries_needed
        request.computed = tokens = self.plan(old.name).can_start_at(
            tokens, at, needed, saved.first_query
        )
        if self.runtime.policy.observation is not None and tokens < saved.tokens:
            # observations of later tokens cannot be removed
            request.restored = None
            request.start_over()
            self.known_from.pop(old.name, None)
            return request
        self.known_from[old.name] = min(saved.first_query, tokens)
        prefix: list[int] = []
        if self.prefix_tokens.get(old.prefix, 0) >= old.shared * self.block:
            prefix = self.prefixes.get(old.prefix, [])[: old.shared]
        first = compaction.retained.start if compaction else len(prefix)
        own = range(first, -(-tokens // self.block))
        if in_place:
            assert saved.blocks is not None
            fresh = self._parked(saved.blocks[: len(own)])
        else:
            fresh = [self.free.pop() for _ in own]
        request.held = {*range(len(prefix)), *own}
        request.table = prefix + [0] * (first - len(prefix)) + fresh
        args = (old.name, prompt, saved, tokens, fresh, in_place, prefix)
        self.transfer.restore(*args, rewound, moves)
        due = self.plan(old.name).due(at, tokens)
        records, self.runtime.records = self.runtime.records or [], []
        assert len(records) == (due is not None), "compacted off the plan"
        if due is not None:
            held = request.shared + len(due.retained)
            self._check_kept(request, records[0].kept_positions, held)
            self._release(request, set(range(due.freed.start, due.freed.stop)))
        return request
