"""Entries for the tokens that queries do not select: one mean per chunk.

See :mod:`vllm_kvplugins.spans.chunk_means`. Means are written when tokens move to the
host, and stay as they are; only their biases change with each selection. They are on
the device while a request runs, and in host memory while a session waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from vllm_kvplugins.engine.entries import EntryArena
from vllm_kvplugins.engine.heap import Heap
from vllm_kvplugins.engine.retrieval.host_tier import HostTier
from vllm_kvplugins.engine.retrieval.hot_slots import HotSlots
from vllm_kvplugins.engine.retrieval.offloaded import Batch, MeanRun, Offloaded
from vllm_kvplugins.ops.coarse_entries import CoarseEntries
from vllm_kvplugins.ops.device import moved
from vllm_kvplugins.ops.unselected import ChunkRuns, logarithms, write_unselected
from vllm_kvplugins.spans.chunk_means import ChunkMeans


@dataclass(frozen=True, slots=True, eq=False)
class BatchEntries:
    """The entries of a batch; the same in all layers of a step.

    Attributes:
        means: what computes their biases.
        slot_indices: int64 [requests], rows of hot slots.
        hot: int64 [layers, requests], hot slots.
    """

    means: UnselectedMeans
    runs: ChunkRuns
    slot_indices: torch.Tensor
    hot: torch.Tensor

    def of_layer(self, layer: int) -> CoarseEntries:
        """Entries of a layer, with biases for the tokens that are in hot slots now."""
        return self.means.attended(self, layer)


class UnselectedMeans:
    """Means of all requests on one worker.

    Args:
        hot_slots: tells which tokens are selected.
    """

    def __init__(
        self, means: ChunkMeans, heap: Heap, tier: HostTier, hot_slots: HotSlots
    ) -> None:
        self._means, self._heap, self._tier = means, heap, tier
        self._hot_slots = hot_slots
        dtype = heap.pages.dtype if heap.fp8 is None else torch.bfloat16
        self._arena = EntryArena(
            len(hot_slots.layers), heap.layout.head_dim, dtype, heap.pages.device
        )
        self._last_runs: tuple[list[tuple[MeanRun, int]], ChunkRuns] | None = None
        self._logs = logarithms(means.chunk_tokens, hot_slots.token.device)

    def append(
        self,
        state: Offloaded,
        layers: range,
        first: int,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Write the means of chunks that become full with these tokens.

        Args:
            first: number of the first one among the request's host tokens; the host
                tier has all earlier ones.
            keys, values: [layers * num_kv_heads, n, head_dim], on the device.
        """
        begin = first - first % self._means.chunk_tokens
        stop = first + keys.shape[1]
        self._make_room(state, stop)
        if self._means.num_chunks(stop) == self._means.num_chunks(begin):
            return
        parts = [self._heap.unscaled(rows) for rows in (keys, values)]
        if begin < first:
            # The host has the first tokens of the chunk.
            held = self._tier.read(state.tables(layers), range(begin, first))
            parts = [
                torch.cat([moved(lead, rows.device).to(rows.dtype), rows], 1)
                for lead, rows in zip(held, parts, strict=True)
            ]
        for plane, rows in enumerate(parts):
            self._write(state, layers, begin, plane, self._means.means(rows))

    def _write(
        self,
        state: Offloaded,
        layers: range,
        first: int,
        plane: int,
        means: torch.Tensor,
    ) -> None:
        """Write means [layers * num_kv_heads, n, head_dim] from a token on."""
        begin = self._means.num_chunks(first)
        run = self._run_of(state, plane)
        at = layers.start - self._hot_slots.layers.start
        target = run[at : at + len(layers), :, begin : begin + means.shape[1]]
        target.copy_(means.view(target.shape))

    def _run_of(self, state: Offloaded, plane: int) -> torch.Tensor:
        """[layers, num_kv_heads, room, head_dim], keys (plane 0) or values (1)."""
        entries = self._arena.keys if plane == 0 else self._arena.values
        heads, own = self._heap.num_kv_heads, state.means
        stop = own.first + heads * own.room
        return entries[:, own.first : stop].unflatten(1, (heads, own.room))

    def _make_room(self, state: Offloaded, tokens: int) -> None:
        """Allocate entries for this many tokens; copies those that the request has."""
        room, old = self._means.num_chunks(tokens), state.means
        if room <= old.room:
            return
        held = [self._run_of(state, plane) for plane in (0, 1)] if old.room else []
        state.means = MeanRun(self._arena.take(self._heap.num_kv_heads * room), room)
        for plane, rows in enumerate(held):
            self._run_of(state, plane)[:, :, : old.room] = rows
        self._release(old)

    def _release(self, run: MeanRun) -> None:
        if run.room:
            self._arena.release(run.first, self._heap.num_kv_heads * run.room)

    # -- steps --------------------------------------------------------------------

    def of(self, batch: Batch) -> BatchEntries:
        """The entries of a batch."""
        states, layers = batch.states, self._hot_slots.layers
        hot = [[state.hot[layer] for state in states] for layer in layers]
        selects_on = self._hot_slots.token.device
        return BatchEntries(
            self,
            self._runs(states),
            slot_indices=moved(batch.slot_indices, selects_on),
            hot=moved(torch.tensor(hot), selects_on),
        )

    def _runs(self, states: Sequence[Offloaded]) -> ChunkRuns:
        """The runs of these requests. Returns the same object while they have the same
        entries, which is most steps."""
        chunks = [self._means.num_chunks(state.tokens) for state in states]
        key = [
            (state.means, number) for state, number in zip(states, chunks, strict=True)
        ]
        if self._last_runs is None or self._last_runs[0] != key:
            head = torch.arange(self._heap.num_kv_heads)
            first = [state.means.first + head * state.means.room for state in states]
            devices = self._heap.pages.device, self._hot_slots.token.device
            runs = ChunkRuns.of(torch.stack(first), torch.tensor(chunks), *devices)
            self._last_runs = key, runs
        return self._last_runs[1]

    def attended(self, entries: BatchEntries, layer: int) -> CoarseEntries:
        """See :meth:`BatchEntries.of_layer`."""
        at, runs = layer - self._hot_slots.layers.start, entries.runs
        bias = self._arena.bias[at]
        if runs.num_chunks:
            write_unselected(
                bias,
                runs,
                self._hot_slots.hot_set(layer).token,
                entries.slot_indices,
                entries.hot[at],
                self._logs,
            )
        return CoarseEntries(
            self._arena.keys[at], self._arena.values[at], bias, runs.starts, runs.counts
        )

    # -- requests -----------------------------------------------------------------

    def release(self, state: Offloaded) -> None:
        """Free the entries of a request."""
        self._release(state.means)
        state.means = MeanRun()

    def to_host(self, state: Offloaded) -> None:
        """Move the means of a request that ends to host memory, for its session."""
        chunks = self._means.num_chunks(state.tokens)
        state.host_means = [
            self._run_of(state, plane)[:, :, :chunks].to("cpu", copy=True)
            for plane in (0, 1)
        ]
        self.release(state)

    def continue_from(self, state: Offloaded, new: Offloaded) -> None:
        """Give the means of a session to the request that continues it. Nobody writes
        to them, so both may have them."""
        chunks = self._means.num_chunks(new.tokens)
        new.host_means = [rows[:, :, :chunks] for rows in state.host_means]

    def attach(self, state: Offloaded) -> None:
        """Move the means of a session to the device, for the request that continues
        it."""
        self._make_room(state, state.tokens)
        chunks, held = self._means.num_chunks(state.tokens), state.host_means
        state.host_means = []
        for plane, rows in enumerate(held if chunks else []):
            target = self._run_of(state, plane)[:, :, :chunks]
            target.copy_(moved(rows, target.device))

    def bytes_of(self, state: Offloaded) -> int:
        """Device memory of the entries of a request."""
        heap = self._heap
        entry = 2 * heap.layout.head_dim * self._arena.keys.itemsize
        entries = len(self._hot_slots.layers) * heap.num_kv_heads * state.means.room
        return int(entries * self._means.entry_bytes(entry))

    @property
    def num_bytes(self) -> int:
        """Device memory of all entries, in use or not."""
        return self._arena.allocated_device_bytes

    def check_integrity(
        self, running: Iterable[Offloaded], waiting: Sequence[Offloaded]
    ) -> None:
        """Check that each entry has one owner, and that sessions have none."""
        runs = [state.means for state in running]
        heads = self._heap.num_kv_heads
        self._arena.check_integrity(
            [(run.first, heads * run.room) for run in runs if run.room]
        )
        assert not any(state.means.room for state in waiting), (
            "a session has entries on the device"
        )
