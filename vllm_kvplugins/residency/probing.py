"""Probes: extra tokens that run through the model only to see where they look.

Their keys and values are never written to the cache. Attention over the
request's pages and the probe's own tokens is computed here, densely, so that a
probe needs no slots, no page tables and no kernel of its own::

    policy.probes ──> forward(token_ids, positions)
                          │ every layer
                          └──> attend ──> attention output, policy.observe
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from vllm_kvplugins.policies.base import (
    Encode,
    KVCachePolicy,
    LayerView,
    Probe,
    ProbeOccasion,
)
from vllm_kvplugins.residency.requests import PageList
from vllm_kvplugins.residency.views import Views
from vllm_kvplugins.scoring import valid_keys

# Masks hold at most this many entries at a time; 2**26 bools are 64 MiB.
_MAX_MASK = 1 << 26


@dataclasses.dataclass(frozen=True, slots=True)
class ProbeModel:
    """The model, as probes need it.

    Attributes:
        forward: runs int64 [tokens] ids at int64 [tokens] positions through all
            layers; each of them calls ``Prober.attend``.
        encode: its tokenizer.
        max_positions: positions that it has.
        max_tokens: most tokens of one forward pass.
    """

    forward: Callable[[torch.Tensor, torch.Tensor], None]
    encode: Encode
    max_positions: int
    max_tokens: int


@dataclasses.dataclass(slots=True)
class _Running:
    """The probe whose forward pass is under way."""

    probe: Probe
    owned: PageList
    tokens: int
    # per layer: what the policy's ``observe`` last returned
    observed: dict[int, Any]


class Prober:
    """Runs a policy's probes against single requests of one worker."""

    def __init__(self, policy: KVCachePolicy, views: Views, model: ProbeModel) -> None:
        self._policy = policy
        self._views = views
        self._model = model
        self._running: _Running | None = None

    def run(
        self, prompt: Sequence[int], owned: PageList, since: int, tokens: int
    ) -> dict[int, Any]:
        """Let the policy probe a request.

        Args:
            prompt: its token ids.
            owned: its pages.
            since: token count at its compaction before; 0 if there was none.
            tokens: its token count.

        Returns:
            Per layer what the policy observed; empty if it had no probe.

        Cost: a forward pass per probe, and dense copies of one layer's keys and
            values of the request at a time.
        """
        room = min(self._model.max_positions - tokens, self._model.max_tokens)
        occasion = ProbeOccasion(prompt, since, tokens, room, self._model.encode)
        observed: dict[int, Any] = {}
        for probe in self._policy.probes(occasion):
            count = len(probe.token_ids)
            assert 0 < count <= room, (
                f"probe of {count} tokens, there is room for {room}"
            )
            device = owned.pages.device
            token_ids = torch.tensor(probe.token_ids, dtype=torch.int64, device=device)
            positions = torch.arange(tokens, tokens + count, device=device)
            self._running = _Running(probe, owned, tokens, observed)
            try:
                self._model.forward(token_ids, positions)
            finally:
                self._running = None
            assert len(observed) == self._views.heap.num_layers, "layers were left out"
        return observed

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """One layer's attention for the running probe; shows it to the policy.

        Args:
            queries: [tokens, num_q_heads, head_dim], after RoPE.
            keys: [tokens, num_kv_heads, head_dim], after RoPE.
            values: [tokens, num_kv_heads, head_dim].

        Returns:
            [tokens, num_q_heads, head_dim].
        """
        running = self._running
        assert running is not None, "no probe is running"
        view = self._probe_view(running, layer, queries.transpose(0, 1), keys, values)
        output = dense_attention(view)
        running.observed[layer] = self._policy.observe(view)
        return output.transpose(0, 1)

    def _probe_view(
        self,
        running: _Running,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> LayerView:
        """The request's slots with the probe's own behind them."""
        count = keys.shape[0]
        cached = self._views.view(
            layer,
            running.owned,
            running.tokens,
            queries,
            running.observed.get(layer),
        )
        own = torch.arange(running.tokens, running.tokens + count, device=keys.device)
        positions = torch.cat([cached.positions, own.expand(keys.shape[1], -1)], 1)
        own_values = values.transpose(0, 1)
        return dataclasses.replace(
            cached,
            keys=torch.cat([cached.keys, keys.transpose(0, 1)], 1),
            positions=positions,
            valid=None if cached.valid is None else positions >= 0,
            query_positions=own,
            load_values=lambda: torch.cat([cached.values, own_values], 1),
            probe=running.probe,
        )


def dense_attention(view: LayerView) -> torch.Tensor:
    """Causal attention of a view's queries over its slots, in any order.

    Returns:
        [num_q_heads, num_queries, head_dim], dtype of the queries.

    Cost: memory for a mask of 64 MiB, else that of torch's attention.
    """
    num_kv_heads, num_slots, head_dim = view.keys.shape
    num_queries = view.queries.shape[1]
    grouped = view.queries.unflatten(0, (num_kv_heads, -1))
    group = grouped.shape[1]
    # What lies in slots without a token may be NaN, which no mask removes.
    keys = valid_keys(view.keys, view.valid).unsqueeze(1)
    values = valid_keys(view.values, view.valid).unsqueeze(1)
    # Slots lie alike in all heads until a compaction: one mask is enough then.
    positions = view.positions if view.valid is not None else view.positions[:1]
    if view.valid is None and not bool((view.positions == positions).all()):
        positions = view.positions
    output = torch.empty_like(grouped)
    step = max(_MAX_MASK // (positions.shape[0] * group * num_slots), 1)
    for first in range(0, num_queries, step):
        at = view.query_positions[first : first + step, None]
        seen = (positions[:, None] <= at) & (positions[:, None] >= 0)
        mask = seen.unsqueeze(1).repeat_interleave(group, 1).flatten(1, 2)
        part = grouped[:, :, first : first + step]
        attended = F.scaled_dot_product_attention(
            part.reshape(num_kv_heads, 1, -1, head_dim),
            keys,
            values,
            attn_mask=mask.unsqueeze(1),
            scale=view.scale,
        )
        output[:, :, first : first + step] = attended.view(part.shape)
    return output.flatten(0, 1)
