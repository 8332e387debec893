"""The RoPE of a loaded vLLM model, for policies that undo it."""

from __future__ import annotations

from typing import Any

import torch

from vllm_kvplugins.scoring.rotary import Rotary


def rotary_of(model: torch.nn.Module) -> Rotary | None:
    """The model's rotary embedding, if it has exactly one plain one.

    Returns:
        None for models without RoPE, with different ones per layer, or with
        one that is not a table over one position index (M-RoPE).
    """
    modules: list[Any] = [
        module for module in model.modules() if hasattr(module, "cos_sin_cache")
    ]
    if not modules or hasattr(modules[0], "mrope_section"):
        return None
    table = modules[0].cos_sin_cache
    if any(module.cos_sin_cache.data_ptr() != table.data_ptr() for module in modules):
        same = all(torch.equal(module.cos_sin_cache, table) for module in modules)
        if not same:
            return None
    cos, sin = table.to(torch.float32).chunk(2, dim=-1)
    return Rotary(cos, sin, bool(modules[0].is_neox_style))
