"""Small models with random weights whose layers attend in different ways.

They are built from transformers' real configuration classes, with seeded weights that
make attention peaked (see ``tiny_model``), and have a window of 64 tokens: two blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tiny_model import VOCABULARY, write_tokenizer

WINDOW = 64
CHUNK = 64
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "sliding_window": WINDOW,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_FULL, _SLIDING = "full_attention", "sliding_attention"
# Attention of a model's layers: as many full ones as in the smallest real group.
_ALTERNATING = [_SLIDING, _FULL] * 2
# As Gemma 3: one full layer behind several with a window, in several groups.
MOSTLY_SLIDING = [_SLIDING, _SLIDING, _FULL] * 2


def _gemma3() -> Any:
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(
        **_COMMON,
        num_hidden_layers=len(MOSTLY_SLIDING),
        layer_types=MOSTLY_SLIDING,
        query_pre_attn_scalar=32,
    )


def _mistral(layer_types: Sequence[str] = _ALTERNATING) -> Any:
    from transformers import MistralConfig

    # As Ministral: vLLM reads ``layer_types``.
    return MistralConfig(
        **_COMMON,
        num_hidden_layers=len(layer_types),
        layer_types=list(layer_types),
        architectures=["MistralForCausalLM"],
    )


def _llama4() -> Any:
    from transformers import Llama4TextConfig

    # Three layers with chunked attention, then one with full attention and no RoPE.
    return Llama4TextConfig(
        **{**_COMMON, "sliding_window": None},
        num_hidden_layers=4,
        attention_chunk_size=CHUNK,
        no_rope_layers=[1, 1, 1, 0],
        intermediate_size_mlp=128,
        num_local_experts=2,
        moe_layers=[],
        interleave_moe_layer_step=0,
        architectures=["Llama4ForCausalLM"],
    )


def _gpt_oss() -> Any:
    from transformers import GptOssConfig

    # A learned sink per query head; vLLM gives every other layer a window.
    return GptOssConfig(
        **_COMMON,
        num_hidden_layers=len(_ALTERNATING),
        layer_types=_ALTERNATING,
        num_local_experts=2,
        num_experts_per_tok=1,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    )


def _gemma2() -> Any:
    from transformers import Gemma2Config

    # Capped attention logits, and capped logits of the output.
    return Gemma2Config(
        **_COMMON,
        num_hidden_layers=len(_ALTERNATING),
        layer_types=_ALTERNATING,
        query_pre_attn_scalar=32,
        attn_logit_softcapping=5.0,
    )


# Names and attention in the compatibility matrix.
FEATURES = {
    "gemma3": ("Gemma 3", "sliding window or full, two RoPE bases, QK-norm"),
    "mistral": ("Mistral, Ministral's layers", "sliding window or full"),
    "llama4": ("Llama 4", "chunks, or full without RoPE"),
    "gpt_oss": ("gpt-oss", "sliding window or full, learned sinks; MoE"),
    "gemma2": ("Gemma 2", "sliding window or full, capped logits"),
}
MODELS: dict[str, Callable[..., Any]] = {
    "gemma3": _gemma3,
    "mistral": _mistral,
    "llama4": _llama4,
    "gpt_oss": _gpt_oss,
    "gemma2": _gemma2,
}


def write_tiny_hybrid(folder: Path, name: str, seed: int, **settings: Any) -> Path:
    """Config, random weights and tokenizer of one of ``MODELS``.

    Args:
        settings: of its function in ``MODELS``.
    """
    from transformers import AutoModelForCausalLM

    config = MODELS[name](**settings)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    norms = _GEMMA_NORMS if name.startswith("gemma") else {}
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            _fill(weight_name, weight, norms, generator)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def _fill(
    name: str, weight: torch.Tensor, norms: dict[str, float], generator: torch.Generator
) -> None:
    """Random values under which the two best tokens differ clearly."""
    if "sinks" in name:
        weight.copy_(torch.randn(weight.shape, generator=generator))
    elif weight.dim() < 2:
        weight += next((g for part, g in norms.items() if part in name), 0.0)
    else:
        gain = next((g for part, g in _GAINS.items() if part in name), 1.0)
        values = torch.randn(weight.shape, generator=generator)
        weight.copy_(values * (gain / math.sqrt(weight.shape[-1])))


_GAINS = {
    "embed": 4.0,
    "lm_head": 4.0,
    "v_proj": 2.0,
    "o_proj": 2.0,
    "q_proj": 1.5,
    "k_proj": 1.5,
}
# What is added to the weights of Gemma's norms. Queries and keys: attention becomes
# peaked. Outputs of sublayers: they outweigh the embeddings, which are tied and would
# otherwise repeat the last token.
_GEMMA_NORMS = {
    "q_norm": 1.0,
    "k_norm": 1.0,
    "post_attention_layernorm": 7.0,
    "post_feedforward_layernorm": 7.0,
}
