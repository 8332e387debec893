"""The RoPE of a loaded vLLM model, for policies that undo it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vllm_kvplugins.scoring.rotary import Rotary


def rotary_of(
    model: torch.nn.Module, layers: Sequence[torch.nn.Module]
) -> Rotary | None:
    """The rotary embedding of some attention layers, if they share a plain one.

    Other layers may have another one: Gemma 3 has one base for windowed and one for
    full attention.

    Args:
        layers: vLLM's attention layers.

    Returns:
        None for layers without RoPE, with different ones, or with one that is not a
        table over one position index (M-RoPE).
    """
    modules = _rotary_modules(model, layers)
    if not modules or hasattr(modules[0], "mrope_section"):
        return None
    table = modules[0].cos_sin_cache
    if any(module.cos_sin_cache.data_ptr() != table.data_ptr() for module in modules):
        same = all(torch.equal(module.cos_sin_cache, table) for module in modules)
        if not same:
            return None
    cos, sin = table.to(torch.float32).chunk(2, dim=-1)
    return Rotary(cos, sin, bool(modules[0].is_neox_style))


def _rotary_modules(
    model: torch.nn.Module, layers: Sequence[torch.nn.Module]
) -> list[Any]:
    """The rotary embedding of each layer; empty if some layers have none.

    It is next to the layer, in the same module. Where no layer of the model has one
    next to it, all layers share those of the model.
    """
    next_to: dict[int, Any] = {}  # by id of the layer
    for module in model.modules():
        children = list(module.children())
        rotary = [child for child in children if hasattr(child, "cos_sin_cache")]
        if rotary:
            next_to |= {id(c): rotary[0] for c in children if hasattr(c, "impl")}
    if not next_to:
        return [m for m in model.modules() if hasattr(m, "cos_sin_cache")]
    if any(id(layer) not in next_to for layer in layers):
        return []  # layers without RoPE
    return [next_to[id(layer)] for layer in layers]
