"""Tiny drafters for the tiny Llama of ``tiny_model``."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_hybrids import MOSTLY_SLIDING, write_tiny_hybrid
from tiny_model import write_tokenizer


def drafter(path: Path, method: str = "draft_model", tokens: int = 3) -> dict[str, Any]:
    """vLLM's setting for a drafter in a folder."""
    return {"method": method, "model": str(path), "num_speculative_tokens": tokens}


def write_noisy_copy(folder: Path, model: str, seed: int, noise: float) -> Path:
    """The model with noise on its weights: drafts like it, and is sometimes wrong.

    Args:
        noise: share of each weight's standard deviation.
    """
    generator = torch.Generator().manual_seed(seed)
    state = load_file(Path(model, "model.safetensors"))
    for weight in state.values():
        if weight.dim() == 2:
            added = torch.randn(weight.shape, generator=generator)
            weight += noise * weight.std() * added
    return _write(folder, model, state)


def write_copy_with_more_heads(folder: Path, model: str) -> Path:
    """The model with every KV head twice: it computes the same tokens."""
    config = _config(model)
    heads, size = config["num_key_value_heads"], config["head_dim"]
    state = load_file(Path(model, "model.safetensors"))
    for name, weight in state.items():
        if re.search(r"\.[kv]_proj\.weight$", name):
            parts = weight.view(heads, size, -1)
            state[name] = parts.repeat_interleave(2, 0).reshape(-1, weight.shape[1])
    return _write(folder, model, state, num_key_value_heads=2 * heads)


def write_calm_copy(folder: Path, model: str, gains: Sequence[float]) -> Path:
    """The model with smaller outputs of its layers, so that heads can guess it.

    Args:
        gains: of the outputs of each layer.
    """
    state = load_file(Path(model, "model.safetensors"))
    for layer, gain in enumerate(gains):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            state[f"model.layers.{layer}.{name}.weight"] *= gain
    return _write(folder, model, state)


def write_eagle_head(folder: Path, model: str) -> Path:
    """An EAGLE head that computes the model's first layer, and not its second."""
    state = load_file(Path(model, "model.safetensors"))
    embedding = state["model.embed_tokens.weight"]
    hidden = embedding.shape[1]
    first = "model.layers.0."
    head = {
        name.removeprefix("model."): weight
        for name, weight in state.items()
        if name.startswith(first) and "input_layernorm" not in name
    }
    # The embedding of the next token passes, the hidden state does not.
    head["fc.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], 1)
    head["embed_tokens.weight"] = embedding
    return _write(folder, model, head, num_hidden_layers=1)


def write_eagle3_head(folder: Path, model: str) -> Path:
    """An EAGLE-3 head with other KV heads, which guesses from the next token alone.

    Queries and keys are constant, so that RoPE makes each token attend to itself, and
    the values are the embeddings.
    """
    state = load_file(Path(model, "model.safetensors"))
    embedding, lm_head = state["model.embed_tokens.weight"], state["lm_head.weight"]
    hidden, inner = embedding.shape[1], _config(model)["intermediate_size"]
    nothing, identity = torch.zeros(hidden, 2 * hidden), torch.eye(hidden)
    attention, mlp = "midlayer.self_attn.", "midlayer.mlp."
    constant = torch.full((hidden,), 4.0)
    head = {
        "embed_tokens.weight": embedding,
        "lm_head.weight": lm_head,
        "norm.weight": torch.ones(hidden),
        "fc.weight": torch.zeros(hidden, 3 * hidden),
        "midlayer.hidden_norm.weight": torch.ones(hidden),
        "midlayer.input_layernorm.weight": torch.ones(hidden),
        "midlayer.post_attention_layernorm.weight": torch.ones(hidden),
        attention + "q_proj.weight": nothing,
        attention + "q_proj.bias": constant,
        attention + "k_proj.weight": nothing.clone(),
        attention + "k_proj.bias": constant.clone(),
        attention + "v_proj.weight": torch.cat([identity, nothing[:, :hidden]], 1),
        attention + "v_proj.bias": torch.zeros(hidden),
        attention + "o_proj.weight": identity.clone(),
        attention + "o_proj.bias": torch.zeros(hidden),
        mlp + "gate_proj.weight": torch.zeros(inner, hidden),
        mlp + "up_proj.weight": torch.zeros(inner, hidden),
        mlp + "down_proj.weight": torch.zeros(hidden, inner),
    }
    return _write(
        folder,
        model,
        head,
        num_hidden_layers=1,
        num_key_value_heads=_config(model)["num_attention_heads"],
        attention_bias=True,
        draft_vocab_size=len(lm_head),
        eagle_aux_hidden_state_layer_ids=[0, 1, 2],
    )


def write_model_with_mtp(folder: Path, model: str) -> Path:
    """The model as a MiMo, whose MTP layer computes the first layer."""
    state = load_file(Path(model, "model.safetensors"))
    hidden = state["model.embed_tokens.weight"].shape[1]
    layer, mtp = "model.layers.0.", "model.mtp_layers.0."
    more = {
        mtp + name.removeprefix(layer): weight.clone()
        for name, weight in state.items()
        if name.startswith(layer)
    }
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        more[f"{mtp}{name}.weight"] = torch.ones(hidden)
    # Of hidden state and next token's embedding, the second passes.
    more[mtp + "input_proj.weight"] = torch.cat(
        [torch.zeros(hidden, hidden), torch.eye(hidden)], 1
    )
    state |= more
    for name in [name for name in state if re.search(r"\.[qkv]_proj\.weight$", name)]:
        state[name.replace(".weight", ".bias")] = torch.zeros(len(state[name]))
    changes = {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2"}
    return _write(folder, model, state, num_nextn_predict_layers=1, **changes)


def write_pair(folder: Path, model: str, method: str) -> tuple[str, dict[str, Any]]:
    """A model and a head that drafts for it, right about one time in three.

    Args:
        method: vLLM's name of the kind of head.

    Returns:
        The folder of the model; vLLM's setting for the head.
    """
    gains = (0.15, 0.15) if method == "eagle3" else (1.0, 0.3)
    calm = str(write_calm_copy(folder / "model", model, gains))
    if method == "mtp":
        path = write_model_with_mtp(folder / "mtp", calm)
        return str(path), drafter(path, method)
    write = {"eagle": write_eagle_head, "eagle3": write_eagle3_head}[method]
    return calm, drafter(write(folder / "head", calm), method)


def write_windowed_pair(folder: Path, seed: int) -> tuple[str, dict[str, Any]]:
    """A model most of whose layers have a window, and an EAGLE head for it.

    The head has full attention and computes the model's first layer, which adds little.

    Returns:
        As :func:`write_pair`.
    """
    model = write_tiny_hybrid(
        folder / "whole", "mistral", seed, layer_types=MOSTLY_SLIDING
    )
    gains = (0.03,) * len(MOSTLY_SLIDING)
    calm = str(write_calm_copy(folder / "model", str(model), gains))
    head = write_eagle_head(folder / "head", calm)
    config = _config(str(head))
    for window in ("layer_types", "sliding_window"):
        del config[window]
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (head / "config.json").write_text(json.dumps(config))
    return calm, drafter(head, "eagle")


def _config(model: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(Path(model, "config.json").read_text())
    return config


def _write(
    folder: Path, model: str, state: dict[str, torch.Tensor], **changes: Any
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_config(model) | changes))
    write_tokenizer(folder)
    state = {name: weight.contiguous() for name, weight in state.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
