"""Verdicts on the policies' pages and tables of results, from the committed rows."""

from __future__ import annotations

import functools
import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.append(str(ROOT / "benchmarks" / "quality"))

import _path  # noqa: E402, F401
from _evidence_report import (  # noqa: E402
    MIB,
    name_of,
    percent,
    shares_of,
    speed_tables,
    tables,
)
from _evidence_samples import KL, MULTIKEY, PASSKEY  # noqa: E402
from _evidence_verdicts import (  # noqa: E402
    MIN_CONTEXTS,
    SAME_MEMORY,
    Comparison,
    comparisons,
)
from _quality_stats import STOCK  # noqa: E402

Model = dict[str, Any]
NAMES = {PASSKEY: "pass key", MULTIKEY: "one key of sixteen", KL: "KL divergence"}


@functools.cache
def _models() -> list[Model]:
    models: list[Model] = json.loads((RESULTS / "evidence.json").read_text())
    return models


def evidence_tables() -> str:
    """Tables of all models."""
    return tables(_models())


def evidence_speed() -> str:
    """Speed of all policies and models, with spreads."""
    return speed_tables(_models())


def summary() -> str:
    """Best policies per model, task and share."""
    return "\n".join(line for model in _models() for line in _summary(model)) + "\n"


BEST = 3


def _summary(model: Model) -> Iterator[str]:
    stock = next(cell for cell in model["cells"] if name_of(cell) == STOCK)
    found = ", ".join(
        f"{NAMES[task]} {round(stock[task]['mean'] * stock[task]['samples'])} of "
        f"{stock[task]['samples']}"
        for task in (PASSKEY, MULTIKEY)
        if task in stock
    )
    yield f"**{model['model']}** (stock vLLM: {found}):"
    yield ""
    heads = {
        PASSKEY: "Most pass keys",
        MULTIKEY: "Most keys of sixteen",
        KL: "Nearest to full KV (KL)",
    }
    for task, head in heads.items():
        parts = []
        for share in shares_of(model):
            cells = [c for c in model["cells"] if c["share"] == share and task in c]
            sign = 1 if task == KL else -1
            cells.sort(key=lambda c: (sign * c[task]["mean"], c["label"]))
            # A policy that finds no key is none of the best.
            best = [
                f"`{name_of(c)}` {_value(task, c)}"
                for c in cells[:BEST]
                if c[task]["mean"] or task == KL
            ]
            parts.append(f"at {percent(share)} {', '.join(best) or 'none'}")
        yield f"- **{head}:** {'; '.join(parts)}."
    hosted = {
        name_of(cell): cell["host_bytes"]
        for cell in model["cells"]
        if cell.get("host_bytes")
    }
    if hosted:
        parts = [
            f"`{name}` {num / MIB:.0f} MiB" for name, num in sorted(hosted.items())
        ]
        yield f"- **Host memory in addition:** {', '.join(parts)}; the others none."
    yield ""


def _value(task: str, cell: Any) -> str:
    score = cell[task]
    if task == KL:
        return f"{score['mean']:.3f}"
    return str(round(score["mean"] * score["samples"]))


def headline() -> str:
    """What a tenth of the context finds, with and without host memory."""
    share, rows, tokens, asked = 0.1, [], 0, 0
    for model in _models():
        cells = [c for c in model["cells"] if c["share"] == share and PASSKEY in c]
        stock = next(cell for cell in model["cells"] if name_of(cell) == STOCK)
        dropping = sorted(_count(c) for c in cells if not c.get("host_bytes"))
        keeping = [c for c in cells if c.get("host_bytes")]
        if not dropping or not keeping:
            continue
        best = max(keeping, key=lambda cell: (_count(cell), -cell[KL]["mean"]))
        rows.append(
            [
                model["model"],
                f"{_count(stock)} ({stock['device_bytes'] / MIB:.0f} MiB)",
                f"{dropping[0]} to {dropping[-1]}",
                f"{_count(best)}: `{best['label']}` ({best['host_bytes'] / MIB:.0f} "
                "MiB)",
            ]
        )
        tokens, asked = model["settings"]["tokens"], stock[PASSKEY]["samples"]
    text = (
        "- **Small budgets lose details, unless the host keeps them.** How many of "
        f"{asked} pass keys a model finds with {percent(share)} of a context of "
        f"{tokens} tokens ([all policies](docs/quality.md)):"
    )
    heads = ["model", "stock vLLM (device memory)", "policies that drop tokens"]
    heads += ["best policy that keeps the rest on the host (host memory)"]
    lines = [textwrap.fill(text, 100, subsequent_indent="  "), ""]
    lines += [f"  | {' | '.join(row)} |" for row in (heads, ["---"] * 4, *rows)]
    return "\n".join(lines) + "\n"


def _count(cell: Any) -> int:
    return round(cell[PASSKEY]["mean"] * cell[PASSKEY]["samples"])


def verdict(policy: str) -> str:
    """What the rows show about a policy, from paired tests that survive Holm."""
    return verdict_of(_models(), policy)


def verdict_of(models: Sequence[Model], policy: str) -> str:
    """See ``verdict``."""
    cells = [
        (model, cell)
        for model in models
        for cell in model["cells"]
        if name_of(cell) == policy
    ]
    measured = [(model, cell) for model, cell in cells if "refused" not in cell]
    if not measured:
        if not cells:
            return "**Verdict.** Not measured yet.\n"
        shares = _percents([cell["share"] for _, cell in cells if cell["share"]])
        reason = cells[0][1]["refused"].partition(", more than")[0]
        return (
            f"**Verdict.** Not measured at {shares} of the context, where it cannot "
            f"run: it {reason}.\n"
        )
    own = _own(measured)
    tests = comparisons(models, policy)
    lines = [
        f"**Verdict.** {_conditions(own, policy)} {_keys(own)}, and KL divergence from "
        f"full KV (nats). ▲: `{policy}` is better than this one, ▼: worse, both by "
        "[paired tests](../quality.md#how-policies-are-compared); no mark: no "
        "difference is shown.",
        "",
        *_comparison_table(tests, own, policy),
        "",
        *(f"- {line}" for line in (*_memory(models, policy), *_untested(own))),
        f"- Command: `{_command(own, policy)}`",
        "",
    ]
    return "\n".join(lines)


def _own(measured: Sequence[tuple[Model, Any]]) -> list[Model]:
    """Models in which the policy has cells."""
    return list({model["model"]: model for model, _ in measured}.values())


def _cells(model: Model, policy: str) -> list[Any]:
    """What was measured of a policy."""
    found = (c for c in model["cells"] if name_of(c) == policy and "refused" not in c)
    return sorted(found, key=lambda cell: cell["share"] or 1.0)


def _conditions(models: Sequence[Model], policy: str) -> str:
    """Contexts and settings; the latter for each model, if they differ."""
    tokens = _listed(
        [str(n) for n in sorted({m["settings"]["tokens"] for m in models})]
    )
    fixed = {}
    for model in models:
        chosen = {
            key: value
            for key, value in _cells(model, policy)[0]["policy"].items()
            if key not in ("name", "budget", "ratio")
        }
        fixed[model["model"]] = f"`{json.dumps(chosen)}`" if chosen else "defaults"
    each = set(fixed.values())
    if each == {"defaults"}:
        shown = ""
    elif len(each) == 1:
        shown = f", with {each.pop()}"
    else:
        shown = "".join(f", {text} on {model}" for model, text in fixed.items())
    return f"Contexts of {tokens} tokens{shown}."


def _command(models: Sequence[Model], policy: str) -> str:
    """Measures the policy on one of the models."""
    chosen = _cells(models[0], policy)[0]["policy"]
    fixed = {k: v for k, v in chosen.items() if k not in ("budget", "ratio")}
    name = policy if len(fixed) == 1 else f"'{json.dumps(fixed)}'"
    return (
        "python benchmarks/quality/evidence.py run MODEL --texts ESSAYS --samples 20 "
        f"--policies {name} --out RESULTS"
    )


def _keys(models: Sequence[Model]) -> str:
    asked = {len(model["samples"][PASSKEY]) for model in models}
    return f"Pass keys found, of {_listed([str(n) for n in sorted(asked)])}"


def _comparison_table(
    tests: Sequence[Comparison], models: Sequence[Model], policy: str
) -> Iterator[str]:
    """One line per model and share: the policy's results, and those of the others."""
    baselines = list(dict.fromkeys(test.baseline for test in tests))
    names = ["stock vLLM" if each == STOCK else f"`{each}`" for each in baselines]
    yield f"| model | held | `{policy}` | {' | '.join(names)} |"
    yield "|---" * (3 + len(names)) + "|"
    for model in models:
        for cell in _cells(model, policy):
            own = [_shown(task, cell) for task in NAMES if task in _tested(model, cell)]
            others = [
                [
                    test
                    for test in tests
                    if (test.model, test.share, test.baseline)
                    == (model["model"], cell["share"], each)
                ]
                for each in baselines
            ]
            held = percent(cell["share"]) if cell["share"] else "all"
            cells = [", ".join(_other(t) for t in each) or "–" for each in others]
            line = " | ".join([model["model"], held, ", ".join(own) or "–", *cells])
            yield f"| {line} |"


def _tested(model: Model, cell: Any) -> list[str]:
    """Tasks with enough contexts for a test."""
    return [
        task
        for task, samples in model["samples"].items()
        if task in cell and len({group for _, group in samples}) >= MIN_CONTEXTS
    ]


def _shown(task: str, cell: Any) -> str:
    score = cell[task]
    return _number(task, score["mean"], score["samples"])


def _other(test: Comparison) -> str:
    mark = {"better": " ▲", "worse": " ▼", "": ""}[test.shown]
    return f"{_number(test.task, test.other, test.samples)}{mark}"


def _number(task: str, mean: float, samples: int) -> str:
    return f"{mean:.3f}" if task == KL else str(round(mean * samples))


def _memory(models: Sequence[Model], policy: str) -> Iterator[str]:
    """Memory that a reader of the shares alone would not expect."""
    for model in models:
        stock = next((c for c in model["cells"] if name_of(c) == STOCK), None)
        for cell in model["cells"]:
            if (
                name_of(cell) != policy
                or "device_bytes" not in cell
                or not cell["share"]
            ):
                continue
            if stock and cell["device_bytes"] > SAME_MEMORY * cell["share"] * stock[
                "device_bytes"
            ] + 2 * _block(model, stock):
                yield (
                    f"{model['model']}: holds {cell['device_bytes'] / MIB:.1f} MiB at "
                    f"{percent(cell['share'])}, "
                    f"{100 * cell['device_bytes'] / stock['device_bytes']:.1f} % of "
                    f"stock's device bytes."
                )
    hosted = [
        (
            model,
            max(c.get("host_bytes", 0) for c in model["cells"] if name_of(c) == policy),
        )
        for model in models
        if any(name_of(cell) == policy for cell in model["cells"])
    ]
    parts = [
        f"{num_bytes / MIB:.1f} MiB"
        + (f" ({model['model']})" if len(hosted) > 1 else "")
        for model, num_bytes in hosted
        if num_bytes
    ]
    if parts:
        yield f"Host memory per request, in addition: {_listed(parts)}."


def _block(model: Model, stock: Any) -> float:
    """Bytes of a block of the measured cache, from stock's bytes and blocks."""
    size = model["settings"]["block_size"]
    blocks = -(-model["settings"]["tokens"] // size)
    return float(stock["device_bytes"] / blocks)


def _untested(models: Sequence[Model]) -> Iterator[str]:
    for task, name in NAMES.items():
        too_few = {
            model["model"]: model["samples"][task]
            for model in models
            if model["samples"].get(task)
            and len({group for _, group in model["samples"][task]}) < MIN_CONTEXTS
        }
        if not too_few:
            continue
        samples = next(iter(too_few.values()))
        contexts = len({group for _, group in samples})
        where = "" if len(too_few) == len(models) else f" with {_listed([*too_few])}"
        yield (
            f"Not tested: {name}{where}; {len(samples)} questions about {contexts} "
            "contexts are too few."
        )


def _percents(shares: Sequence[float]) -> str:
    """``5, 10 and 20 %``; "" without shares."""
    numbers = [percent(share).removesuffix(" %") for share in sorted({*shares})]
    return f"{_listed(numbers)} %" if numbers else ""


def _listed(parts: Sequence[str]) -> str:
    *first, last = parts or [""]
    return f"{', '.join(first)} and {last}" if first else last
