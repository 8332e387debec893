"""Which prompt tokens a policy keeps, computed without an engine.

Repeats the steps of ``engine/runtime.py`` for one request whose prompt arrives in one
chunk, on tensors instead of pages. Observation, plan, scores, allocation and keep_top
come from the package. ``tests/unit/test_benchmarks_selection.py`` checks that the
runtime keeps the same tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from _masked_model import Branches, MaskedModel, Prompt

from vllm_kvplugins.config import describe
from vllm_kvplugins.plan.geometry import Geometry, Lengths
from vllm_kvplugins.policies import capabilities
from vllm_kvplugins.policies.base import KVCachePolicy, LayerView
from vllm_kvplugins.policies.capabilities import (
    Encode,
    Observation,
    Probe,
    ProbeOccasion,
)
from vllm_kvplugins.policies.registry import available_policies, get_policy_class
from vllm_kvplugins.scoring.rotary import Rotary
from vllm_kvplugins.scoring.selection import keep_top


def dropping_policies() -> list[str]:
    """Names of the policies that drop tokens of every prompt.

    Other policies keep all tokens, move them to host memory, or drop between turns.
    """
    return [name for name in available_policies() if get_policy_class(name).compresses]


@dataclass(frozen=True, slots=True)
class Probing:
    """Inputs for policies that run probe tokens after the prompt.

    Attributes:
        model: runs the probes.
        prompt: the prompt's token ids.
        encode: the model's tokenizer, without special tokens.
    """

    model: MaskedModel
    prompt: Sequence[int]
    encode: Encode


class Selector:
    """Computes what policies keep of one prompt.

    Args:
        prompt: keys, values and queries of the prompt.
        rotary: the model's RoPE, for policies that need it.
        block_size: tokens per page.
        probing: for policies that probe.
        output_weights: reads the output projection of a layer, for policies that need
            it.
    """

    def __init__(
        self,
        prompt: Prompt,
        rotary: Rotary | None,
        block_size: int,
        probing: Probing | None = None,
        output_weights: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        self.prompt = prompt
        self.output_weights = output_weights
        self.probing = probing
        self.rotary = rotary
        heads, _, dim = prompt.keys[0].shape
        layers = len(prompt.keys)
        self.geometry = Geometry(
            block_size, layers, heads, 2 * 2 * dim * heads * layers
        )
        # by policy settings without budget and allocator, on which they do not depend
        self._observed: dict[str, list[Any]] = {}

    def kept(self, policy: KVCachePolicy) -> torch.Tensor:
        """Tokens that the policy keeps: bool [layers, kv_heads, tokens].

        Raises:
            ValueError: the policy does not compact exactly once, at the prompt's end.
        """
        tokens, size = self.prompt.tokens, self.geometry.block_size
        shape = (self.geometry.num_layers, self.geometry.num_kv_heads)
        plan = policy.plan(Lengths(tokens), self.geometry)
        keep = torch.ones(*shape, tokens, dtype=torch.bool)
        if not plan.compactions:
            return keep
        (compaction, *others) = plan.compactions
        if others or compaction.at_tokens != tokens or compaction.candidates.start:
            raise ValueError(f"{policy.name} compacts before the prompt is in: {plan}")
        slots = len(compaction.candidates) * size
        budget = len(compaction.retained) * size + tokens - slots
        observed = self._observations(policy)
        scores = torch.stack(
            [
                policy.score(
                    self._view(layer, policy.queries_needed, attention, budget)
                )
                for layer, attention in enumerate(observed)
            ]
        )[..., :slots]
        pages = torch.full(shape, slots // size)
        counts = policy.page_allocator().allocate(
            scores, len(compaction.retained), size, pages
        )
        keep[..., :slots] = keep_top(scores, counts * size)
        return keep

    def _observations(self, policy: KVCachePolicy) -> list[Any]:
        """What ``observe`` returns for the whole prompt or its probes, per layer."""
        observation, probing = policy.observation, policy.probing
        if observation is None and probing is None:
            return [None] * self.geometry.num_layers
        defaults = {
            field: info.default
            for field, info in type(policy).model_fields.items()
            if field in ("budget", "allocator")
        }
        key = describe(policy.model_copy(update=defaults))
        if key not in self._observed:
            if observation is not None:
                self._observed[key] = self._observe_prompt(observation)
            if probing is not None:
                self._observed[key] = self._observe_probes(probing)
        return self._observed[key]

    def _observe_prompt(self, observation: Observation) -> list[Any]:
        layers, tokens = range(self.geometry.num_layers), self.prompt.tokens
        return [observation.observe(self._view(i, tokens, None, 0)) for i in layers]

    def _observe_probes(self, hooks: capabilities.Probing) -> list[Any]:
        """Run each of the policy's probes after the whole prompt."""
        probing, prompt = self.probing, self.prompt
        assert probing is not None, "the policy needs a model to probe"
        layers, heads = self.geometry.num_layers, self.geometry.num_kv_heads
        room = probing.model.max_positions - prompt.tokens
        occasion = ProbeOccasion(probing.prompt, 0, prompt.tokens, room, probing.encode)
        everything = torch.ones(1, layers, heads, prompt.tokens, dtype=torch.bool)
        observed: list[Any] = [None] * layers
        for probe in hooks.probes(occasion):
            ran = Branches(prompt, everything)
            probing.model.extend(ran, torch.tensor([list(probe.token_ids)]), logits=1)
            for layer in range(layers):
                view = self._probe_view(layer, ran, probe, observed[layer])
                observed[layer] = hooks.observe(view)
        return observed

    def _probe_view(
        self, layer: int, ran: Branches, probe: Probe, observed: Any
    ) -> LayerView:
        """The prompt's slots followed by the probe's slots."""
        cached = self._view(layer, 0, observed, 0)
        tokens, new = self.prompt.tokens, ran.new_tokens
        positions = torch.arange(tokens + new)
        keys = torch.cat([self.prompt.keys[layer], ran.keys[layer][0]], 1)
        values = torch.cat([self.prompt.values[layer], ran.values[layer][0]], 1)
        return dataclasses.replace(
            cached,
            positions=positions.expand(self.geometry.num_kv_heads, -1),
            queries=ran.queries[layer][0],
            query_positions=positions[tokens:],
            load_keys=lambda: keys,
            load_values=lambda: values,
            probe=probe,
        )

    def _view(
        self, layer: int, queries: int, observed: Any, budget_tokens: int
    ) -> LayerView:
        """The view of one layer, with its newest ``queries`` queries."""
        prompt, tokens = self.prompt, self.prompt.tokens
        first = max(tokens - queries, 0)
        positions = torch.arange(tokens)
        return LayerView(
            layer=layer,
            positions=positions.expand(self.geometry.num_kv_heads, -1),
            valid=None,
            queries=prompt.queries[layer][:, first:],
            query_positions=positions[first:],
            scale=prompt.scales[layer],
            rotary=self.rotary,
            observed=observed,
            budget_tokens=budget_tokens,
            load_keys=lambda: prompt.keys[layer],
            load_values=lambda: prompt.values[layer],
            load_output_weights=(
                None
                if self.output_weights is None
                else partial(self.output_weights, layer)
            ),
        )
