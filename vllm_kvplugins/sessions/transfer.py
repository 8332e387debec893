"""Saves the caches of a worker's requests, and restores them into other requests."""

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
    copy_in,
    copy_out,
    mismatch,
    reuse_in_place,
)


class Transfer:
    """Saves and restores requests of one worker.

    Args:
        runtime: the worker's; it must be attached before the first call.
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

    # Called outside of a step, but the pool's tensors are inference tensors.
    @torch.inference_mode()
    def save(
        self,
        request_id: str,
        compaction: Compaction | None,
        tokens: int,
        blocks: Sequence[int],
        first_query: int,
    ) -> CacheSnapshot:
        """Copy a request's cache out of the pool.

        Call before the runtime forgets the request.

        Args:
            compaction: its last one, with candidates counted from block 0.
            tokens: how many of its tokens to save.
            blocks: physical ids, from its first resident block on.
            first_query: position of the first query to save; ``tokens`` = none.

        Raises:
            ValueError: the request was last compacted at another token count, or its
                queries were not kept, or its own session failed to load.
        """
        runtime = self._runtime
        assert runtime.tables is not None, "not attached"
        tracked = runtime.tracked(request_id)
        compacted_at = compaction.at_tokens if compaction else 0
        if tracked.lost:
            raise ValueError("its own session failed to load")
        if tracked.compacted_at != compacted_at:
            raise ValueError(
                f"compacted at {tracked.compacted_at} tokens, not at {compacted_at}"
            )
        retrieval = runtime.retrieval
        if retrieval is not None and tracked.resident is not None:
            # the positions must be those of the tokens that were fetched last
            retrieval.refresh_positions(request_id, tracked.resident.positions)
        saved = copy_out(
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
                raise ValueError(f"queries {first_query} to {tokens} were not kept")
            saved.queries = window.take(first_query, tokens)
        observation = runtime.policy.observation
        if observation is not None:
            for layer, observed in tracked.observed.items():
                saved.observed[layer] = observation.pack(observed)
        if retrieval is not None:
            saved.offloaded = retrieval.detach(request_id)
        return saved.on(torch.device("cpu"))

    def discard(self, saved: CacheSnapshot) -> None:
        """Free the host tier that a snapshot holds; it will not be restored."""
        if saved.offloaded is not None:
            assert self._runtime.retrieval is not None
            self._runtime.retrieval.discard(saved.offloaded)
            saved.offloaded = None

    def mismatch(self, saved: CacheSnapshot) -> str | None:
        """Why a snapshot does not fit this worker; None = it does."""
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
        """Let a request continue from a snapshot.

        Call after the runtime has learned of the request, before its first step.

        Args:
            tokens: how many of the saved tokens to restore.
            blocks: physical ids, from its first resident block on.
            in_place: the snapshot was saved from these blocks, and they still hold it.

        Raises:
            COPY_ERRORS: a copy failed, for example for want of device memory. The
                request's KV is invalid until it is recomputed, and the session's
                tokens in the host tier are freed.
        """
        runtime, resident = self._runtime, None
        assert runtime.tables is not None, "not attached"
        runtime.forget([request_id])
        try:
            ids, there = self._ids(blocks), saved.on(self._heap.pages.device)
            if in_place:
                resident = reuse_in_place(runtime.tables, there, blocks)
            else:
                resident = copy_in(self._heap, runtime.tables, there, tokens, ids)
            tracked = self._restored_state(request_id, saved, there, tokens, resident)
            runtime.adopt(request_id, prompt_tokens, tracked, tokens, ids)
        except COPY_ERRORS:
            if resident is not None and runtime.tracked(request_id).resident is None:
                runtime.tables.leave(resident.slot_index)
            runtime.lose(request_id)
            self.discard(saved)
            raise

    def _restored_state(
        self,
        request_id: str,
        saved: CacheSnapshot,
        there: CacheSnapshot,
        tokens: int,
        resident: Resident | None,
    ) -> RequestState:
        """The runtime's state of a request whose pages are restored.

        Args:
            there: ``saved`` with its small tensors on the pool's device.
        """
        runtime = self._runtime
        if saved.offloaded is not None:
            assert runtime.retrieval is not None
            assert runtime.tables is not None
            assert resident is not None, "tokens are offloaded by compactions only"
            runtime.retrieval.attach(request_id, saved.offloaded)
            saved.offloaded = None  # the request owns it from now on
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
