"""Keys and queries of a real model, after RoPE."""

from __future__ import annotations

import functools

import torch


@functools.lru_cache(maxsize=4)
def capture(
    model_path: str, text: str, num_tokens: int, num_queries: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Run a model over a text and record the inputs of its attention layers.

    Returns:
        Per layer the last queries, float32 [kv_heads, group, num_queries,
        head_dim], and all keys, float32 [kv_heads, num_tokens, head_dim].
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    layers = []

    def attention(module, query, key, value, attention_mask, **more):
        group = query.shape[1] // key.shape[1]
        last = query[0, :, -num_queries:].unflatten(0, (-1, group))
        layers.append((last.clone(), key[0].clone()))
        return sdpa_attention_forward(module, query, key, value, attention_mask, **more)

    ALL_ATTENTION_FUNCTIONS.register("kvp_capture", attention)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.float32, attn_implementation="kvp_capture"
    )
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :num_tokens]
    assert ids.shape[1] == num_tokens, f"the text has {ids.shape[1]} tokens"
    with torch.no_grad():
        model.model(ids, use_cache=False)
    return layers


def mass_covered(
    queries: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """Share of the attention that falls on some slots.

    Args:
        queries: [heads, n, head_dim]; keys: [heads, slots, head_dim].
        slots: int64 [heads, n, k], -1 for none.

    Returns:
        float32 [heads, n].
    """
    scores = queries @ keys.transpose(1, 2) / keys.shape[-1] ** 0.5
    weights = scores.softmax(-1)
    gathered = weights.gather(-1, slots.clamp(min=0)) * (slots >= 0)
    return gathered.sum(-1)
