"""What the policy did to one request, for clients that ask for it (``kv_report``).

The scheduler adds the report to the ``kv_transfer_params`` that vLLM returns with the
last output of a request.
"""

from __future__ import annotations

from typing import Any

from vllm_kvplugins.policies.base import KVCachePolicy
from vllm_kvplugins.vllm_adapter.config.request_params import (
    requested_episode,
    requested_turn_ends,
)
from vllm_kvplugins.vllm_adapter.scheduler.block_manager import ResidencyBlockManager

REPORT_KEY = "kv_policy"


def report_of(
    request: Any, manager: ResidencyBlockManager, host_bytes: int, session_bytes: int
) -> dict[str, Any]:
    """The report of a request that ends and still has its blocks.

    Where the request was preempted, it describes the last start.

    Args:
        host_bytes: host memory that the request has reserved.
        session_bytes: size of the session that it leaves; 0: it leaves none.

    Returns:
        Plain values:

        - ``policy``: its name.
        - ``tokens``: of prompt and answer, as far as they were computed.
        - ``cached_tokens``, ``loaded_tokens``, ``session_tokens``: prompt tokens that
          came from the prefix cache, from another KV connector and from a session.
        - ``session_on_device``: the session was still on the device, nothing was
          copied.
        - ``turn_ends``: where the turns end that the policy has found, in tokens of the
          prompt; None if it does not use turns.
        - ``compressions``: compactions of this request.
        - ``block_size``: tokens of a block.
        - ``held_blocks``: blocks of the policy's layers that it holds at its end.
        - ``stock_blocks``: blocks that it would hold without a policy.
        - ``host_bytes``, ``session_bytes``: as in the arguments.
        - ``episode``, ``episodes``: which episode answered, from 0, and how many there
          are; both None without episodes.
    """
    policy = manager.kv_cache_spec.policy
    request_id, admission = request.request_id, manager.starts.of(request)
    tokens = min(request.num_computed_tokens, request.num_tokens)
    stock_blocks = -(-tokens // manager.block_size)
    blocks = manager.req_to_blocks.get(request_id, ())[:stock_blocks]
    # A session's compaction counts as the first one of the request's plan.
    restored = int(admission.first_block > 0)
    episode, episodes = requested_episode(request.sampling_params) or (None, None)
    return {
        "policy": policy.name,
        "tokens": tokens,
        "cached_tokens": admission.cached_tokens,
        "loaded_tokens": max(admission.loaded_tokens - admission.cached_tokens, 0),
        "session_tokens": admission.external_tokens or 0,
        "session_on_device": manager.starts.is_in_place(request_id),
        "turn_ends": _turn_ends(request, policy),
        "compressions": manager.freed_compactions.get(request_id, 0) - restored,
        "block_size": manager.block_size,
        "held_blocks": sum(not block.is_null for block in blocks),
        "stock_blocks": stock_blocks,
        "host_bytes": host_bytes,
        "session_bytes": session_bytes,
        "episode": episode,
        "episodes": episodes,
    }


def _turn_ends(request: Any, policy: KVCachePolicy) -> list[int] | None:
    if policy.turns is None:
        return None
    requested = requested_turn_ends(request.sampling_params)
    return list(policy.find_turn_ends(request.prompt_token_ids or (), requested))
