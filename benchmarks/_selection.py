"""Which tokens a policy keeps of a prompt, without an engine.

The runtime's steps (``residency/runtime.py``) for one request whose prompt came in
one chunk, over tensors instead of pages: observe, plan, score, allocate, keep_top
are the project's own. ``tests/unit/test_benchmarks_selection.py`` checks that the
runtime keeps the same.
"""

from __future__ import annotations

from typing import Any

import torch
from _masked_model import Prompt

from vllm_kvplugins.config import describe
from vllm_kvplugins.policies.base import (
    Compressor,
    Geometry,
    KVCachePolicy,
    LayerView,
    Lengths,
    Trigger,
)
from vllm_kvplugins.rotary import Rotary
from vllm_kvplugins.selection import keep_top


def probed(policy: KVCachePolicy) -> bool:
    """Whether the policy wants a forward pass of its own before it scores.

    ``Selector`` does not run one yet: this is where it would.
    """
    probe = getattr(Trigger, "PROBE", Trigger.NEVER)
    return bool(probe & policy.observes)


class Selector:
    """Asks policies about one prompt.

    Args:
        prompt: its keys, values and queries.
        rotary: the model's RoPE, for policies that need it.
        block_size: tokens per page.
    """

    def __init__(self, prompt: Prompt, rotary: Rotary | None, block_size: int) -> None:
        self.prompt = prompt
        self.rotary = rotary
        heads, _, dim = prompt.keys[0].shape
        layers = len(prompt.keys)
        self.geometry = Geometry(
            block_size, layers, heads, 2 * 2 * dim * heads * layers
        )
        # what policies observed, which depends on no budget
        self._observed: dict[str, list[Any]] = {}

    def kept(self, policy: KVCachePolicy) -> torch.Tensor:
        """bool [layers, kv_heads, tokens], True where the policy keeps the token.

        Raises:
            ValueError: the policy compacts other than once, at the prompt's end.
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
        budget = len(compaction.zone) * size + tokens - slots
        observed = self._observations(policy)
        scores = torch.stack(
            [
                policy.score(self._view(layer, policy.queries_needed, seen, budget))
                for layer, seen in enumerate(observed)
            ]
        )[..., :slots]
        pages = torch.full(shape, slots // size)
        counts = policy.page_allocator().allocate(
            scores, len(compaction.zone), size, pages
        )
        keep[..., :slots] = keep_top(scores, counts * size)
        return keep

    def _observations(self, policy: KVCachePolicy) -> list[Any]:
        """What ``observe`` returns for the whole prompt, per layer."""
        if Trigger.PREFILL_CHUNK not in policy.observes:
            return [None] * self.geometry.num_layers
        assert isinstance(policy, Compressor)
        default = type(policy).model_fields["budget"].default
        key = describe(policy.model_copy(update={"budget": default}))
        if key not in self._observed:
            tokens = self.prompt.tokens
            self._observed[key] = [
                policy.observe(self._view(layer, tokens, None, 0))
                for layer in range(self.geometry.num_layers)
            ]
        return self._observed[key]

    def _view(
        self, layer: int, queries: int, observed: Any, budget_tokens: int
    ) -> LayerView:
        """One layer with its newest ``queries``."""
        prompt, tokens = self.prompt, self.prompt.tokens
        first = max(tokens - queries, 0)
        positions = torch.arange(tokens)
        return LayerView(
            layer=layer,
            keys=prompt.keys[layer],
            positions=positions.expand(self.geometry.num_kv_heads, -1),
            valid=None,
            queries=prompt.queries[layer][:, first:],
            query_positions=positions[first:],
            scale=prompt.scales[layer],
            rotary=self.rotary,
            observed=observed,
            budget_tokens=budget_tokens,
            load_values=lambda: prompt.values[layer],
        )
