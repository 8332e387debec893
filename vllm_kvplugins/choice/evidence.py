"""The measured policies that ship with the package.

``scripts/publish_evidence.py`` writes ``evidence.json`` from the committed rows.
"""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

PASSKEY, MULTIKEY, KL = "passkey", "multikey", "kl"
FILE = "evidence.json"


@dataclass(frozen=True, slots=True)
class Contract:
    """What a policy can do besides answering.

    Attributes:
        turns: it compresses each turn of a conversation once.
        sessions: it can continue a request from its cache.
        keeps_all: tokens that leave the device stay in host memory.
        prefix_cache: prompts are read through vLLM's prefix cache.
        prefill_block: it can compress while it reads the prompt.
    """

    turns: bool
    sessions: bool
    keeps_all: bool
    prefix_cache: bool
    prefill_block: bool


@dataclass(frozen=True, slots=True)
class Measured:
    """A policy at one share of the context, over all models that it was measured on.

    Attributes:
        settings: by model; the budget is fitted to each.
        budget_setting: name of the setting that limits what it holds.
        device_share: device bytes of a request over stock's, the largest of all models.
        host_share: the same for host memory.
        scores: by model and task: ``mean``, ``samples`` and, for keys, ``found``.
        speed: by model: ratios of medians to stock's; empty if not measured.
    """

    policy: str
    share: float
    settings: Mapping[str, Mapping[str, Any]]
    budget_setting: str
    device_share: float
    host_share: float
    scores: Mapping[str, Mapping[str, Any]]
    speed: Mapping[str, Mapping[str, float]]

    def mean(self, *tasks: str) -> float | None:
        """Mean score over tasks and models; None if a task lacks a measurement."""
        values = [
            scores[task]["mean"] if task in scores else None
            for scores in self.scores.values()
            for task in tasks
        ]
        known = [value for value in values if value is not None]
        return statistics.mean(known) if len(known) == len(values) else None

    def share_of(self, stock: Measured) -> float | None:
        """Keys found over those that stock finds, mean over both tasks; the model with
        the smallest share counts. None if a task lacks a measurement."""
        tasks = (PASSKEY, MULTIKEY)
        if self.mean(*tasks) is None:
            return None
        shares: list[float] = [
            sum(scores[task]["mean"] for task in tasks)
            / sum(stock.scores[model][task]["mean"] for task in tasks)
            for model, scores in self.scores.items()
        ]
        return min(shares)

    def found(self, task: str) -> tuple[int, int] | None:
        """Keys found and questions asked, over all models."""
        scores = [each[task] for each in self.scores.values() if task in each]
        if not scores:
            return None
        return sum(s["found"] for s in scores), sum(s["samples"] for s in scores)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that was measured.

    Attributes:
        contracts: by policy.
        models: names; context lengths in ``tokens``, stock's scores in ``stock``.
        cells: one per policy and share.
        partly: policies that lack one of the models at some share; they are left out.
    """

    contracts: Mapping[str, Contract]
    models: tuple[str, ...]
    tokens: tuple[int, ...]
    machines: tuple[str, ...]
    stock: Measured
    cells: tuple[Measured, ...]
    partly: tuple[str, ...]

    def speed_of(self, policy: str) -> float:
        """Tokens per second over stock's, mean over the cells with three rounds; 0 if
        the policy has none."""
        ratios = [
            speed["tokens_per_s_ratio"]
            for cell in self.cells
            if cell.policy == policy
            for speed in cell.speed.values()
            if "tokens_per_s_ratio" in speed
        ]
        return statistics.mean(ratios) if ratios else 0.0


@functools.cache
def load() -> Evidence:
    """The package's file; it is read once per process."""
    text = resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8")
    return read(json.loads(text))


def read(content: Mapping[str, Any]) -> Evidence:
    """The evidence in the content of ``evidence.json``."""
    models = content["models"]
    names = tuple(model["model"] for model in models)
    rows: dict[tuple[str, float], dict[str, Any]] = {}
    for model in models:
        for cell in model["cells"]:
            if cell["share"] is not None:
                key = cell["policy"], cell["share"]
                rows.setdefault(key, {})[model["model"]] = cell
    whole = {
        key: by_model for key, by_model in rows.items() if set(by_model) == {*names}
    }
    return Evidence(
        contracts={
            name: Contract(**fields) for name, fields in content["policies"].items()
        },
        models=names,
        tokens=tuple(sorted({model["tokens"] for model in models})),
        machines=tuple(sorted({model["machine"] for model in models})),
        stock=Measured(
            policy="stock",
            share=1.0,
            settings={},
            budget_setting="",
            device_share=1.0,
            host_share=0.0,
            scores={model["model"]: _scores(model["stock"]) for model in models},
            speed={},
        ),
        cells=tuple(_measured(*key, by_model) for key, by_model in whole.items()),
        partly=tuple(sorted({policy for policy, _ in rows.keys() - whole.keys()})),
    )


def _measured(policy: str, share: float, by_model: Mapping[str, Any]) -> Measured:
    cells = by_model.values()
    return Measured(
        policy=policy,
        share=share,
        settings={model: cell["settings"] for model, cell in by_model.items()},
        budget_setting=next(iter(cells))["budget_setting"],
        device_share=max(cell["device_share"] for cell in cells),
        host_share=max(cell["host_share"] for cell in cells),
        scores={model: _scores(cell) for model, cell in by_model.items()},
        speed={
            model: {k: v for k, v in cell.items() if k.endswith("_ratio")}
            for model, cell in by_model.items()
        },
    )


def _scores(cell: Mapping[str, Any]) -> dict[str, Any]:
    return {task: cell[task] for task in (PASSKEY, MULTIKEY, KL) if task in cell}
