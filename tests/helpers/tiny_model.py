"""A Llama with random weights that runs thousands of tokens per second.

Its weights are large enough that attention is peaked and that the two best
tokens differ clearly: dropping or mixing up cached tokens changes what it says.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

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


def write_config(folder: Path, **changes: Any) -> Path:
    """A model folder with a ``config.json`` only, for ``load_format="dummy"``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    return folder


def write_tiny_model(folder: Path, seed: int) -> Path:
    """Config and random weights of the tiny Llama."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float) -> torch.Tensor:
        weight = torch.randn(rows, columns, generator=generator)
        return weight * (gain / columns**0.5)

    ones = torch.ones(_HIDDEN)
    state = {
        "model.embed_tokens.weight": matrix(VOCABULARY, _HIDDEN, _HIDDEN**0.5),
        "model.norm.weight": ones.clone(),
        "lm_head.weight": matrix(VOCABULARY, _HIDDEN, 4.0),
    }
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        state |= {
            name + "input_layernorm.weight": ones.clone(),
            name + "post_attention_layernorm.weight": ones.clone(),
            name + "self_attn.q_proj.weight": matrix(_HEADS * _HEAD_DIM, _HIDDEN, 1.5),
            name + "self_attn.k_proj.weight": matrix(
                KV_HEADS * _HEAD_DIM, _HIDDEN, 1.5
            ),
            name + "self_attn.v_proj.weight": matrix(
                KV_HEADS * _HEAD_DIM, _HIDDEN, 2.0
            ),
            name + "self_attn.o_proj.weight": matrix(_HIDDEN, _HEADS * _HEAD_DIM, 2.0),
            name + "mlp.gate_proj.weight": matrix(_INNER, _HIDDEN, 1.0),
            name + "mlp.up_proj.weight": matrix(_INNER, _HIDDEN, 1.0),
            name + "mlp.down_proj.weight": matrix(_HIDDEN, _INNER, 1.0),
        }
    write_config(folder)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
