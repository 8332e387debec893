"""Speculative decoding under a policy: what runs, and what is refused.

The model verifies drafts: it computes them in one step and rejects the first wrong one
and all after it. Under a policy, no rejected draft may leave a trace:

- Compactions run after steps without drafts (``ResidencyPlan.clip_chunk``).
- Votes and kept queries count accepted tokens only (``PolicyRuntime``).
- Each draft retrieves with its own query, as without speculation.

The scheduler plans a step when it knows which drafts of the step before were accepted,
so asynchronous scheduling is off.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm_kvplugins.errors import coded
from vllm_kvplugins.model_config import STATE

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    from vllm_kvplugins.policies.base import KVCachePolicy

# Drafters without a KV cache of their own.
_METHODS = ("ngram", "suffix", "medusa")


def argument_problems(args: EngineArgs) -> list[str]:
    """Arguments that contradict speculative decoding under a policy."""
    if not args.speculative_config or not args.async_scheduling:
        return []
    return [
        coded(
            "KVP048",
            "--async-scheduling plans a step before it is known which drafts were "
            "accepted, and a policy plans with accepted tokens; remove "
            "--async-scheduling or --speculative-config",
        )
    ]


@contextmanager
def without_async_scheduling(args: EngineArgs) -> Iterator[None]:
    """Turn asynchronous scheduling off if the engine speculates.

    Restores the argument on exit.
    """
    saved = args.async_scheduling
    if args.speculative_config:
        args.async_scheduling = False
    try:
        yield
    finally:
        args.async_scheduling = saved


def problems(
    vllm_config: VllmConfig, policy: KVCachePolicy, types: Sequence[str]
) -> list[str]:
    """Why a policy cannot run with this speculative decoding.

    Args:
        types: attention type of each layer.
    """
    speculative = vllm_config.speculative_config
    if speculative is None:
        return []
    reasons = []
    if speculative.method not in _METHODS:
        reasons.append(
            f"drafter {speculative.method!r} is not one of those without a KV cache "
            "that run under a policy; use one of " + ", ".join(_METHODS)
        )
    if vllm_config.use_v2_model_runner:
        reasons.append(
            "model runner V2 does not tell a policy which drafts were accepted; set "
            "VLLM_USE_V2_MODEL_RUNNER=0"
        )
    if STATE in types:
        reasons.append(
            "the recurrent states of this model would need blocks for drafts; remove "
            "--speculative-config"
        )
    if policy.retrieval is not None and policy.retrieval.prefetch != "off":
        reasons.append(
            f'"prefetch": "{policy.retrieval.prefetch}" selects with one query per '
            'step, and each draft selects with its own; use "prefetch": "off"'
        )
    return [coded("KVP004", f"speculative decoding: {reason}") for reason in reasons]
