"""Measuring how much a layer's keys change when queries see less (EpiCache)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from vllm_kvplugins.budgets.sensitivity_profile import MeasureSettings
from vllm_kvplugins.errors import KVPolicyError
from vllm_kvplugins.training.reference_model import load_attending

ATTENTION = "kvp-sensitivity"
# Queries at a time, so that masks and scores stay small however long the text is.
_QUERIES_AT_A_TIME = 512


def block_mask(
    first_query: int, queries: int, settings: MeasureSettings
) -> torch.Tensor:
    """What queries see when only sinks and the most recent tokens are left.

    The mask M' of EpiCache, section 3.2. With M = 4 and one sink, a row per query:

        1 . . . . .
        1 1 . . . .
        1 1 1 . . .
        1 1 1 1 . .
        1 . 1 1 1 .
        1 . . 1 1 1

    Args:
        first_query: position of the first query.
        queries: how many follow one another from there.

    Returns:
        bool [queries, first_query + queries]; True: seen. With a budget of at least
        all tokens it is the causal mask.
    """
    query = torch.arange(first_query, first_query + queries)[:, None]
    key = torch.arange(first_query + queries)[None]
    recent = settings.budget - settings.sinks
    return (key <= query) & ((key < settings.sinks) | (key > query - recent))


def mean_cosine(first: torch.Tensor, second: torch.Tensor) -> float:
    """Mean over KV heads and tokens of the cosine of two layers of keys (equation 9).

    Args:
        first, second: [num_kv_heads, tokens, head_dim].
    """
    cosine = F.cosine_similarity(first.double(), second.double(), dim=-1)
    return float(cosine.mean())


@dataclass(slots=True)
class _Pass:
    """What the attention function of a running measurement knows."""

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

    The two forward passes run side by side, as a batch of two: row 0 under the causal
    mask, row 1 under ``block_mask``. A layer's keys of both are compared as soon as
    they are there, so that no pass has to be kept.

    Keys are taken as they are cached, after RoPE. Their cosine is the same before it:
    both passes rotate the key of a position by the same angles.

    Args:
        model: of ``load_model``.
        tokens: of the text, more than ``settings.budget``.
        progress: called with the index of each layer that is done.

    Returns:
        A float >= 0 per layer. The first ``budget`` tokens see the same in both passes
        and count with a cosine of 1, so values grow with the text's length; their
        proportions, which is all that budgets use, hardly do.

    Raises:
        ValueError: no query sees less than all before it.
        KVPolicyError: keys are not finite, or the model called no such attention.

    Cost: two forward passes; activations of two sequences and, per layer, scores of
    512 queries at a time. Neither attention maps nor keys of other layers are kept.
    """
    if len(tokens) <= settings.budget:
        raise ValueError(
            f"{len(tokens)} tokens are not more than the budget of {settings.budget}, "
            "so nothing would be masked"
        )
    running = _Pass(settings, progress)
    body = model.base_model
    for module in body.modules():
        if hasattr(module, "layer_idx"):
            module.kvp_sensitivity = running
    ids = torch.tensor([tokens, tokens], device=model.device)
    try:
        with torch.no_grad():
            body(ids, use_cache=False)
    finally:
        for module in body.modules():
            if hasattr(module, "kvp_sensitivity"):
                del module.kvp_sensitivity
    layers = model.config.get_text_config().num_hidden_layers
    if sorted(running.similarity) != list(range(layers)):
        raise KVPolicyError(
            f"of {layers} layers {len(running.similarity)} attend through the "
            "attention interface of transformers; this model cannot be calibrated"
        )
    return [max(1 - running.similarity[layer], 0.0) for layer in range(layers)]


def load_model(folder: str, dtype: str) -> Any:
    """A transformers model whose attention can be measured; on the CPU.

    Raises:
        KVPolicyError: there is none, or it cannot be loaded.
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
    """What transformers calls with [2, heads, tokens, head_dim] each."""
    running: _Pass = module.kvp_sensitivity
    similarity = mean_cosine(key[0], key[1])
    if similarity != similarity:  # NaN
        raise KVPolicyError(
            f"keys of layer {module.layer_idx} are not finite; try --dtype float32, "
            "and check the model's weights"
        )
    running.similarity[module.layer_idx] = similarity
    running.progress(module.layer_idx)
    parts = []
    for first in range(0, query.shape[2], _QUERIES_AT_A_TIME):
        asked = query[:, :, first : first + _QUERIES_AT_A_TIME]
        seen = first + asked.shape[2]
        everything = block_mask(
            first, asked.shape[2], MeasureSettings(budget=seen, sinks=0, dtype="")
        )
        less = block_mask(first, asked.shape[2], running.settings)
        parts.append(
            F.scaled_dot_product_attention(
                asked,
                key[:, :, :seen],
                value[:, :, :seen],
                attn_mask=torch.stack([everything, less])[:, None].to(key.device),
                scale=scaling,
                enable_gqa=True,
            )
        )
    return torch.cat(parts, 2).transpose(1, 2).contiguous(), None
