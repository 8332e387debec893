"""A Llama with random weights that processes thousands of tokens per second.

Its weights are large enough that attention is peaked and the two best tokens differ
clearly: dropping or mixing up cached tokens changes the output.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

VOCABULARY = 1000
LAYERS = 2
KV_HEADS = 2
_HIDDEN, _HEADS, _HEAD_DIM, _INNER = 128, 4, 32, 256

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "float32",
    "vocab_size": VOCABULARY,
    "hidden_size": _HIDDEN,
    "intermediate_size": _INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": _HEAD_DIM,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# Changes of ``write_config`` for a model with latent attention, which policies refuse.
MLA = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 2,
}


def write_config(folder: Path, **changes: Any) -> Path:
    """A model folder without weights, for ``load_format="dummy"``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    write_tokenizer(folder)
    return folder


def write_tiny_model(
    folder: Path,
    seed: int,
    heads: int = _HEADS,
    kv_heads: int = KV_HEADS,
    hidden: int = _HIDDEN,
    inner: int = _INNER,
    vocabulary: int = VOCABULARY,
) -> Path:
    """Config, random weights and a tokenizer of the tiny Llama."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float) -> torch.Tensor:
        weight = torch.randn(rows, columns, generator=generator)
        return weight * (gain / columns**0.5)

    ones = torch.ones(hidden)
    state = {
        "model.embed_tokens.weight": matrix(vocabulary, hidden, hidden**0.5),
        "model.norm.weight": ones.clone(),
        "lm_head.weight": matrix(vocabulary, hidden, 4.0),
    }
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        state |= {
            name + "input_layernorm.weight": ones.clone(),
            name + "post_attention_layernorm.weight": ones.clone(),
            name + "self_attn.q_proj.weight": matrix(heads * _HEAD_DIM, hidden, 1.5),
            name + "self_attn.k_proj.weight": matrix(kv_heads * _HEAD_DIM, hidden, 1.5),
            name + "self_attn.v_proj.weight": matrix(kv_heads * _HEAD_DIM, hidden, 2.0),
            name + "self_attn.o_proj.weight": matrix(hidden, heads * _HEAD_DIM, 2.0),
            name + "mlp.gate_proj.weight": matrix(inner, hidden, 1.0),
            name + "mlp.up_proj.weight": matrix(inner, hidden, 1.0),
            name + "mlp.down_proj.weight": matrix(hidden, inner, 1.0),
        }
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    sizes = {"hidden_size": hidden, "intermediate_size": inner}
    write_config(folder, vocab_size=vocabulary, **shape, **sizes)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_tokenizer(folder: Path) -> None:
    """A tokenizer with one token per word, for policies that encode text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<unk>": 0, "Repeat": 5, "Summarize": 6, "the": 7, "context": 8}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def masked_logits(
    folder: Path,
    tokens: list[int],
    visible: torch.Tensor,
    seen_by_layer: list[tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> torch.Tensor:
    """Logits of the tiny Llama under one attention mask per layer and KV head.

    Written out in plain torch, so that it shares no code with vLLM.

    Args:
        tokens: the whole sequence.
        visible: bool [LAYERS, KV_HEADS, tokens, tokens]; query, key.
        seen_by_layer: gets each layer's queries [heads, tokens, head_dim] and keys
            [KV_HEADS, tokens, head_dim], after RoPE.

    Returns:
        float32 [tokens, VOCABULARY].
    """
    weights = load_file(folder / "model.safetensors")
    x = weights["model.embed_tokens.weight"][tokens]
    count, group = len(tokens), _HEADS // KV_HEADS
    frequency = 10000.0 ** (-torch.arange(0, _HEAD_DIM, 2).double() / _HEAD_DIM)
    angle = torch.arange(count).double()[:, None] * frequency
    cos, sin = angle.cos().float()[:, None], angle.sin().float()[:, None]

    def norm(values: torch.Tensor, name: str) -> torch.Tensor:
        mean = values.pow(2).mean(-1, keepdim=True)
        return values * torch.rsqrt(mean + LLAMA["rms_norm_eps"]) * weights[name]

    def rotated(values: torch.Tensor) -> torch.Tensor:
        first, second = values.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        h = norm(x, name + "input_layernorm.weight")
        q, k, v = (
            (h @ weights[f"{name}self_attn.{part}_proj.weight"].T).view(
                count, -1, _HEAD_DIM
            )
            for part in "qkv"
        )
        q, k = rotated(q), rotated(k)
        if seen_by_layer is not None:
            seen_by_layer.append((q.transpose(0, 1), k.transpose(0, 1)))
        k = k.repeat_interleave(group, 1)
        logits = torch.einsum("qhd,khd->hqk", q, k) * _HEAD_DIM**-0.5
        allowed = visible[layer].repeat_interleave(group, 0)
        shares = logits.masked_fill(~allowed, -torch.inf).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", shares, v.repeat_interleave(group, 1))
        x = x + mixed.reshape(count, -1) @ weights[name + "self_attn.o_proj.weight"].T
        h = norm(x, name + "post_attention_layernorm.weight")
        gate = torch.nn.functional.silu(h @ weights[name + "mlp.gate_proj.weight"].T)
        up = h @ weights[name + "mlp.up_proj.weight"].T
        x = x + (gate * up) @ weights[name + "mlp.down_proj.weight"].T
    return norm(x, "model.norm.weight") @ weights["lm_head.weight"].T
