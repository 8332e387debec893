"""The attention layers of a drafter, which vLLM loads next to the model's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from vllm_kvplugins.engine.heap import FP8_DTYPES
from vllm_kvplugins.engine.runtime import PolicyRuntime
from vllm_kvplugins.errors import coded
from vllm_kvplugins.plan.geometry import Geometry
from vllm_kvplugins.vllm_adapter.scheduler.spec import is_managed


def names(
    model: torch.nn.Module, layers: Mapping[str, Any], cached: Iterable[str]
) -> tuple[str, ...]:
    """The layers with a KV cache that are not part of the model.

    Args:
        model: the loaded model, which verifies the drafts.
        layers: of the process, by name.
        cached: names of the layers with a KV cache, in the order of their caches.
    """
    own = {id(module) for module in model.modules()}
    return tuple(name for name in cached if id(layers[name]) not in own)


def problems(
    draft_layers: Iterable[str], specs: Mapping[str, Any], layers: Mapping[str, Any]
) -> list[str]:
    """Whether the caches of all draft layers can follow those of the model.

    Args:
        specs: vLLM's spec of each layer with a KV cache.
        layers: of the process, by name.
    """
    drafts = tuple(draft_layers)
    if not drafts:
        return []
    plain = [
        f"layer {name} of the drafter is not plain full attention, and a compaction "
        "moves the tokens of such layers only; use another drafter"
        for name in drafts
        if not is_managed(specs[name])
    ]
    of_model = {
        _cache_dtype(layers[name], spec)
        for name, spec in specs.items()
        if is_managed(spec) and name not in drafts
    }
    other = [
        f"layer {name} of the drafter has a KV cache of {_name(dtype)}, and the model "
        f"one of {' and '.join(sorted(map(_name, of_model)))}, and both lie in the "
        'same blocks; remove "kv_cache_dtype" from --speculative-config, or set '
        "--kv-cache-dtype for both"
        for name in drafts
        if {dtype := _cache_dtype(layers[name], specs[name])} != of_model
    ]
    return [
        coded(
            "KVP004",
            f"speculative decoding: {reason}, or remove --speculative-config",
        )
        for reason in plain + other
    ]


def _cache_dtype(layer: Any, spec: Any) -> torch.dtype:
    """Dtype of the elements of a layer's cache; vLLM's spec of fp8 has uint8."""
    dtype: torch.dtype = FP8_DTYPES.get(layer.kv_cache_dtype, spec.dtype)
    return dtype


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def geometry(
    draft_layers: Iterable[str], specs: Mapping[str, Any], ranks: int
) -> Geometry | None:
    """Shape of the cache of the draft layers; None: there are none.

    The layers have plain full attention and one shape, like all layers of one heap.
    vLLM divides the KV heads of a drafter among the ranks of the model, and gives each
    rank one if there are fewer heads than ranks.

    Args:
        specs: vLLM's spec of each layer with a KV cache, on this rank.
        ranks: of tensor parallelism.
    """
    layers = [specs[name] for name in draft_layers]
    if not layers:
        return None
    first = layers[0]
    element_bytes = first.dtype.itemsize
    per_layer = 2 * first.num_kv_heads * first.head_size * element_bytes
    return Geometry(
        block_size=first.block_size,
        num_layers=len(layers),
        num_kv_heads=first.num_kv_heads,
        kv_bytes_per_token=ranks * len(layers) * per_layer,
        head_dim=first.head_size,
        element_bytes=element_bytes,
    )


def use_draft_backend(layer: Any, runtime: PolicyRuntime) -> None:
    """Give a draft layer its page tables.

    vLLM makes one metadata builder per backend, so the draft layers get a builder of
    their own.
    """
    layer.attn_backend = layer.attn_backend.draft_backend
    layer.impl.bind(runtime, None, layer)
