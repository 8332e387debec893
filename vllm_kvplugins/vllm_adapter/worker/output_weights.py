"""Reads the weights of attention's output projections from a loaded vLLM model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.linear import RowParallelLinear

from vllm_kvplugins.errors import coded
from vllm_kvplugins.policies.base import KVCachePolicy


@dataclass(frozen=True, slots=True, eq=False)
class OutputWeights:
    """The output projection of one attention layer; a call returns its weights.

    The weights may be packed for the CPU or quantized, so the projection is applied to
    the identity. Each rank projects its own heads.

    Attributes:
        projection: vLLM's linear layer.
        num_heads: query heads of this rank.
        head_dim: elements of a head.
    """

    projection: Any
    num_heads: int
    head_dim: int

    @torch.no_grad()
    def __call__(self) -> torch.Tensor:
        """float [num_heads, head_dim, hidden size], in the model's dtype."""
        identity = torch.eye(
            self.num_heads * self.head_dim,
            dtype=self.projection.params_dtype,
            device=_device_of(self.projection),
        )
        rows = self.projection.quant_method.apply(self.projection, identity, None)
        return rows.view(self.num_heads, self.head_dim, -1)


def output_weights_of(
    model: torch.nn.Module, layers: Sequence[Any]
) -> list[OutputWeights] | None:
    """The output projections of some attention layers.

    The projection of a layer is the linear layer in the same module that takes all
    elements of the layer's heads.

    Args:
        layers: vLLM's attention layers.

    Returns:
        One per layer; None if a layer has none, or several.
    """
    wanted = {id(layer): index for index, layer in enumerate(layers)}
    found: dict[int, OutputWeights] = {}
    for module in model.modules():
        children = list(module.children())
        for layer in children:
            index = wanted.get(id(layer))
            if index is None:
                continue
            width = layer.num_heads * layer.head_size
            linear = [getattr(child, "base_layer", child) for child in children]
            linear = [
                child
                for child in linear
                if isinstance(child, RowParallelLinear)
                and child.input_size_per_partition == width
            ]
            if len(linear) == 1:
                found[index] = OutputWeights(
                    linear[0], layer.num_heads, layer.head_size
                )
    if len(found) < len(layers):
        return None
    return [found[index] for index in range(len(layers))]


def output_weight_problems(
    policy: KVCachePolicy, found: Sequence[OutputWeights] | None
) -> list[str]:
    """Whether the policy needs output projections that this model does not show."""
    if not policy.needs_output_weights or found is not None:
        return []
    return [
        coded(
            "KVP041",
            f"{policy.name} needs the output projection of each attention layer, and "
            "this model has none next to its attention (vLLM's transformers backend, "
            "for example); use another policy, such as snapkv",
        )
    ]


def _device_of(module: torch.nn.Module) -> torch.device:
    return next(module.parameters()).device
