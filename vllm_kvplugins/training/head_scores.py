"""Measure how much each KV head looks back at a text while the model repeats it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_kvplugins.errors import KVPolicyError, coded
from vllm_kvplugins.training.reference_model import (
    attend,
    load_attending,
    of_all_layers,
)

ATTENTION = "kvp-head-scores"
REQUEST = "\n\nRepeat the previous context exactly.\n\n"
# Queries at a time; bounds the memory of attention weights for long texts.
_QUERIES_AT_A_TIME = 256
# The first tokens get much attention from every head, the last ones are near.
_SINKS, _RECENT = 4, 32


@dataclass(slots=True)
class _Pass:
    """State of a running measurement, shared with the attention function.

    Attributes:
        tokens: of the text.
        first: position of the first token of the repetition.
        scores: by layer.
    """

    tokens: int
    first: int
    progress: Callable[[int], None]
    scores: dict[int, tuple[float, ...]] = field(default_factory=dict)


def head_scores(
    model: Any,
    tokens: Sequence[int],
    request: Sequence[int],
    progress: Callable[[int], None] = lambda layer: None,
) -> tuple[tuple[float, ...], ...]:
    """Scores of all KV heads, for one text (KVzip, arXiv:2505.23416).

    The model reads the text, the request to repeat it, and the text again. A token's
    score is the largest attention that it gets from any query of the repetition, in any
    query head of the KV head. A head's score is the mean of its tokens, without the
    first and the last ones, which streaming heads keep too.

    Args:
        model: from ``load_model``.
        tokens: of the text.
        request: tokens of ``REQUEST``.
        progress: called with the index of each finished layer.

    Returns:
        A float in [0, 1] per layer and KV head.

    Raises:
        ValueError: the text is too short.
        KVPolicyError: a layer does not use the attention interface of transformers, or
            its attention is not finite.

    Cost: one forward pass over twice the text; attention weights of 256 queries.
    """
    if len(tokens) <= _SINKS + _RECENT:
        raise ValueError(f"{len(tokens)} tokens leave nothing to score")
    running = _Pass(len(tokens), len(tokens) + len(request), progress)
    attend(model, torch.tensor([[*tokens, *request, *tokens]]), running)
    problem = "the heads of this model cannot be ranked"
    return tuple(of_all_layers(model, running.scores, problem))


def load_model(folder: str, dtype: str) -> Any:
    """Load a transformers model for :func:`head_scores`, on the CPU.

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
    """Attention function for transformers; tensors are [1, heads, tokens, head_dim]."""
    running: _Pass = module.kvp_running
    kv_heads, tokens = key.shape[1:3]
    # [kv_heads, group, tokens, head_dim]
    queries = query[0].unflatten(0, (kv_heads, -1))
    peak = queries.new_zeros(kv_heads, running.tokens)
    parts = []
    for first in range(0, tokens, _QUERIES_AT_A_TIME):
        chunk = queries[:, :, first : first + _QUERIES_AT_A_TIME]
        seen = first + chunk.shape[2]
        logits = chunk @ key[0, :, None, :seen].mT * scaling
        later = torch.ones(chunk.shape[2], seen, dtype=torch.bool).triu(first + 1)
        weights = logits.masked_fill_(later, -torch.inf).softmax(-1)
        repeating = weights[:, :, max(running.first - first, 0) :, : running.tokens]
        if repeating.shape[2]:
            peak = peak.maximum(repeating.amax((1, 2)))
        parts.append(weights @ value[0, :, None, :seen])
    scores = peak[:, _SINKS : running.tokens - _RECENT].float().mean(1)
    if not bool(scores.isfinite().all()):
        raise KVPolicyError(
            coded(
                "KVP627",
                f"attention of layer {module.layer_idx} is not finite; try --dtype "
                "float32, and check the model's weights",
            )
        )
    running.scores[module.layer_idx] = tuple(scores.tolist())
    running.progress(module.layer_idx)
    attended = torch.cat(parts, 2).flatten(0, 1)  # [heads, tokens, head_dim]
    return attended.transpose(0, 1)[None].contiguous(), None
