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
HOW = "[How policies are compared](../quality.md#how-policies-are-compared)"


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
    lines = []
    for model in _models():
        share = 0.1
        cells = [c for c in model["cells"] if c["share"] == share and PASSKEY in c]
        stock = next(cell for cell in model["cells"] if name_of(cell) == STOCK)
        dropping = sorted(_count(c) for c in cells if not c.get("host_bytes"))
        keeping = [c for c in cells if c.get("host_bytes")]
        if not dropping or not keeping:
            continue
        best = max(keeping, key=lambda cell: (_count(cell), -cell[KL]["mean"]))
        low, high, asked = dropping[0], dropping[-1], stock[PASSKEY]["samples"]
        lines.append(
            f"On {model['model']}, with {percent(share)} of a context of "
            f"{model['settings']['tokens']} tokens, policies that drop tokens find "
            f"{low} to {high} of {asked} pass keys, "
            f"and `{best['label']}`, which keeps the rest in host memory "
            f"({best['host_bytes'] / MIB:.0f} MiB), finds {_count(best)}; stock vLLM, "
            f"with {stock['device_bytes'] / MIB:.0f} MiB on the device, finds "
            f"{_count(stock)}."
        )
    text = " ".join(
        (
            "- **Small budgets lose details.**",
            *lines,
            "All policies: [quality](docs/quality.md).",
        )
    )
    return textwrap.fill(text, 100, subsequent_indent="  ") + "\n"


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
    tests = comparisons(models, policy)
    conditions = [_settings(model, policy) for model in _own(measured)]
    lines = [
        f"**Verdict.** {'; '.join(conditions)}. {HOW}.",
        "",
        *(f"- {line}" for line in _claims(tests)),
        *(f"- {line}" for line in _memory(models, policy)),
        *(f"- {line}" for line in _untested(_own(measured))),
        "",
    ]
    return "\n".join(lines)


def _own(measured: Sequence[tuple[Model, Any]]) -> list[Model]:
    """Models in which the policy has cells."""
    return list({model["model"]: model for model, _ in measured}.values())


def _settings(model: Model, policy: str) -> str:
    """Model, settings, shares and n, for the verdict's first sentence."""
    cells = [c for c in model["cells"] if name_of(c) == policy and "refused" not in c]
    fixed = {
        key: value
        for key, value in cells[0]["policy"].items()
        if key not in ("name", "budget", "ratio")
    }
    shown = f"with `{json.dumps(fixed)}`, " if fixed else ""
    shares = _percents([cell["share"] for cell in cells if cell["share"]])
    held = f"{shares} of the context" if shares else "the whole context"
    counts = sorted(
        {cell[task]["samples"] for cell in cells for task in NAMES if task in cell}
    )
    return (
        f"{model['model']}, {model['settings']['tokens']} tokens, {shown}{held}, "
        f"n = {_listed([str(count) for count in counts])} per task"
    )


def _claims(tests: Sequence[Comparison]) -> Iterator[str]:
    baselines = list(dict.fromkeys(test.baseline for test in tests))
    for result in ("better", "worse"):
        for baseline in baselines:
            shown = [t for t in tests if t.baseline == baseline and t.shown == result]
            if shown:
                name = "stock vLLM" if baseline == STOCK else f"`{baseline}`"
                head = f"**{result.capitalize()} than {name}:**"
                yield f"{head} {_figures(tests, shown)}."
    parts = []
    for baseline in baselines:
        silent = [t for t in tests if t.baseline == baseline and not t.shown]
        if silent:
            name = "stock vLLM" if baseline == STOCK else f"`{baseline}`"
            parts.append(f"{name} ({_where(tests, silent)})")
    if parts:
        yield f"No difference shown to {_listed(parts)}."


def _figures(tests: Sequence[Comparison], shown: Sequence[Comparison]) -> str:
    """The figures of claims, by model and task."""
    parts = []
    several = len({test.model for test in tests}) > 1
    for model in dict.fromkeys(test.model for test in shown):
        for task in NAMES:
            own = [t for t in shown if (t.model, t.task) == (model, task)]
            if own:
                where = f"{model}, " if several else ""
                own.sort(key=lambda test: test.share or 0.0)
                pairs = ", ".join(f"{_pair(t)}{_at(t)}" for t in own)
                parts.append(f"{where}{NAMES[task]} {pairs}")
    return "; ".join(parts)


def _pair(test: Comparison) -> str:
    if test.task == KL:
        return f"{test.own:.3f} against {test.other:.3f}"
    own, other = (round(mean * test.samples) for mean in (test.own, test.other))
    return f"{own} against {other} of {test.samples}"


def _at(test: Comparison) -> str:
    return f" at {percent(test.share)}" if test.share else ""


def _where(tests: Sequence[Comparison], silent: Sequence[Comparison]) -> str:
    several = len({test.model for test in tests}) > 1
    parts = []
    for model in dict.fromkeys(test.model for test in silent):
        for task in NAMES:
            own = [t for t in silent if (t.model, t.task) == (model, task)]
            if own:
                where = f"{model}, " if several else ""
                shares = _percents([t.share for t in own if t.share])
                parts.append(f"{where}{NAMES[task]}{f' at {shares}' if shares else ''}")
    return "; ".join(parts)


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
    for model in models:
        for task, samples in model["samples"].items():
            contexts = len({group for _, group in samples})
            if contexts < MIN_CONTEXTS:
                where = f" with {model['model']}" if len(models) > 1 else ""
                yield (
                    f"Not tested: {NAMES[task]}{where}; {len(samples)} questions about "
                    f"{contexts} contexts are too few."
                )


def _percents(shares: Sequence[float]) -> str:
    """``5, 10 and 20 %``; "" without shares."""
    numbers = [percent(share).removesuffix(" %") for share in sorted({*shares})]
    return f"{_listed(numbers)} %" if numbers else ""


def _listed(parts: Sequence[str]) -> str:
    *first, last = parts or [""]
    return f"{', '.join(first)} and {last}" if first else last
