"""Requests' caches out of a worker, and back into it for those who go on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_kvplugins.engine.heap import Heap
from vllm_kvplugins.engine.requests import RequestState, Resident
from vllm_kvplugins.engine.runtime import PolicyRuntime
from vllm_kvplugins.engine.windows import Window
from vllm_kvplugins.plan.residency_plan import Compaction
from vllm_kvplugins.sessions.snapshot import (
    COPY_ERRORS,
    CacheSnapshot,
    mismatch,
    put_back,
    take_out,
    take_over,
)


class Transfer:
    """Saves and restores requests of one worker.

    Args:
        runtime: of the worker; must be attached before the first call.
    """

    def __init__(self, runtime: PolicyRuntime) -> None:
        self._runtime = runtime

    @property
    def _heap(self) -> Heap:
        assert self._runtime.heap is not None, "not attached"
        return self._runtime.heap

    def _ids(self, blocks: Sequence[int]) -> torch.Tensor:
        device = self._heap.pages.device
        return torch.tensor(blocks, dtype=torch.int64, device=device)

    # vLLM calls outside of steps, whose tensors are written here.
    @torch.inference_mode()
    def save(
        self,
        request_id: str,
        compaction: Compaction | None,
        tokens: int,
        blocks: Sequence[int],
        first_query: int,
    ) -> CacheSnapshot:
        """Copy a request's cache out of the pool; call before it is forgotten.

        Args:
            compaction: its last one, candidates counted from block 0.
            tokens: whose cache to save.
            blocks: physical ids, from its first resident block on.
            first_query: position of the first query to save; ``tokens`` = none.

        Raises:
            ValueError: the request was last compacted at another token count, or its
                queries were not kept, or it has nothing of its own to save.
        """
        runtime = self._runtime
        assert runtime.tables is not None, "not attached"
        tracked = runtime.tracked(request_id)
        here, said = tracked.compacted_at, compaction.at_tokens if compaction else 0
        if tracked.lost:
            raise ValueError("what it started from could not be loaded")
        if here != said:
            raise ValueError(f"compacted at {here} tokens, not at {said}")
        retrieval = runtime.retrieval
        if retrieval is not None and tracked.resident is not None:
            # the retained region's positions say what was fetched last
            retrieval.refresh_positions(request_id, tracked.resident.positions)
        saved = take_out(
            self._heap,
            runtime.tables,
            tracked.resident,
            compaction,
            tokens,
            self._ids(blocks),
        )
        if first_query < tokens:
            window = tracked.window
            if window is None or not window.has(first_query, tokens):
                raise ValueError(f"no queries of tokens {first_query} to {tokens}")
            saved.queries = window.take(first_query, tokens)
        observation = runtime.policy.observation
        if observation is not None:
            for layer, observed in tracked.observed.items():
                saved.observed[layer] = observation.pack(observed)
        if retrieval is not None:
            saved.offloaded = retrieval.detach(request_id)
        return saved.on(torch.device("cpu"))

    def discard(self, saved: CacheSnapshot) -> None:
        """Nobody will restore it."""
        if saved.offloaded is not None:
            assert self._runtime.retrieval is not None
            self._runtime.retrieval.discard(saved.offloaded)
            saved.offloaded = None

    def mismatch(self, saved: CacheSnapshot) -> str | None:
        """Why a saved cache cannot be restored here, if so."""
        return mismatch(self._heap, saved)

    @torch.inference_mode()
    def restore(
        self,
        request_id: str,
        prompt_tokens: int,
        saved: CacheSnapshot,
        tokens: int,
        blocks: Sequence[int],
        in_place: bool = False,
    ) -> None:
        """Let a request go on from a saved cache; call before its first step, and
        after ``learn``.

        Args:
            tokens: how many of the saved ones.
            blocks: physical ids, from its first resident block on.
            in_place: they are those that it was saved from, as they were.

        Raises:
            COPY_ERRORS: there is no memory on the device, say. The request's blocks
                may hold anything then: it is lost (:class:`Tracked`), and so is what
                the session had on the host.
        """
        runtime, resident = self._runtime, None
        assert runtime.tables is not None, "not attached"
        runtime.forget([request_id])
        try:
            ids, there = self._ids(blocks), saved.on(self._heap.pages.device)
            if in_place:
                resident = take_over(runtime.tables, there, blocks)
            else:
                resident = put_back(self._heap, runtime.tables, there, tokens, ids)
            tracked = self._tracked(request_id, saved, there, tokens, resident)
            runtime.adopt(request_id, prompt_tokens, tracked, tokens, ids)
        except COPY_ERRORS:
            if resident is not None and runtime.tracked(request_id).resident is None:
                runtime.tables.leave(resident.slot_index)
            runtime.lose(request_id)
            self.discard(saved)
            raise

    def _tracked(
        self,
        request_id: str,
        saved: CacheSnapshot,
        there: CacheSnapshot,
        tokens: int,
        resident: Resident | None,
    ) -> RequestState:
        """What is known of a request that goes on; it has its pages already.

        Args:
            there: the same on the pool's device.
        """
        runtime = self._runtime
        if saved.offloaded is not None:
            assert runtime.retrieval is not None
            assert runtime.tables is not None
            assert resident is not None, "nothing is offloaded before a compaction"
            runtime.retrieval.attach(request_id, saved.offloaded)
            saved.offloaded = None  # the request's from now on
            pages, _ = runtime.tables.retained(resident.slot_index)
            runtime.retrieval.settle(request_id, pages, resident.positions)
        observation = runtime.policy.observation
        assert observation is not None or not there.observed
        observed = {
            layer: observation.unpack(packed)
            for layer, packed in there.observed.items()
            if observation is not None
        }
        window = None
        if there.queries is not None:
            window = Window.restored(there.queries, there.first_query, tokens)
        return RequestState(resident, window, observed, there.compaction)
