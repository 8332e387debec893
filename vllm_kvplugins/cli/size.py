"""``kvplugins size``: compute the memory of requests without loading a model."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_kvplugins.amounts import amount
from vllm_kvplugins.cli import model_checks
from vllm_kvplugins.cli.console import out, user_errors
from vllm_kvplugins.errors import KVPolicyError, coded, refuse

if TYPE_CHECKING:
    from vllm_kvplugins.model_config import ConfigOnlyModel
    from vllm_kvplugins.model_memory import ModelMemory
    from vllm_kvplugins.plan.geometry import Geometry
    from vllm_kvplugins.plan.sizing import Footprint
    from vllm_kvplugins.policies.base import KVCachePolicy

_GIB = 1 << 30
_ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def size(
    model: Annotated[
        str, typer.Argument(help="Folder, or Hugging Face ID in the cache.")
    ],
    context: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens of each prompt.")
    ],
    policy: Annotated[
        str, typer.Option("--policy", "--kv-policy", help="See `kvplugins list`.")
    ],
    policy_config: Annotated[
        str | None,
        typer.Option(
            "--policy-config",
            "--kv-policy-config",
            metavar="JSON",
            help="Settings of the policy, for example '{\"budget\": 512}'.",
        ),
    ] = None,
    answer: Annotated[
        int, typer.Option(metavar="M", min=2, help="Tokens of each answer.")
    ] = 512,
    concurrency: Annotated[
        int, typer.Option(metavar="C", min=1, help="Concurrent requests.")
    ] = 1,
    pool_gib: Annotated[
        float | None,
        typer.Option(metavar="G", min=0, help="vLLM's KV cache in GiB."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(metavar="D", help="Type of keys and values.")
    ] = "bfloat16",
    block_size: Annotated[
        int, typer.Option(metavar="B", min=1, help="Tokens per block.")
    ] = 32,
    prefill_chunk: Annotated[
        int,
        typer.Option(
            "--max-num-batched-tokens",
            metavar="T",
            min=1,
            help="vLLM's limit of tokens per step; counts for sliding windows only.",
        ),
    ] = 2048,
    shared_prefix: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="First tokens that all requests share, such as a system prompt.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of tables.")
    ] = False,
) -> None:
    """Compute the KV memory of requests under a policy, from config.json alone.

    Exit status 1 if fewer requests fit the pool than --concurrency.
    """
    if pool_gib is not None and not math.isfinite(pool_gib):
        message = f"{pool_gib} GiB is not the size of a pool; give a finite number"
        raise typer.BadParameter(coded("KVP603", message), param_hint="--pool-gib")
    with user_errors():
        figures = sizing(
            model,
            policy,
            policy_config,
            prompt_tokens=context,
            answer_tokens=answer,
            requests=concurrency,
            pool_bytes=None if pool_gib is None else int(pool_gib * _GIB),
            dtype=dtype,
            block_size=block_size,
            prefill_chunk=prefill_chunk,
            shared_prefix=shared_prefix,
        )
    if as_json:
        typer.echo(json.dumps(figures, indent=2))
    else:
        _print(out(), figures)
    pool = figures["pool"]
    raise typer.Exit(1 if pool and pool["requests"] < concurrency else 0)


def sizing(
    model_name: str,
    policy_name: str,
    policy_config: str | None,
    *,
    prompt_tokens: int,
    answer_tokens: int,
    requests: int,
    pool_bytes: int | None,
    dtype: str,
    block_size: int,
    prefill_chunk: int,
    shared_prefix: int | None = None,
) -> dict[str, Any]:
    """All figures as plain data, as printed by ``--json``.

    Args:
        shared_prefix: tokens that all prompts have in common; None: the number in
            ``policy_config``, if any.

    Raises:
        KVPolicyError: policy, model or settings cannot run; lists all reasons.
    """
    from vllm_kvplugins.cli.settings import written_settings
    from vllm_kvplugins.config import parse_options, parse_policy
    from vllm_kvplugins.model_config import read_model_config
    from vllm_kvplugins.model_memory import ModelMemory
    from vllm_kvplugins.plan.geometry import Lengths
    from vllm_kvplugins.plan.residency_plan import ResidencyPlan
    from vllm_kvplugins.plan.sizing import footprint

    options = parse_options(policy_config) if policy_config is not None else {}
    policy = parse_policy({"name": policy_name, **options})
    model = read_model_config(model_name, dtype)
    _check_start_up(policy, model, dtype, block_size)
    memory = ModelMemory.of(model, block_size)
    geometry = memory.geometry
    tokens = prompt_tokens + answer_tokens
    _refuse_impossible_lengths(policy, geometry, tokens)

    shared = _shared_blocks(policy, options, shared_prefix, prompt_tokens, block_size)
    history_only = policy.turns is not None and policy.turns.history_only
    history = (prompt_tokens,) if history_only else ()
    lengths = Lengths(prompt_tokens, history, shared_blocks=shared)
    request = footprint(
        policy.plan_request(lengths, geometry),
        prompt_tokens,
        answer_tokens,
        policy.max_prompt_blocks(tokens, geometry),
        memory.others,
        prefill_chunk,
    )
    stock = footprint(
        ResidencyPlan(geometry.block_size),
        prompt_tokens,
        answer_tokens,
        others=memory.others,
        prefill_chunk=prefill_chunk,
    )
    return {
        "model": model_name,
        "policy": policy.name,
        "config": written_settings(policy),
        "dtype": dtype,
        "num_layers": geometry.num_layers,
        "num_kv_heads": geometry.num_kv_heads,
        "head_dim": memory.shape.head_dim,
        "kv_bytes_per_token": geometry.kv_bytes_per_token,
        "block_size": geometry.block_size,
        "block_bytes": memory.block_bytes,
        "prompt_tokens": prompt_tokens,
        "answer_tokens": answer_tokens,
        "shared_blocks": shared,
        **_memory(policy, memory, request, stock, tokens, requests, pool_bytes, shared),
        "notes": _notes(policy, model, tokens),
    }


def _memory(
    policy: KVCachePolicy,
    memory: ModelMemory,
    request: Footprint,
    stock: Footprint,
    tokens: int,
    requests: int,
    pool_bytes: int | None,
    shared_blocks: int,
) -> dict[str, Any]:
    """Memory of one request, of ``requests`` requests, and what fits into a pool.

    All requests hold the shared blocks once, also those of stock vLLM.
    """
    from vllm_kvplugins.plan.sizing import blocks_for

    block_bytes = memory.block_bytes
    storage = policy.host_storage
    host_bytes = storage.host_bytes(tokens, memory.geometry) if storage else 0
    device_bytes = reserved = 0
    if policy.retrieval is not None:
        device_bytes = policy.retrieval.device_bytes(tokens, memory.geometry)
        reserved = policy.retrieval.reserved_device_bytes(memory.geometry)
    host_limit = storage.host_memory_bytes if storage else None
    host_requests = host_limit // host_bytes if host_limit and host_bytes else None
    own, stock_own = request.without(shared_blocks), stock.without(shared_blocks)
    return {
        "request": {
            **_amounts(request, block_bytes),
            "host_bytes": host_bytes,
            "device_bytes": device_bytes,
        },
        "reserved_device_bytes": reserved,
        "stock_request": _amounts(stock, block_bytes),
        "wanted": {
            "requests": requests,
            "pool_bytes": (shared_blocks + blocks_for(own, requests)) * block_bytes,
            "stock_pool_bytes": (shared_blocks + blocks_for(stock_own, requests))
            * block_bytes,
            "host_bytes": requests * host_bytes,
        },
        "pool": None
        if pool_bytes is None
        else _pool(
            own, stock_own, pool_bytes, block_bytes, host_requests, shared_blocks
        ),
    }


def _amounts(footprint: Footprint, block_bytes: int) -> dict[str, dict[str, int]]:
    """Blocks and bytes of a request at each stage."""
    names = ("full", "prefill_peak", "after_prefill", "decode_peak", "end")
    blocks = {name: getattr(footprint, name) for name in names}
    return {
        name: {"blocks": count, "bytes": count * block_bytes}
        for name, count in blocks.items()
    }


def _pool(
    request: Footprint,
    stock: Footprint,
    pool_bytes: int,
    block_bytes: int,
    host_requests: int | None,
    shared_blocks: int,
) -> dict[str, Any]:
    """Requests that fit into a pool, with the policy and with stock vLLM.

    Args:
        request, stock: blocks beyond the shared ones.
    """
    from vllm_kvplugins.plan.sizing import capacity

    own_bytes = max(pool_bytes - shared_blocks * block_bytes, 0)
    with_policy = capacity(request, own_bytes, block_bytes, host_requests)
    with_stock = capacity(stock, own_bytes, block_bytes, None)
    return {
        "bytes": pool_bytes,
        "blocks": max(pool_bytes // block_bytes - 1, 0),
        "requests": with_policy.requests,
        "decoding_alone": with_policy.decoding,
        "limit": with_policy.limit.value,
        "stock_requests": with_stock.requests,
        "stock_decoding_alone": with_stock.decoding,
        "stock_limit": with_stock.limit.value,
    }


def _shared_blocks(
    policy: KVCachePolicy,
    options: dict[str, Any],
    shared_prefix: int | None,
    prompt_tokens: int,
    block_size: int,
) -> int:
    """Blocks of the prefix that all requests share.

    Raises:
        KVPolicyError: the policy shares no prefixes.
    """
    from vllm_kvplugins.config import parse_prefix

    setting = parse_prefix(options).shared_prefix
    tokens = shared_prefix
    if tokens is None:
        tokens = setting if isinstance(setting, int) else 0
    if tokens and not policy.keeps_shared_prefix:
        raise KVPolicyError(
            coded("KVP050", f"{policy.name} shares no prefix; remove --shared-prefix")
        )
    return min(tokens, prompt_tokens - 1) // block_size


def _check_start_up(
    policy: KVCachePolicy, model: ConfigOnlyModel, dtype: str, block_size: int
) -> None:
    """Run the start-up checks of the engine that need no engine."""
    title = f"KV policy {policy.name!r} cannot run with these settings"
    refuse(
        title,
        [
            *model_checks.model_problems(model),
            *model_checks.cache_problems(dtype, block_size),
            *model_checks.policy_problems(policy, model),
        ],
    )
    refuse(title, model_checks.shape_problems(policy, model))


def _refuse_impossible_lengths(
    policy: KVCachePolicy, geometry: Geometry, tokens: int
) -> None:
    from vllm_kvplugins.vllm_adapter.config import host_memory

    reason = host_memory.host_limit_problem(policy, geometry, tokens)
    if reason:
        raise KVPolicyError(reason)


def _notes(policy: KVCachePolicy, model: ConfigOnlyModel, tokens: int) -> list[str]:
    """Limits of the figures that matter for this request."""
    from vllm_kvplugins.model_config import FULL, STATE

    notes = []
    states = model.layer_types.count(STATE)
    others = sum(kind != FULL for kind in model.layer_types) - states
    if others:
        notes.append(
            f"{others} of {len(model.layer_types)} layers have a sliding window or "
            "chunks and stay vLLM's. The figures contain the blocks that they hold; "
            f"`kvplugins doctor {model.model}` shows them"
        )
    if states:
        notes.append(
            f"{states} layers keep a recurrent state. The figures contain three blocks "
            "per group of them and request, which vLLM needs at most, and blocks that "
            "are large enough for one state, with the dtypes of states on CPUs."
        )
    positions = model.max_positions
    if positions is not None and tokens > positions:
        notes.append(
            f"config.json allows {positions} positions; vLLM accepts {tokens} only "
            "with scaled RoPE"
        )
    storage, turns = policy.host_storage, policy.turns
    if storage is not None and storage.host_memory_bytes is None:
        notes.append(
            "host_memory is not set: the engine uses half of the memory that is free "
            "at start-up, and requests wait for it"
        )
    if turns is not None and turns.history_only:
        notes.append(
            f"{policy.name} compresses histories, not queries: the figures assume "
            "a prompt that is all history"
        )
    elif turns is not None:
        notes.append(
            f"{policy.name} frees blocks at the ends of turns: the figures assume a "
            "prompt without turns"
        )
    if policy.probing is not None:
        notes.append(
            f"{policy.name} runs probe tokens after the prompt. They need positions, "
            "but no blocks: keep --max-model-len below the limit of the model"
        )
    return notes


# -- tables -----------------------------------------------------------------------

_ROWS = {
    "prefill_peak": "peak of the prefill",
    "after_prefill": "after the prefill",
    "decode_peak": "peak while decoding",
    "end": "end of the answer",
}


def _print(console: Console, figures: dict[str, Any]) -> None:
    request, stock = figures["request"], figures["stock_request"]
    console.print(
        f"[bold]{escape(figures['policy'])}[/] on {escape(figures['model'])}: "
        f"prompt of {figures['prompt_tokens']:,} tokens, answer of "
        f"{figures['answer_tokens']:,}"
    )
    console.print(
        f"{figures['num_layers']} layers × {figures['num_kv_heads']} KV heads × "
        f"{figures['head_dim']}, {figures['dtype']}: "
        f"{figures['kv_bytes_per_token']:,} bytes per token, "
        f"{amount(figures['block_bytes'])} per block of {figures['block_size']} "
        f"tokens; without a policy, a request needs "
        f"{amount(request['full']['bytes'])}\n"
    )
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("one request", no_wrap=True)
    for name in ("blocks", "memory", "stock blocks", "stock memory"):
        table.add_column(name, justify="right", no_wrap=True)
    for key, label in _ROWS.items():
        cells = [
            text
            for used in (request[key], stock[key])
            for text in (f"{used['blocks']:,}", amount(used["bytes"]))
        ]
        table.add_row(label, *cells)
    if request["host_bytes"]:
        table.add_row("host memory, maximum", "", amount(request["host_bytes"]))
    if request["device_bytes"]:
        used = amount(request["device_bytes"])
        table.add_row("device memory, codes and means", "", used)
    console.print(table)
    if figures["shared_blocks"]:
        shared = figures["shared_blocks"]
        console.print(
            f"all requests hold {shared:,} of these blocks once "
            f"({amount(shared * figures['block_bytes'])}), also with stock vLLM"
        )
    if figures["reserved_device_bytes"]:
        console.print(
            f"{amount(figures['reserved_device_bytes'])} of device memory next to the "
            "pool are set aside at start-up, in proportion to host_memory"
        )
    for line in (*_requested_lines(figures["wanted"]), *_pool_lines(figures)):
        console.print(line)
    for note in figures["notes"]:
        console.print(f"[yellow]note:[/] {escape(note)}")


def _requested_lines(requested: dict[str, int]) -> list[str]:
    host = ""
    if requested["host_bytes"]:
        host = f", and {amount(requested['host_bytes'])} of host memory"
    return [
        f"\n[bold]Pool for {_requests(requested['requests'])} at once:[/] "
        f"{amount(requested['pool_bytes'])} (stock "
        f"{amount(requested['stock_pool_bytes'])})"
        f"{host}"
    ]


def _pool_lines(figures: dict[str, Any]) -> list[str]:
    pool = figures["pool"]
    if pool is None:
        return []
    enough = pool["requests"] >= figures["wanted"]["requests"]
    colour = "green" if enough else "bold red"
    ratio = ""
    if pool["stock_requests"] and pool["requests"]:
        ratio = f" (ratio {pool['requests'] / pool['stock_requests']:.1f})"
    return [
        f"[bold]A pool of {amount(pool['bytes'])} fits[/] [{colour}]"
        f"{_requests(pool['requests'])}[/] at once, each at full length; stock "
        f"{pool['stock_requests']:,}{ratio}",
        f"[bold]Limit:[/] {_limit(figures)}",
    ]


def _limit(figures: dict[str, Any]) -> str:
    """The reason why no further request fits."""
    pool, request = figures["pool"], figures["request"]
    prefill, decode = amount(request["prefill_peak"]["bytes"]), request["decode_peak"]
    return {
        "prefill-never-fits": f"the prefill of one prompt needs {prefill}, more than "
        "the pool. A policy frees blocks only after the prompt, so no such request can "
        "run; with prefill_block it frees blocks during the prompt",
        "start-up": "vLLM starts only if a whole request of --max-model-len fits the "
        f"pool, here {figures['prompt_tokens'] + figures['answer_tokens']:,} tokens, "
        "before a policy frees anything; with prefill_block, only the part of a prompt "
        "that is held at once must fit",
        "prefill": f"the prefill. A prompt needs {prefill} in addition to the decoding "
        f"requests; without it {pool['decoding_alone']:,} could decode",
        "decoding": f"decoding, {amount(decode['bytes'])} per request",
        "host-memory": f"host memory, {amount(request['host_bytes'])} per request; "
        "raise host_memory",
    }[pool["limit"]]


def _requests(count: int) -> str:
    return f"{count:,} request" if count == 1 else f"{count:,} requests"


def element_bytes(dtype: str) -> int:
    """Bytes of one number of the cache.

    Raises:
        KVPolicyError: the cache cannot have this type.
    """
    if dtype not in _ELEMENT_BYTES:
        message = f"--dtype {dtype} is none of {', '.join(_ELEMENT_BYTES)}"
        raise KVPolicyError(coded("KVP603", message))
    return _ELEMENT_BYTES[dtype]
