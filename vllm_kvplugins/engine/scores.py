"""A policy's scores of one request, all layers and KV heads, slot by slot."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch

from vllm_kvplugins.engine.requests import DueCompaction, PageList, RequestState
from vllm_kvplugins.engine.views import Views
from vllm_kvplugins.errors import KVPolicyError
from vllm_kvplugins.log_throttle import LogThrottle
from vllm_kvplugins.policies.base import KVCachePolicy, LayerView

logger = logging.getLogger("vllm.kv_policy")


@dataclass(slots=True)
class UnscoredTokens:
    """What becomes of scores that tell nothing: one request must not end the server.

    They come where the model's own numbers overflowed, as they may in float16, or
    where a policy has a fault.

    Attributes:
        compactions: those that had any.
    """

    compactions: int = 0
    _notes: LogThrottle = field(default_factory=LogThrottle)

    def settle(
        self,
        policy: str,
        request_id: str,
        scores: torch.Tensor,
        room: int,
    ) -> torch.Tensor:
        """The scores, NaN worth the least, and ``inf`` only what may demand to stay:
        more than there is room for is worth the most. The log says of whom.

        Args:
            scores: float32 [layers, kv_heads, slots]; overwritten.
            room: slots that each KV head keeps, on average.
        """
        unknown = scores.isnan()
        endless = scores.isposinf()
        endless &= endless.sum(-1, keepdim=True) > room
        touched = unknown | endless
        if not bool(touched.any()):
            return scores
        self.compactions += 1
        layers = touched.flatten(1).any(1).nonzero()[:, 0].tolist()
        note = (
            f"{policy} gave scores that are NaN, or infinite for more tokens than "
            f"stay, in {len(layers)} layers, first in layer {layers[0]}: keys, values "
            "or queries of the request hold NaN or infinity, or the policy has a "
            "fault. What is NaN counts as worth the least"
        )
        if format := self._notes.format(note):
            logger.warning("request %s: %s", request_id, format)
        most = torch.finfo(scores.dtype).max
        return scores.masked_fill_(unknown, -torch.inf).masked_fill_(endless, most)


def slot_scores(
    policy: KVCachePolicy,
    views: Views,
    due: DueCompaction,
    owned: PageList,
    fixed: torch.Tensor,
    competing: torch.Tensor,
    tracked: RequestState,
) -> torch.Tensor:
    """Ask a policy what each competing slot is worth.

    Args:
        owned: the request's pages.
        fixed, competing: int64 [rows]: pages of each up to the first number stay
            whole, and those from there to the second compete.
        tracked: what is known of the request; its window of queries is used up.

    Returns:
        float32 [layers, kv_heads, slots]; -inf where nothing competes; perhaps NaN
        elsewhere.

    Raises:
        KVPolicyError: scores are not one number per slot.
    """
    heap, row = views.heap, due.row
    size = heap.layout.block_size
    slots = int(competing.max()) * size
    shape = (heap.num_layers, heap.num_kv_heads, slots)
    # layers with fewer slots than the longest stay at -inf beyond their own
    scores = torch.full(shape, -torch.inf, device=heap.pages.device)
    window, tracked.window = tracked.window, None
    queries = torch.empty(heap.num_layers, 0, 0, 0)
    if due.first_query < row.after_tokens:
        assert window is not None, "its queries are missing"
        queries = window.take(due.first_query, row.after_tokens)
    compaction = due.compaction
    blocks = len(compaction.retained) - compaction.fixed_blocks
    budget = blocks * size + row.after_tokens % size
    for layer in range(heap.num_layers):
        order = None
        if tracked.resident is not None:
            # a retained region is in no order: show it oldest first
            positions = views.positions(layer, owned, row.after_tokens)
            order = positions.argsort(dim=1, stable=True)
        observed = tracked.observed.get(layer)
        mine = queries[layer].transpose(0, 1).contiguous()
        view = views.view(layer, owned, row.after_tokens, mine, observed, budget, order)
        score = policy.score(view)
        check_scores(policy, layer, score, view)
        if order is not None:
            score = score.scatter(1, order, score)
        width = min(score.shape[1], slots)
        scores[layer, :, :width] = score[:, :width]
    place = torch.arange(slots, device=scores.device)
    first, stop = ((pages * size).view(*shape[:2], 1) for pages in (fixed, competing))
    return scores.masked_fill_((place < first) | (place >= stop), -torch.inf)


def check_scores(
    policy: KVCachePolicy, layer: int, score: torch.Tensor, view: LayerView
) -> None:
    """Refuse what is no float per slot; fewer would fit somehow, to the wrong tokens.

    Raises:
        KVPolicyError: it is something else.
    """
    wanted = tuple(view.positions.shape)
    got = tuple(score.shape) if isinstance(score, torch.Tensor) else type(score)
    if got != wanted or not score.is_floating_point():
        kind = f" of {score.dtype}" if isinstance(score, torch.Tensor) else ""
        raise KVPolicyError(
            f"{policy.name}.score returned {got}{kind} for layer {layer}; it must be "
            f"a tensor of floats, [KV heads, slots] = {wanted}"
        )
