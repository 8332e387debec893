"""``--kv-policy auto``: replaced by a policy before anything else sees it.

::

    EngineArgs, "auto" ── stock configuration ── Request ── decide ── candidates
                                                                          │
       first one that start-up does not refuse, else stock vLLM  <────────┘

The request in ``additional_config`` becomes that of the chosen policy, also in the
arguments of the command line, so that processes that are started later find a policy
and never choose again.
"""

from __future__ import annotations

import argparse
import copy
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm_kvplugins.choice import AUTO, report
from vllm_kvplugins.choice.decision import STOCK_WITH_PLUGIN, decide, served
from vllm_kvplugins.choice.evidence import load
from vllm_kvplugins.choice.requests import Request, request_for
from vllm_kvplugins.choice.settings import AutoSettings
from vllm_kvplugins.config import CONFIG_KEY, parse_auto
from vllm_kvplugins.errors import KVPolicyError, coded, refuse
from vllm_kvplugins.model_config import ConfigOnlyModel
from vllm_kvplugins.policies.registry import get_policy_class
from vllm_kvplugins.vllm_adapter.config import compat, memory_estimate
from vllm_kvplugins.vllm_adapter.config.engine_config import is_on_several_nodes
from vllm_kvplugins.vllm_adapter.startup import activation

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

logger = logging.getLogger("vllm.kv_policy")

_ARGUMENTS = "_kvplugins_arguments"


def remember_arguments(engine_args: EngineArgs, args: argparse.Namespace) -> None:
    """The command line from which vLLM's API servers make the same engine again."""
    setattr(engine_args, _ARGUMENTS, args)


def configured(
    args: EngineArgs, request: Any, build: Callable[[EngineArgs], VllmConfig]
) -> VllmConfig:
    """The configuration of an engine with the policy that is best for it, or without.

    Changes ``args.additional_config`` to what was chosen.

    Args:
        build: vLLM's ``create_engine_config``.

    Raises:
        KVPolicyError: KVP051 or a value is invalid; KVP053, neither a policy nor stock
            vLLM can serve the model; KVP054, the KV cache cannot be estimated; KVP055,
            several nodes would choose.
    """
    settings, passed = parse_auto(request)
    refuse(f"KV policy {AUTO!r} cannot choose here", _node_problems(args))
    before = args.additional_config
    _write(args, None)
    try:
        return _chosen(args, settings, passed, build)
    except BaseException:
        args.additional_config = before
        raise


def _chosen(
    args: EngineArgs,
    settings: AutoSettings,
    passed: dict[str, Any],
    build: Callable[[EngineArgs], VllmConfig],
) -> VllmConfig:
    activation.deactivate()
    evidence = load()
    wanted, origin = _request(args, build(_copy_of(args)), settings)
    able = served(evidence, wanted, settings.workload, settings.min_score)
    asked = replace(wanted, concurrency=able)
    result = decide(evidence, asked, settings.workload, settings.min_score)
    refused: dict[str, str] = {}
    can_wait = asked.longest_request <= asked.usable
    for candidate in _candidates(result, passed, settings.host_memory, can_wait):
        _write(args, candidate)
        try:
            vllm_config = activation.configured(args, candidate, build)
        except KVPolicyError as error:
            refused[candidate["name"]] = " ".join(str(error).split())
            continue
        _log(result, candidate, refused, asked, wanted, origin, settings)
        return vllm_config
    if passed or not can_wait:
        raise KVPolicyError(_nothing(result, refused, passed))
    _write(args, None)
    activation.deactivate()
    _log(result, None, refused, asked, wanted, origin, settings)
    return build(args)


def _candidates(
    result: dict[str, Any],
    passed: dict[str, Any],
    host_memory: int | None,
    can_wait: bool,
) -> Iterator[dict[str, Any]]:
    """Policies to try, best first, with their settings and those of the user.

    Stock vLLM has no sessions and no kernels of this package. If the user has set some,
    a policy that keeps everything stands for it.

    Args:
        passed: settings of the user that any policy takes.
        can_wait: the pool holds the longest request, so requests without a policy run,
            if fewer at a time.
    """
    for row in result["alternatives"]:
        limit = {}
        fields = get_policy_class(row["policy"]).model_fields
        if host_memory is not None and "host_memory" in fields:
            limit = {"host_memory": host_memory}
        yield {"name": row["policy"]} | row["settings"] | limit | passed
    if passed and can_wait:
        yield {"name": STOCK_WITH_PLUGIN} | passed


def _request(
    args: EngineArgs, stock: VllmConfig, settings: AutoSettings
) -> tuple[Request, str]:
    """What to choose for, and where the figures come from.

    Args:
        stock: the engine's configuration without a policy.
    """
    model = stock.model_config
    config = ConfigOnlyModel(model.model, str(model.dtype), model.hf_config.to_dict())
    longest = model.max_model_len

    def request(pool_bytes: int, host_bytes: int) -> Request:
        answer = min(settings.answer, max(longest // 2, 1))
        context = min(settings.context or longest, longest - answer)
        return request_for(
            config,
            prompt_tokens=max(context, 1),
            answer_tokens=answer,
            concurrency=settings.concurrency or stock.scheduler_config.max_num_seqs,
            memory=pool_bytes,
            host_memory=host_bytes,
            block_size=args.block_size or activation.default_block_size(),
            element_bytes=compat.kv_element_bytes(stock),
            longest=longest,
        )

    sizes = request(0, 0)
    pool = memory_estimate.pool(stock, sizes.bytes_of(1))
    host = memory_estimate.host(pool.num_bytes, settings.host_memory, model.model)
    if compat.fits_max_model_len(model):
        room = pool.num_bytes - sizes.bytes_of(1) - sizes.other_bytes
        longest = max(min(longest, room // sizes.token_bytes), 1)
    asked = request(pool.num_bytes, host.num_bytes)
    origin = (
        f"KV cache {_amount(pool)}, host memory {_amount(host)}, prompts of "
        f"{asked.prompt_tokens:,} tokens ("
        f"{'as set' if settings.context else 'the longest that the server accepts'})"
    )
    return asked, origin


def _amount(memory: memory_estimate.Memory) -> str:
    return f"{memory.num_bytes / (1 << 30):,.2f} GiB ({memory.source})"


def _nothing(
    result: dict[str, Any], refused: dict[str, str], passed: dict[str, Any]
) -> str:
    reasons = [*result["reasons"], *(f"{n}: {why}" for n, why in refused.items())]
    remedy = "give vLLM a larger KV cache, or lower --max-model-len"
    if passed:
        remedy += f", or remove {', '.join(passed)}"
    listed = "".join(f"\n  - {reason}" for reason in reasons)
    return coded("KVP053", f"KV policy {AUTO!r} found no policy; {remedy}:{listed}")


def _log(
    result: dict[str, Any],
    chosen: dict[str, Any] | None,
    refused: dict[str, str],
    asked: Request,
    wanted: Request,
    origin: str,
    settings: AutoSettings,
) -> None:
    """One message with everything about the choice."""
    text = list(report.lines(result, chosen, refused, load()))
    text.insert(1, f"for: {origin}, workload {settings.workload.value}")
    if asked.concurrency < wanted.concurrency:
        text.insert(
            2,
            f"for: {asked.concurrency} of {wanted.concurrency} requests at a time, "
            "which fit; others wait",
        )
    command = report.recommend_command(
        asked, settings.workload.value, settings.min_score
    )
    text.append(f"all figures: {command}")
    warns = bool(refused) or _falls_short(result, chosen, asked)
    level = logging.WARNING if warns else logging.INFO
    logger.log(level, "KV policy %s: %s", AUTO, "\n  ".join(text))


def _falls_short(
    result: dict[str, Any], chosen: dict[str, Any] | None, asked: Request
) -> bool:
    """Whether the choice loses answers, or keeps all tokens in too small a pool."""
    row = report.row_of(result, chosen)
    if row is None:
        return bool(result["stock_bytes"] > asked.usable)
    return (row["share_of_stock"] or 0.0) < AutoSettings().min_score


# -- the user's arguments ------------------------------------------------------------


def _node_problems(args: EngineArgs) -> list[str]:
    """Each node of an engine reads its own memory, and could choose another policy."""
    if not is_on_several_nodes(args):
        return []
    return [
        coded(
            "KVP055",
            "the engine runs on several nodes, and each would choose for its own "
            "memory; run kvplugins recommend once, and name its policy on every node",
        )
    ]


def _write(args: EngineArgs, request: dict[str, Any] | None) -> None:
    """Put a request, or none, in the place of the user's; also for API servers."""
    config = {k: v for k, v in args.additional_config.items() if k != CONFIG_KEY}
    if request is not None:
        config[CONFIG_KEY] = request
    args.additional_config = config
    arguments = getattr(args, _ARGUMENTS, None)
    if arguments is not None:
        arguments.additional_config = config


def _copy_of(args: EngineArgs) -> EngineArgs:
    """Arguments for a configuration that is only looked at.

    vLLM writes defaults into the arguments and into their dictionaries.
    """
    copied = copy.copy(args)
    for name, value in vars(args).items():
        if isinstance(value, dict):
            setattr(copied, name, dict(value))
    return copied
