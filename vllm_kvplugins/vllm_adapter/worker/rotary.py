"""The RoPE of a loaded vLLM model, for policies that undo it."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from vllm_kvplugins.scoring.rotary import Rotary


def rotary_of(model: Any) -> Rotary | None:
    """The RoPE of a model's text layers, if all have the same plain one.

    Returns:
        None for models without RoPE, with different ones per layer, with layers that
        skip it, or with one that is not a table over one position index (M-RoPE,
        LongRoPE, FoPE).
    """
    if hasattr(model, "get_language_model"):  # a vision tower has a RoPE of its own
        model = model.get_language_model()
    if _skips_layers(getattr(model, "config", None)):
        return None
    modules = [m for m in model.modules() if hasattr(m, "cos_sin_cache")]
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
