"""Run the model with spans at two resolutions, chosen by a router (SeKV, 3.3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vllm_kvplugins.routers.router import Router
from vllm_kvplugins.training.examples import Example
from vllm_kvplugins.training.teacher import continue_with

# (layer, queries [num_q_heads, n, head_dim]) -> zoom [num_q_heads, n, spans].
Decide = Callable[[int, torch.Tensor], torch.Tensor]


def student_logits(model: Any, example: Example, decide: Decide) -> torch.Tensor:
    """Logits of the example's passage when ``decide`` chooses the zoomed spans.

    Returns:
        float32 [window, vocabulary].
    """
    passage = example.passage
    assert passage is not None

    def attend(
        layer: int,
        scale: float,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        memory = Memory.of(example, layer)
        zoom = decide(layer, query)
        return mixed_attention(query, key, value, memory, zoom, scale).to(value.dtype)

    return continue_with(model, passage.tokens, passage.first_position, attend)


def routed(router: Router, example: Example) -> Decide:
    """The decisions of a router, with straight-through gradients."""

    def decide(layer: int, queries: torch.Tensor) -> torch.Tensor:
        summary = router.summarize(example.means[0, layer], layer)
        logits = router.logits(queries, summary, example.log_sizes, layer)
        return straight_through(logits, router.threshold[layer, :, None, None])

    return decide


def straight_through(logits: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """1.0 where a gate exceeds its threshold, else 0.0 (equation 9).

    The gradient is that of the gate minus the threshold (Bengio et al., 2013).
    """
    gap = logits.sigmoid() - threshold.sigmoid()
    hard = (logits > threshold).float()
    return hard + gap - gap.detach()


@dataclass(frozen=True, slots=True)
class Memory:
    """The context of the passage in one layer.

    Attributes:
        keys, values: [num_kv_heads, tokens, head_dim], of all tokens.
        span: int64 [tokens], span of each token; -1 for a token outside of spans.
        mean_keys, mean_values: [num_kv_heads, spans, head_dim].
        log_sizes: float32 [spans].
    """

    keys: torch.Tensor
    values: torch.Tensor
    span: torch.Tensor
    mean_keys: torch.Tensor
    mean_values: torch.Tensor
    log_sizes: torch.Tensor

    @staticmethod
    def of(example: Example, layer: int) -> Memory:
        passage, segments = example.passage, example.segments
        assert passage is not None
        span = torch.full((passage.first_position,), -1)
        span[segments.positions] = segments.span
        return Memory(
            passage.keys[layer],
            passage.values[layer],
            span.to(passage.keys.device),
            example.means[0, layer],
            example.means[1, layer],
            example.log_sizes,
        )


def mixed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    memory: Memory,
    zoom: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention to tokens, span means and zoomed tokens in one softmax.

    A token of a span has weight ``zoom``, the mean of its span ``1 - zoom``. With zoom
    0 or 1 this is SeKV's attention. It is linear in zoom before the normalization, so
    the gradient shows the effect of the other choice.

    Args:
        query: [num_q_heads, n, head_dim], of the passage.
        key, value: [num_kv_heads, n, head_dim], of the passage; causal.
        memory: the context.
        zoom: float32 [num_q_heads, n, spans].
        scale: softmax scale.

    Returns:
        float32 [num_q_heads, n, head_dim].
    """
    group, count = query.shape[0] // key.shape[0], query.shape[1]

    def wide(rows: torch.Tensor) -> torch.Tensor:
        return rows.float().repeat_interleave(group, 0)

    scaled_query = query.float() * scale
    keys = torch.cat([wide(memory.keys), wide(key), wide(memory.mean_keys)], 1)
    values = torch.cat([wide(memory.values), wide(value), wide(memory.mean_values)], 1)
    scores = scaled_query @ keys.mT
    before, spans = memory.keys.shape[1], zoom.shape[-1]
    later = torch.ones(count, count, dtype=torch.bool, device=query.device).triu(1)
    scores[..., before : before + count].masked_fill_(later, -torch.inf)
    scores[..., before + count :] += memory.log_sizes
    weights = (scores - scores.amax(-1, keepdim=True).detach()).exp()
    in_span = memory.span >= 0
    seen = torch.where(in_span, zoom[..., memory.span.clamp(min=0)], 1.0)
    counts = torch.cat(
        [seen, torch.ones_like(zoom[..., :1]).expand(*zoom.shape[:2], count), 1 - zoom],
        -1,
    )
    assert counts.shape[-1] == before + count + spans
    weights = weights * counts
    return weights @ values / weights.sum(-1, keepdim=True).clamp(min=1e-30)
