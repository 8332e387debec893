"""A transformers model with an attention mask per layer and KV head.

After a compaction the engine attends to the kept tokens at their old positions. A model
that reads the whole prompt and hides the dropped positions computes the same attention
(``tests/engine/test_masked_reference.py`` compares the two). All policies and budgets
share one pass over the prompt, because they differ only after it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AutoModelForCausalLM

from vllm_kvplugins.scoring.rotary import Rotary

ATTENTION = "kvp-masked"


@dataclass(slots=True)
class Prompt:
    """Keys, values and queries of one pass over a prompt, after RoPE; lists by layer.

    Attributes:
        queries: [num_q_heads, tokens, head_dim].
        keys, values: [num_kv_heads, tokens, head_dim].
        scales: softmax scale.
        logits: [n, vocabulary] of the newest n tokens.
    """

    queries: list[torch.Tensor] = field(default_factory=list)
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def tokens(self) -> int:
        return self.keys[0].shape[1]

    def first(self, tokens: int) -> Prompt:
        """The prompt cut to its first tokens; without logits."""

        def cut(part: list[torch.Tensor]) -> list[torch.Tensor]:
            return [layer[:, :tokens].contiguous() for layer in part]

        return Prompt(cut(self.queries), cut(self.keys), cut(self.values), self.scales)


@dataclass(slots=True)
class Branches:
    """Several continuations of one prompt, each with its own mask.

    Attributes:
        prompt: the shared prompt.
        visible: bool [branches, layers, num_kv_heads, prompt tokens].
        keys, values: per layer, [branches, num_kv_heads, new tokens, head_dim].
        queries: per layer, [branches, num_q_heads, step's tokens, head_dim].
        outputs: per layer, attention outputs of the step's tokens; shape of
            ``queries``.
    """

    prompt: Prompt
    visible: torch.Tensor
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)
    queries: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def new_tokens(self) -> int:
        return self.keys[0].shape[2] if self.keys else 0


def attend(
    queries: torch.Tensor,
    prompt_keys: torch.Tensor,
    prompt_values: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention of the newest tokens to a masked prompt and to each other.

    Args:
        queries: [branches, num_q_heads, n, head_dim], of the newest n tokens.
        prompt_keys, prompt_values: [num_kv_heads, tokens, head_dim], shared.
        new_keys, new_values: [branches, num_kv_heads, m, head_dim], m >= n.
        visible: bool [branches, num_kv_heads, tokens].
        scale: softmax scale.

    Returns:
        Attention outputs, shape of ``queries``.
    """
    branches, num_q_heads, count, dim = queries.shape
    heads, tokens, _ = prompt_keys.shape
    group, new = num_q_heads // heads, new_keys.shape[2]
    # [heads, branches, group * count, dim]: one matmul for all branches
    q = queries.reshape(branches, heads, group * count, dim).transpose(0, 1)
    q = q.contiguous() * scale
    old = torch.bmm(q.flatten(1, 2), prompt_keys.transpose(1, 2))
    old = old.view(heads, branches, group * count, tokens)
    old.masked_fill_(~visible.transpose(0, 1)[:, :, None], -torch.inf)
    own = q @ new_keys.transpose(0, 1).transpose(2, 3)
    future = torch.ones(count, new, dtype=torch.bool).triu_(new - count + 1)
    own.masked_fill_(future.repeat(group, 1), -torch.inf)
    shares = torch.cat([old, own], -1).softmax(-1)
    out = torch.bmm(shares[..., :tokens].flatten(1, 2), prompt_values)
    out = out.view_as(q) + shares[..., tokens:] @ new_values.transpose(0, 1)
    return out.transpose(0, 1).reshape(branches, num_q_heads, count, dim)


class MaskedModel:
    """A causal language model on the CPU whose attention takes per-head masks.

    Args:
        folder: a transformers model whose layers all use full attention.
        dtype: of weights and cache.
    """

    def __init__(self, folder: str | Path, dtype: torch.dtype = torch.float32) -> None:
        AttentionInterface.register(ATTENTION, _attention)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=ATTENTION
        ).eval()
        self._prompt: Prompt | None = None
        self._branches: Branches | None = None
        for layer in self.model.model.layers:
            # in a list, so that it is not registered as a submodule
            layer.self_attn.masked_model = [self]

    @torch.no_grad()
    def read(self, tokens: list[int], logits: int = 1) -> Prompt:
        """Run one pass over a prompt.

        Args:
            tokens: token ids of the prompt.
            logits: number of newest tokens whose logits to return.
        """
        self._prompt = prompt = Prompt()
        try:
            out = self.model(
                torch.tensor([tokens]), use_cache=False, logits_to_keep=logits
            )
        finally:
            self._prompt = None
        prompt.logits = out.logits[0].float()
        return prompt

    @torch.no_grad()
    def extend(
        self, branches: Branches, tokens: torch.Tensor, logits: int = 0
    ) -> torch.Tensor:
        """Append the next tokens to every branch.

        Args:
            branches: the branches to extend, in place.
            tokens: int64 [branches, n].
            logits: number of newest tokens whose logits to return; 0 = all n.

        Returns:
            float32 [branches, logits, vocabulary].
        """
        first = branches.prompt.tokens + branches.new_tokens
        positions = torch.arange(first, first + tokens.shape[1])
        self._branches = branches
        try:
            out = self.model(
                tokens,
                position_ids=positions.expand_as(tokens),
                use_cache=False,
                logits_to_keep=logits,
            )
        finally:
            self._branches = None
        return out.logits.float()

    @property
    def max_positions(self) -> int:
        """The model's maximum number of positions."""
        return int(self.model.config.max_position_embeddings)

    @torch.no_grad()
    def rotary(self) -> Rotary:
        """The model's RoPE in the form that policies take."""
        positions = torch.arange(self.max_positions)[None]
        table = self.model.model.rotary_emb(torch.zeros(1), positions)
        cos, sin = (part[0, :, : part.shape[2] // 2].float() for part in table)
        return Rotary(cos, sin, is_neox=True)

    def output_weights(self, layer: int) -> torch.Tensor:
        """Output projection of a layer: [num_q_heads, head_dim, hidden size]."""
        attention = self.model.model.layers[layer].self_attn
        weight = attention.o_proj.weight.T
        return weight.reshape(-1, attention.head_dim, weight.shape[1])

    def attention(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Attention of one layer; records its inputs.

        Returns:
            [branches, num_q_heads, n, head_dim].
        """
        if self._prompt is not None:
            prompt = self._prompt
            prompt.queries.append(q[0])
            prompt.keys.append(k[0])
            prompt.values.append(v[0])
            prompt.scales.append(scale)
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=True
            )
        b = self._branches
        assert b is not None, "call read() or extend() instead of the model"
        if layer in b.keys:
            k = torch.cat([b.keys[layer], k], 2)
            v = torch.cat([b.values[layer], v], 2)
        b.keys[layer], b.values[layer], b.queries[layer] = k, v, q
        old_k, old_v = b.prompt.keys[layer], b.prompt.values[layer]
        visible = b.visible[:, layer]
        b.outputs[layer] = attend(q, old_k, old_v, k, v, visible, scale)
        return b.outputs[layer]


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function for transformers; returns [batch, n, heads, head_dim]."""
    (masked,) = module.masked_model
    out = masked.attention(module.layer_idx, query, key, value, scaling)
    return out.transpose(1, 2).contiguous(), None
