"""``kvplugins doctor MODEL``: what a policy manages in a model, and when it pays."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_kvplugins.amounts import amount
from vllm_kvplugins.cli import model_checks
from vllm_kvplugins.errors import KVPolicyError, codes_in

if TYPE_CHECKING:
    from vllm_kvplugins.model_config import ConfigOnlyModel
    from vllm_kvplugins.model_memory import ModelMemory

# Contexts of which the report shows the share of the policy's layers.
_CONTEXTS = (1024, 4096, 16384, 65536, 262144)
_KINDS = {
    "full_attention": "full attention",
    "sliding_attention": "a sliding window",
    "chunked_attention": "attention chunks",
    "recurrent_state": "a recurrent state",
}


def model_report(name: str, dtype: str, block_size: int) -> dict[str, Any]:
    """All figures as plain data, as printed by ``--json``.

    Args:
        name: a folder, a ``config.json``, or an ID in the Hugging Face cache.
        dtype: of keys and values.
        block_size: tokens per block.

    Returns:
        ``problems`` alone if no policy can run.

    Raises:
        KVPolicyError: the file cannot be read.
    """
    from vllm_kvplugins.model_config import read_model_config
    from vllm_kvplugins.model_memory import ModelMemory
    from vllm_kvplugins.policies.registry import available_policies

    model = read_model_config(name, dtype)
    problems = [
        *model_checks.model_problems(model),
        *model_checks.cache_problems(dtype, block_size),
    ]
    report: dict[str, Any] = {"model": name, "problems": problems}
    if problems:
        return report
    refused = _refused_policies(model)
    if len(refused) == len(available_policies()):
        problems += next(iter(refused.values()))
        return report
    report |= _figures(model, ModelMemory.of(model, block_size))
    report["refused_policies"] = refused
    return report


def _figures(model: ConfigOnlyModel, memory: ModelMemory) -> dict[str, Any]:
    geometry, limit = memory.geometry, model.max_positions
    contexts = [n for n in _CONTEXTS if limit is None or n <= limit]
    return {
        "layers": dict(Counter(model.layer_types)),
        "managed_layers": geometry.num_layers,
        "num_layers": memory.shape.num_layers,
        "num_kv_heads": geometry.num_kv_heads,
        "head_dim": memory.shape.head_dim,
        "kv_bytes_per_token": geometry.kv_bytes_per_token,
        "other_bytes": memory.other_bytes(),
        "block_size": geometry.block_size,
        "block_bytes": memory.block_bytes,
        "page_bytes": memory.page_bytes,
        "pages_per_block": geometry.num_layers * geometry.num_kv_heads,
        "managed_share": {str(n): round(memory.managed_share(n), 4) for n in contexts},
        "half_tokens": memory.half_tokens(),
        "max_positions": limit,
    }


def _refused_policies(model: ConfigOnlyModel) -> dict[str, list[str]]:
    """Policies that the engine refuses with their default settings, and why."""
    from vllm_kvplugins.config import parse_policy
    from vllm_kvplugins.policies.registry import available_policies

    refused = {}
    for name in available_policies():
        try:
            policy = parse_policy({"name": name})
            reasons = model_checks.policy_problems(policy, model)
            reasons += model_checks.shape_problems(policy, model)
        except KVPolicyError as error:
            reasons = [str(error)]
        if reasons:
            refused[name] = reasons
    return refused


def print_report(console: Console, report: dict[str, Any]) -> None:
    """Print a report as a table and one verdict."""
    console.print(f"[bold]{escape(report['model'])}[/]")
    if report["problems"]:
        for problem in report["problems"]:
            console.print(f"[bold red]FAIL[/]  {escape(problem)}")
        console.print("\n[bold red]No policy can run with this model.[/]")
        return
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    for name, text in _lines(report):
        table.add_row(name, escape(text))
    console.print(table)
    for names, reasons in _by_code(report["refused_policies"]).items():
        console.print(f"[yellow]not with this model:[/] {', '.join(names)}")
        for reason in reasons:
            console.print(f"  {escape(reason)}")
    console.print(f"\n[bold]{escape(verdict(report))}[/]")


def _by_code(refused: dict[str, list[str]]) -> dict[tuple[str, ...], list[str]]:
    """Policies with the same error codes together, with the reasons of the first."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, reasons in refused.items():
        groups.setdefault(tuple(codes_in("\n".join(reasons))), []).append(name)
    return {tuple(names): refused[names[0]] for names in groups.values()}


def _lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    others = [
        f"{count} with {_KINDS[kind]}"
        for kind, count in report["layers"].items()
        if kind != "full_attention"
    ]
    left = f"; vLLM keeps {' and '.join(others)}" if others else ""
    lines = [
        (
            "layers",
            f"a policy manages {report['managed_layers']} of {report['num_layers']}, "
            f"those with full attention{left}",
        ),
        (
            "keys and values",
            f"{amount(report['kv_bytes_per_token'])} per token in the managed layers "
            f"({report['num_kv_heads']} KV heads × {report['head_dim']})"
            + (
                f"; at most {amount(report['other_bytes'])} per request in the others"
                if others
                else ""
            ),
        ),
        (
            "reclaim",
            f"whole blocks of {report['block_size']} tokens, "
            f"{amount(report['block_bytes'])}; a block has room for "
            f"{report['pages_per_block']} pages of {amount(report['page_bytes'])}, "
            "each of one layer and KV head",
        ),
    ]
    if others:
        shares = [
            f"{share:.0%} at {int(tokens) // 1024}K"
            for tokens, share in report["managed_share"].items()
        ]
        lines.append(("managed share", "of a request's memory: " + ", ".join(shares)))
    return lines


def verdict(report: dict[str, Any]) -> str:
    """From which context on a policy can save memory worth having."""
    layers = f"{report['managed_layers']} of {report['num_layers']} layers"
    figures = f"{layers}, {amount(report['kv_bytes_per_token'])} per token"
    half = report["half_tokens"]
    if not half:
        return (
            f"{figures}: a policy can free whatever a context holds above its budget."
        )
    return (
        f"{figures}: below {half:,} tokens expect little. There the policy's layers "
        "hold less than half of a request's memory."
    )
