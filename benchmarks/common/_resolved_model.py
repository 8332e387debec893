"""Span policies over a whole prompt in transformers.

``_masked_model.py`` hides dropped tokens. This model adds, in the same softmax, the
entries of a span policy (``policies/span_policy.py``): one mean per span, or the span's
tokens as reconstructed from their factors. Segmentation, gates, room and factors come
from the package. ``tests/unit/test_benchmarks_resolved.py`` compares the result with an
explicit computation.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from _masked_model import Branches, MaskedModel, Prompt

from vllm_kvplugins import ops
from vllm_kvplugins.plan.geometry import Geometry, Lengths
from vllm_kvplugins.policies.span_policy import SpanPolicy
from vllm_kvplugins.spans.coarse import CoarseSpans, weighted_means
from vllm_kvplugins.spans.segmentation import Segments


@dataclass(slots=True)
class Resolved:
    """One prompt under one span policy.

    Attributes:
        policy: the span policy.
        segments: resident tokens and spans of the prompt.
        room: number of tokens that can be zoomed, per KV head.
        spans: span means, per layer.
        keys, values: per layer, float32 [num_kv_heads, resident + spans + n, head_dim]:
            resident tokens, span means, then the n reconstructed tokens (n = 0 without
            zoom).
    """

    policy: SpanPolicy
    segments: Segments
    room: int
    spans: list[CoarseSpans] = field(default_factory=list)
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        policy: SpanPolicy,
        prompt: Prompt,
        surprisal: torch.Tensor,
        geometry: Geometry,
    ) -> Resolved | None:
        """Segment a prompt; None if the policy keeps it whole."""
        tokens, size = prompt.tokens, geometry.block_size
        plan = policy.plan(Lengths(tokens), geometry)
        if not plan.compactions:
            return None
        (compaction,) = plan.compactions
        stays = len(compaction.retained) * size + tokens % size
        segments = policy.segment(surprisal, stays, geometry)
        model = cls(policy, segments, policy.zoom_tokens(tokens, geometry))
        for layer, pair in enumerate(zip(prompt.keys, prompt.values, strict=True)):
            model._add_layer(layer, *(rows.float() for rows in pair))
        return model

    def _add_layer(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        found, heads = self.segments, len(keys)
        inside = keys[:, found.positions], values[:, found.positions]
        spans = CoarseSpans.of(
            inside[0],
            found,
            lambda means: self.policy.summarize(layer, means),
            self.policy.uses_key_variance,
        )
        parts = [
            [keys[:, found.resident], spans.keys],
            [values[:, found.resident], weighted_means(inside[1], found)],
        ]
        if self.room:
            rows = [part.bfloat16() for part in inside]
            factors = self.policy.decompose(layer, rows[0], rows[1], spans)
            which = torch.arange(len(factors))
            again = ops.reconstruct(factors, which, torch.float32)
            again = again.view(2 * heads, *keys[:1, found.positions].shape[1:])
            parts[0].append(again[:heads])
            parts[1].append(again[heads:])
        self.spans.append(spans)
        self.keys.append(torch.cat(parts[0], 1))
        self.values.append(torch.cat(parts[1], 1))

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        new_keys: torch.Tensor,
        new_values: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Attention output of one token.

        Args:
            queries: [num_q_heads, head_dim].
            new_keys, new_values: [num_kv_heads, n, head_dim] of tokens after the
                prompt.

        Returns:
            [num_q_heads, head_dim].
        """
        keys, spans = self.keys[layer], self.spans[layer]
        heads, count, _ = keys.shape
        grouped = queries.float().view(heads, -1, queries.shape[-1])
        resident = int(self.segments.resident.sum())
        first = resident + self.segments.num_spans
        bias = torch.zeros(heads, count)
        bias[:, resident:first] = spans.log_sizes
        if self.room:
            gates = self.policy.gates(layer, grouped, spans, scale)
            zoomed = ops.within_room(gates, spans.sizes, self.room)
            bias[:, resident:first].masked_fill_(zoomed, -torch.inf)
            hidden = ~zoomed[:, self.segments.span]
            bias[:, first:].masked_fill_(hidden, -torch.inf)
        old = grouped @ keys.mT * scale + bias[:, None]
        own = grouped @ new_keys.float().mT * scale
        shares = torch.cat([old, own], -1).softmax(-1)
        out = shares[..., :count] @ self.values[layer]
        out += shares[..., count:] @ new_values.float()
        return out.reshape(-1, queries.shape[-1])


@dataclass(slots=True)
class ResolvedBranches(Branches):
    """Branches that may attend to spans. ``resolved``: None = use the branch's mask."""

    resolved: list[Resolved | None] = field(default_factory=list)


class ResolvedModel(MaskedModel):
    """A masked model that also extends ``ResolvedBranches``, one token at a time."""

    def attention(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        out = super().attention(layer, q, k, v, scale)
        branches = self._branches
        if self._prompt is not None or not isinstance(branches, ResolvedBranches):
            return out
        new_k, new_v = branches.keys[layer], branches.values[layer]
        for i, one in enumerate(branches.resolved):
            if one is not None:
                seen = one.attend(layer, q[i, :, 0], new_k[i], new_v[i], scale)
                out[i, :, 0] = seen.to(out.dtype)
        return out


def surprisals(logits: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Surprisal of each token in nats, float32 [tokens]; 0 for the first token.

    Args:
        logits: [tokens, vocabulary], of all tokens.
        tokens: token ids.
    """
    following = torch.tensor(tokens[1:])[:, None]
    token_logits = logits[:-1].gather(1, following)[:, 0]
    found = logits[:-1].logsumexp(-1) - token_logits
    return torch.cat([torch.zeros(1), found])
