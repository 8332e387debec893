"""Requests that the pool of KV blocks can never hold."""

from __future__ import annotations

from typing import Any

from vllm_kvplugins.errors import coded
from vllm_kvplugins.plan.residency_plan import ResidencyPlan
from vllm_kvplugins.policies.base import KVCachePolicy


def blocks_per_engine(vllm_config: Any) -> int | None:
    """Blocks that requests of one engine can have; None before it has started.

    vLLM writes their number into the front end's configuration when the engines are
    up, summed over those that the front end talks to.
    """
    total = vllm_config.cache_config.num_gpu_blocks
    if not total:
        return None
    parallel = vllm_config.parallel_config
    engines = parallel.data_parallel_size
    if parallel.data_parallel_rank_local is not None:
        engines = 1
    elif parallel.local_engines_only:
        engines = parallel.data_parallel_size_local
    return int(total // engines) - 1  # vLLM never hands out the first one


def pool_problem(
    policy: KVCachePolicy,
    plan: ResidencyPlan,
    prompt_tokens: int,
    answer_tokens: int,
    pool_blocks: int,
    runs_ahead: bool,
    other_blocks: int = 0,
    slots_ahead: int = 0,
    max_slots: int | None = None,
) -> str | None:
    """Why a request never fits in the pool; None if it fits.

    vLLM would preempt such a request forever.

    Args:
        plan: the request's plan.
        answer_tokens: maximum number of generated tokens.
        pool_blocks: usable blocks of the pool.
        runs_ahead: with async scheduling, a step allocates its block before the step
            in flight has freed its own.
        other_blocks: blocks that layers without a policy hold at the same time.
        slots_ahead, max_slots: as in ``ResidencyPlan.peak_blocks``.
    """
    # vLLM never computes the KV entries of the answer's last token.
    last = prompt_tokens + max(answer_tokens, 1) - 1
    held = plan.peak_blocks(last, slots_ahead=slots_ahead, max_slots=max_slots)
    need = held + runs_ahead + other_blocks
    if need <= pool_blocks:
        return None
    return coded(
        "KVP502",
        f"a prompt of {prompt_tokens} tokens and an answer of up to {answer_tokens} "
        f"tokens need up to {need} blocks of {plan.block_size} tokens under KV policy "
        f"{policy.name!r}, and the pool has {pool_blocks}; lower max_tokens, set a "
        "decode_budget, or give vLLM a larger KV cache",
    )
