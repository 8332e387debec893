"""Small models with recurrent layers and full attention, with random weights.

``RECURRENT`` lists them, built from transformers' real configuration classes. A test
that runs one proves a row of the matrix in ``docs/compatibility.md``. vLLM enlarges the
blocks of these models until one holds a recurrent state, so the states are small.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tiny_model import VOCABULARY, write_tokenizer

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
# vLLM keeps states in float32 on CPUs with AVX512-BF16, in bfloat16 on others.
_BLOCK_OF_DELTA_NETS = 96 if torch.cpu._is_avx512_bf16_supported() else 64
_DELTA_NET: dict[str, Any] = {
    "head_dim": 128,
    "num_hidden_layers": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


@dataclass(frozen=True)
class Recurrent:
    """A tiny model.

    Attributes:
        feature: its layers, for the compatibility matrix.
        config: name of the configuration class in transformers.
        changes: fields of the configuration; None leaves a common field out.
        block_size: to which vLLM enlarges blocks of 32 tokens, in ``dtype``.
        kernel_dtype: the only dtype that vLLM's CPU kernel of its layers has.
        fixes: names in ``scenarios_recurrent.FIXES``, of what vLLM lacks on CPUs.
        shortest_prompt: tokens; vLLM's kernel fails on shorter ones.
        runs: whether vLLM's CPU build runs the layers.
    """

    feature: str
    config: str
    changes: dict[str, Any] = field(default_factory=dict)
    block_size: int = 64
    kernel_dtype: str = ""
    fixes: tuple[str, ...] = ()
    shortest_prompt: int = 1
    runs: bool = True

    @property
    def dtype(self) -> str:
        """The dtype in which it is tested."""
        return self.kernel_dtype or "float32"

    @property
    def architecture(self) -> str:
        """vLLM's name."""
        return self.config.replace("TextConfig", "Config")[: -len("Config")] + (
            "ForCausalLM"
        )


# vLLM's kernel of Mamba-2 for CPUs returns no states inside of a chunk, which its
# prefix cache expects. Under a policy, vLLM does not ask for them.
_MAMBA_2 = {"fixes": ("checkpoints",)}
RECURRENT: dict[str, Recurrent] = {
    "Granite-4": Recurrent(
        "Mamba-2, or full attention",
        "GraniteMoeHybridConfig",
        {
            **_MAMBA,
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "attention"] * 2,
            "shared_intermediate_size": 128,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "position_embedding_type": "rope",
        },
        **_MAMBA_2,
    ),
    "Granite-4, large state": Recurrent(
        "the same; a block has more tokens than a step",
        "GraniteMoeHybridConfig",
        {
            **_MAMBA,
            "mamba_d_state": 128,
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "attention"] * 2,
            "shared_intermediate_size": 128,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "position_embedding_type": "rope",
        },
        block_size=288,
        **_MAMBA_2,
    ),
    "Nemotron-H": Recurrent(
        "Mamba-2, or full attention without RoPE, or MLP",
        "NemotronHConfig",
        {
            "head_dim": 32,
            "num_hidden_layers": 6,
            "layers_block_type": ["mamba", "mlp", "attention"] * 2,
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "ssm_state_size": 16,
            "n_groups": 1,
            "conv_kernel": 4,
            "expand": 2,
        },
        **_MAMBA_2,
    ),
    "Falcon-H1": Recurrent(
        "Mamba-2 and full attention in each layer",
        "FalconH1Config",
        {**_MAMBA, "head_dim": 32, "num_hidden_layers": 3, "mamba_d_ssm": 256},
        **_MAMBA_2,
    ),
    "Zamba2": Recurrent(
        "Mamba-2 in each layer; full attention with shared weights in some",
        "Zamba2Config",
        {
            "num_key_value_heads": None,
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "hybrid"] * 2,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "n_mamba_heads": 8,
            "mamba_ngroups": 1,
            "num_mem_blocks": 1,
            "use_mem_rope": True,
            "adapter_rank": 8,
        },
        block_size=32,
        **_MAMBA_2,
    ),
    "LFM2": Recurrent(
        "short convolution, or full attention",
        "Lfm2Config",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention"] * 2,
            "conv_L_cache": 3,
            "conv_dim": 128,
            "block_dim": 128,
            "block_ff_dim": 128,
            "block_multiple_of": 32,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
        },
        block_size=32,
        fixes=("rotary",),
    ),
    "Qwen3-Next": Recurrent(
        "gated delta net, or gated full attention; MoE; bfloat16",
        "Qwen3NextConfig",
        {
            **_DELTA_NET,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
        block_size=_BLOCK_OF_DELTA_NETS,
        kernel_dtype="bfloat16",
    ),
    "Qwen3.5": Recurrent(
        "gated delta net, or gated full attention; bfloat16",
        "Qwen3_5TextConfig",
        _DELTA_NET,
        block_size=_BLOCK_OF_DELTA_NETS,
        kernel_dtype="bfloat16",
        fixes=("torchvision",),
        shortest_prompt=2,
    ),
    "Jamba": Recurrent(
        "Mamba-1, or full attention without RoPE",
        "JambaConfig",
        {
            "num_hidden_layers": 8,
            "attn_layer_period": 4,
            "attn_layer_offset": 2,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "mamba_dt_rank": 8,
        },
        block_size=64,
        runs=False,
    ),
    "OLMo-Hybrid": Recurrent(
        "gated delta net of its own, or full attention",
        "OlmoHybridConfig",
        {
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 64,
        },
        block_size=64,
        runs=False,
    ),
}


def config_of(name: str) -> Any:
    """The configuration of one of ``RECURRENT``."""
    import transformers

    model = RECURRENT[name]
    values = {**_COMMON, **model.changes, "architectures": [model.architecture]}
    values = {key: value for key, value in values.items() if value is not None}
    return getattr(transformers, model.config)(**values)


def write_tiny_recurrent(folder: Path, name: str, seed: int) -> Path:
    """Configuration, random weights and tokenizer of one of ``RECURRENT``."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = config_of(name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    # Tied embeddings must not outweigh the layers: answers would repeat one token.
    gains = _GAINS | ({"embed": 1.0} if config.tie_word_embeddings else {})
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            if weight.dim() == 2:
                gain = next((g for part, g in gains.items() if part in weight_name), 1)
                values = torch.randn(weight.shape, generator=generator)
                weight.copy_(values * gain / math.sqrt(len(weight.T)))
    model.to(getattr(torch, RECURRENT[name].dtype)).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


# How far outputs of matrices spread, so that the best tokens differ clearly.
_GAINS = {
    "embed": 4.0,
    "lm_head": 4.0,
    "v_proj": 2.0,
    "o_proj": 2.0,
    "q_proj": 1.5,
    "k_proj": 1.5,
}
