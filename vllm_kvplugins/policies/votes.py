"""What queries of a view attend to, asked of the pages themselves where that is faster.

On a GPU with this package's kernels the pages are read in place, without a matrix of
weights (``ops.page_votes``); elsewhere the view's copy of the keys is.
"""

from __future__ import annotations

import torch

from vllm_kvplugins.policies.base import LayerView
from vllm_kvplugins.scoring import attention_votes
from vllm_kvplugins.scoring.logits import LogitRules


def window_votes(view: LayerView) -> torch.Tensor:
    """Mean attention that a view's queries pay to each slot before them.

    ProtoKV, equation 4, divided by the number of queries: they belong to the last
    slots, and see each other causally.

    Returns:
        float32 [num_kv_heads, group, num_slots - num_queries]; 0 where there is no
        token.

    Raises:
        ValueError: there are no slots before the queries'.
    """
    window, num_slots = view.queries.shape[1], view.positions.shape[1]
    if view.page_votes is None or window >= num_slots:
        return attention_votes.window_votes(
            view.queries, view.keys, view.scale, view.valid, view.rules
        )
    return view.page_votes(False)[..., : num_slots - window] / window


def attention_mass(view: LayerView) -> torch.Tensor:
    """Attention that a view's queries pay to each slot, summed over them.

    Returns:
        float32 [num_kv_heads, num_slots], mean over the query heads that share a KV
        head; 0 where there is no token. Of a probe's own slots it says nothing.
    """
    if view.page_votes is None:
        return attention_votes.attention_mass(*_attention_arguments(view))
    return view.page_votes(False).mean(1)


def attention_peak(view: LayerView) -> torch.Tensor:
    """Most attention that any of a view's queries pays to each slot (EpiCache,
    equation 3), the maximum also over the query heads that share a KV head.

    Returns:
        As :func:`attention_mass`.
    """
    if view.page_votes is None:
        return attention_votes.attention_peak(*_attention_arguments(view))
    return view.page_votes(True).amax(1)


def _attention_arguments(
    view: LayerView,
) -> tuple[torch.Tensor, torch.Tensor, float, torch.Tensor, torch.Tensor, LogitRules]:
    at = view.query_positions, view.positions
    return view.queries, view.keys, view.scale, *at, view.rules
