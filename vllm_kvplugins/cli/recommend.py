"""``kvplugins recommend``: choose a policy for a model and memory, as measured."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_kvplugins.amounts import parse_bytes
from vllm_kvplugins.cli.console import out, user_errors
from vllm_kvplugins.cli.evidence import KL, MULTIKEY, PASSKEY, Evidence, Measured, load
from vllm_kvplugins.cli.size import amount, element_bytes
from vllm_kvplugins.errors import coded, refuse

if TYPE_CHECKING:
    from vllm_kvplugins.model_config import ConfigOnlyModel

# Granularity and limits of a recommended prefill_block, in tokens.
_BLOCK_STEP, _LARGEST_BLOCK = 256, 2048
_SHOWN = 8


class Workload(StrEnum):
    """What requests look like; decides which scores count."""

    CHAT = "chat"
    DOCUMENT = "document"
    AGENT = "agent"


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
            model, context, answer, concurrency, memory, host_memory, dtype, block_size
        )
        result = recommendation(load(), request, workload)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        _print(out(), result)
    raise typer.Exit(0 if result["policy"] else 1)


@dataclass(frozen=True, slots=True)
class Request:
    """A model, its requests, and the memory for them; sizes in bytes.

    Attributes:
        token_bytes: keys and values of one token, in the layers that a policy manages.
        other_bytes: what layers that vLLM manages hold of each request.
        notes: what limits the figures for this model.
    """

    model: str
    prompt_tokens: int
    answer_tokens: int
    concurrency: int
    memory: int
    host_memory: int | None
    token_bytes: int
    block_size: int
    dtype: str = "bfloat16"
    other_bytes: int = 0
    notes: tuple[str, ...] = ()

    def bytes_of(self, tokens: float) -> int:
        """Bytes of this many tokens, in whole blocks."""
        blocks = -(-int(tokens) // self.block_size)
        return blocks * self.block_size * self.token_bytes

    @property
    def stock_request(self) -> int:
        """A request without a policy, at its end."""
        tokens = self.prompt_tokens + self.answer_tokens
        return self.bytes_of(tokens) + self.other_bytes

    @property
    def usable(self) -> int:
        """The pool without the block that vLLM never allocates."""
        return self.memory - self.bytes_of(1)

    def decoding(self, device_share: float) -> int:
        """A request that keeps a share of its prompt, at the end of its answer.

        One block more, as the newest tokens of a prompt stay in their block.
        """
        kept = self.bytes_of(device_share * self.prompt_tokens) + self.other_bytes
        return kept + self.bytes_of(self.answer_tokens) + self.bytes_of(1)


@dataclass(frozen=True, slots=True)
class Option:
    """A measured policy that fits.

    Attributes:
        prefill_block: tokens of a prompt between two compactions, without which the
            prompt does not fit; None: it fits as measured.
        score: smaller is better.
    """

    cell: Measured
    prefill_block: int | None
    score: tuple[float, ...] = ()


def _request(
    model_name: str,
    context: int,
    answer: int,
    concurrency: int,
    memory: str,
    host_memory: str | None,
    dtype: str,
    block_size: int,
) -> Request:
    from vllm_kvplugins.model_config import read_model_config
    from vllm_kvplugins.model_memory import ModelMemory

    element_bytes(dtype)  # refuses dtypes that a cache cannot have
    config = read_model_config(model_name, dtype)
    notes = tuple(_model_notes(config, context + answer))
    sizes = ModelMemory.of(config, block_size)
    return Request(
        model_name,
        context,
        answer,
        concurrency,
        _bytes(memory, "--memory"),
        None if host_memory is None else _bytes(host_memory, "--host-memory"),
        sizes.block_bytes // sizes.geometry.block_size,
        sizes.geometry.block_size,
        dtype,
        sizes.other_bytes(context + answer),
        notes,
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


# -- the choice --------------------------------------------------------------------


def recommendation(
    evidence: Evidence, request: Request, workload: Workload
) -> dict[str, Any]:
    """All figures as plain data, as printed by ``--json``.

    Returns:
        ``policy``: a name, ``stock``, or None if nothing fits; ``settings`` and
        ``command`` to serve it; ``reasons``, ``notes``; ``alternatives``: the best
        cell of each policy that fits, the recommended one first; ``excluded``: why
        other policies are not among them.
    """
    stock_bytes = request.concurrency * request.stock_request
    result: dict[str, Any] = {
        "model": request.model,
        "workload": workload.value,
        "prompt_tokens": request.prompt_tokens,
        "answer_tokens": request.answer_tokens,
        "concurrency": request.concurrency,
        "memory": request.memory,
        "stock_request_bytes": request.stock_request,
        "stock_bytes": stock_bytes,
        "fitting_share": round(_fitting_share(request), 4),
        "policy": None,
        "settings": {},
        "command": "",
        "reasons": [],
        "notes": [],
        "alternatives": [],
        "excluded": {},
    }
    if stock_bytes <= request.usable:
        result["policy"] = "stock"
        result["command"] = _command(request, None, {})
        result["reasons"] = [
            f"stock vLLM fits: {_count(request.concurrency)} of "
            f"{amount(request.stock_request)} each; a policy would only cost answers"
        ]
        result["notes"] = list(request.notes)
        return result
    options, excluded = _options(evidence, request, workload)
    result["excluded"] = excluded
    if not options:
        result["reasons"] = [
            "no policy fits at a share of the context that was measured"
        ]
        result["notes"] = list(request.notes)
        return result
    best = options[0]
    settings = _settings(best, evidence, request, workload)
    result["policy"], result["settings"] = best.cell.policy, settings
    result["command"] = _command(request, best.cell.policy, settings)
    result["reasons"] = list(_reasons(best, options, evidence, request, workload))
    result["notes"] = [*request.notes, *_notes(best, evidence, request, workload)]
    result["alternatives"] = [
        _figures(option, evidence, request, workload) for option in options
    ]
    return result


def _fitting_share(request: Request) -> float:
    """Share of each prompt that the memory can hold, next to the answers."""
    per_request = request.usable / request.concurrency
    left = per_request - request.bytes_of(request.answer_tokens) - request.bytes_of(1)
    return max(0.0, min(1.0, left / request.bytes_of(request.prompt_tokens)))


def _options(
    evidence: Evidence, request: Request, workload: Workload
) -> tuple[list[Option], dict[str, str]]:
    """The best option of each policy, best first; and why others are left out.

    Policies that fit as they were measured come before those that need a
    ``prefill_block``, with which nothing was measured.
    """
    excluded = dict.fromkeys(evidence.partly, "not measured on all models at any share")
    found: dict[str, list[Option]] = {}
    for cell in evidence.cells:
        reason = _unsuitable(cell, evidence, workload)
        option = None if reason else _fitting(cell, evidence, request)
        if isinstance(option, Option):
            found.setdefault(cell.policy, []).append(option)
        else:
            excluded[cell.policy] = reason or str(option)
    ranked = _ranked([o for options in found.values() for o in options], workload)
    best: dict[str, Option] = {}
    for option in ranked:
        best.setdefault(option.cell.policy, option)
    excluded = {p: reason for p, reason in excluded.items() if p not in best}
    return list(best.values()), excluded


def _unsuitable(cell: Measured, evidence: Evidence, workload: Workload) -> str:
    """Why a policy does not suit a workload, by its contract; "" if it does."""
    contract = evidence.contracts[cell.policy]
    if cell.mean(*_TASKS[workload]) is None:
        return "a task of this workload is not measured"
    if workload is Workload.CHAT:
        if not contract.sessions:
            return "no sessions: every turn computes the whole history again"
        if not (contract.turns or contract.keeps_all):
            return "compresses the whole history again at every turn"
    if workload is Workload.AGENT and not contract.prefix_cache:
        return "reads no prompt through the prefix cache"
    return ""


def _fitting(cell: Measured, evidence: Evidence, request: Request) -> Option | str:
    """The option, or why the policy does not fit the memory.

    A prompt is held completely until it is read, next to the requests that decode, and
    vLLM starts only if one whole request fits. With ``prefill_block`` only the kept
    tokens and one block must fit.
    """
    if request.host_memory is not None:
        host = _host_bytes(cell, request) * request.concurrency
        if host > request.host_memory:
            return f"needs {amount(host)} of host memory"
    held = request.decoding(cell.device_share)
    others = (request.concurrency - 1) * held
    prompt = request.bytes_of(request.prompt_tokens) + request.other_bytes
    whole = max(others + prompt, others + held, request.stock_request)
    if whole <= request.usable:
        return Option(cell, None)
    if others + held > request.usable:
        return f"needs {amount(others + held)} at the smallest measured share"
    if not evidence.contracts[cell.policy].prefill_block:
        return f"holds a whole prompt while it reads it: {amount(whole)}"
    room = (request.usable - others - held) // request.token_bytes
    block = min(room // _BLOCK_STEP * _BLOCK_STEP, _LARGEST_BLOCK)
    if block < _BLOCK_STEP:
        return f"no room for a prefill_block of {_BLOCK_STEP} tokens"
    return Option(cell, block)


_TASKS = {
    Workload.DOCUMENT: (PASSKEY, MULTIKEY),
    Workload.CHAT: (KL,),
    Workload.AGENT: (PASSKEY, MULTIKEY, KL),
}


def _ranked(options: Sequence[Option], workload: Workload) -> list[Option]:
    """Best first; equal scores: less device memory, then less host memory.

    ``agent`` adds the ranks in keys found and in divergence.
    """

    def keys(option: Option) -> float:
        return -(option.cell.mean(PASSKEY, MULTIKEY) or 0.0)

    def divergence(option: Option) -> float:
        return option.cell.mean(KL) or 0.0

    def rank(measure: Callable[[Option], float]) -> dict[float, int]:
        return {v: i for i, v in enumerate(sorted({measure(o) for o in options}))}

    found, far = rank(keys), rank(divergence)
    score: dict[Workload, Callable[[Option], float]] = {
        Workload.DOCUMENT: keys,
        Workload.CHAT: divergence,
        Workload.AGENT: lambda o: found[keys(o)] + far[divergence(o)],
    }
    return sorted(
        options,
        key=lambda o: (
            o.prefill_block is not None,
            score[workload](o),
            o.cell.device_share,
            o.cell.host_share,
            o.cell.policy,
        ),
    )


def _host_bytes(cell: Measured, request: Request) -> int:
    return round(cell.host_share * request.stock_request)


def _settings(
    option: Option, evidence: Evidence, request: Request, workload: Workload
) -> dict[str, Any]:
    """Settings as measured, with the budget for this prompt length."""
    settings = dict(next(iter(option.cell.settings.values())))
    name = option.cell.budget_setting
    budgets = [each[name] for each in option.cell.settings.values()]
    if isinstance(budgets[0], int):
        share = min(budgets) / evidence.tokens[0]
        settings[name] = max(int(share * request.prompt_tokens), 1)
    else:
        settings[name] = min(budgets)
    if option.prefill_block is not None:
        settings["prefill_block"] = option.prefill_block
    if workload is Workload.CHAT and not evidence.contracts[option.cell.policy].turns:
        settings["sessions"] = True
    return settings


def _command(request: Request, policy: str | None, settings: dict[str, Any]) -> str:
    parts = [
        *("vllm", "serve", request.model),
        *("--max-model-len", str(request.prompt_tokens + request.answer_tokens)),
        *("--max-num-seqs", str(request.concurrency)),
        *("--kv-cache-memory-bytes", str(request.memory)),
        *("--dtype", request.dtype, "--block-size", str(request.block_size)),
    ]
    if policy is not None:
        parts += ["--kv-policy", policy, "--kv-policy-config", json.dumps(settings)]
    return shlex.join(parts)


# -- words -------------------------------------------------------------------------


def _reasons(
    best: Option,
    options: Sequence[Option],
    evidence: Evidence,
    request: Request,
    workload: Workload,
) -> Iterator[str]:
    share = _fitting_share(request)
    yield (
        f"stock vLLM needs {amount(request.concurrency * request.stock_request)} for "
        f"{_count(request.concurrency)}; {amount(request.memory)} hold {share:.0%} of "
        "each prompt next to its answer"
    )
    fitting = len(options)
    policies = "1 policy that fits" if fitting == 1 else f"{fitting} policies that fit"
    yield (
        f"of {policies}, {best.cell.policy} at {best.cell.share:.0%} of "
        f"the context {_best_at(best.cell, evidence, workload)}"
    )
    if len(options) > 1:
        second = options[1].cell
        yield (
            f"next, {second.policy} at {second.share:.0%}: "
            f"{_scores_text(second, workload)}"
        )


def _best_at(cell: Measured, evidence: Evidence, workload: Workload) -> str:
    what = {
        Workload.DOCUMENT: "finds the most keys",
        Workload.CHAT: "is closest to full KV",
        Workload.AGENT: "is best in keys found and closeness to full KV together",
    }[workload]
    stock = _scores_text(evidence.stock, Workload.DOCUMENT)
    text = f"{what}: {_scores_text(cell, workload)}"
    return text if workload is Workload.CHAT else f"{text} (stock: {stock})"


def _scores_text(cell: Measured, workload: Workload) -> str:
    names = {PASSKEY: "pass keys", MULTIKEY: "keys among sixteen"}
    parts = []
    for task in _TASKS[workload]:
        if task == KL:
            parts.append(f"KL {cell.mean(KL):.3f} nats")
        elif (found := cell.found(task)) is not None:
            parts.append(f"{found[0]} of {found[1]} {names[task]}")
    return ", ".join(parts)


def _notes(
    best: Option, evidence: Evidence, request: Request, workload: Workload
) -> Iterator[str]:
    tokens = " and ".join(f"{count:,}" for count in evidence.tokens)
    yield (
        f"extrapolated: measured on {' and '.join(evidence.models)}, with {tokens} "
        f"tokens, not on your model or texts; your prompts are "
        f"{request.prompt_tokens / evidence.tokens[-1]:.1f} times as long. Measure "
        "them: benchmarks/quality/quality.py"
    )
    samples = best.cell.found(PASSKEY) or best.cell.found(MULTIKEY)
    if samples:
        yield (
            f"{samples[1]} questions per task: differences of a few keys may be "
            "chance; the policies' pages test them"
        )
    keeps_all = evidence.contracts[best.cell.policy].keeps_all
    if best.prefill_block is not None and keeps_all:
        yield (
            "the prompt does not fit the pool, so it moves to host memory while it is "
            "read (prefill_block); its tokens still attend to all of it. What "
            "generated tokens find was measured without prefill_block"
        )
    elif best.prefill_block is not None:
        yield (
            "the prompt does not fit the pool, so the policy compresses while it reads "
            "it (prefill_block). Quality was measured without prefill_block"
        )
    host = _host_bytes(best.cell, request)
    if host:
        total = amount(host * request.concurrency)
        yield f"needs up to {total} of host memory in addition"
    if workload is Workload.CHAT:
        yield "sessions keep caches between turns and take host memory in addition"
    if not any(best.cell.speed.values()):
        yield "the speed of these settings was not measured"


def _figures(
    option: Option, evidence: Evidence, request: Request, workload: Workload
) -> dict[str, Any]:
    cell = option.cell
    return {
        "policy": cell.policy,
        "share": cell.share,
        "settings": _settings(option, evidence, request, workload),
        "device_bytes": request.decoding(cell.device_share),
        "host_bytes": _host_bytes(cell, request),
        "measured_with_these_settings": option.prefill_block is None,
        "scores": {model: dict(scores) for model, scores in cell.scores.items()},
        "speed": {model: dict(ratios) for model, ratios in cell.speed.items()},
        "pass_keys": cell.found(PASSKEY),
        "keys_of_sixteen": cell.found(MULTIKEY),
        "kl": cell.mean(KL),
    }


def _count(requests: int) -> str:
    return "1 request" if requests == 1 else f"{requests:,} requests"


def _print(console: Console, result: dict[str, Any]) -> None:
    policy = result["policy"]
    if policy is None:
        console.print("[bold red]Nothing fits.[/]")
    elif policy == "stock":
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
