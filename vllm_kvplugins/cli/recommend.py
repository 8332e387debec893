"""``kvplugins recommend``: choose a policy for a model and memory, as measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_kvplugins.amounts import amount, parse_bytes
from vllm_kvplugins.choice.decision import STOCK, decide
from vllm_kvplugins.choice.evidence import load
from vllm_kvplugins.choice.requests import Request, Workload, request_for
from vllm_kvplugins.cli.console import out, user_errors
from vllm_kvplugins.cli.size import element_bytes
from vllm_kvplugins.errors import coded, refuse

if TYPE_CHECKING:
    from vllm_kvplugins.model_config import ConfigOnlyModel

_SHOWN = 8


def recommend(
    model: Annotated[
        str, typer.Argument(help="Folder, or Hugging Face ID in the cache.")
    ],
    context: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens of each prompt.")
    ],
    memory: Annotated[
        str,
        typer.Option(metavar="M", help="vLLM's KV cache, for example 8GiB."),
    ],
    workload: Annotated[
        Workload,
        typer.Option(
            help="document: details are looked up. chat: turns continue a "
            "conversation. agent: both, and prompts share prefixes."
        ),
    ],
    answer: Annotated[
        int, typer.Option(metavar="A", min=2, help="Tokens of each answer.")
    ] = 512,
    concurrency: Annotated[
        int, typer.Option(metavar="C", min=1, help="Concurrent requests.")
    ] = 1,
    host_memory: Annotated[
        str | None,
        typer.Option(metavar="H", help="Host memory for offloaded tokens."),
    ] = None,
    min_score: Annotated[
        float,
        typer.Option(
            metavar="S",
            min=0,
            max=1,
            help="Only policies that find at least this share of the keys that stock "
            "vLLM finds; `--kv-policy auto` uses 0.95.",
        ),
    ] = 0.0,
    max_model_len: Annotated[
        int,
        typer.Option(
            metavar="L",
            min=0,
            help="Tokens of the longest request that the server accepts; 0: of a "
            "prompt and its answer.",
        ),
    ] = 0,
    dtype: Annotated[
        str, typer.Option(metavar="D", help="Type of keys and values.")
    ] = "bfloat16",
    block_size: Annotated[
        int, typer.Option(metavar="B", min=1, help="Tokens per block.")
    ] = 32,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of a table.")
    ] = False,
) -> None:
    """Recommend a policy and its settings, from the measurements in this package.

    Exit status 1 if nothing that was measured fits.
    """
    with user_errors():
        request = _request(
            model,
            context,
            answer,
            concurrency,
            memory,
            host_memory,
            dtype,
            block_size,
            max_model_len,
        )
        result = decide(load(), request, workload, min_score)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        _print(out(), result)
    raise typer.Exit(0 if result["policy"] else 1)


def _request(
    model_name: str,
    context: int,
    answer: int,
    concurrency: int,
    memory: str,
    host_memory: str | None,
    dtype: str,
    block_size: int,
    max_model_len: int,
) -> Request:
    from vllm_kvplugins.model_config import read_model_config

    element_bytes(dtype)  # refuses dtypes that a cache cannot have
    config = read_model_config(model_name, dtype)
    return request_for(
        config,
        prompt_tokens=context,
        answer_tokens=answer,
        concurrency=concurrency,
        memory=_bytes(memory, "--memory"),
        host_memory=None
        if host_memory is None
        else _bytes(host_memory, "--host-memory"),
        block_size=block_size,
        longest=max_model_len,
        notes=tuple(_model_notes(config, context + answer)),
    )


def _bytes(text: str, option: str) -> int:
    try:
        value = parse_bytes(int(text) if text.isdigit() else text)
    except ValueError as error:
        message = coded("KVP603", str(error))
        raise typer.BadParameter(message, param_hint=option) from error
    assert value is not None
    return value


def _model_notes(config: ConfigOnlyModel, tokens: int) -> Iterator[str]:
    """Refuse models that no policy runs on; note what limits others.

    Raises:
        KVPolicyError: the engine would refuse the model under every policy.
    """
    from vllm_kvplugins.vllm_adapter.config import validation

    reasons = [*validation.model_problems(config), *config.layer_problems()]
    refuse(f"no KV policy can run with {config.model}", reasons)
    positions = config.max_positions
    if positions is not None and tokens > positions:
        yield (
            f"config.json allows {positions} positions; vLLM accepts {tokens} only "
            "with scaled RoPE"
        )


def _print(console: Console, result: dict[str, Any]) -> None:
    policy = result["policy"]
    if policy is None:
        console.print("[bold red]Nothing fits.[/]")
    elif policy == STOCK:
        console.print("[bold]Serve without a policy.[/]")
    else:
        settings = escape(json.dumps(result["settings"]))
        console.print(f"[bold]Recommended:[/] [bold cyan]{policy}[/] {settings}")
    for reason in result["reasons"]:
        console.print(f"  {escape(reason)}")
    if result["command"]:
        console.print(f"\n{escape(result['command'])}\n", soft_wrap=True)
    if result["alternatives"]:
        console.print(_table(result["alternatives"]))
    for name, reason in result["excluded"].items():
        console.print(f"[dim]not {escape(name)}: {escape(reason)}[/]")
    for note in result["notes"]:
        console.print(f"[yellow]note:[/] {escape(note)}")


def _table(alternatives: list[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("policy", no_wrap=True)
    for name in ("share", "pass keys", "key of 16", "KL", "device", "host"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("settings")
    for row in alternatives[:_SHOWN]:
        table.add_row(
            row["policy"],
            f"{row['share']:.0%}",
            *(_of(row[name]) for name in ("pass_keys", "keys_of_sixteen")),
            "–" if row["kl"] is None else f"{row['kl']:.3f}",
            amount(row["device_bytes"]),
            amount(row["host_bytes"]) if row["host_bytes"] else "–",
            escape(json.dumps(row["settings"])),
        )
    return table


def _of(found: tuple[int, int] | None) -> str:
    return "–" if found is None else f"{found[0]} of {found[1]}"
