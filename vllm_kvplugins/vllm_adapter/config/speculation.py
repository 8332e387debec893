"""Speculative decoding under a policy: what runs, and what is refused.

The model verifies drafts: it computes them in one step and rejects the first wrong one
and all after it. Under a policy, no rejected draft may leave a trace:

- Compactions run after steps without drafts (``ResidencyPlan.clip_chunk``).
- Votes and kept queries count accepted tokens only (``PolicyRuntime``).
- Each draft retrieves with its own query, as without speculation.
- The layers of a drafter with a KV cache keep the tokens that the model's layers keep
  (``engine/draft_layers.py``). The drafter runs before the compaction of its step. Its
  cache has the dtype of the model's; the worker checks the layers, whose checkpoint may
  ask for another one (``worker/draft_layers.py``).
- Another KV connector is shown accepted tokens only (``scheduler.exact_prefix``).

The scheduler plans a step when it knows which drafts of the step before were accepted,
so asynchronous scheduling is off.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm_kvplugins.errors import coded
from vllm_kvplugins.model_config import FULL, STATE, groups_of, layer_types

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    from vllm_kvplugins.policies.base import KVCachePolicy

# Drafters without a KV cache, and with one.
_WITHOUT_CACHE = ("ngram", "suffix", "medusa")
_WITH_CACHE = ("draft_model", "eagle", "eagle3", "mtp")


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


def drafter_with_cache(vllm_config: VllmConfig) -> tuple[str, Any] | None:
    """Method and model configuration of a drafter with a KV cache; None without one."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method not in _WITH_CACHE:
        return None
    return speculative.method, speculative.draft_model_config


def problems(
    vllm_config: VllmConfig,
    policy: KVCachePolicy,
    types: Sequence[str],
) -> list[str]:
    """Why a policy cannot run with this speculative decoding.

    Args:
        types: attention type of each layer of the model.
    """
    speculative = vllm_config.speculative_config
    if speculative is None:
        return []
    reasons: list[str] = []
    if speculative.method in _WITH_CACHE:
        reasons += _cache_problems(vllm_config, types)
    elif speculative.method not in _WITHOUT_CACHE:
        reasons.append(
            f"drafter {speculative.method!r} has not been tried under a policy; use "
            "one of " + ", ".join((*_WITHOUT_CACHE, *_WITH_CACHE))
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


def _cache_problems(vllm_config: VllmConfig, types: Sequence[str]) -> Iterator[str]:
    """Why a drafter with a KV cache cannot run, without code."""
    # `kvplugins recommend` runs without torch, which the engine imports.
    from vllm_kvplugins.engine.heap import FP8_DTYPES

    speculative = vllm_config.speculative_config
    without = f"use a drafter without a KV cache ({', '.join(_WITHOUT_CACHE)})"
    drafter = f"drafter {speculative.method!r} has a KV cache, and"
    draft = speculative.draft_model_config
    if any(kind != FULL for kind in types):
        for reason in _window_problems(vllm_config, types):
            yield f"{drafter} {reason}; {without}"
    if draft.use_mla or any(kind != FULL for kind in _draft_types(draft)):
        yield (
            f"{drafter} some of its layers are not plain full attention; use another "
            f"drafter ({', '.join(_WITHOUT_CACHE)} have no cache)"
        )
    if vllm_config.num_prefill_lookahead_tokens > 1:
        yield (
            f"{drafter} its layers read several tokens behind a chunk of the prompt, "
            f"which may end anywhere under a policy; {without}"
        )
    own, dtype = speculative.kv_cache_dtype, vllm_config.cache_config.cache_dtype
    if own is not None and FP8_DTYPES.get(own) != FP8_DTYPES.get(dtype):
        yield (
            f"{drafter} its dtype {own!r} is not that of the model's cache, {dtype!r}, "
            'and both lie in the same blocks; remove "kv_cache_dtype"'
        )
    if speculative.parallel_drafting:
        yield (
            f"{drafter} it drafts all tokens at once, which has not been tried; remove "
            '"parallel_drafting"'
        )


def _window_problems(vllm_config: VllmConfig, types: Sequence[str]) -> Iterator[str]:
    """What keeps the layers of a drafter out of the group of the full-attention layers.

    Args:
        types: attention type of each layer of the model, some of them not full.
    """
    model, speculative = vllm_config.model_config, vllm_config.speculative_config
    draft = speculative.draft_model_config
    if speculative.method == "mtp":
        yield "MTP layers have not been tried with layers of other attention"
    heads, own = (
        (each.get_total_num_kv_heads(), each.get_head_size()) for each in (model, draft)
    )
    if own != heads:
        yield (
            f"with layers of other attention, its KV heads ({own[0]} of {own[1]} "
            f"elements) must match those of the model ({heads[0]} of {heads[1]})"
        )
    num_groups = groups_of([*types, *_draft_types(draft)]).get(FULL, 0)
    if num_groups > 1:
        yield (
            f"vLLM would put its layers and the model's full-attention layers into "
            f"{num_groups} KV cache groups, and a policy manages one"
        )


def draft_layer_types(vllm_config: VllmConfig) -> tuple[str, ...]:
    """Attention type of each layer of a drafter with a KV cache; none without one."""
    drafter = drafter_with_cache(vllm_config)
    return () if drafter is None else _draft_types(drafter[1])


def _draft_types(model: Any) -> tuple[str, ...]:
    """Attention type of each layer of a draft model."""
    config = model.hf_text_config
    return layer_types(config, getattr(config, "num_hidden_layers", 0))
