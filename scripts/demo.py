"""Demos of KV-cache policies on a running server; ``serve.sh --demo`` calls this.

    python scripts/demo.py plan --policy all            what each policy would be asked
    python scripts/demo.py run --port 8000 --policy snapkv
    python scripts/demo.py table RESULTS.json ...       one table of several runs

``run`` asks the questions that suit the policy, prints the answers, what the policy did
and the speed. Exit status 0: the policy did its work, whatever the model answered.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import urllib.error
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from _demo_client import DemoError, Server, is_ready
from _demo_kinds import STOCK, Answer, Result, plan_of, problems, run_talk
from _demo_talks import TALKS

_EPISODE = re.compile(r"episode (\d+) of (\d+) \(cosine ([-\d.]+)")
_COLUMNS = (
    "policy",
    "kind",
    "answers right",
    "of stock",
    "blocks held",
    "of stock",
    "host MiB",
    "first token",
    "of stock",
    "tokens/s",
    "of stock",
    "worked",
)


# -- text ------------------------------------------------------------------------------


def report(result: Result, stock: Result | None) -> str:
    """What one demo showed, next to stock vLLM."""
    plan = result.plan
    lines = [
        f"model            {result.model}",
        f"policy           {plan.policy} ({plan.kind}) {plan.settings}".rstrip(),
    ]
    for number, answer in enumerate(result.answers):
        other = stock.answers[number] if stock else None
        lines += ["", *_question(answer, other), *_effects(result, number)]
    last, last_of_stock = result.last, stock.last if stock else None
    held = f"{last.held_blocks} of {last.whole_blocks} (a block is "
    held += f"{result.block_size} tokens)"
    lines += [
        "",
        "blocks held      " + held + _beside(last_of_stock, "held_blocks"),
        *_outside_the_pool(result),
        f"first token      {result.first_s:.2f} s" + _beside(stock, "first_s", ".2f"),
        f"decode           {result.tokens_per_s:.1f} tokens/s"
        + _beside(stock, "tokens_per_s", ".1f"),
    ]
    return "\n".join(lines)


def _outside_the_pool(result: Result) -> list[str]:
    lines = [f"host memory      {result.host_mib:.0f} MiB"] if result.host_mib else []
    if result.plan.kind == "spans":
        lines.append("                 span means use device memory outside the pool")
    return lines


def _question(answer: Answer, stock: Answer | None) -> list[str]:
    question = answer.question
    if len(question) > 70:
        question = f"{question[:30].strip()} ... {question[-30:].strip()}"
    lines = [f"question         {question} ({answer.prompt_tokens} tokens)"]
    if answer.expected is None:  # the conversation goes on with a scripted answer
        return lines
    lines.append(f"answer           {answer.text!r}{_verdict(answer)}")
    if stock is not None:
        lines.append(f"stock vLLM       {stock.text!r}{_verdict(stock)}")
    return lines


def _verdict(answer: Answer) -> str:
    return ": right" if answer.is_right else f": wrong, expected {answer.expected!r}"


def _effects(result: Result, number: int) -> list[str]:
    """What the policy did during one question."""
    answer, lines = result.answers[number], []
    shown = {
        "eviction": "compressions blocks_freed",
        "full": "blocks_freed",
        "turns": "compressions blocks_freed session_hits session_restored_tokens",
        "episodes": "compressions blocks_freed session_hits session_restored_tokens",
        "retrieval": "selected_tokens fetched_tokens",
        "spans": "compressions selected_tokens fetched_tokens",
    }.get(result.plan.kind, "")
    names = {"selected_tokens": "zoomed tokens", "fetched_tokens": "reconstructed"}
    names = names if result.plan.kind == "spans" else {}
    if result.episodes and number < len(result.episodes):
        lines.append(f"episode          {result.episodes[number]}")
    if shown:
        counts = ", ".join(
            f"{names.get(name, name.replace('_', ' '))} {answer.counts[name]:.0f}"
            for name in shown.split()
        )
        lines.append(f"policy           {counts}")
    if len(result.answers) > 1:
        lines.append(f"blocks held      {answer.held_blocks} of {answer.whole_blocks}")
    return lines


def _beside(stock: Result | Answer | None, name: str, form: str = "") -> str:
    return f"; stock {getattr(stock, name):{form}}" if stock is not None else ""


def table(results: list[Result], stock: dict[str, Result], known_model: bool) -> str:
    """One line per policy."""
    rows = [_COLUMNS, *(_row(r, stock.get(r.plan.talk), known_model) for r in results)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in (0, 1, len(row) - 1) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _row(result: Result, stock: Result | None, known_model: bool) -> tuple[str, ...]:
    plan, wrong = result.plan, problems(result, known_model)
    worked = f"no: {wrong[0]}" if wrong else "yes"
    if not result.answers:
        return (plan.policy, plan.kind, *["-"] * (len(_COLUMNS) - 3), worked)

    def beside_stock(cell: Callable[[Result], str]) -> tuple[str, str]:
        return cell(result), cell(stock) if stock else "-"

    return (
        plan.policy,
        plan.kind,
        *beside_stock(lambda r: f"{sum(r.judged)} of {len(r.judged)}"),
        *beside_stock(lambda r: str(r.last.held_blocks)),
        f"{result.host_mib:.0f}",
        *beside_stock(lambda r: f"{r.first_s:.2f} s"),
        *beside_stock(lambda r: f"{r.tokens_per_s:.1f}"),
        worked,
    )


# -- commands --------------------------------------------------------------------------


def show_plans(chosen: argparse.Namespace) -> int:
    """Print policy, kind, talk, encoder and settings of each demo, tab-separated."""
    from vllm_kvplugins.policies import available_policies

    names = available_policies() if chosen.policy == "all" else [chosen.policy]
    for name in names:
        plan = plan_of(name, chosen.policy_config)
        encoder = "encoder" if plan.encoder else "-"
        # not the settings last: `read` drops what is empty in between
        print(plan.policy, plan.kind, plan.talk, encoder, plan.settings, sep="\t")
    return 0


def run(chosen: argparse.Namespace) -> int:
    """Run the demo of one policy, or the given talks on stock vLLM."""
    plan = plan_of(chosen.policy, chosen.policy_config)
    server = Server.connect(f"http://127.0.0.1:{chosen.port}")
    plans = [replace(plan, talk=talk) for talk in chosen.talk or [plan.talk]]
    results, code = [], 0
    stock = read_results([chosen.stock]) if chosen.stock else []
    for each in plans:
        result = run_talk(server, each, TALKS[each.talk]())
        if chosen.log and each.encoder:
            result.episodes = episodes_in(Path(chosen.log).read_text(errors="replace"))
        results.append(result)
        if not chosen.quiet:
            print(report(result, by_talk(stock).get(each.talk)))
        for problem in problems(result, chosen.known_model):
            print(f"error: {problem}", file=sys.stderr)
            code = 1
    if chosen.out:
        text = json.dumps([result.as_json() for result in results], indent=1)
        Path(chosen.out).write_text(text)
    return code


def show_table(chosen: argparse.Namespace) -> int:
    """Print one table of results; exit status 1 if a policy did not do its work."""
    results = read_results(chosen.files)
    stock = [result for result in results if result.plan.policy == STOCK]
    rows = [result for result in results if result.plan.policy != STOCK]
    print(table(rows, by_talk(stock), chosen.known_model))
    failed = [r.plan.policy for r in rows if problems(r, chosen.known_model)]
    print(f"\n{len(rows) - len(failed)} of {len(rows)} policies did their work")
    return 1 if failed else 0


def note_failure(chosen: argparse.Namespace) -> int:
    """Write the result of a demo whose server did not start."""
    plan = plan_of(chosen.policy, chosen.policy_config)
    result = Result(plan, failure=chosen.failure)
    Path(chosen.out).write_text(json.dumps([result.as_json()]))
    return 0


def read_results(files: list[str]) -> list[Result]:
    """Results of files that ``run --out`` wrote."""
    return [
        Result.from_json(data)
        for file in files
        for data in json.loads(Path(file).read_text())
    ]


def by_talk(results: list[Result]) -> dict[str, Result]:
    """Results by what was asked."""
    return {result.plan.talk: result for result in results}


def episodes_in(log: str) -> list[str]:
    """The episode of each query, from the debug messages of a server's log."""
    return [
        f"{int(number) + 1} of {count} (cosine {cosine})"
        for number, count, cosine in _EPISODE.findall(log)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    ready = commands.add_parser("is-ready", help="exit status 0 if the server is up")
    plan = commands.add_parser("plan", help="what each policy would be asked")
    one = commands.add_parser("run", help="one demo on a running server")
    failed = commands.add_parser("failed", help="note that a server did not start")
    many = commands.add_parser("table", help="one table of several results")
    for each in (ready, one):
        each.add_argument("--port", type=int, default=8000)
    for each in (plan, one, failed):
        each.add_argument("--policy", default=STOCK, help="as the server was started")
        each.add_argument("--policy-config", default="", metavar="JSON")
    for each in (one, failed):
        each.add_argument("--out", metavar="FILE", help="write the result as JSON")
    one.add_argument("--talk", action="append", choices=sorted(TALKS))
    one.add_argument("--stock", metavar="FILE", help="result of --policy none")
    one.add_argument("--log", metavar="FILE", help="the server's log")
    one.add_argument("--quiet", action="store_true", help="print errors only")
    failed.add_argument("failure")
    many.add_argument("files", nargs="+")
    for each in (one, many):
        each.add_argument(
            "--known-model",
            action="store_true",
            help="the model answers everything if nothing is dropped; else fail",
        )
    chosen = parser.parse_args()
    if chosen.command == "is-ready":
        return 0 if is_ready(f"http://127.0.0.1:{chosen.port}") else 1
    command = {
        "plan": show_plans,
        "run": run,
        "failed": note_failure,
        "table": show_table,
    }[chosen.command]
    try:
        return command(chosen)
    except urllib.error.HTTPError as error:
        print(f"error: HTTP {error.code}: {error.read().decode()}", file=sys.stderr)
    except (DemoError, OSError, ValueError) as error:  # KVPolicyError is a ValueError
        print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        return 130
    return 1


if __name__ == "__main__":
    sys.exit(main())
