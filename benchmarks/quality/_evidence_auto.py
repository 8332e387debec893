"""Whether ``--kv-policy auto`` wins: its choice at a tenth of the context, joined with
the answers of stock vLLM and of the best single policy.

Choosing by the rows on which one reports favours whoever is chosen. So the contexts of
each task are divided in two halves. Every answer counts for the policy that was chosen
by the other half: ``scores_of`` never sees the rows that it chose by. The best single
policy of a task is chosen with all rows, which favours it, not ``auto``.
"""

from __future__ import annotations

import statistics
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from _evidence_package import choosing, compact
from _evidence_report import Cell, Model, name_of
from _evidence_samples import KL, MULTIKEY, PASSKEY
from _evidence_verdicts import cell_of
from _quality_stats import DRAWS, STOCK, interval

from vllm_kvplugins.choice.decision import decide
from vllm_kvplugins.choice.evidence import Evidence, read
from vllm_kvplugins.choice.requests import Request, Workload
from vllm_kvplugins.choice.settings import AutoSettings

SHARE = 0.1
TASKS = (PASSKEY, MULTIKEY, KL)
MIN_SCORE = AutoSettings().min_score
# Eight prompts as long as the measured ones, in a pool for a third of each: stock vLLM
# does not fit, and every policy at a tenth does.
_REQUESTS, _POOL_SHARE = 8, 0.35


@dataclass(frozen=True, slots=True)
class Comparison:
    """``auto`` on one task of one model, against the best single policy.

    Attributes:
        own, stock, best: means over all samples.
        policies: what was chosen by either half.
        rival: the best single policy.
        worst: the end of the 95 % interval of ``best`` at which it is worse; ``best``
            if all contexts are equal.
        low, high: 95 % interval of the paired difference to ``rival``; positive is
            better; None if all differences are equal.
    """

    model: str
    task: str
    samples: int
    own: float
    stock: float
    best: float
    policies: tuple[str, ...]
    rival: str
    worst: float
    low: float | None
    high: float | None

    @property
    def is_below(self) -> bool:
        """Outside of the interval of the best single policy, on its worse side."""
        if self.task == KL:
            return self.own > self.worst
        return self.own < self.worst

    @property
    def is_worse_in_pairs(self) -> bool:
        """Worse on the same samples, however small the difference is."""
        return self.high is not None and self.high < 0


# -- the choice ----------------------------------------------------------------------


def request(hosted: bool) -> Request:
    """Requests of which a tenth fits, with host memory or without."""
    tokens, answer = 2000, 32
    whole = _REQUESTS * (tokens + answer)
    return Request(
        model="measured",
        prompt_tokens=tokens,
        answer_tokens=answer,
        concurrency=_REQUESTS,
        memory=int(whole * _POOL_SHARE),
        host_memory=None if hosted else 0,
        token_bytes=1,
        block_size=1,
    )


def choose(
    models: Sequence[Model], workload: Workload, hosted: bool, min_score: float
) -> str:
    """The policy at a tenth of the context, by the rows of these models."""
    evidence = _tenth(read(compact(models)))
    result = decide(evidence, request(hosted), workload, min_score)
    return str(result["policy"])


def _tenth(evidence: Evidence) -> Evidence:
    cells = tuple(cell for cell in evidence.cells if cell.share == SHARE)
    return replace(evidence, cells=cells)


def halves(model: Model) -> tuple[Mapping[str, list[bool]], ...]:
    """Per task, which samples are in a half. A context is in one half only."""
    first: dict[str, list[bool]] = {}
    for task, samples in model["samples"].items():
        groups = sorted({group for _, group in samples})
        first[task] = [groups.index(group) % 2 == 0 for _, group in samples]
    second = {task: [not each for each in keep] for task, keep in first.items()}
    return first, second


def part_of(model: Model, keep: Mapping[str, list[bool]]) -> Model:
    """The model with these samples only."""
    return model | {"cells": [_part(cell, keep) for cell in model["cells"]]}


def _part(cell: Cell, keep: Mapping[str, list[bool]]) -> Cell:
    tasks = {}
    for task in TASKS:
        if task in cell:
            scores = _kept(cell[task]["scores"], keep[task])
            mean = statistics.mean(scores)
            tasks[task] = {"samples": len(scores), "mean": mean, "scores": scores}
    return cell | tasks


def _kept(values: Sequence[Any], keep: Sequence[bool]) -> list[Any]:
    return [value for value, kept in zip(values, keep, strict=True) if kept]


# -- the comparison ------------------------------------------------------------------


def comparisons(
    models: Sequence[Model], workload: Workload, hosted: bool = True
) -> list[Comparison]:
    """``auto`` on every model and task, also on models that it does not choose by."""
    chosen = chosen_by_halves(choosing(models), workload, hosted, MIN_SCORE)
    return [compared(model, task, chosen) for model in models for task in TASKS]


def compared(model: Model, task: str, chosen: Sequence[str]) -> Comparison:
    """The choice on one task of one model, against the best single policy."""
    own = scores_of(model, task, chosen)
    stock = _cell(model, STOCK)[task]["scores"]
    sign = -1 if task == KL else 1
    rival = max(
        (c for c in model["cells"] if c["share"] == SHARE and task in c),
        key=lambda c: (sign * c[task]["mean"], name_of(c) in chosen),
    )
    groups = [group for _, group in model["samples"][task]]
    gaps = [sign * (a - b) for a, b in zip(own, rival[task]["scores"], strict=True)]
    name = f"auto {model['model']} {task} {name_of(rival)}"
    equal = len(set(gaps)) == 1
    low, high = (None if equal else interval(gaps, groups, name)) or (None, None)
    worst = rival[task]["high" if task == KL else "low"]
    mean = statistics.mean(rival[task]["scores"])
    return Comparison(
        model["model"],
        task,
        len(own),
        statistics.mean(own),
        statistics.mean(stock),
        mean,
        tuple(dict.fromkeys(chosen)),
        name_of(rival),
        mean if worst is None else worst,
        low,
        high,
    )


def scores_of(model: Model, task: str, chosen: Sequence[str]) -> list[float]:
    """Each sample's score under the policy that the other half has chosen."""
    by_half = [_cell(model, policy)[task]["scores"] for policy in chosen]
    first, _ = halves(model)
    return [
        by_half[1 if in_first else 0][index]
        for index, in_first in enumerate(first[task])
    ]


def _cell(model: Model, policy: str) -> Cell:
    cell = cell_of(model, policy, None if policy == STOCK else SHARE)
    assert cell is not None, f"{policy} has no cell at {SHARE} on {model['model']}"
    return cell


def share_of_stock(
    model: Model, chosen: Sequence[str], tasks: Sequence[str] = (PASSKEY, MULTIKEY)
) -> tuple[float, float, float]:
    """Score over stock's, both as means over the tasks, with its 95 % interval from a
    bootstrap over contexts. Of the default tasks it is the share of stock's keys."""
    generator = np.random.default_rng(zlib.crc32(model["model"].encode()))
    own, stock = np.zeros(DRAWS + 1), np.zeros(DRAWS + 1)
    for task in tasks:
        groups = [group for _, group in model["samples"][task]]
        parts = _sums(groups, scores_of(model, task, chosen), _cell(model, STOCK)[task])
        drawn = generator.integers(len(parts), size=(DRAWS, len(parts)))
        means = parts[drawn].sum(1)
        whole = parts.sum(0, keepdims=True)
        sums = np.concatenate([whole, means])
        own += sums[:, 0] / sums[:, 2]
        stock += sums[:, 1] / sums[:, 2]
    ratios = own[1:] / np.maximum(stock[1:], 1e-9)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(own[0] / stock[0]), float(low), float(high)


def with_tasks_of(model: Model, other: Model) -> Model:
    """The model with the tasks of both, in the cells that both have."""
    tasks = {task: samples for task, samples in other["samples"].items() if samples}
    cells = []
    for more in other["cells"]:
        cell = cell_of(model, name_of(more), more["share"])
        if cell is not None:
            scores = {task: more[task] for task in tasks if task in more}
            cells.append(cell | scores)
    return model | {"samples": model["samples"] | tasks, "cells": cells}


def _sums(
    groups: Sequence[str], own: Sequence[float], stock: Mapping[str, Any]
) -> np.ndarray[Any, Any]:
    """Per context: own score, stock's score, and number of samples."""
    found: dict[str, list[float]] = {}
    for group, a, b in zip(groups, own, stock["scores"], strict=True):
        total = found.setdefault(group, [0.0, 0.0, 0.0])
        for index, value in enumerate((a, b, 1.0)):
            total[index] += value
    return np.array(list(found.values()))


def chosen_by_halves(
    models: Sequence[Model], workload: Workload, hosted: bool, min_score: float
) -> tuple[str, ...]:
    """The choice by each half of the contexts."""
    return tuple(
        choose(
            [part_of(m, halves(m)[half]) for m in models], workload, hosted, min_score
        )
        for half in (0, 1)
    )
