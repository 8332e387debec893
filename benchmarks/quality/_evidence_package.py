"""The part of the evidence that ships in the package: ``kvplugins recommend`` reads it.

One cell per policy and share, without single samples, and what the contract says about
each policy, so that the command needs neither torch nor vLLM.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from _evidence_report import TITLES, Cell, Model, cells_of, name_of
from _evidence_samples import KL
from _evidence_verdicts import cell_of
from _quality_fit import budget_setting
from _quality_stats import STOCK

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.policies.capabilities import Trigger

__all__ = ["cells_of", "choosing", "compact", "written"]


def written(models: Sequence[Model]) -> str:
    """The file's text."""
    return json.dumps(compact(choosing(models)), indent=1) + "\n"


def choosing(models: Sequence[Model]) -> list[Model]:
    """The models by which policies are chosen: those with measured speeds.

    A choice ranks by speed, too. The others test it on a model that it has not seen.
    """
    return [model for model in models if any(map(_speed, model["cells"]))]


def compact(models: Sequence[Model]) -> dict[str, Any]:
    """Everything that ``kvplugins recommend`` knows."""
    names = sorted({name_of(cell) for model in models for cell in model["cells"]})
    return {
        "policies": {name: _contract(name) for name in names if name != STOCK},
        "models": [_model(model) for model in models],
    }


def _contract(name: str) -> dict[str, Any]:
    """What a policy can do besides answering, from its hooks and settings."""
    policy = parse_policy({"name": name})
    seen = policy.observation
    reads_all = policy.spans is not None or (
        seen is not None and Trigger.PREFILL_CHUNK in seen.triggers
    )
    return {
        "turns": policy.turns is not None,
        "sessions": policy.spans is None,
        "keeps_all": policy.retrieval is not None,
        "prefix_cache": not reads_all,
        "prefill_block": "prefill_block" in type(policy).model_fields,
    }


def _model(model: Model) -> dict[str, Any]:
    stock = cell_of(model, STOCK, None)
    if stock is None or "device_bytes" not in stock:
        raise ValueError(f"{model['model']}: stock vLLM has no complete cell")
    return {
        "model": model["model"],
        "tokens": model["settings"]["tokens"],
        "machine": model["machine"],
        "stock": _scores(stock) | {"device_bytes": stock["device_bytes"]},
        "cells": list(_cells(model, stock)),
    }


def _cells(model: Model, stock: Cell) -> Iterator[dict[str, Any]]:
    for cell in model["cells"]:
        if name_of(cell) == STOCK or "refused" in cell or "device_bytes" not in cell:
            continue
        settings = {k: v for k, v in cell["policy"].items() if k != "name"}
        yield {
            "policy": name_of(cell),
            "settings": settings,
            "budget_setting": budget_setting({"name": name_of(cell)}),
            "share": cell["share"],
            "device_share": round(cell["device_bytes"] / stock["device_bytes"], 4),
            "host_share": round(cell["host_bytes"] / stock["device_bytes"], 4),
            **_scores(cell),
            **_speed(cell),
        }


def _scores(cell: Cell) -> dict[str, Any]:
    scores: dict[str, Any] = {}
    for task in TITLES:
        if task not in cell:
            continue
        score = cell[task]
        scores[task] = {"samples": score["samples"], "mean": score["mean"]}
        if task != KL:
            scores[task]["found"] = round(score["mean"] * score["samples"])
    return scores


def _speed(cell: Cell) -> dict[str, float]:
    """Medians of the ratios to stock, if there are at least three rounds."""
    names = ("tokens_per_s_ratio", "first_token_ms_ratio")
    return {
        name: round(statistics.median(cell[name]), 3)
        for name in names
        if len(cell.get(name, ())) >= 3
    }
