"""Compactions of requests: the policy scores each layer, then the kept tokens move.

::

    pages of the request ── LayerView per layer ── policy.score
        ── allocator: pages per (layer, KV head) ── slots to keep
        ── RetainedRegions.compact: move the kept tokens ── new retained region
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from vllm_kvplugins.budgets import PageAllocator
from vllm_kvplugins.engine.draft_layers import DraftLayers
from vllm_kvplugins.engine.heap import Heap
from vllm_kvplugins.engine.requests import DueCompaction, PageList, RequestState
from vllm_kvplugins.engine.retained_regions import RetainedRegions
from vllm_kvplugins.engine.step_extension import StepExtension
from vllm_kvplugins.errors import KVPolicyError, coded
from vllm_kvplugins.log_throttle import LogThrottle
from vllm_kvplugins.ops.extension import compiled_for
from vllm_kvplugins.ops.page_votes import VoteQueries, VoteSlots, page_votes
from vllm_kvplugins.plan.residency_plan import Compaction
from vllm_kvplugins.policies.base import KVCachePolicy, LayerView
from vllm_kvplugins.scoring.logits import PLAIN, LogitRules
from vllm_kvplugins.scoring.rotary import Rotary
from vllm_kvplugins.scoring.selection import keep_top

logger = logging.getLogger("vllm.kv_policy")


@dataclass(frozen=True, slots=True)
class Compactor:
    """Compacts the requests of one worker.

    Attributes:
        regions: the retained regions in the heap that the policy manages.
        extensions: called before and after the tokens of a request move.
        draft_layers: compacted with the same scores; None without any.
    """

    policy: KVCachePolicy
    regions: RetainedRegions
    views: Views
    extensions: Sequence[StepExtension] = ()
    draft_layers: DraftLayers | None = None
    invalid_scores: InvalidScores = field(default_factory=lambda: InvalidScores())

    def run(self, due: DueCompaction, state: RequestState) -> torch.Tensor:
        """Compact a request.

        Args:
            state: of the request; gets the new retained region.

        Returns:
            int32 [rows, slots], RoPE positions in the retained region, -1 in unused
            slots.
        """
        row, resident = due.row, state.resident
        if resident is not None:
            for extension in self.extensions:
                extension.refresh_positions(row.request_id, resident.positions)
        owned = self.regions.owned(row, due.blocks, resident)
        for extension in self.extensions:
            observed = extension.before_compaction(due, owned)
            if observed is not None:
                state.observed = observed
        competing = self.regions.competing(row, owned)
        fixed = self.regions.fixed(due.compaction, resident)
        scores = self._scores(due, state, owned, competing, fixed)
        keep, counts = choose_slots(
            self.policy.page_allocator(),
            due.compaction,
            scores,
            competing,
            fixed,
            self.regions.heap.layout.block_size,
        )
        if self.draft_layers is not None:
            self.draft_layers.compact(due, scores, owned.positions)
        state.resident, pages = self.regions.compact(
            due, resident, owned, competing, keep, counts
        )
        positions = state.resident.positions
        for extension in self.extensions:
            extension.after_compaction(row.request_id, pages, positions)
        return positions

    def _scores(
        self,
        due: DueCompaction,
        state: RequestState,
        owned: PageList,
        competing: torch.Tensor,
        fixed: torch.Tensor,
    ) -> torch.Tensor:
        """The result of :func:`slot_scores`, without invalid scores."""
        scores = slot_scores(
            self.policy, self.views, due, owned, fixed, competing, state
        )
        compaction = due.compaction
        room = len(compaction.retained) - compaction.fixed_blocks
        room *= self.regions.heap.layout.block_size
        return self.invalid_scores.replace(
            self.policy.name, due.row.request_id, scores, room
        )


# -- views of the cache ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Views:
    """Makes the views of one worker's cache that policies read.

    Attributes:
        scales: softmax scale per layer.
        rotary: the model's RoPE; None if policies cannot undo it.
        rules: what else a layer does to logits, per layer; empty: nothing.
        output_weights: reads the output projection, per layer; empty: the policy does
            not need it.
    """

    heap: Heap
    scales: Sequence[float]
    rotary: Rotary | None
    rules: Sequence[LogitRules] = ()
    output_weights: Sequence[Callable[[], torch.Tensor]] = ()

    def rules_of(self, layer: int) -> LogitRules:
        """What a layer does to logits besides scaling."""
        return self.rules[layer] if self.rules else PLAIN

    def rows(self, layer: int) -> slice:
        """The layer's rows among all (layer, KV head) pairs."""
        heads = self.heap.num_kv_heads
        return slice(layer * heads, (layer + 1) * heads)

    def positions(self, layer: int, owned: PageList, tokens: int) -> torch.Tensor:
        """int64 [kv_heads, max slots], -1 in slots without a token."""
        rows, size = self.rows(layer), self.heap.layout.block_size
        lengths = owned.owned[rows] * size - (-tokens % size)
        longest = int(lengths.max())
        place = torch.arange(longest, device=lengths.device)
        positions = owned.positions[rows, :longest].long()
        return positions.masked_fill(place >= lengths[:, None], -1)

    def view(
        self,
        layer: int,
        owned: PageList,
        tokens: int,
        queries: torch.Tensor,
        observed: Any,
        budget_tokens: int = 0,
        order: torch.Tensor | None = None,
    ) -> LayerView:
        """One layer of a request whose newest token has position ``tokens - 1``.

        Args:
            queries: [num_q_heads, num_queries, head_dim] of its newest tokens.
            order: int64 [kv_heads, slots], the order in which the view shows the
                slots; None = the order in the cache.
        """
        heap = self.heap
        positions = self.positions(layer, owned, tokens)
        slots = positions.shape[1]
        used = -(-slots // heap.layout.block_size)
        pages = owned.pages[self.rows(layer), :used]

        def ordered(tensor: torch.Tensor) -> torch.Tensor:
            tensor = tensor[:, :slots]
            if order is None:
                return tensor
            return tensor.gather(1, order[..., None].expand_as(tensor))

        query_positions = torch.arange(
            tokens - queries.shape[1], tokens, device=pages.device
        )
        votes = self.votes(
            layer,
            VoteSlots(pages, positions),
            VoteQueries(queries, query_positions),
            order,
        )
        if order is not None:
            positions = positions.gather(1, order)
        return LayerView(
            layer=layer,
            positions=positions,
            valid=positions >= 0 if bool((positions < 0).any()) else None,
            queries=queries,
            query_positions=query_positions,
            scale=self.scales[layer],
            rotary=self.rotary,
            observed=observed,
            budget_tokens=budget_tokens,
            load_keys=cache(lambda: ordered(heap.keys(layer, pages))),
            load_values=lambda: ordered(heap.values(layer, pages)),
            page_votes=votes,
            rules=self.rules_of(layer),
            load_output_weights=(
                self.output_weights[layer] if self.output_weights else None
            ),
        )

    def votes(
        self,
        layer: int,
        slots: VoteSlots,
        queries: VoteQueries,
        order: torch.Tensor | None = None,
    ) -> Callable[[bool], torch.Tensor] | None:
        """``LayerView.page_votes`` of some pages; None where votes need dense keys.

        Args:
            slots: in the order of the cache.
            queries: with ``own_keys``, those of a probe; its slots come last and get 0.
            order: int64 [kv_heads, slots], the order of the votes; None = unchanged.
        """
        if not reads_votes_from_pages(self.heap.pages.device):
            return None
        if self.heap.fp8 is not None:
            return None  # the kernel reads plain elements
        if not self.rules_of(layer).plain:
            return None  # the kernel knows no other rules
        kv, scale = self.heap.kv, self.scales[layer]

        def votes_of(largest: bool) -> torch.Tensor:
            votes = page_votes(kv, slots, queries, scale, largest)
            if queries.own_keys is not None:
                votes = F.pad(votes, (0, queries.own_keys.shape[1]))
            if order is None:
                return votes
            return votes.gather(2, order.unsqueeze(1).expand_as(votes))

        return votes_of


def reads_votes_from_pages(device: torch.device) -> bool:
    """Whether votes are computed from pages instead of a copy of the keys.

    True on a GPU with our compiled kernels. On a CPU the copy is faster
    (docs/gpu.md).
    """
    return device.type == "cuda" and compiled_for(device)[0]


# -- scores and selection ------------------------------------------------------


def slot_scores(
    policy: KVCachePolicy,
    views: Views,
    due: DueCompaction,
    owned: PageList,
    fixed: torch.Tensor,
    competing: torch.Tensor,
    state: RequestState,
) -> torch.Tensor:
    """The policy's score of every competing slot.

    Args:
        owned: the request's pages.
        fixed: int64 [rows], pages per row that stay whole.
        competing: int64 [rows], pages per row up to which slots compete; the pages
            behind ``fixed`` up to this number do.
        state: of the request; this function removes its window of queries.

    Returns:
        float32 [layers, kv_heads, slots]; -inf where no slot competes. May hold NaN
        elsewhere, see :class:`InvalidScores`.

    Raises:
        KVPolicyError: the policy did not return one float per slot.
    """
    heap, row = views.heap, due.row
    size = heap.layout.block_size
    slots = int(competing.max()) * size
    shape = (heap.num_layers, heap.num_kv_heads, slots)
    # Layers with fewer slots than the longest layer keep -inf behind their own.
    scores = torch.full(shape, -torch.inf, device=heap.pages.device)
    window, state.window = state.window, None
    queries = torch.empty(heap.num_layers, 0, 0, 0)
    if due.first_query < row.after_tokens:
        assert window is not None, "the queries that score it were not kept"
        queries = window.take(due.first_query, row.after_tokens)
    compaction = due.compaction
    blocks = len(compaction.retained) - compaction.fixed_blocks
    budget = blocks * size + row.after_tokens % size
    for layer in range(heap.num_layers):
        order = None
        if state.resident is not None:
            # The slots of a retained region are unordered. Show the oldest first.
            positions = views.positions(layer, owned, row.after_tokens)
            order = positions.argsort(dim=1, stable=True)
        observed = state.observed.get(layer)
        layer_queries = queries[layer].transpose(0, 1).contiguous()
        view = views.view(
            layer, owned, row.after_tokens, layer_queries, observed, budget, order
        )
        score = policy.score(view)
        check_scores(policy, layer, score, view)
        if order is not None:
            score = score.scatter(1, order, score)
        width = min(score.shape[1], slots)
        scores[layer, :, :width] = score[:, :width]
    if compaction.whole_tokens != (0, 0):
        _keep_whole(scores, owned.positions[:, :slots], compaction.whole_tokens)
    place = torch.arange(slots, device=scores.device)
    first, stop = ((pages * size).view(*shape[:2], 1) for pages in (fixed, competing))
    return scores.masked_fill_((place < first) | (place >= stop), -torch.inf)


def _keep_whole(
    scores: torch.Tensor, positions: torch.Tensor, whole_tokens: tuple[int, int]
) -> None:
    """Mark the tokens of a compaction that stay whatever their scores.

    Args:
        scores: float32 [layers, kv_heads, slots]; overwritten.
        positions: int32 [layers * kv_heads, slots].
        whole_tokens: positions [start, stop).
    """
    start, stop = whole_tokens
    whole = (positions >= start) & (positions < stop)
    scores.masked_fill_(whole.view(scores.shape), torch.inf)


def check_scores(
    policy: KVCachePolicy, layer: int, score: torch.Tensor, view: LayerView
) -> None:
    """Refuse scores that are not one float per slot.

    A tensor of another shape might broadcast and score the wrong tokens.

    Raises:
        KVPolicyError: the shape or the dtype is wrong.
    """
    expected = tuple(view.positions.shape)
    got = tuple(score.shape) if isinstance(score, torch.Tensor) else type(score)
    if got != expected or not score.is_floating_point():
        kind = f" of {score.dtype}" if isinstance(score, torch.Tensor) else ""
        raise KVPolicyError(
            coded(
                "KVP201",
                f"{policy.name}.score returned {got}{kind} for layer {layer}; return "
                f"a tensor of floats with shape [KV heads, slots] = {expected}",
            )
        )


@dataclass(slots=True)
class InvalidScores:
    """Replaces NaN and surplus ``inf`` scores, so that one request cannot stop the
    server.

    Such scores occur when the model's own numbers overflow, as they may in float16,
    or when a policy has a bug.

    Attributes:
        compactions: compactions that had invalid scores.
    """

    compactions: int = 0
    _throttle: LogThrottle = field(default_factory=LogThrottle)

    def replace(
        self, policy: str, request_id: str, scores: torch.Tensor, room: int
    ) -> torch.Tensor:
        """Replace NaN by the lowest score, and log the request.

        A row that marks more slots with ``inf`` than there is room for gets the
        largest finite score in these slots.

        Args:
            scores: float32 [layers, kv_heads, slots]; overwritten.
            room: slots that each KV head keeps, on average.
        """
        is_nan = scores.isnan()
        surplus = scores.isposinf()
        surplus &= surplus.sum(-1, keepdim=True) > room
        invalid = is_nan | surplus
        if not bool(invalid.any()):
            return scores
        self.compactions += 1
        layers = invalid.flatten(1).any(1).nonzero()[:, 0].tolist()
        note = (
            f"{policy} returned scores that are NaN, or infinite for more tokens than "
            f"fit into the budget, in {len(layers)} layers, first in layer {layers[0]}."
            " Either keys, values or queries of the request hold NaN or infinity, or "
            "the policy has a bug. Tokens with a NaN score are dropped first"
        )
        if text := self._throttle.format(note):
            logger.warning("KV policy: request %s: %s", request_id, text)
        largest = torch.finfo(scores.dtype).max
        return scores.masked_fill_(is_nan, -torch.inf).masked_fill_(surplus, largest)


def choose_slots(
    allocator: PageAllocator,
    compaction: Compaction,
    scores: torch.Tensor,
    competing: torch.Tensor,
    fixed: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the slots that stay.

    Args:
        scores: float32 [layers, kv_heads, slots]; -inf in pages that stay whole.
        competing: int64 [layers * kv_heads], pages of each row, the earlier retained
            region first.
        fixed: int64, same shape, pages of that region that stay whole.

    Returns:
        bool [rows, slots], the slots that stay; int64 [rows], pages of each row after
        the compaction.
    """
    layers, heads, slots = scores.shape
    counts = allocator.allocate(
        scores,
        len(compaction.retained) - compaction.fixed_blocks,
        block_size,
        (competing - fixed).view(layers, heads).cpu(),
    )
    counts = counts.to(scores.device).view(-1)
    keep = keep_top(scores.view(layers * heads, -1), counts * block_size)
    stays = torch.arange(slots, device=scores.device) < fixed[:, None] * block_size
    return keep | stays, counts + fixed
