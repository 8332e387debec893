"""Saves the caches of a worker's requests, and restores them into other requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from vllm_kvplugins.engine.requests import RequestState, Resident
from vllm_kvplugins.engine.retained_regions import RetainedRegions
from vllm_kvplugins.engine.runtime import PolicyRuntime
from vllm_kvplugins.engine.windows import Window
from vllm_kvplugins.ops.device import SideStream
from vllm_kvplugins.plan.residency_plan import Compaction
from vllm_kvplugins.sessions.deltas import Lineage
from vllm_kvplugins.sessions.page_tokens import PageFormat
from vllm_kvplugins.sessions.rewind import SavedTokens, rebuild
from vllm_kvplugins.sessions.settings import SessionDtype
from vllm_kvplugins.sessions.snapshot import (
    COPY_ERRORS,
    CacheSnapshot,
    PagesToCopy,
    fill_pages,
    mismatch,
    pages_to_copy,
    register,
)
from vllm_kvplugins.sessions.stored_pages import (
    StoredPages,
    pack_queries,
    stored_pages,
    unpack_queries,
)


class PendingSave:
    """The cache of an ended request that is still to be copied, in any thread.

    Its blocks must not be reused until then.

    Args:
        saved: everything but pages; its queries are as the model computed them. If it
            is not kept, ``Transfer.discard`` must free what it has.
        pages: in each heap.
        side: where copies are queued on a GPU, after ``written``.
        written: an event after all writes to the pages; None on a CPU.
    """

    def __init__(
        self,
        saved: CacheSnapshot,
        pages: Sequence[PagesToCopy],
        side: SideStream,
        written: torch.cuda.Event | None,
    ) -> None:
        self.saved = saved
        self._pages = pages
        self._side, self._written = side, written

    @property
    def num_bytes(self) -> int:
        """Memory of the pages, as they will be stored."""
        return sum(pages.num_bytes for pages in self._pages)

    # Outside of a step, but the pool's tensors are inference tensors.
    @torch.inference_mode()
    def finish(self) -> CacheSnapshot:
        """Copy the pages, and wait for the copies.

        Raises:
            COPY_ERRORS: a copy failed.
        """
        saved = self.saved
        with self._side.after(self._written):
            saved.parts = tuple(pages.copy_out() for pages in self._pages)
            if saved.queries is not None:
                saved.queries = pack_queries(saved.queries, saved.dtype)
            return saved.on(torch.device("cpu"))


class PendingPlacement:
    """A snapshot that is still to be copied to free blocks, in any thread.

    Args:
        heaps: of the pool.
        blocks: int64, physical IDs, from the first resident block; on its device.
        side: where copies are queued on a GPU, after ``free``.
        free: an event after all reads and writes of earlier owners; None on a CPU.
    """

    def __init__(
        self,
        heaps: Sequence[tuple[RetainedRegions, StoredPages]],
        saved: CacheSnapshot,
        tokens: int,
        blocks: torch.Tensor,
        side: SideStream,
        free: torch.cuda.Event | None,
    ) -> None:
        self._heaps, self._saved, self._tokens = heaps, saved, tokens
        self._blocks, self._side, self._free = blocks, side, free

    @torch.inference_mode()
    def finish(self) -> tuple[torch.Tensor, ...]:
        """Copy the pages, and wait for the copies.

        Returns:
            For each heap, the page IDs of the retained region, in host memory.

        Raises:
            COPY_ERRORS: a copy failed.
        """
        blocks, no_prefix = self._blocks, self._blocks[:0]
        last, tokens = self._saved.compaction, self._tokens
        with self._side.after(self._free):
            ids = [
                fill_pages(*heap, part, last, tokens, blocks, no_prefix)
                for heap, part in zip(self._heaps, self._saved.parts, strict=True)
            ]
            placed = tuple(each.cpu() for each in ids)
            done = self._side.event()
        if done is not None:
            done.synchronize()
        return placed


class Transfer:
    """Saves and restores requests of one worker.

    Args:
        runtime: runtime of the worker, which must be attached before the first call.
        dtype: the setting ``session_dtype``.
    """

    def __init__(self, runtime: PolicyRuntime, dtype: SessionDtype = "auto") -> None:
        self._runtime = runtime
        self._dtype = dtype
        self._formats: tuple[PageFormat, ...] = ()
        self._side: SideStream | None = None

    @property
    def _heaps(self) -> list[tuple[RetainedRegions, StoredPages]]:
        """The regions of each heap, with the format of its pages."""
        return [
            (regions, stored_pages(regions.heap, self._dtype))
            for regions in self._runtime.regions
        ]

    def page_formats(self) -> tuple[PageFormat, ...]:
        """The order of elements in stored pages of each heap.

        Cost: the first call reads tables from the pool's device.
        """
        if not self._formats:
            self._formats = tuple(
                PageFormat(stored.layout, stored.slot_elements())
                for _, stored in self._heaps
            )
        return self._formats

    @property
    def _device(self) -> torch.device:
        """Device of the pool."""
        assert self._runtime.heap is not None, "not attached"
        return self._runtime.heap.pages.device

    def _ids(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.int64, device=self._device)

    # Runs outside of a step, but the pool's tensors are inference tensors.
    @torch.inference_mode()
    def save(
        self,
        request_id: str,
        compaction: Compaction | None,
        tokens: int,
        blocks: Sequence[int],
        first_query: int,
    ) -> PendingSave:
        """Prepare to copy a request's cache out of the pool.

        Call before the runtime forgets the request. Reads no page.

        Args:
            compaction: its last compaction, with candidates from the shared prefix on.
            tokens: number of tokens to save.
            blocks: physical IDs, from its first resident block.
            first_query: position of the first query to save; ``tokens``: save none.

        Raises:
            ValueError: the last compaction was at another token count, queries are
                missing, or the request's own session failed to load.
        """
        runtime = self._runtime
        state = runtime.request_state(request_id)
        compacted_at = compaction.at_tokens if compaction else 0
        if state.lost:
            raise ValueError("its own session failed to load")
        if state.compacted_at != compacted_at:
            raise ValueError(
                f"compacted at {state.compacted_at} tokens, not at {compacted_at}"
            )
        runtime.observe_accepted(request_id, tokens)
        runtime.refresh_positions(request_id)
        ids, residents = self._ids(blocks), runtime.residents(request_id)
        pages = [
            pages_to_copy(*heap, resident, compaction, tokens, ids)
            for heap, resident in zip(self._heaps, residents, strict=True)
        ]
        saved = CacheSnapshot(tokens, compaction, (), self._dtype, blocks=tuple(blocks))
        if first_query < tokens:
            window = state.window
            if window is None or not window.has(first_query, tokens):
                raise ValueError(f"queries {first_query} to {tokens} were not kept")
            saved.queries = window.take(first_query, tokens)
            saved.queries_dtype = saved.queries.dtype
        observation = runtime.policy.observation
        if observation is not None:
            for layer, observed in state.observed.items():
                saved.observed[layer] = observation.pack(observed)
        saved.extension_states = runtime.detach_extensions(request_id)
        saved.lineage = state.lineage
        return PendingSave(saved, pages, *self._after_all_steps())

    def _after_all_steps(self) -> tuple[SideStream, torch.cuda.Event | None]:
        """The stream for copies, and an event after all steps so far."""
        if self._side is None:
            self._side = SideStream(self._device)
        if self._device.type != "cuda":
            return self._side, None
        event = torch.cuda.Event()
        event.record()
        return self._side, event

    @torch.inference_mode()
    def place(
        self, saved: CacheSnapshot, tokens: int, blocks: Sequence[int]
    ) -> PendingPlacement:
        """Prepare to copy a snapshot to free blocks. Writes no page.

        Args:
            tokens: number of saved tokens to copy.
            blocks: physical IDs, from its first resident block. The caller keeps them
                free until a request continues the snapshot in place.
        """
        ids = self._ids(blocks)
        return PendingPlacement(
            self._heaps, saved, tokens, ids, *self._after_all_steps()
        )

    def discard(self, saved: CacheSnapshot) -> None:
        """Free the host tier that a snapshot holds; it will not be restored."""
        self._runtime.discard_extensions(saved.extension_states)
        saved.extension_states = ()

    def mismatch(self, saved: CacheSnapshot) -> str | None:
        """Why a snapshot does not fit this worker; None: it fits."""
        heaps = self._heaps
        if saved.dtype != self._dtype:
            return f"its session_dtype is {saved.dtype}, not {self._dtype}"
        if len(saved.parts) != len(heaps):
            return f"it has layers of {len(saved.parts)} models, not {len(heaps)}"
        for (regions, stored), part in zip(heaps, saved.parts, strict=True):
            problem = mismatch(regions.heap.rows, stored, part)
            if problem is not None:
                return problem
        return None

    @torch.inference_mode()
    def restore(
        self,
        request_id: str,
        prompt_tokens: int,
        saved: CacheSnapshot,
        tokens: int,
        blocks: Sequence[int],
        in_place: bool = False,
        prefix: Sequence[int] = (),
        rewound: Compaction | None = None,
        moves: bool = False,
    ) -> None:
        """Let a request continue from a snapshot.

        Call after the runtime has learned of the request, before its first step.

        Args:
            tokens: number of saved tokens to restore.
            blocks: physical IDs, from its first resident block.
            in_place: whether these blocks still hold the snapshot.
            prefix: physical IDs of first blocks that hold their tokens already.
            rewound: the last compaction of the restored cache, which is rebuilt, if it
                is earlier than that of the snapshot.
            moves: the snapshot is not used again: the request gets its tokens in the
                host tier.

        Raises:
            COPY_ERRORS: a copy failed, for example because device memory is full. The
                request's KV is invalid until it is recomputed. The tokens in the host
                tier of a snapshot that moves are freed.
        """
        runtime = self._runtime
        runtime.forget([request_id])
        residents: list[Resident | None] = []
        try:
            ids, shared = self._ids(blocks), self._ids(prefix)
            on_device = self._on_device(saved)
            if rewound is not None:
                on_device = replace(on_device, compaction=rewound)
                # The scheduler goes back without a drafter only: its layers have lost
                # what the last compaction dropped.
                ((_, stored),) = self._heaps
                source = SavedTokens(runtime, stored, saved)
                residents.append(rebuild(runtime, source, rewound, tokens, ids))
            else:
                first = blocks if in_place else None
                self._copy_in(on_device, tokens, ids, shared, first, residents)
            state = self._restored_state(
                request_id, saved, on_device, tokens, residents[0], moves
            )
            if rewound is None:
                state.lineage = _lineage(saved, tokens)
            runtime.resume(
                request_id, prompt_tokens, state, residents, tokens, ids, shared
            )
        except COPY_ERRORS:
            self._release(request_id, residents)
            runtime.mark_lost(request_id)
            if moves:
                self.discard(saved)
            raise

    def _copy_in(
        self,
        on_device: CacheSnapshot,
        tokens: int,
        ids: torch.Tensor,
        shared: torch.Tensor,
        in_place: Sequence[int] | None,
        residents: list[Resident | None],
    ) -> None:
        """Copy a snapshot into each heap.

        Args:
            in_place: the physical IDs in ``ids``, if the blocks still hold the
                snapshot; None: they do not.
            residents: gets the retained region in each heap, also if a later copy
                fails.
        """
        if in_place is not None:
            assert on_device.blocks is not None, "it was read from a file"
            assert tuple(in_place) == on_device.blocks[: len(in_place)], (
                "it was saved from other blocks"
            )
        last = on_device.compaction
        for (regions, stored), part in zip(self._heaps, on_device.parts, strict=True):
            if in_place is None:
                args = (part, last, tokens, ids, shared)
                retained = fill_pages(regions, stored, *args)
            else:
                assert part.retained_ids is not None, "it was read from a file"
                retained = part.retained_ids
            residents.append(register(regions, part, last, retained, shared))

    def _release(self, request_id: str, residents: Sequence[Resident | None]) -> None:
        """Release the retained regions that the runtime has not taken over yet."""
        if self._runtime.request_state(request_id).resident is not None:
            return  # the runtime takes all of them at once
        for regions, resident in zip(self._runtime.regions, residents, strict=False):
            if resident is not None:
                regions.tables.release(resident.slot_index)

    def _on_device(self, saved: CacheSnapshot) -> CacheSnapshot:
        """A copy with queries as the model computed them.

        All tensors except for pages are on the pool's device.
        """
        queries = saved.queries
        if queries is not None:
            head_dim = self._runtime.regions[0].heap.layout.head_dim
            queries = unpack_queries(
                queries, saved.dtype, head_dim, saved.queries_dtype
            )
        return replace(saved, queries=queries).on(self._device)

    def _restored_state(
        self,
        request_id: str,
        saved: CacheSnapshot,
        on_device: CacheSnapshot,
        tokens: int,
        resident: Resident | None,
        moves: bool,
    ) -> RequestState:
        """The runtime's state of a request whose pages are restored.

        Args:
            on_device: see ``_on_device``; with the compaction of the request.
            resident: its retained region in the layers of the model.
        """
        runtime = self._runtime
        if saved.extension_states:
            assert resident is not None, "tokens are offloaded by compactions only"
            self._attach(request_id, saved, on_device.compaction, moves)
            runtime.place_extensions(request_id, resident)
        observation = runtime.policy.observation
        assert observation is not None or not on_device.observed
        observed = {
            layer: observation.unpack(packed)
            for layer, packed in on_device.observed.items()
            if observation is not None
        }
        window = None
        if on_device.queries is not None:
            window = Window.restored(on_device.queries, on_device.first_query, tokens)
        return RequestState(None, window, observed, on_device.compaction)

    def _attach(
        self,
        request_id: str,
        saved: CacheSnapshot,
        compaction: Compaction | None,
        moves: bool,
    ) -> None:
        """Give a request its part of what a snapshot has in step extensions."""
        assert compaction is not None, "tokens are offloaded by compactions only"
        states = self._runtime.continue_extensions(
            saved.extension_states, compaction, moves
        )
        if moves:
            saved.extension_states = ()
        try:
            self._runtime.attach_extensions(request_id, states)
        except COPY_ERRORS:
            self._runtime.discard_extensions(states)
            raise


def _lineage(saved: CacheSnapshot, tokens: int) -> Lineage:
    """What the next session of a conversation needs to know of the last one.

    Args:
        tokens: how many of its tokens are restored.
    """
    slots = tuple(part.slots for part in saved.parts)
    return Lineage(saved.file, tokens, saved.tokens, saved.compaction, slots)
