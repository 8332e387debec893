"""Probes: extra tokens that run through the model only to see where they look.

Their keys and values are never written to the cache. Attention over the
request's pages and the probe's own tokens is computed here, densely, so that a
probe needs no slots, no page tables and no kernel of its own::

    policy.probes of all requests due ──> forward(token_ids, positions)
                                              │ every layer, request by request
                                              └──> attention output, policy.observe
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from vllm_kvplugins.engine.compactor import Views
from vllm_kvplugins.engine.requests import PageList
from vllm_kvplugins.policies.base import LayerView
from vllm_kvplugins.policies.capabilities import (
    Encode,
    Probe,
    ProbeOccasion,
    Probing,
)
from vllm_kvplugins.scoring.attention_votes import valid_keys

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
class ProbeRequest:
    """A request that the policy may probe.

    Attributes:
        prompt: its token ids.
        owned: its pages.
        since: token count at its compaction before; 0 if there was none.
        tokens: its token count.
        patched_prompt: see ``ProbeOccasion``.
        observed: per layer what the policy observed last; filled by the probes.
    """

    prompt: Sequence[int]
    owned: PageList
    since: int
    tokens: int
    patched_prompt: Sequence[int] = ()
    observed: dict[int, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True)
class _Part:
    """One request's tokens in the forward pass that is under way."""

    asked: ProbeRequest
    probe: Probe
    tokens: slice


class Prober:
    """Runs a policy's probes against requests of one worker."""

    def __init__(self, probing: Probing, views: Views, model: ProbeModel) -> None:
        self._probing = probing
        self._views = views
        self._model = model
        self._running: list[_Part] = []

    def run(self, requests: Sequence[ProbeRequest]) -> None:
        """Let the policy probe requests; what it observes goes into each.

        The first probes of all requests share forward passes, then the second ones,
        and so on: a request's next probe may build on what the one before observed.

        Cost: a forward pass per ``max_tokens`` tokens of probes, and dense copies of
            one layer's keys and values of one request at a time.
        """
        asks = [(asked, self._probes(asked)) for asked in requests]
        for turn in range(max((len(probes) for _, probes in asks), default=0)):
            batch: list[tuple[ProbeRequest, Probe]] = []
            count = 0
            for asked, probes in asks:
                if turn >= len(probes):
                    continue
                tokens = len(probes[turn].token_ids)
                if count + tokens > self._model.max_tokens:
                    self._forward(batch)
                    batch, count = [], 0
                batch.append((asked, probes[turn]))
                count += tokens
            self._forward(batch)

    def _probes(self, asked: ProbeRequest) -> Sequence[Probe]:
        room = min(self._model.max_positions - asked.tokens, self._model.max_tokens)
        probes = self._probing.probes(
            ProbeOccasion(
                asked.prompt,
                asked.since,
                asked.tokens,
                room,
                self._model.encode,
                asked.patched_prompt,
            )
        )
        for probe in probes:
            count = len(probe.token_ids)
            assert 0 < count <= room, (
                f"probe of {count} tokens, there is room for {room}"
            )
        return probes

    def _forward(self, batch: Sequence[tuple[ProbeRequest, Probe]]) -> None:
        token_ids: list[int] = []
        positions: list[int] = []
        for asked, probe in batch:
            count = len(probe.token_ids)
            part = slice(len(token_ids), len(token_ids) + count)
            self._running.append(_Part(asked, probe, part))
            token_ids += probe.token_ids
            positions += range(asked.tokens, asked.tokens + count)
        device = batch[0][0].owned.pages.device
        try:
            self._model.forward(
                torch.tensor(token_ids, dtype=torch.int64, device=device),
                torch.tensor(positions, dtype=torch.int64, device=device),
            )
        finally:
            self._running = []
        layers = self._views.heap.num_layers
        for asked, _ in batch:
            assert len(asked.observed) == layers, "layers were left out"

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """One layer's attention for the running probes; shows it to the policy.

        Args:
            queries: [tokens, num_q_heads, head_dim], after RoPE.
            keys: [tokens, num_kv_heads, head_dim], after RoPE.
            values: [tokens, num_kv_heads, head_dim].

        Returns:
            [tokens, num_q_heads, head_dim].
        """
        assert self._running, "no probe is running"
        output = torch.empty_like(queries)
        for part in self._running:
            view = self._probe_view(part, layer, queries, keys, values)
            output[part.tokens] = dense_attention(view).transpose(0, 1)
            part.asked.observed[layer] = self._probing.observe(view)
        return output

    def _probe_view(
        self,
        part: _Part,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> LayerView:
        """A request's slots with its probe's own behind them."""
        asked, here = part.asked, part.tokens
        cached = self._views.view(
            layer,
            asked.owned,
            asked.tokens,
            queries[here].transpose(0, 1),
            asked.observed.get(layer),
        )
        own_keys, own_values = keys[here].transpose(0, 1), values[here].transpose(0, 1)
        own = torch.arange(
            asked.tokens, asked.tokens + own_keys.shape[1], device=keys.device
        )
        positions = torch.cat([cached.positions, own.expand(len(own_keys), -1)], 1)
        votes = self._views.votes(
            layer,
            asked.owned.pages[self._views.rows(layer)],
            cached.positions,
            cached.queries,
            own,
            own_keys,
        )
        return dataclasses.replace(
            cached,
            keys=torch.cat([cached.keys, own_keys], 1),
            positions=positions,
            valid=None if cached.valid is None else positions >= 0,
            query_positions=own,
            load_values=lambda: torch.cat([cached.values, own_values], 1),
            probe=part.probe,
            page_votes=votes,
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
