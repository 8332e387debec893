"""Tiny models of many architectures, from the real configuration classes.

``ARCHITECTURES`` lists them. A test that runs one proves a row of the matrix in
``docs/compatibility.md``, so one line here adds a row:

    "Qwen3": Architecture("QK-norm", "Qwen3Config", {"head_dim": 32}),

``write`` saves the configuration, seeded random weights as transformers writes them,
and a tokenizer with one token per character. Its weights are large enough that
attention is peaked and the best token is clear (see ``tiny_model``).
"""

from __future__ import annotations

import json
import string
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_model import VOCABULARY

LAYERS = 2
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 32
MAX_POSITIONS = 1024

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HEADS * HEAD_DIM,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Architecture:
    """A tiny model.

    Attributes:
        feature: what distinguishes its attention, for the compatibility matrix.
        config: name of the configuration class in transformers.
        changes: fields of the configuration; None leaves a common field out.
        undoes_rope: whether policies can undo its RoPE. False: it has none, or one
            that they cannot read, and they refuse the model with KVP031.
    """

    feature: str
    config: str
    changes: dict[str, Any] = field(default_factory=dict)
    undoes_rope: bool = True


def _llama(feature: str, **changes: Any) -> Architecture:
    return Architecture(feature, "LlamaConfig", changes)


def _head_size(size: int) -> Architecture:
    return _llama(f"head size {size}", head_dim=size)


def _rope(kind: str, **parameters: Any) -> Architecture:
    rope = {"rope_type": kind, "rope_theta": 10000.0, **parameters}
    return _llama(f"RoPE: {kind}", rope_parameters=rope)


_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
_PARTIAL = {"rope_type": "default", "rope_theta": 10000.0}

ARCHITECTURES: dict[str, Architecture] = {
    "Qwen3": Architecture("QK-norm per head", "Qwen3Config", {"head_dim": HEAD_DIM}),
    "Olmo2": Architecture(
        "QK-norm over all heads; vLLM's transformers backend",
        "Olmo2Config",
        undoes_rope=False,
    ),
    "Qwen3-MoE": Architecture(
        "MoE, QK-norm",
        "Qwen3MoeConfig",
        {"head_dim": HEAD_DIM, "num_experts": 4, **_MOE},
    ),
    "Mixtral": Architecture(
        "MoE",
        "MixtralConfig",
        {"head_dim": HEAD_DIM, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "GLM-4": Architecture(
        "partial rotary (half, interleaved)",
        "Glm4Config",
        {
            "head_dim": HEAD_DIM,
            "rope_parameters": {**_PARTIAL, "partial_rotary_factor": 0.5},
        },
    ),
    "StableLM": Architecture(
        "partial rotary (a quarter)",
        "StableLmConfig",
        {"rope_parameters": {**_PARTIAL, "partial_rotary_factor": 0.25}},
    ),
    "Phi": Architecture(
        "partial rotary (half), biases, no GQA; vLLM's transformers backend",
        "PhiConfig",
        {
            "num_key_value_heads": HEADS,
            "rope_parameters": {**_PARTIAL, "partial_rotary_factor": 0.5},
        },
        undoes_rope=False,
    ),
    "Granite": Architecture(
        "softmax scale of its own", "GraniteConfig", {"attention_multiplier": 0.1}
    ),
    "GPT-2": Architecture(
        "no RoPE",
        "GPT2Config",
        {
            "n_embd": HEADS * HEAD_DIM,
            "n_head": HEADS,
            "n_layer": LAYERS,
            "n_positions": MAX_POSITIONS,
            **dict.fromkeys(k for k in _COMMON if not k.endswith("id")),
            "vocab_size": VOCABULARY,
            "tie_word_embeddings": False,
        },
        undoes_rope=False,
    ),
    "Llama, linear": _rope("linear", factor=4.0),
    "Llama, llama3": _rope(
        "llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=256,
    ),
    "Llama, yarn": _rope("yarn", factor=4.0, original_max_position_embeddings=256),
    **{
        f"Llama, head size {size}": _head_size(size)
        for size in (64, 80, 96, 112, 128, 192, 256)
    },
}


def write(name: str, folder: Path, seed: int) -> Path:
    """A folder with the configuration, random weights and a tokenizer of a model."""
    import transformers

    architecture = ARCHITECTURES[name]
    values = _COMMON | architecture.changes
    values = {key: value for key, value in values.items() if value is not None}
    config = getattr(transformers, architecture.config)(**values)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _save(model, folder, seed)
    _write_tokenizer(folder)
    return folder


def _save(model: Any, folder: Path, seed: int) -> None:
    """Give a model seeded random weights, and save it with its configuration."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_values(name, parameter.shape, generator))
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)


def _write_tokenizer(folder: Path, special_ids: dict[str, int] | None = None) -> None:
    """One token per printable character, so that structured output has its tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    characters = string.ascii_letters + string.digits + string.punctuation + " \n"
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {character: 10 + i for i, character in enumerate(characters)}
    vocabulary |= special_ids or {}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", *(special_ids or {})])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


# Parts of parameter names, and how far outputs spread for inputs of variance 1.
_GAINS = {
    "lm_head": 4.0,
    "q_proj": 1.5,
    "k_proj": 1.5,
    "v_proj": 2.0,
    "o_proj": 2.0,
    "c_attn": 1.7,
}


def _values(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Random numbers for one parameter, by its name and shape."""
    noise = torch.randn(shape, generator=generator)
    if "norm" in name or ".ln_" in name or "layernorm" in name:
        return noise * 0.1 + (0.0 if name.endswith("bias") else 1.0)
    if name.endswith("bias"):
        return noise * 0.1
    if "embed" in name or ".wte" in name or ".wpe" in name:
        return noise
    gain = next((gain for part, gain in _GAINS.items() if part in name), 1.0)
    inputs = shape[0] if ".c_" in name else shape[-1]  # GPT-2 transposes its matrices
    return noise * (gain / inputs**0.5)


# -- images ----------------------------------------------------------------------

IMAGE_TOKEN, VIDEO_TOKEN, VISION_START, VISION_END = 900, 901, 902, 903
IMAGE_SIDE = 224  # pixels
IMAGE_TOKENS = (IMAGE_SIDE // 28) ** 2  # patches of 14 pixels, 2 x 2 merged
_VISION_TOKENS = {
    "<|image_pad|>": IMAGE_TOKEN,
    "<|video_pad|>": VIDEO_TOKEN,
    "<|vision_start|>": VISION_START,
    "<|vision_end|>": VISION_END,
}


def write_vision(folder: Path, seed: int) -> Path:
    """A tiny Qwen2.5-VL: M-RoPE, and a vision tower of two layers."""
    import transformers

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    config = transformers.Qwen2_5_VLConfig(
        text_config=_COMMON | {"rope_parameters": rope},
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "num_heads": 2,
            "intermediate_size": 128,
            "out_hidden_size": HEADS * HEAD_DIM,
            "fullatt_block_indexes": [1],
        },
        image_token_id=IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=False,
    )
    model = transformers.AutoModelForImageTextToText.from_config(
        config, dtype=torch.float32
    )
    _save(model, folder, seed)
    _write_tokenizer(folder, _VISION_TOKENS)
    return folder


# -- LoRA ------------------------------------------------------------------------

_RANK, _ALPHA = 4, 8
_ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj")


def write_adapter(model: Path, folder: Path, seed: int) -> Path:
    """A LoRA adapter of a model, with random weights that change its answers."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {
            f"base_model.model.{name}.lora_{part}.weight": matrix
            for name, pair in _adapter_matrices(model, seed).items()
            for part, matrix in zip("AB", pair, strict=True)
        },
        folder / "adapter_model.safetensors",
    )
    config = {
        "peft_type": "LORA",
        "r": _RANK,
        "lora_alpha": _ALPHA,
        "target_modules": list(_ADAPTED),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def write_merged(model: Path, folder: Path, seed: int) -> Path:
    """The model with the weights of ``write_adapter`` merged into its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    state = load_file(model / "model.safetensors")
    for name, (a, b) in _adapter_matrices(model, seed).items():
        state[f"{name}.weight"] += (_ALPHA / _RANK) * b @ a
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _adapter_matrices(
    model: Path, seed: int
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Per adapted module, A [rank, inputs] and B [outputs, rank]."""
    generator = torch.Generator().manual_seed(seed)
    matrices = {}
    for key, weight in sorted(load_file(model / "model.safetensors").items()):
        name = key.removesuffix(".weight")
        if name.endswith(_ADAPTED):
            outputs, inputs = weight.shape
            a = torch.randn(_RANK, inputs, generator=generator) / inputs**0.5
            b = torch.randn(outputs, _RANK, generator=generator) / _RANK**0.5
            matrices[name] = a, b
    return matrices
