"""Routers and training examples with random values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_kvplugins.model_config import ModelFingerprint
from vllm_kvplugins.plan.geometry import Geometry
from vllm_kvplugins.routers.files import RouterFacts, RouterReport, write_router
from vllm_kvplugins.routers.router import Router
from vllm_kvplugins.training.examples import Cut, Example, make_example
from vllm_kvplugins.training.teacher import Reading


@dataclass(frozen=True)
class Shape:
    layers: int = 2
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 8
    routing_dim: int = 4
    max_rank: int = 6

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


def random_router(shape: Shape, random: torch.Generator, tau: float = 0.5) -> Router:
    """A router in which every weight matters."""
    size = (shape.layers, shape.heads, shape.routing_dim, shape.head_dim)
    router = Router.new(torch.randn(size, generator=random), tau, shape.max_rank, 0)
    for name, tensor in router.tensors.items():
        if name != "projection":
            tensor += 0.5 * torch.randn(tensor.shape, generator=random)
    return router


def random_reading(
    shape: Shape, tokens: int, asking: int, random: torch.Generator
) -> Reading:
    """Attention with some favored tokens, and a surprising token every 29."""

    def rows(heads: int, count: int) -> torch.Tensor:
        size = (shape.layers, heads, count, shape.head_dim)
        return torch.randn(size, generator=random)

    surprisal = torch.rand(tokens, generator=random)
    surprisal[::29] += 5
    return Reading(
        tokens=torch.randint(100, (tokens,), generator=random),
        surprisal=surprisal,
        keys=2 * rows(shape.kv_heads, tokens),
        values=rows(shape.kv_heads, tokens),
        queries=2 * rows(shape.heads, asking),
        hidden=torch.randn(asking, 16, generator=random),
        scale=shape.head_dim**-0.5,
    )


def random_example(shape: Shape, random: torch.Generator) -> tuple[Reading, Example]:
    cut = Cut(
        budget=(0.4, 0.4), queries=40, mined=12, window=6, max_rank=shape.max_rank
    )
    reading = random_reading(shape, 340, cut.queries, random)
    geometry = Geometry(4, shape.layers, shape.kv_heads, 100)
    example = make_example(reading, cut, geometry, 0, with_passage=True)
    assert example is not None
    assert example.segments.num_spans > 4
    return reading, example


def write_random_router(
    path: Path, model: ModelFingerprint, random: torch.Generator, **changes: Any
) -> Router:
    """A router file that fits a model.

    Args:
        changes: tensors in place of those that were drawn.
    """
    shape = Shape(
        model.num_layers,
        model.num_kv_heads,
        (model.num_heads or 0) // model.num_kv_heads,
        model.head_dim,
        max_rank=64,
    )
    router = random_router(shape, random)
    router = Router(**router.tensors | changes)
    facts = RouterFacts(
        plugin="0",
        model="model",
        fingerprint=model,
        settings={},
        texts={"a.txt": "0"},
        report=RouterReport(
            zoom_f1={"router": 0.5, "mean_key": 0.4},
            zoom_f1_in_room={},
            zoomed={},
            covered_in_room={},
            divergence={},
            kept_energy=1.0,
            mean_rank=1.0,
            zoom_rate=torch.rand(router.threshold.shape, generator=random).tolist(),
            tau=router.tau.tolist(),
        ),
    )
    write_router(router, facts, path)
    return router
