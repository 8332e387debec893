"""Routers as files: safetensors, with what they were made of beside the numbers."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vllm_kvplugins.errors import KVPolicyError
from vllm_kvplugins.model_config import ModelFingerprint
from vllm_kvplugins.routers.router import Router

_AGAIN = "make one with `kvplugins train-router MODEL --data DIR --out DIR`"


class RouterReport(BaseModel):
    """Held-out figures of a router, beside others; see ``report.py``.

    Attributes:
        zoom_f1: of decisions by thresholds, against the teacher's targets (equation
            12), by what decides.
        zoom_f1_in_room: of what is zoomed where spans compete for a quarter of the
            tokens, against what the teacher's attention would choose there.
        zoomed: share of (query, query head, span) that is seen token by token.
        covered_in_room: share of the attention to spans that zoomed ones hold there.
        divergence: from full attention, nats per token.
        kept_energy: share of the squared norm that gated components keep.
        mean_rank: components that a span keeps of keys, or of values.
        zoom_rate: [layers][num_q_heads], share of spans that each zooms into.
        tau: [layers][num_q_heads].
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
    """What a router was trained for and on.

    Attributes:
        model: name of the model.
        settings: of the training.
        texts: name of each text -> sha256.
        report: held-out figures.
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
    """Write a file for :func:`read_router`; projections in bfloat16.

    Raises:
        OSError: it cannot be written there.
    """
    tensors = {
        name: tensor.detach().float().contiguous()
        for name, tensor in router.tensors.items()
    }
    tensors["projection"] = tensors["projection"].bfloat16()
    told = {"facts": json.dumps(facts.model_dump(mode="json"))}
    save_file(tensors, path, told)


def read_router(path: Path) -> tuple[Router, RouterFacts]:
    """Read what :func:`write_router` wrote.

    Raises:
        KVPolicyError: no such file, or it is no router of this version.
    """
    try:
        with safe_open(path, "pt") as file:
            told = file.metadata() or {}
            names = file.keys()
            tensors = {name: file.get_tensor(name).float() for name in names}
    except (OSError, SafetensorError) as error:
        raise KVPolicyError(f"cannot read the router {path}: {error}; {_AGAIN}") from (
            error
        )
    try:
        facts = RouterFacts.model_validate(json.loads(told.get("facts", "{}")))
        router = Router(**tensors)
    except (ValidationError, ValueError, TypeError) as error:
        raise KVPolicyError(
            f"{path} is not a router that this program reads ({error}); {_AGAIN}"
        ) from error
    problems = _shape_problems(router, facts.fingerprint)
    if problems:
        raise KVPolicyError(f"{path} is damaged ({'; '.join(problems)}); {_AGAIN}")
    return router, facts


def shipped_router() -> Path:
    """The file of the router that comes with this package. There is one, so that no
    model need be known to find it; the model that it is for stands in it, and is held
    against the one that is served at start-up."""
    folder = Path(str(resources.files(__package__))) / "shipped"
    (path,) = folder.glob("*.safetensors")
    return path


def _shape_problems(router: Router, model: ModelFingerprint) -> list[str]:
    """Where numbers do not fit each other, or the model that they are said to fit."""
    if router.projection.dim() != 4 or router.rank_out.dim() != 2:
        return ["a tensor has other dimensions than it should"]
    layers, heads, routing_dim, _ = router.projection.shape
    hidden, rank = router.rank_out.shape
    wanted = {
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
    found = router.tensors
    return [
        f"{name} is {tuple(found[name].shape)}, not {shape}"
        for name, shape in wanted.items()
        if tuple(found[name].shape) != shape
    ] + [
        f"{name} holds NaN or infinity"
        for name, tensor in found.items()
        if not bool(torch.isfinite(tensor).all())
    ]
