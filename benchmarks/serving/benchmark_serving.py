"""Compare systems under load: one server per system, with equal pool, load and seed.

Systems are stock vLLM, policies, and alternatives of vLLM's own (``offload``,
``lmcache``, ``fp8``). Workloads: single requests, of random tokens or of a dataset,
sent and measured by ``vllm bench serve``; conversations with think time
(``_serving_chat.py``); and agents with tools (``_serving_agents.py``). One server runs
at a time; systems alternate (A, B, A, B …).
Every finished measurement is a line of ``--out``. An interrupted run resumes from this
file. ``--sweep`` searches for the highest rate at which each server meets the service
level, instead of fixed rates. ``--base-url`` drives a server that already runs.

    python benchmarks/serving/benchmark_serving.py MODEL --policies stock,full,snapkv \\
        --pool-tokens 16384 --request-rate 0.5,1,2 --out serving.jsonl --plots plots
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import _path  # noqa: F401
import typer
from _engine import provenance
from _serving_agents import AgentLoad, require_tools
from _serving_bench import (
    BenchArgumentError,
    BenchLoad,
    bench,
    bench_figures,
    bench_window,
    check_load,
)
from _serving_bytes import byte_figures, numbers_per_token
from _serving_chat import ChatLoad, chat, paragraphs, users_of
from _serving_metrics import (
    Sampler,
    Slo,
    latency_figures,
    read_metrics,
    server_figures,
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
    read_unavailable,
    running_settings_of,
    settings_of,
    split_policies,
)
from _serving_server import (
    RunningServer,
    Server,
    ServerError,
    exit_on_signals,
    serving,
)
from _serving_sweep import Sweep, next_index, share_within_limits
from _serving_systems import (
    alternative_of,
    missing_of,
    policy_settings,
    pool_of,
    problem_of,
    server_arguments,
    server_environment,
)
from rich.console import Console

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.errors import KVPolicyError

WARM_UP_SEED = 99
DEFAULT_SYSTEMS = "stock,full,snapkv,offload,lmcache,fp8"


@dataclass(frozen=True, slots=True)
class Comparison:
    """All settings of a run, except systems and rates.

    Attributes:
        running: drive this server and start none; ``pool`` then only names the model.
    """

    pool: Pool
    chat: ChatLoad
    agents: AgentLoad
    random: BenchLoad
    slo: Slo
    seed: int
    request_timeout_s: float
    start_timeout_s: float
    dataset: BenchLoad | None = None
    running: RunningServer | None = None

    def load(self, cell: Cell) -> ChatLoad | BenchLoad:
        """The load of a cell."""
        if cell.workload == "dataset":
            assert self.dataset is not None, "checked with the options"
            return self.dataset
        if cell.workload == "random":
            return self.random
        return self.agents if cell.workload == "agents" else self.chat

    @property
    def served(self) -> str:
        """Name of the model on the server."""
        return self.running.served if self.running else self.pool.model

    def row(self, cell: Cell, measured: dict[str, Any]) -> Row:
        """One row of this comparison."""
        load, slo = self.load(cell), self.slo
        if self.running is None:
            settings = settings_of(self.pool, self.seed, load, slo)
        else:
            url, served = self.running.url, self.running.served
            settings = running_settings_of(url, served, self.seed, load, slo)
        return make_row(cell, settings, measured)


# -- one measurement ------------------------------------------------------------


def warm_up(
    server: Server | RunningServer,
    comparison: Comparison,
    blocks: int | None,
    workloads: set[str],
) -> None:
    """Send two short conversations that do not count, and check the pool's size.

    Args:
        blocks: of the pool; None = any.
        workloads: that follow; agents need tools in the chat template.

    Raises:
        ServerError: a conversation fails, the pool has the wrong size, or the chat
            template leaves out tools.
    """
    load = replace(comparison.chat, users=2, turns=1, answer_tokens=8, texts="")
    model, timeout_s = comparison.served, comparison.request_timeout_s
    for answer in chat(server.url, model, load, 10.0, WARM_UP_SEED, timeout_s):
        if answer.error:
            raise ServerError(f"a request to warm up failed: {answer.error}")
    found = read_metrics(server.url).get("blocks")
    if blocks is not None and found != blocks:
        raise ServerError(f"a pool of {found} blocks, not {blocks}")
    if "agents" in workloads:
        few = replace(comparison.agents, users=1, turns=2)
        (agent,) = users_of(few, 1.0, WARM_UP_SEED)
        require_tools(server.url, comparison.served, agent.talk)


def measure(
    server: Server | RunningServer, comparison: Comparison, cell: Cell, keep: Path
) -> dict[str, Any]:
    """Run one load against a server.

    Args:
        keep: folder for the JSON of ``vllm bench serve``.

    Returns:
        ``figures``; ``samples`` over time; ``bench_result``, the file that was kept;
        and ``first_error`` if a request failed.

    Raises:
        ServerError: the server ended, or every request failed.
    """
    load, seed = comparison.load(cell), cell.seed(comparison.seed)
    kept: dict[str, Any] = {}
    cpu_s = server.cpu_s()
    with Sampler(server.url) as sampler:
        if isinstance(load, ChatLoad):
            began = time.perf_counter()
            answers = chat(
                server.url,
                comparison.served,
                load,
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
            file = keep / result_name(comparison, cell)
            kept["bench_result"] = f"{keep.name}/{file.name}"
            result = bench(
                server.url,
                comparison.pool.model,
                load,
                cell.rate,
                seed,
                comparison.slo,
                file,
                comparison.served,
            )
            figures = bench_figures(result)
            start_s, end_s = bench_window(result)
            errors = [error for error in result["errors"] if error]
    server.require_alive()
    if not figures["completed"]:
        raise ServerError(f"no request succeeded; the first said: {errors[:1]}")
    figures |= server_figures(sampler.samples, start_s, end_s)
    samples = figures.pop("samples", {})
    if comparison.running is None:
        pool = comparison.pool
        numbers = numbers_per_token(pool.model)
        figures |= byte_figures(cell.policy, pool, figures, numbers)
    if cpu_s is not None:
        figures["server_cpu_s"] = (server.cpu_s() or 0.0) - cpu_s
    measured = {"figures": figures, "samples": samples} | kept
    return measured | ({"first_error": errors[0][:300]} if errors else {})


def result_name(comparison: Comparison, cell: Cell) -> str:
    """File name of one result of ``vllm bench serve``, the same in every run."""
    key = key_of(comparison.row(cell, {})).encode()
    name = str(cell.policy.get("name", "stock"))
    digest = hashlib.sha256(key).hexdigest()[:8]
    return f"{name}-{cell.rate:g}-{cell.repetition + 1}-{digest}.json"


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
        Labels of policies whose server failed; they are not retried. An alternative of
        vLLM's own that cannot run is not among them: the file says why.
    """
    rows, keep = read_rows(out), out.with_name(out.stem + "-bench")
    if sweep is None:
        todo = sum(key_of(comparison.row(cell, {})) not in rows for cell in cells)
        say(f"{todo} of {len(cells)} measurements to come, see {out}")
    source = provenance()
    failed: list[str] = []
    unavailable: list[str] = []
    for turn in dict.fromkeys(map(turn_of, cells)):
        same = [cell for cell in cells if turn_of(cell) == turn]
        label, system = same[0].label, same[0].policy
        if label in [*failed, *unavailable]:
            continue
        if next_cell(comparison, sweep, same, rows) is None:
            continue
        try:
            with started(comparison, same) as server:
                say(f"{label}: ready after {server.start_s:.0f} s")
                while cell := next_cell(comparison, sweep, same, rows):
                    measured = measure(server, comparison, cell, keep)
                    row = comparison.row(cell, measured | {"source": source})
                    append_row(out, row)
                    rows[key_of(row)] = row
                    say(line_of(cell, row))
        except ServerError as error:
            if alternative_of(system) and comparison.running is None:
                unavailable.append(label)
                note = {"policy": dict(system), "unavailable": error.reason}
                append_row(out, note | {"source": source})
                say(f"{label}: cannot run here: {error.reason}")
            else:
                failed.append(label)
                say(f"{label}: {error}")
    return failed


@contextlib.contextmanager
def started(
    comparison: Comparison, cells: list[Cell]
) -> Iterator[Server | RunningServer]:
    """The warm server of a system: a new one, or the one that already runs.

    Args:
        cells: of one system.

    Raises:
        ServerError: it does not start, or does not answer.
    """
    system, workloads = cells[0].policy, {cell.workload for cell in cells}
    if comparison.running is not None:
        warm_up(comparison.running, comparison, None, workloads)
        yield comparison.running
        return
    if missing := missing_of(system):
        raise ServerError(missing)
    arguments = server_arguments(system, comparison.pool, comparison.seed)
    environment = server_environment(system)
    with serving(arguments, comparison.start_timeout_s, environment) as server:
        blocks = pool_of(system, comparison.pool).blocks
        warm_up(server, comparison, blocks, workloads)
        yield server


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


def line_of(cell: Cell, row: Row) -> str:
    """Progress line of a finished measurement; names the file that was kept."""
    figures = row["figures"]
    kept = f", see {row['bench_result']}" if "bench_result" in row else ""
    return (
        f"{cell.label}: {cell.workload} at {cell.rate:g}/s, repetition "
        f"{cell.repetition + 1}: TTFT {figures['p50_ttft_ms']:.0f} ms, "
        f"{figures['output_throughput_tokens_per_s']:.1f} tokens/s, "
        f"{figures['completed']} done, {figures['failed']} failed{kept}"
    )


def read_policies(text: str) -> list[dict[str, Any]]:
    """Parse --policies and check the settings before any server starts."""
    try:
        policies = split_policies(text)
        for system in policies:
            if problem := problem_of(system):
                raise ValueError(problem)
            if policy := policy_settings(system):
                parse_policy(policy)
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


def read_server_args(text: str) -> tuple[str, ...]:
    """Parse --server-args; refuse what would make pools differ unseen."""
    arguments = tuple(shlex.split(text))
    if any(each.partition("=")[0] == "--kv-cache-dtype" for each in arguments):
        raise typer.BadParameter(
            "--server-args: --kv-cache-dtype would change the bytes of every pool; "
            "name fp8 in --policies"
        )
    return arguments


def read_rates(text: str) -> list[float]:
    """Parse --rates."""
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"--rates must be numbers, got {text!r}") from error
    if not all(0 < rate < 1e6 or rate == float("inf") for rate in rates):
        raise typer.BadParameter(f"--rates must be positive, got {text!r}")
    return rates


def read_workloads(text: str, dataset: str) -> list[str]:
    """Parse --workloads; ``dataset``: the value of --dataset-name."""
    workloads = (text or ("dataset" if dataset else "chat,random")).split(",")
    if unknown := sorted(set(workloads) - set(WORKLOADS)):
        raise typer.BadParameter(f"--workloads: {unknown} is none of {WORKLOADS}")
    if ("dataset" in workloads) != bool(dataset):
        raise typer.BadParameter("--workloads dataset and --dataset-name go together")
    return workloads


def read_systems(text: str, base_url: str) -> list[dict[str, Any]]:
    """Parse --policies; with --base-url, the name of the one system that runs."""
    if not base_url:
        return read_policies(text or DEFAULT_SYSTEMS)
    try:
        systems = split_policies(text or "running server")
    except ValueError as error:
        raise typer.BadParameter(f"--policies: {error}") from error
    if len(systems) > 1:
        raise typer.BadParameter("--base-url drives one server; name one of --policies")
    return systems


def read_running(base_url: str) -> RunningServer | None:
    """The server of --base-url; None without one."""
    try:
        return RunningServer(base_url) if base_url else None
    except ServerError as error:
        raise typer.BadParameter(f"--base-url: {error}") from error


def check_loads(comparison: Comparison, workloads: list[str]) -> None:
    """Refuse options that ``vllm bench serve`` refuses, before any server starts."""
    loads = [comparison.dataset] if "dataset" in workloads else []
    if "random" in workloads and comparison.random.extra:
        loads.append(comparison.random)
    try:
        for load in loads:
            assert load is not None
            check_load(load)
    except BenchArgumentError as error:
        raise typer.BadParameter(str(error)) from error


def main(
    model: Annotated[str, typer.Argument()] = "",
    policies: Annotated[
        str,
        typer.Option(
            help="names or JSON, separated by commas: stock (vLLM without a policy), "
            "policies, and vLLM's own offload, lmcache and fp8; with --base-url, what "
            "the running server is"
        ),
    ] = "",
    base_url: Annotated[
        str,
        typer.Option(
            help="drive a server that already runs, instead of starting servers; "
            "needs no MODEL if its tokenizer is found by the server's name for it"
        ),
    ] = "",
    pool_tokens: Annotated[int, typer.Option(help="KV cache of every server")] = 16384,
    rates: Annotated[
        str,
        typer.Option(
            "--request-rate",
            "--rates",
            help="requests (random) or users (chat, agents) per second",
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
        str,
        typer.Option(
            help="chat, agents, random, dataset; by commas. Default: dataset with "
            "--dataset-name, otherwise chat,random"
        ),
    ] = "",
    repetitions: int = 3,
    users: Annotated[
        int, typer.Option(help="chat, agents: number of conversations")
    ] = 16,
    turns: Annotated[
        int, typer.Option(help="chat, agents: requests per conversation")
    ] = 4,
    think_s: Annotated[
        float, typer.Option(help="chat, agents: mean think time; of tools, too")
    ] = 2.0,
    first_words: Annotated[
        int, typer.Option(help="chat: length of the first message; agents: of a task")
    ] = 400,
    next_words: Annotated[
        int, typer.Option(help="chat: length of later messages; agents: of a result")
    ] = 50,
    answer_tokens: Annotated[
        int, typer.Option(help="chat, agents: length of every answer")
    ] = 128,
    system_words: Annotated[
        int, typer.Option(help="agents: length of the system prompt that all share")
    ] = 300,
    tool_calls: Annotated[
        int, typer.Option(min=1, help="agents: tool calls after each task")
    ] = 4,
    texts: Annotated[
        Path | None, typer.Option(help="chat: send the paragraphs of this file")
    ] = None,
    requests: Annotated[
        int,
        typer.Option(
            "--num-prompts", "--requests", help="random, dataset: number of requests"
        ),
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
    dataset_name: Annotated[
        str, typer.Option(help="dataset: as in vllm bench serve; sharegpt, custom, …")
    ] = "",
    dataset_path: Annotated[
        str, typer.Option(help="dataset: as in vllm bench serve")
    ] = "",
    max_concurrency: Annotated[
        int,
        typer.Option(min=0, help="random, dataset: most requests at a time; 0: any"),
    ] = 0,
    bench_args: Annotated[
        str, typer.Option(help="random, dataset: further arguments of vllm bench serve")
    ] = "",
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
    request_timeout_s: Annotated[
        float, typer.Option(help="chat, agents: limit of a request")
    ] = 600.0,
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
        if not model and not base_url:
            raise typer.BadParameter("give a MODEL, --base-url, or --report-only")
        if texts:
            read_texts(texts)
        if Path(model).is_dir():
            # a local folder needs no lookup on the hub
            os.environ.setdefault("HF_HUB_OFFLINE", "1")
        running = read_running(base_url)
        extra = tuple(shlex.split(bench_args))
        chats = ChatLoad(
            users,
            turns,
            think_s,
            first_words,
            next_words,
            answer_tokens,
            str(texts or ""),
        )
        agents = AgentLoad(
            **asdict(replace(chats, texts="")),
            system_words=system_words,
            tool_calls=tool_calls,
        )
        comparison = Comparison(
            pool=Pool(
                model or (running.root if running else ""),
                pool_tokens,
                block_size,
                max_model_len,
                dtype,
                prefix_caching,
                not cuda_is_available() if eager is None else eager,
                read_server_args(server_args),
            ),
            chat=chats,
            agents=agents,
            random=BenchLoad(
                requests,
                input_tokens,
                output_tokens,
                max_concurrency=max_concurrency,
                extra=() if dataset_name else extra,
            ),
            slo=Slo(slo_ttft_ms, slo_tpot_ms),
            seed=seed,
            request_timeout_s=request_timeout_s,
            start_timeout_s=start_timeout_s,
            dataset=BenchLoad(
                requests,
                dataset=dataset_name,
                path=dataset_path,
                max_concurrency=max_concurrency,
                extra=extra,
            )
            if dataset_name
            else None,
            running=running,
        )
        chosen = read_workloads(workloads, dataset_name)
        check_loads(comparison, chosen)
        started_rates = read_rates(rates)[:1] if sweep else read_rates(rates)
        if sweep and started_rates[0] == float("inf"):
            raise typer.BadParameter("--sweep needs a finite first --request-rate")
        systems = read_systems(policies, base_url)
        cells = cells_of(systems, chosen, started_rates, repetitions)
        exit_on_signals()
        try:
            search = Sweep(started_rates[0], goodput_share) if sweep else None
            failed = run_all(comparison, cells, out, say, search)
        except KeyboardInterrupt:
            say("stopped; run the same command again to resume")
            raise typer.Exit(130) from None
    rows = list(read_rows(out).values())
    unavailable = read_unavailable(out)
    report(rows, console, csv, json_out, plots, goodput_share, unavailable)
    if failed:
        say(f"failed, see above: {', '.join(failed)}")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
