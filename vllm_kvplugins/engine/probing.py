"""Probes: extra tokens that run through the model to see what they attend to.

Their keys and values are never written to the cache. This module computes attention
over the request's pages and the probe's own tokens densely, so a probe needs no slots,
no page tables and no kernel of its own. Layers that the policy does not manage attend
to their window in vLLM's blocks::

    policy.probes of all requests due ──> forward(token_ids, positions)
                          every layer of the policy, request by request
                              └──> attention output, policy.observe
                          every other layer
                              └──> attention output
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from vllm_kvplugins.engine.compactor import Views
from vllm_kvplugins.engine.probe_attention import LocalLayer, dense_attention
from vllm_kvplugins.engine.requests import PageList
from vllm_kvplugins.ops.page_votes import VoteQueries, VoteSlots
from vllm_kvplugins.policies.base import LayerView
from vllm_kvplugins.policies.capabilities import (
    Encode,
    Probe,
    ProbeOccasion,
    Probing,
)


@dataclasses.dataclass(frozen=True, slots=True)
class ProbeModel:
    """The model as the prober uses it.

    Attributes:
        forward: runs int64 [tokens] ids at int64 [tokens] positions through all
            layers, each of which calls ``Prober.attend`` or ``attend_local``.
        encode: the tokenizer.
        max_positions: number of positions that the model supports.
        max_tokens: maximum number of tokens per forward pass.
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
        first_query: index of its first token among the step's tokens.
        since: token count at its previous compaction; 0 if there was none.
        tokens: its token count.
        patched_prompt, shared: see ``ProbeOccasion``.
        observed: per layer, what the policy observed last; filled by the probes.
    """

    prompt: Sequence[int]
    owned: PageList
    first_query: int
    since: int
    tokens: int
    patched_prompt: Sequence[int] = ()
    shared: int = 0
    observed: dict[int, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True)
class _Part:
    """One request's tokens in the current forward pass."""

    request: ProbeRequest
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
        """Run the policy's probes and fill ``observed`` of each request.

        The first probes of all requests share forward passes, then the second probes,
        and so on. The next probe of a request may use what the previous one observed.

        Cost: a forward pass per ``max_tokens`` tokens of probes, and dense copies of
            one layer's keys and values of one request at a time.
        """
        with_probes = [(request, self._probes(request)) for request in requests]
        for turn in range(max((len(probes) for _, probes in with_probes), default=0)):
            batch: list[tuple[ProbeRequest, Probe]] = []
            count = 0
            for request, probes in with_probes:
                if turn >= len(probes):
                    continue
                tokens = len(probes[turn].token_ids)
                if count + tokens > self._model.max_tokens:
                    self._forward(batch)
                    batch, count = [], 0
                batch.append((request, probes[turn]))
                count += tokens
            self._forward(batch)

    def _probes(self, request: ProbeRequest) -> Sequence[Probe]:
        room = min(self._model.max_positions - request.tokens, self._model.max_tokens)
        probes = self._probing.probes(
            ProbeOccasion(
                request.prompt,
                request.since,
                request.tokens,
                room,
                self._model.encode,
                request.patched_prompt,
                request.shared,
            )
        )
        for probe in probes:
            count = len(probe.token_ids)
            assert 0 < count <= room, f"a probe has {count} tokens, the limit is {room}"
        return probes

    def _forward(self, batch: Sequence[tuple[ProbeRequest, Probe]]) -> None:
        token_ids: list[int] = []
        positions: list[int] = []
        for request, probe in batch:
            count = len(probe.token_ids)
            part = slice(len(token_ids), len(token_ids) + count)
            self._running.append(_Part(request, probe, part))
            token_ids += probe.token_ids
            positions += range(request.tokens, request.tokens + count)
        device = batch[0][0].owned.pages.device
        try:
            self._model.forward(
                torch.tensor(token_ids, dtype=torch.int64, device=device),
                torch.tensor(positions, dtype=torch.int64, device=device),
            )
        finally:
            self._running = []
        layers = self._views.heap.num_layers
        for request, _ in batch:
            assert len(request.observed) == layers, "a layer did not call attend"

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """Compute one layer's attention of the running probes; let the policy observe.

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
            part.request.observed[layer] = self._probing.observe(view)
        return output

    def attend_local(
        self,
        layer: LocalLayer,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """Compute the running probes' attention in a layer that vLLM manages.

        Args and result: as for ``attend``.
        """
        assert self._running, "no probe is running"
        output = torch.empty_like(queries)
        for part in self._running:
            request, at = part.request, part.tokens
            own = (rows[at].transpose(0, 1) for rows in (queries, keys, values))
            attended = layer.attend(request.first_query, request.tokens, *own)
            output[at] = attended.transpose(0, 1)
        return output

    def _probe_view(
        self,
        part: _Part,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> LayerView:
        """A request's slots, followed by the slots of its probe."""
        request, tokens = part.request, part.tokens
        cached = self._views.view(
            layer,
            request.owned,
            request.tokens,
            queries[tokens].transpose(0, 1),
            request.observed.get(layer),
        )
        own_keys, own_values = (
            keys[tokens].transpose(0, 1),
            values[tokens].transpose(0, 1),
        )
        own = torch.arange(
            request.tokens, request.tokens + own_keys.shape[1], device=keys.device
        )
        positions = torch.cat([cached.positions, own.expand(len(own_keys), -1)], 1)
        votes = self._views.votes(
            layer,
            VoteSlots(request.owned.pages[self._views.rows(layer)], cached.positions),
            VoteQueries(cached.queries, own, own_keys),
        )
        return dataclasses.replace(
            cached,
            positions=positions,
            valid=None if cached.valid is None else positions >= 0,
            query_positions=own,
            load_keys=cache(lambda: torch.cat([cached.keys, own_keys], 1)),
            load_values=lambda: torch.cat([cached.values, own_values], 1),
            probe=part.probe,
            page_votes=votes,
        )
