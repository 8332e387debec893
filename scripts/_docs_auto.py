"""What ``--kv-policy auto`` chooses at a tenth of the context, and how it answers."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks" / "quality"))

import _path  # noqa: E402, F401
from _evidence_auto import (  # noqa: E402
    MIN_SCORE,
    SHARE,
    Comparison,
    choose,
    chosen_by_halves,
    comparisons,
    share_of_stock,
    with_tasks_of,
)
from _evidence_package import choosing  # noqa: E402
from _evidence_report import OTHER_TITLES, Model, cells_of  # noqa: E402
from _evidence_samples import KL, MULTIKEY, PASSKEY  # noqa: E402
from _evidence_tasks import other_tasks as table_of_tasks  # noqa: E402
from _evidence_verdicts import cell_of  # noqa: E402

from vllm_kvplugins.choice.requests import Workload  # noqa: E402

_NAMES = {PASSKEY: "pass key", MULTIKEY: "key of 16", KL: "KL, nats"}


@functools.cache
def _models() -> list[Model]:
    path = ROOT / "benchmarks" / "results" / "evidence.json"
    models: list[Model] = json.loads(path.read_text())
    return models


def tables() -> str:
    """The choices, and the comparison of those with host memory."""
    parts = (_choices(), _shares(), _answers(), _shares_of_other_tasks())
    return "\n".join(line for part in parts for line in [*part, ""])


def other_tasks() -> str:
    """Scores on tasks that nothing is chosen by, a table per model."""
    parts = []
    for model in _models_of_other_tasks():
        parts += [f"**{model['model']}**", "", table_of_tasks(model), ""]
    return "\n".join(parts)


def _models_of_other_tasks() -> Iterator[Model]:
    for file in sorted((ROOT / "benchmarks" / "results").glob("ruler-*.jsonl")):
        yield cells_of(file, OTHER_TITLES)


def _shares_of_other_tasks() -> Iterator[str]:
    """What is left of stock's score on tasks that nothing was chosen by."""
    own = {model["model"]: model for model in _models()}
    others = list(_models_of_other_tasks())
    chosen = chosen_by_halves(
        choosing(_models()), Workload.AGENT, hosted=True, min_score=MIN_SCORE
    )
    name = " and ".join(dict.fromkeys(chosen))
    heads = (f"score of `{name}` / of stock vLLM", *(m["model"] for m in others))
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    tasks = list(OTHER_TITLES)
    alone = (_share(model, chosen, tasks) for model in others)
    yield f"| four tasks like RULER's | {' | '.join(alone)} |"
    every = [PASSKEY, MULTIKEY, *tasks]
    joined = (with_tasks_of(own[model["model"]], model) for model in others)
    shares = (_share(model, chosen, every) for model in joined)
    yield f"| these, pass keys and keys of 16 | {' | '.join(shares)} |"


def _choices() -> Iterator[str]:
    models = choosing(_models())
    heads = ["workload", "host memory", "`min_score`", "all rows", "first half"]
    heads += ["second half", *(f"{model['model']} only" for model in models)]
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for hosted in (True, False):
        for workload in Workload:
            for least in (MIN_SCORE, 0.0):
                if hosted and not least:
                    continue
                cells = [choose(models, workload, hosted, least)]
                cells += chosen_by_halves(models, workload, hosted, least)
                cells += [choose([m], workload, hosted, least) for m in models]
                first = [workload.value, "yes" if hosted else "no", f"{least:g}"]
                yield f"| {' | '.join([*first, *cells])} |"


def _shares() -> Iterator[str]:
    models = _models()
    names = (_named(model["model"]) for model in models)
    yield f"| at 10 % of the context | {' | '.join(names)} |"
    yield "|---" * (len(models) + 1) + "|"
    for workload, hosted, least in _distinct():
        chosen = chosen_by_halves(choosing(models), workload, hosted, least)
        cells = [_share(model, chosen) for model in models]
        name = " and ".join(dict.fromkeys(chosen))
        yield f"| keys found by `{name}` / by stock vLLM | {' | '.join(cells)} |"


def _share(
    model: Model, chosen: Sequence[str], tasks: Sequence[str] = (PASSKEY, MULTIKEY)
) -> str:
    if not all(cell_of(model, policy, SHARE) for policy in chosen):
        return "not measured"
    share, low, high = share_of_stock(model, chosen, tasks)
    return f"{share:.0%} ({low:.0%} to {high:.0%})"


def _named(model: str) -> str:
    """The name of a model, which says if the choice has not seen it."""
    seen = {each["model"] for each in choosing(_models())}
    return model if model in seen else f"{model} (not used for the choice)"


def _distinct() -> Iterator[tuple[Workload, bool, float]]:
    """Conditions with a policy, one for each choice."""
    seen = set()
    for hosted, least in ((True, MIN_SCORE), (False, 0.0)):
        for workload in Workload:
            chosen = chosen_by_halves(choosing(_models()), workload, hosted, least)
            if chosen not in seen:
                seen.add(chosen)
                yield workload, hosted, least


def _answers() -> Iterator[str]:
    yield (
        "| model | task | `auto` | stock | best single policy at 10 % | its worse end "
        "| paired difference |"
    )
    yield "|---" * 7 + "|"
    rows = {}
    for workload in Workload:
        for each in comparisons(_models(), workload):
            rows[each.model, each.task, each.policies] = each
    yield from (_answer(each) for each in rows.values())


def _answer(each: Comparison) -> str:
    show = (lambda v: f"{v:.4f}") if each.task == KL else (lambda v: f"{v:.2f}")
    gap = "0 on every sample"
    if each.low is not None and each.high is not None:
        mean = each.own - each.best if each.task != KL else each.best - each.own
        gap = f"{mean:+.4f} ({each.low:+.4f} to {each.high:+.4f})"
    cells = [
        _named(each.model),
        _NAMES[each.task],
        f"{show(each.own)} ({' and '.join(each.policies)})",
        show(each.stock),
        f"{show(each.best)} ({each.rival})",
        show(each.worst),
        gap,
    ]
    return f"| {' | '.join(cells)} |"
