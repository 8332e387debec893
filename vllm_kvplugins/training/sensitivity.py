"""Measure how much the keys of each layer change under eviction (EpiCache)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from vllm_kvplugins.budgets.sensitivity_profile import MeasureSettings
from vllm_kvplugins.errors import KVPolicyError, coded
from vllm_kvplugins.training.reference_model import (
    attend,
    load_attending,
    of_all_layers,
)

ATTENTION = "kvp-sensitivity"
# Queries per chunk; bounds the memory of masks and scores for long texts.
_QUERIES_AT_A_TIME = 512


def block_mask(
    first_query: int, queries: int, settings: MeasureSettings
) -> torch.Tensor:
    """Mask that leaves queries only the sinks and the most recent tokens.

    The mask M' of EpiCache, section 3.2. With M = 4 and one sink, one row per query:

        1 . . . . .
        1 1 . . . .
        1 1 1 . . .
        1 1 1 1 . .
        1 . 1 1 1 .
        1 . . 1 1 1

    Args:
        first_query: position of the first query.
        queries: number of consecutive queries.

    Returns:
        bool [queries, first_query + queries]; True where a query sees a key. Equal to
        the causal mask if the budget covers all tokens.
    """
    query = torch.arange(first_query, first_query + queries)[:, None]
    key = torch.arange(first_query + queries)[None]
    recent = settings.budget - settings.sinks
    return (key <= query) & ((key < settings.sinks) | (key > query - recent))


def mean_cosine(first: torch.Tensor, second: torch.Tensor) -> float:
    """Cosine similarity of two sets of keys, mean over KV heads and tokens (eq. 9).

    Args:
        first, second: [num_kv_heads, tokens, head_dim].
    """
    cosine = F.cosine_similarity(first.double(), second.double(), dim=-1)
    return float(cosine.mean())


@dataclass(slots=True)
class _Pass:
    """State of a running measurement, shared with the attention function."""

    settings: MeasureSettings
    progress: Callable[[int], None]
    similarity: dict[int, float] = field(default_factory=dict)


def layer_sensitivity(
    model: Any,
    tokens: list[int],
    settings: MeasureSettings,
    progress: Callable[[int], None] = lambda layer: None,
) -> list[float]:
    """s_l = 1 - sigma_l of every layer, for one text (EpiCache, equations 8 and 9).

    Both forward passes run as a batch of two: row 0 with the causal mask, row 1 with
    ``block_mask``. The keys of a layer are compared as soon as they are computed, so no
    pass has to be stored.

    Keys are compared after RoPE, as cached. RoPE does not change their cosine: both
    passes rotate the key of a position by the same angles.

    Args:
        model: from ``load_model``.
        tokens: of the text, more than ``settings.budget``.
        progress: called with the index of each finished layer.

    Returns:
        A float >= 0 per layer. The first ``budget`` tokens see the same keys in both
        passes and count with a cosine of 1, so values grow with the length of the
        text. Budgets use only their proportions, which hardly change.

    Raises:
        ValueError: the text is not longer than the budget.
        KVPolicyError: keys are not finite, or a layer does not use the attention
            interface of transformers.

    Cost: two forward passes; memory for the activations of two sequences and, per
    layer, scores of 512 queries at a time.
    """
    if len(tokens) <= settings.budget:
        raise ValueError(
            f"{len(tokens)} tokens are not more than the budget of {settings.budget}, "
            "so nothing would be masked"
        )
    running = _Pass(settings, progress)
    attend(model, torch.tensor([tokens, tokens]), running)
    problem = "this model cannot be calibrated"
    similarity = of_all_layers(model, running.similarity, problem)
    return [max(1 - value, 0.0) for value in similarity]


def load_model(folder: str, dtype: str) -> Any:
    """Load a transformers model for :func:`layer_sensitivity`, on the CPU.

    Raises:
        KVPolicyError: the model is missing or cannot be loaded.
    """
    return load_attending(folder, dtype, ATTENTION, _attention)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function for transformers; tensors are [2, heads, tokens, head_dim]."""
    running: _Pass = module.kvp_running
    similarity = mean_cosine(key[0], key[1])
    if similarity != similarity:  # NaN
        raise KVPolicyError(
            coded(
                "KVP627",
                f"keys of layer {module.layer_idx} are not finite; try --dtype "
                "float32, and check the model's weights",
            )
        )
    running.similarity[module.layer_idx] = similarity
    running.progress(module.layer_idx)
    parts = []
    for first in range(0, query.shape[2], _QUERIES_AT_A_TIME):
        chunk = query[:, :, first : first + _QUERIES_AT_A_TIME]
        seen = first + chunk.shape[2]
        causal = block_mask(
            first, chunk.shape[2], MeasureSettings(budget=seen, sinks=0, dtype="")
        )
        evicted = block_mask(first, chunk.shape[2], running.settings)
        parts.append(
            F.scaled_dot_product_attention(
                chunk,
                key[:, :, :seen],
                value[:, :, :seen],
                attn_mask=torch.stack([causal, evicted])[:, None].to(key.device),
                scale=scaling,
                enable_gqa=True,
            )
        )
    return torch.cat(parts, 2).transpose(1, 2).contiguous(), None
