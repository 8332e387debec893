"""Tiny drafters for the tiny Llama of ``tiny_model``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
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
