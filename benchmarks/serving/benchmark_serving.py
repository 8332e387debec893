"""Compare policies under load: one server per policy, with equal pool, load and seed.

Two workloads: single requests of random tokens, sent and measured by ``vllm bench
serve``, and conversations with think time (``_serving_chat.py``). One server runs at a
time; policies alternate (A, B, A, B …). Every finished measurement is a line of
``--out``. An interrupted run resumes from this file. ``--sweep`` searches for the
highest rate at which each server meets the service level, instead of fixed rates.

    python benchmarks/serving/benchmark_serving.py MODEL --policies stock,full,snapkv \\
        --pool-tokens 16384 --request-rate 0.5,1,2 --out serving.jsonl --plots plots
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import _path  # noqa: F401
import typer
from _engine import provenance
from _serving_chat import ChatLoad, chat, paragraphs
from _serving_metrics import (
    Sampler,
    Slo,
    latency_figures,
    read_metrics,
    server_figures,
)
from _serving_random import (
    RandomLoad,
    bench,
    bench_arguments,
    bench_figures,
    bench_window,
)
from _serving_report import report
from _serving_rows import (
    WORKLOADS,
    Cell,
    Pool,
    Row,
    append_row,
    cells_of,
    key_of,
    make_row,
    read_rows,
    settings_of,
    split_policies,
)
from _serving_server import (
    Server,
    ServerError,
    exit_on_signals,
    policy_arguments,
    serving,
)
from _serving_sweep import Sweep, next_index, share_within_limits
from rich.console import Console

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.errors import KVPolicyError

WARM_UP_SEED = 99


@dataclass(frozen=True, slots=True)
class Comparison:
    """All settings of a run, except policies and rates."""

    pool: Pool
    chat: ChatLoad
    random: RandomLoad
    slo: Slo
    seed: int
    request_timeout_s: float
    start_timeout_s: float

    def row(self, cell: Cell, measured: dict[str, Any]) -> Row:
        """One row of this comparison."""
        load = self.chat if cell.workload == "chat" else self.random
        return make_row(
            cell, settings_of(self.pool, self.seed, load, self.slo), measured
        )


# -- one measurement ------------------------------------------------------------


def warm_up(server: Server, comparison: Comparison) -> None:
    """Send two short conversations that do not count, and check the pool's size.

    Raises:
        ServerError: a conversation fails, or the pool has the wrong size.
    """
    load = replace(comparison.chat, users=2, turns=1, answer_tokens=8, texts="")
    model, timeout_s = comparison.pool.model, comparison.request_timeout_s
    for answer in chat(server.url, model, load, 10.0, WARM_UP_SEED, timeout_s):
        if answer.error:
            raise ServerError(f"a request to warm up failed: {answer.error}")
    blocks = read_metrics(server.url).get("blocks")
    if blocks != comparison.pool.blocks:
        raise ServerError(f"a pool of {blocks} blocks, not {comparison.pool.blocks}")


def measure(server: Server, comparison: Comparison, cell: Cell) -> dict[str, Any]:
    """Run one load against a server.

    Returns:
        ``figures``, ``samples`` over time, and ``first_error`` if a request failed.

    Raises:
        ServerError: the server ended, or every request failed.
    """
    model, seed = comparison.pool.model, cell.seed(comparison.seed)
    with Sampler(server.url) as sampler:
        if cell.workload == "chat":
            began = time.perf_counter()
            answers = chat(
                server.url,
                model,
                comparison.chat,
                cell.rate,
                seed,
                comparison.request_timeout_s,
            )
            # The load starts with the first user, so the gap before does not count.
            start_s = min((answer.start_s for answer in answers), default=began)
            end_s = time.perf_counter()
            figures = latency_figures(answers, end_s - start_s, comparison.slo)
            errors = [answer.error for answer in answers if answer.error]
        else:
            result = bench(
                bench_arguments(
                    server.url,
                    model,
                    comparison.random,
                    cell.rate,
                    seed,
                    comparison.slo,
                )
            )
            figures = bench_figures(result)
            start_s, end_s = bench_window(result)
            errors = [error for error in result["errors"] if error]
    server.require_alive()
    if not figures["completed"]:
        raise ServerError(f"no request succeeded; the first said: {errors[:1]}")
    figures |= server_figures(sampler.samples, start_s, end_s)
    samples = figures.pop("samples", {})
    measured = {"figures": figures, "samples": samples}
    return measured | ({"first_error": errors[0][:300]} if errors else {})


# -- all of them ----------------------------------------------------------------


def run_all(
    comparison: Comparison,
    cells: list[Cell],
    out: Path,
    say: Callable[[str], None],
    sweep: Sweep | None = None,
) -> list[str]:
    """Measure every cell that ``out`` lacks, or search for the highest rates.

    Args:
        comparison: shared settings.
        cells: the measurements; those of one server must be adjacent. Under a sweep
            one per search, whose rate does not count.
        out: file of rows; earlier rows are not measured again.
        say: prints a progress line.
        sweep: the search; None: measure the rates of the cells.

    Returns:
        Labels of policies whose server failed; they are not retried.
    """
    rows = read_rows(out)
    if sweep is None:
        todo = sum(key_of(comparison.row(cell, {})) not in rows for cell in cells)
        say(f"{todo} of {len(cells)} measurements to come, see {out}")
    source = provenance()
    failed: list[str] = []
    for turn in dict.fromkeys(map(turn_of, cells)):
        same = [cell for cell in cells if turn_of(cell) == turn]
        label = same[0].label
        if label in failed or next_cell(comparison, sweep, same, rows) is None:
            continue
        arguments = comparison.pool.arguments(comparison.seed)
        try:
            with serving(
                [*arguments, *policy_arguments(same[0].policy)],
                comparison.start_timeout_s,
            ) as server:
                warm_up(server, comparison)
                say(f"{label}: ready after {server.start_s:.0f} s")
                while cell := next_cell(comparison, sweep, same, rows):
                    measured = measure(server, comparison, cell)
                    row = comparison.row(cell, measured | {"source": source})
                    append_row(out, row)
                    rows[key_of(row)] = row
                    say(line_of(cell, row["figures"]))
        except ServerError as error:
            failed.append(label)
            say(f"{label}: {error}")
    return failed


def next_cell(
    comparison: Comparison,
    sweep: Sweep | None,
    cells: list[Cell],
    rows: dict[str, Row],
) -> Cell | None:
    """The next measurement on a server; None if there is none left."""
    for cell in cells:
        due = next_of_search(comparison, sweep, cell, rows) if sweep else cell
        if due is not None and key_of(comparison.row(due, {})) not in rows:
            return due
    return None


def next_of_search(
    comparison: Comparison, sweep: Sweep, cell: Cell, rows: dict[str, Row]
) -> Cell | None:
    """The next rate of a search; None if the highest rate is known."""
    passed: dict[int, bool] = {}
    while (index := next_index(passed)) is not None:
        due = replace(cell, rate=sweep.rate(index))
        row = rows.get(key_of(comparison.row(due, {})))
        if row is None:
            return due
        passed[index] = share_within_limits(row["figures"]) >= sweep.share
    return None


def turn_of(cell: Cell) -> tuple[int, str]:
    """Cells with the same value share one server."""
    return cell.repetition, cell.label


def line_of(cell: Cell, figures: dict[str, Any]) -> str:
    """Progress line of a finished measurement."""
    return (
        f"{cell.label}: {cell.workload} at {cell.rate:g}/s, repetition "
        f"{cell.repetition + 1}: TTFT {figures['p50_ttft_ms']:.0f} ms, "
        f"{figures['output_throughput_tokens_per_s']:.1f} tokens/s, "
        f"{figures['completed']} done, {figures['failed']} failed"
    )


def read_policies(text: str) -> list[dict[str, Any]]:
    """Parse --policies and check the settings before any server starts."""
    try:
        policies = split_policies(text)
        for policy in policies:
            if policy:
                parse_policy(dict(policy))
    except (ValueError, KVPolicyError) as error:
        raise typer.BadParameter(f"--policies: {error}") from error
    return policies


def cuda_is_available() -> bool:
    """Whether servers run on a GPU, where vLLM compiles and captures graphs."""
    from torch import cuda

    return cuda.is_available()


def read_texts(path: Path) -> None:
    """Reject an empty text file before any server starts."""
    try:
        paragraphs(path)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"--texts: {error}") from error


def read_rates(text: str) -> list[float]:
    """Parse --rates."""
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"--rates must be numbers, got {text!r}") from error
    if not all(0 < rate < 1e6 for rate in rates):
        raise typer.BadParameter(f"--rates must be positive and finite, got {text!r}")
    return rates


def read_workloads(text: str) -> list[str]:
    """Parse --workloads."""
    workloads = text.split(",")
    if unknown := sorted(set(workloads) - set(WORKLOADS)):
        raise typer.BadParameter(f"--workloads: {unknown} is none of {WORKLOADS}")
    return workloads


def main(
    model: Annotated[str, typer.Argument()] = "",
    policies: Annotated[
        str,
        typer.Option(
            help="names or JSON, separated by commas; stock is vLLM without a policy"
        ),
    ] = "stock,full,snapkv",
    pool_tokens: Annotated[int, typer.Option(help="KV cache of every server")] = 16384,
    rates: Annotated[
        str,
        typer.Option(
            "--request-rate",
            "--rates",
            help="requests (random) or users (chat) per second",
        ),
    ] = "0.5,1,2",
    sweep: Annotated[
        bool,
        typer.Option(
            help="search for the highest rate at the service level, from the first "
            "--request-rate on"
        ),
    ] = False,
    goodput_share: Annotated[
        float,
        typer.Option(
            min=0.01, max=1.0, help="share of requests that must be within the limits"
        ),
    ] = 0.9,
    workloads: Annotated[
        str, typer.Option(help="chat, random, or both")
    ] = "chat,random",
    repetitions: int = 3,
    users: Annotated[int, typer.Option(help="chat: number of conversations")] = 16,
    turns: Annotated[int, typer.Option(help="chat: messages per user")] = 4,
    think_s: Annotated[float, typer.Option(help="chat: mean think time")] = 2.0,
    first_words: Annotated[
        int, typer.Option(help="chat: length of the first message")
    ] = 400,
    next_words: Annotated[
        int, typer.Option(help="chat: length of later messages")
    ] = 50,
    answer_tokens: Annotated[
        int, typer.Option(help="chat: length of every answer")
    ] = 128,
    texts: Annotated[
        Path | None, typer.Option(help="chat: send the paragraphs of this file")
    ] = None,
    requests: Annotated[
        int,
        typer.Option("--num-prompts", "--requests", help="random: number of requests"),
    ] = 32,
    input_tokens: Annotated[
        int,
        typer.Option(
            "--random-input-len", "--input-tokens", help="random: length of the prompt"
        ),
    ] = 1024,
    output_tokens: Annotated[
        int,
        typer.Option(
            "--random-output-len",
            "--output-tokens",
            help="random: length of the answer",
        ),
    ] = 128,
    slo_ttft_ms: Annotated[float, typer.Option(help="limit for goodput")] = 2000.0,
    slo_tpot_ms: Annotated[float, typer.Option(help="limit for goodput")] = 100.0,
    block_size: int = 32,
    max_model_len: int = 4096,
    dtype: str = "auto",
    prefix_caching: Annotated[
        bool,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            "--prefix-caching/--no-prefix-caching",
        ),
    ] = True,
    eager: Annotated[
        bool | None,
        typer.Option(
            "--enforce-eager/--no-enforce-eager",
            "--eager/--no-eager",
            help="of every server; default: on CPUs only",
        ),
    ] = None,
    server_args: Annotated[
        str, typer.Option(help="further arguments for vllm serve")
    ] = "",
    seed: int = 0,
    request_timeout_s: Annotated[float, typer.Option(help="chat only")] = 600.0,
    start_timeout_s: float = 600.0,
    out: Path = Path("serving.jsonl"),
    csv: Annotated[Path | None, typer.Option(help="table as CSV")] = None,
    json_out: Annotated[
        Path | None, typer.Option(help="write the table as JSON")
    ] = None,
    plots: Annotated[
        Path | None, typer.Option(help="folder for PNG and SVG; needs matplotlib")
    ] = None,
    report_only: Annotated[
        bool, typer.Option(help="only report the rows of --out")
    ] = False,
) -> None:
    """Measure POLICIES under load, then report all rows of OUT."""
    # Do not wrap lines in a file or pipe; rich would assume 80 columns.
    console = Console() if sys.stdout.isatty() else Console(width=140)

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    if plots and not find_spec("matplotlib"):  # fail now instead of after the run
        raise typer.BadParameter("--plots needs matplotlib: pip install matplotlib")
    failed: list[str] = []
    if not report_only:
        if not model:
            raise typer.BadParameter("give a MODEL, or --report-only")
        if texts:
            read_texts(texts)
        if Path(model).is_dir():
            # a local folder needs no lookup on the hub
            os.environ.setdefault("HF_HUB_OFFLINE", "1")
        comparison = Comparison(
            pool=Pool(
                model,
                pool_tokens,
                block_size,
                max_model_len,
                dtype,
                prefix_caching,
                not cuda_is_available() if eager is None else eager,
                tuple(shlex.split(server_args)),
            ),
            chat=ChatLoad(
                users,
                turns,
                think_s,
                first_words,
                next_words,
                answer_tokens,
                str(texts or ""),
            ),
            random=RandomLoad(requests, input_tokens, output_tokens),
            slo=Slo(slo_ttft_ms, slo_tpot_ms),
            seed=seed,
            request_timeout_s=request_timeout_s,
            start_timeout_s=start_timeout_s,
        )
        started = read_rates(rates)[:1] if sweep else read_rates(rates)
        cells = cells_of(
            read_policies(policies), read_workloads(workloads), started, repetitions
        )
        exit_on_signals()
        try:
            search = Sweep(started[0], goodput_share) if sweep else None
            failed = run_all(comparison, cells, out, say, search)
        except KeyboardInterrupt:
            say("stopped; run the same command again to resume")
            raise typer.Exit(130) from None
    rows = list(read_rows(out).values())
    report(rows, console, csv, json_out, plots, goodput_share)
    if failed:
        say(f"failed, see above: {', '.join(failed)}")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
