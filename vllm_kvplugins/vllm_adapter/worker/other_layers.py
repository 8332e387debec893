"""Layers of a hybrid model: those that a policy manages, and those of vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.model_executor.layers.attention.chunked_local_attention import (
    create_chunked_local_attention_backend,
)

from vllm_kvplugins.errors import coded, refuse
from vllm_kvplugins.plan.geometry import Geometry

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def use_stock_backend(layer: Any) -> None:
    """Let vLLM build the metadata of this layer as without a policy.

    vLLM selects one backend for all layers of a process, so the layer was built on
    ours. Its impl runs the stock kernel on stock metadata.

    Args:
        layer: an attention layer, or one without a backend of ours, such as Mamba's,
            which stays as it is.

    Raises:
        KVPolicyError: the layer wraps our backend in a way that this package does not
            know.
    """
    backend: Any = getattr(layer, "attn_backend", None)
    stock = getattr(backend, "stock_backend", None)
    if stock is None:
        return
    if "stock_backend" in vars(backend):
        layer.attn_backend = stock
        return
    chunk = getattr(layer, "attention_chunk_size", None)
    refuse(
        "a KV policy cannot run with this model",
        []
        if chunk
        else [
            coded(
                "KVP203",
                f"layer {layer.layer_name} has an attention backend of its own, "
                f"{backend.__name__}; serve this model without a policy",
            )
        ],
    )
    layer.attn_backend = create_chunked_local_attention_backend(stock, chunk)


def geometry_problems(
    managed: Sequence[Any], vllm_config: VllmConfig, geometry: Geometry
) -> list[str]:
    """Whether the loaded layers have the shape that was read from the configuration.

    The scheduler and the front end plan with the configuration's shape.

    Args:
        managed: specs of the layers that the policy manages.
    """
    ranks = vllm_config.parallel_config.tensor_parallel_size
    total_heads = vllm_config.model_config.get_total_num_kv_heads()
    token_bytes = [
        2 * total_heads * spec.head_size * spec.dtype.itemsize for spec in managed
    ]
    shapes = {
        "full-attention layers": (geometry.num_layers, len(managed)),
        "block size": (geometry.block_size, *{spec.block_size for spec in managed}),
        f"KV heads on each of {ranks} ranks": (
            geometry.num_kv_heads,
            *{spec.num_kv_heads for spec in managed},
        ),
        "bytes per token": (geometry.kv_bytes_per_token, sum(token_bytes)),
    }
    return [
        coded(
            "KVP203",
            f"{name}: {expected} by the model's configuration, "
            f"{', '.join(map(str, loaded)) or 'none'} in the loaded model; serve this "
            "model without a policy and report it",
        )
        for name, (expected, *loaded) in shapes.items()
        if loaded != [expected]
    ]
