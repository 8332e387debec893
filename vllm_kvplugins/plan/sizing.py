"""How much memory requests need under a plan, and how many fit a pool.

Counts blocks, as vLLM's pool does. A pool of n blocks holds n - 1: vLLM never
hands out the first one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from vllm_kvplugins.plan.residency_plan import ResidencyPlan


class Limit(str, Enum):
    """What keeps more requests from running in a pool."""

    # The prompt alone needs more than the pool.
    PREFILL_NEVER_FITS = "prefill-never-fits"
    # vLLM starts only if a whole request of --max-model-len fits.
    START_UP = "start-up"
    # The last request's whole prompt must fit next to the requests that decode.
    PREFILL = "prefill"
    DECODING = "decoding"
    HOST_MEMORY = "host-memory"


@dataclass(frozen=True, slots=True)
class Footprint:
    """Blocks that one request holds.

    Attributes:
        full: prompt and answer, if nothing is freed.
        prefill_peak: most while the prompt is computed.
        after_prefill: at the first decode step, when the prompt's compaction has
            given its blocks back.
        decode_peak: most in any decode step.
        end: after the last decode step.
        positions: what vLLM's start-up check wants: prompt and answer with the
            answer's last token, which is never computed; or the policy's bound for
            prompts.
    """

    full: int
    prefill_peak: int
    after_prefill: int
    decode_peak: int
    end: int
    positions: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many requests a pool carries, each counted at its longest.

    Attributes:
        pool: blocks that can be handed out.
        decoding: as many could decode if their prompts took no room.
        requests: as many run at once, one after the other having been admitted.
        limit: why not one more.
    """

    pool: int
    decoding: int
    requests: int
    limit: Limit


def footprint(
    plan: ResidencyPlan,
    prompt_tokens: int,
    answer_tokens: int,
    prompt_blocks: int | None = None,
) -> Footprint:
    """Walk one request through its plan.

    Args:
        plan: for this prompt length.
        prompt_tokens: >= 1.
        answer_tokens: >= 2; the prefill makes the first, so that one decode step
            or more follows.
        prompt_blocks: the policy's bound for prompts up to that length, if any.

    Cost: O(blocks of the answer).
    """
    size = plan.block_size
    last = prompt_tokens + answer_tokens - 1
    positions = -(-(last + 1) // size)
    # A step first frees blocks, then allocates the block of its token: a request holds
    # more only in steps that begin a block.
    most = plan.resident_blocks(prompt_tokens)
    for computed in range(-(-prompt_tokens // size) * size, last, size):
        most = max(most, plan.resident_blocks(computed) + 1)
    return Footprint(
        full=-(-last // size),
        prefill_peak=plan.peak_blocks(prompt_tokens),
        after_prefill=plan.resident_blocks(prompt_tokens),
        decode_peak=most,
        end=plan.resident_blocks(last),
        positions=positions if prompt_blocks is None else prompt_blocks,
    )


def capacity(
    held: Footprint, pool_bytes: int, block_bytes: int, host_requests: int | None
) -> Capacity:
    """How many requests like this one a pool carries.

    Prompts come in one at a time: the last one's must fit next to the others,
    which decode by then.

    Args:
        held: of each request.
        pool_bytes: memory of vLLM's KV cache.
        block_bytes: of all layers and ranks.
        host_requests: as many fit the host memory; None if that has no limit.
    """
    pool = max(pool_bytes // block_bytes - 1, 0)
    decoding = pool // held.decode_peak
    if held.prefill_peak > pool:
        return Capacity(pool, decoding, 0, Limit.PREFILL_NEVER_FITS)
    if held.positions > pool:
        return Capacity(pool, decoding, 0, Limit.START_UP)
    decoding_beside_prefill = (pool - held.prefill_peak) // held.decode_peak
    requests = min(decoding, decoding_beside_prefill + 1)
    limit = Limit.PREFILL if requests < decoding else Limit.DECODING
    if host_requests is not None and host_requests < requests:
        requests, limit = host_requests, Limit.HOST_MEMORY
    return Capacity(pool, decoding, requests, limit)


def blocks_for(held: Footprint, requests: int) -> int:
    """Smallest pool, in blocks with the one that is never handed out, that carries
    so many requests."""
    decoding = requests * held.decode_peak
    prefilling = (requests - 1) * held.decode_peak + held.prefill_peak
    return max(decoding, prefilling, held.positions) + 1
