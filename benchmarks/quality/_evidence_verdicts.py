"""Verdicts on a policy: paired comparisons on the same samples, corrected for their
number.

Two cells of one model and one share answer the same samples. The exact sign test asks
in how many contexts one of them is better; questions about one context count as one
observation. For right-or-wrong answers with one question per context, this is
McNemar's exact test. Holm's method corrects for all tests of one policy, over models,
shares, tasks and baselines.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from _evidence_report import Cell, Model, name_of
from _evidence_samples import KL, MULTIKEY, PASSKEY
from _quality_stats import STOCK

LEVEL = 0.05
BASELINES = ("snapkv", "streaming-llm", "random")
TASKS = (PASSKEY, MULTIKEY, KL)
# With fewer contexts, no result of the sign test is below LEVEL.
MIN_CONTEXTS = 6
# Two policies hold the same memory if their device bytes differ by less than this.
SAME_MEMORY = 1.1


@dataclass(frozen=True, slots=True)
class Comparison:
    """A policy against a baseline, on one task of one model at one share.

    Attributes:
        own, other: means over samples.
        better, worse: contexts in which the policy is better or worse.
        p: of the exact sign test, two-sided.
        memory: device bytes of the policy over those of the baseline; None: unknown.
        shown: ``better`` or ``worse`` if the difference survives the correction and
            memory cannot explain it; else "".
    """

    model: str
    task: str
    share: float | None
    baseline: str
    samples: int
    own: float
    other: float
    better: int
    worse: int
    p: float
    memory: float | None
    shown: str = ""


def sign_test(better: int, worse: int) -> float:
    """Two-sided p of the exact sign test; ties do not count."""
    trials = better + worse
    tail = sum(math.comb(trials, k) for k in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / 2**trials)


def holm(ps: Sequence[float], level: float = LEVEL) -> list[bool]:
    """Which hypotheses Holm's method rejects, with this familywise error rate."""
    rejected = [False] * len(ps)
    for rank, index in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        if ps[index] > level / (len(ps) - rank):
            break
        rejected[index] = True
    return rejected


def cell_of(model: Model, policy: str, share: float | None) -> Cell | None:
    """The cell of a policy at a share; None if there is none, or it was refused."""
    for cell in model["cells"]:
        if name_of(cell) == policy and cell["share"] == share:
            return None if "refused" in cell else cell
    return None


def comparisons(models: Sequence[Model], policy: str) -> list[Comparison]:
    """All tests of a policy, with what survives the correction.

    Stock vLLM holds all tokens and is compared in answers only: its divergence from
    itself is zero.
    """
    found = [
        test
        for model in models
        for cell in model["cells"]
        if name_of(cell) == policy and "refused" not in cell
        for test in _tests(model, cell)
    ]
    rejected = holm([test.p for test in found])
    return [
        _with_result(test, survives)
        for test, survives in zip(found, rejected, strict=True)
    ]


def _tests(model: Model, cell: Cell) -> Iterator[Comparison]:
    for baseline in (*BASELINES, STOCK):
        share = None if baseline == STOCK else cell["share"]
        other = cell_of(model, baseline, share)
        if baseline == name_of(cell) or other is None:
            continue
        for task in TASKS:
            groups = [group for _, group in model["samples"][task]]
            tested = len(set(groups)) >= MIN_CONTEXTS
            both = task in cell and task in other
            if tested and both and not (baseline == STOCK and task == KL):
                yield compared(model, task, cell, other)


def compared(model: Model, task: str, cell: Cell, other: Cell) -> Comparison:
    """One test of two cells that both have the task; ``shown`` is not filled."""
    groups = [group for _, group in model["samples"][task]]
    sign = -1 if task == KL else 1
    gaps: dict[str, float] = {}
    pairs = zip(cell[task]["scores"], other[task]["scores"], groups, strict=True)
    for own_score, other_score, group in pairs:
        gaps[group] = gaps.get(group, 0.0) + sign * (own_score - other_score)
    better = sum(gap > 1e-9 for gap in gaps.values())
    worse = sum(gap < -1e-9 for gap in gaps.values())
    bytes_known = cell.get("device_bytes") and other.get("device_bytes")
    return Comparison(
        model["model"],
        task,
        cell["share"],
        name_of(other),
        cell[task]["samples"],
        cell[task]["mean"],
        other[task]["mean"],
        better,
        worse,
        sign_test(better, worse),
        cell["device_bytes"] / other["device_bytes"] if bytes_known else None,
    )


def _with_result(test: Comparison, survives: bool) -> Comparison:
    """Fill ``shown``: more memory is no merit, and less memory excuses a loss.

    Stock is no baseline of equal memory: a loss against it is what saving costs.
    """
    if not survives or test.memory is None:
        return test
    result = "better" if test.better > test.worse else "worse"
    unfair = (
        test.memory > SAME_MEMORY
        if result == "better"
        else (test.memory < 1 / SAME_MEMORY and test.baseline != STOCK)
    )
    fields: Mapping[str, Any] = {
        name: getattr(test, name) for name in Comparison.__slots__ if name != "shown"
    }
    return Comparison(**fields, shown="" if unfair else result)
