"""Policies that keep spans at two resolutions, over a whole prompt in transformers.

The model of ``_masked_model.py`` sees what a mask says of the prompt; here it sees, in
the same softmax, what such a policy (``policies/resolution.py``) puts beside it: a
mean per span, or the span's tokens as their factors give them back. Segments, gates,
room and factors are the project's own; ``tests/unit/test_benchmarks_resolved.py`` holds
the sum against one that is written out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from _masked_model import Branches, MaskedModel, Prompt

from vllm_kvplugins import ops
from vllm_kvplugins.plan.geometry import Geometry, Lengths
from vllm_kvplugins.policies.span_policy import SpanPolicy
from vllm_kvplugins.spans.coarse import CoarseSpans
from vllm_kvplugins.spans.segmentation import Segments


@dataclass(slots=True)
class Resolved:
    """One prompt under one policy.

    Attributes:
        room: tokens that can be zoomed, per KV head.
        spans: per layer.
        keys, values: per layer, float32 [num_kv_heads, resident + spans + n, head_dim]:
            resident tokens, means, and the others as factors give them back (n = 0
            without a zoom).
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
        """None: the prompt stays whole."""
        tokens, size = prompt.tokens, geometry.block_size
        plan = policy.plan(Lengths(tokens), geometry)
        if not plan.compactions:
            return None
        (compaction,) = plan.compactions
        stays = len(compaction.retained) * size + tokens % size
        segments = policy.segment(surprisal, stays, geometry)
        made = cls(policy, segments, policy.zoom_tokens(tokens, geometry))
        for layer, pair in enumerate(zip(prompt.keys, prompt.values, strict=True)):
            made._take_in(layer, *(rows.float() for rows in pair))
        return made

    def _take_in(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        found, heads = self.segments, len(keys)
        inside = keys[:, found.positions], values[:, found.positions]
        spans = CoarseSpans.of(
            *inside, found, lambda means: self.policy.summarize(layer, means)
        )
        parts = [
            [keys[:, found.resident], spans.keys],
            [values[:, found.resident], spans.values],
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
        """[num_q_heads, head_dim]; queries of one token, [num_q_heads, head_dim]."""
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
    """Branches some of which see spans. ``resolved``: None = what its mask says."""

    resolved: list[Resolved | None] = field(default_factory=list)


class ResolvedModel(MaskedModel):
    """Goes on with ``ResolvedBranches`` too, token by token."""

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
    """Nats of each token, float32 [tokens], 0 for the first; logits of all tokens."""
    following = torch.tensor(tokens[1:])[:, None]
    said = logits[:-1].gather(1, following)[:, 0]
    found = logits[:-1].logsumexp(-1) - said
    return torch.cat([torch.zeros(1), found])
