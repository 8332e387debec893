"""Router files: safetensors whose metadata describes how the router was trained."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vllm_kvplugins.errors import KVPolicyError, coded
from vllm_kvplugins.model_config import ModelFingerprint
from vllm_kvplugins.routers.router import Router

_REMEDY = "make one with `kvplugins research train-router MODEL --data DIR --out DIR`"


class RouterReport(BaseModel):
    """Figures of a router on held-out texts, with baselines (``training/report.py``).

    Dictionaries map a method (``router``, ``mean_key``, ...) to its figure.

    Attributes:
        zoom_f1: F1 of threshold decisions against the teacher's targets (equation 12).
        zoom_f1_in_room: F1 when spans compete for a quarter of the tokens, against
            the choice that the teacher's attention makes.
        zoomed: share of (query, query head, span) triples that are zoomed.
        covered_in_room: share of the attention to spans that falls on the zoomed
            ones, with the same room.
        divergence: KL divergence from full attention, nats per token.
        kept_energy: share of the squared norm that gated components keep.
        mean_rank: components that a span keeps of its keys or of its values.
        zoom_rate: [layers][num_q_heads], share of spans that each head zooms into.
        tau: [layers][num_q_heads], thresholds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    zoom_f1: dict[str, float]
    zoom_f1_in_room: dict[str, float]
    zoomed: dict[str, float]
    covered_in_room: dict[str, float]
    divergence: dict[str, float]
    kept_energy: float
    mean_rank: float
    zoom_rate: list[list[float]] = Field(min_length=1)
    tau: list[list[float]] = Field(min_length=1)


class RouterFacts(BaseModel):
    """The model, settings and texts that a router was trained with.

    Attributes:
        plugin: version of this package.
        model: name of the model.
        fingerprint: of the model; compared with the served model at start-up.
        settings: ``TrainSettings`` as plain values.
        texts: SHA-256 of each text, by name.
        report: figures on held-out texts.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["kvplugins-router"] = "kvplugins-router"
    version: Literal[1] = 1
    plugin: str
    model: str
    fingerprint: ModelFingerprint
    settings: dict[str, Any]
    texts: dict[str, str] = Field(min_length=1)
    report: RouterReport


def write_router(router: Router, facts: RouterFacts, path: Path) -> None:
    """Write a file for :func:`read_router`, with projections in bfloat16.

    Raises:
        OSError: the file cannot be written.
    """
    tensors = {
        name: tensor.detach().float().contiguous()
        for name, tensor in router.tensors.items()
    }
    tensors["projection"] = tensors["projection"].bfloat16()
    metadata = {"facts": json.dumps(facts.model_dump(mode="json"))}
    save_file(tensors, path, metadata)


def read_router(path: Path) -> tuple[Router, RouterFacts]:
    """Read a file of :func:`write_router`.

    Raises:
        KVPolicyError: the file is missing, damaged or of another version.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            names = file.keys()
            tensors = {name: file.get_tensor(name).float() for name in names}
    except (OSError, SafetensorError) as error:
        raise KVPolicyError(
            coded("KVP646", f"cannot read the router {path}: {error}; {_REMEDY}")
        ) from error
    try:
        facts = RouterFacts.model_validate(json.loads(metadata.get("facts", "{}")))
        router = Router(**tensors)
    except (ValidationError, ValueError, TypeError) as error:
        raise KVPolicyError(
            coded(
                "KVP646",
                f"{path} is not a router file of this version ({error}); {_REMEDY}",
            )
        ) from error
    problems = _shape_problems(router, facts.fingerprint)
    if problems:
        raise KVPolicyError(
            coded("KVP646", f"{path} is damaged ({'; '.join(problems)}); {_REMEDY}")
        )
    return router, facts


def shipped_router() -> Path:
    """Path of the router that comes with this package.

    The package contains one router. Its file names its model, which is compared with
    the served model at start-up.
    """
    folder = Path(str(resources.files(__package__))) / "shipped"
    (path,) = folder.glob("*.safetensors")
    return path


def _shape_problems(router: Router, model: ModelFingerprint) -> list[str]:
    """Tensors whose shapes do not fit each other or the model, or are not finite."""
    if router.projection.dim() != 4 or router.rank_out.dim() != 2:
        return ["a tensor has the wrong number of dimensions"]
    layers, heads, routing_dim, _ = router.projection.shape
    hidden, rank = router.rank_out.shape
    expected = {
        "projection": (
            model.num_layers,
            heads if model.num_heads is None else model.num_heads,
            routing_dim,
            model.head_dim,
        ),
        "threshold": (layers, heads),
        "rank_hidden": (rank + routing_dim + 2, hidden),
        "rank_hidden_bias": (hidden,),
        "rank_out_bias": (rank,),
    }
    tensors = router.tensors
    return [
        f"{name} is {tuple(tensors[name].shape)}, not {shape}"
        for name, shape in expected.items()
        if tuple(tensors[name].shape) != shape
    ] + [
        f"{name} holds NaN or infinity"
        for name, tensor in tensors.items()
        if not bool(torch.isfinite(tensor).all())
    ]
