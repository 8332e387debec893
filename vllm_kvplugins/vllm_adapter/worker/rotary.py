"""The RoPE of a loaded vLLM model, for policies that undo it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from vllm_kvplugins.scoring.rotary import Rotary


def rotary_of(model: Any, layers: Sequence[torch.nn.Module]) -> Rotary | None:
    """The rotary embedding of some attention layers, if they share a plain one.

    Other layers may have another one: Gemma 3 has one base for windowed and one for
    full attention.

    Args:
        layers: vLLM's attention layers.

    Returns:
        None for layers without RoPE, with different ones, with one that is not a table
        over one position index (M-RoPE, LongRoPE, FoPE), and for models some of whose
        layers skip it.
    """
    if hasattr(model, "get_language_model"):  # a vision tower has a RoPE of its own
        model = model.get_language_model()
    if _skips_layers(getattr(model, "config", None)):
        return None
    modules = _rotary_modules(model, layers)
    if not modules or not all(_is_plain(module) for module in modules):
        return None
    first = modules[0]
    table: torch.Tensor = first.cos_sin_cache
    for module in modules:
        if module.is_neox_style != first.is_neox_style:
            return None
        other = module.cos_sin_cache
        if other.data_ptr() != table.data_ptr() and not torch.equal(other, table):
            return None
    cos, sin = table.to(torch.float32).chunk(2, dim=-1)
    return Rotary(cos, sin, bool(first.is_neox_style))


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


def _is_plain(module: Any) -> bool:
    """Whether a module rotates by one table over one position index."""
    return (
        isinstance(module, RotaryEmbedding)
        and type(module).forward_native is RotaryEmbedding.forward_native
        and module.cos_sin_cache.dim() == 2
    )


def _skips_layers(config: Any) -> bool:
    """Whether some layers use no RoPE, although the model has one (NoPE layers).

    The layers' modules do not show it: all have a RoPE, and some do not call it.
    """
    uses = getattr(getattr(config, "text_config", config), "no_rope_layers", None)
    return not all(uses or ())  # 1: the layer has RoPE
