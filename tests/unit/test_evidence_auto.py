"""``auto`` wins by the committed rows, or it is not shipped."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from _evidence_auto import (
    MIN_SCORE,
    choose,
    chosen_by_halves,
    compared,
    comparisons,
    halves,
    scores_of,
    share_of_stock,
    with_tasks_of,
)
from _evidence_package import choosing
from _evidence_report import OTHER_TITLES, Model, cells_of, name_of
from _evidence_samples import KL, MULTIKEY, PASSKEY

from vllm_kvplugins.choice.requests import Workload

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ROWS = RESULTS / "evidence.json"


def _model_name(file: Path) -> str:
    return file.stem.removeprefix("ruler-")


EVERY_WORKLOAD = pytest.mark.parametrize("workload", list(Workload))


@pytest.fixture(scope="module")
def every_model() -> list[Model]:
    read: list[Model] = json.loads(ROWS.read_text(encoding="utf-8"))
    return read


@pytest.fixture(scope="module")
def models(every_model) -> list[Model]:
    """Those that it chooses by."""
    return choosing(every_model)


@EVERY_WORKLOAD
def test_a_tenth_answers_like_stock_on_every_model(models, workload):
    """Each half of the contexts is answered by what the other half has chosen."""
    chosen = chosen_by_halves(models, workload, True, MIN_SCORE)
    assert "stock" not in chosen, "a tenth of the context, not all of it"
    for model in models:
        assert share_of_stock(model, chosen)[0] >= 0.95


@EVERY_WORKLOAD
def test_a_model_that_it_has_not_seen_answers_like_stock(every_model, models, workload):
    """The choice is made by the rows of other models."""
    unseen = [model for model in every_model if model not in models]
    assert unseen
    chosen = chosen_by_halves(models, workload, True, MIN_SCORE)
    for model in unseen:
        assert share_of_stock(model, chosen)[0] >= 0.95


@EVERY_WORKLOAD
def test_no_single_policy_is_better_by_more_than_its_interval(every_model, workload):
    rows = comparisons(every_model, workload)
    assert len(rows) == len(every_model) * 3
    assert [each for each in rows if each.is_below] == []


def test_no_policy_is_better_on_the_same_samples(every_model):
    rows = comparisons(every_model, Workload.AGENT)
    assert [each for each in rows if each.is_worse_in_pairs] == []


@EVERY_WORKLOAD
@pytest.mark.parametrize("file", sorted(RESULTS.glob("ruler-*.jsonl")), ids=_model_name)
def test_tasks_that_it_was_not_chosen_by(every_model, models, workload, file):
    """Averaged over all tasks it answers like stock vLLM, and no single policy is
    better on one of them by more than its interval.
    """
    chosen = chosen_by_halves(models, workload, True, MIN_SCORE)
    others = cells_of(file, OTHER_TITLES)
    (model,) = (m for m in every_model if m["model"] == others["model"])
    tasks = [task for task, samples in others["samples"].items() if samples]
    assert len(tasks) == 4
    every = with_tasks_of(model, others)
    assert share_of_stock(every, chosen, [PASSKEY, MULTIKEY, *tasks])[0] >= 0.95
    assert [t for t in tasks if compared(others, t, chosen).is_below] == []


@EVERY_WORKLOAD
def test_without_host_memory_it_does_not_claim_to_win(models, workload):
    assert choose(models, workload, False, MIN_SCORE) == "stock"
    anyway = chosen_by_halves(models, workload, False, 0.0)
    assert min(share_of_stock(model, anyway)[0] for model in models) < 0.95


def test_every_sample_is_in_one_half_with_all_of_its_context(models):
    for model in models:
        first, second = halves(model)
        for task, samples in model["samples"].items():
            assert [not kept for kept in first[task]] == second[task]
            places: dict[str, set[bool]] = {}
            for (_, group), kept in zip(samples, first[task], strict=True):
                places.setdefault(group, set()).add(kept)
            assert all(len(kept) == 1 for kept in places.values())
            assert 0.25 < sum(first[task]) / len(samples) < 0.75


def test_a_sample_gets_the_score_of_the_policy_that_the_other_half_chose(models):
    model = models[0]
    first, _ = halves(model)
    mixed = scores_of(model, PASSKEY, ("stock", "knorm"))
    stock = scores_of(model, PASSKEY, ("stock", "stock"))
    for own, of_stock, in_first in zip(mixed, stock, first[PASSKEY], strict=True):
        assert own == (0.0 if in_first else of_stock)  # knorm finds nothing


def _worse(models: list[Model], policies: set[str], task: str) -> list[Model]:
    changed = copy.deepcopy(models)
    for model in changed:
        for cell in model["cells"]:
            if name_of(cell) in policies and task in cell:
                scores = [0.5 * score for score in cell[task]["scores"]]
                cell[task]["scores"] = scores
                cell[task]["mean"] = sum(scores) / len(scores)
    return changed


def test_other_rows_give_another_choice(models):
    changed = _worse(models, {"icecache-means"}, MULTIKEY)
    assert choose(models, Workload.AGENT, True, MIN_SCORE) == "icecache-means"
    assert choose(changed, Workload.AGENT, True, MIN_SCORE) == "icecache"


def test_rows_in_which_no_policy_keeps_the_answers_are_seen(models):
    kept = {"icecache", "exact-topk", "pqcache"}
    changed = _worse(models, kept | {"icecache-means"}, PASSKEY)
    assert choose(changed, Workload.AGENT, True, MIN_SCORE) == "stock"


def test_a_choice_below_the_best_single_policy_is_seen(models):
    """If the rule took no notice of what it is compared with."""
    changed = copy.deepcopy(models)
    for model in changed:
        for cell in model["cells"]:
            if name_of(cell) == "knorm" and KL in cell and cell["share"] == 0.1:
                cell[KL] = cell[KL] | {
                    "scores": [0.0] * cell[KL]["samples"],
                    "mean": 0.0,
                    "low": 0.0,
                    "high": 0.0,
                }
    rows = comparisons(changed, Workload.DOCUMENT)
    assert {each.task for each in rows if each.is_below} == {KL}
