"""How much memory requests need under a plan, and how many fit into a pool.

Counts blocks, as vLLM does. A pool of n blocks has n - 1 usable blocks, because vLLM
never allocates its null block.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from enum import StrEnum

from vllm_kvplugins.other_layers import OtherLayers
from vllm_kvplugins.plan.residency_plan import ResidencyPlan

NO_OTHER_LAYERS = OtherLayers()


class Limit(StrEnum):
    """Why a pool cannot run one more request."""

    # A single prompt needs more than the pool.
    PREFILL_NEVER_FITS = "prefill-never-fits"
    # vLLM starts only if a whole request of --max-model-len fits.
    START_UP = "start-up"
    # The whole prompt of the last request must fit next to the decoding requests.
    PREFILL = "prefill"
    DECODING = "decoding"
    HOST_MEMORY = "host-memory"


@dataclass(frozen=True, slots=True)
class Footprint:
    """Number of blocks that one request holds, in all layers.

    Attributes:
        full: for prompt and answer, if the policy frees nothing.
        prefill_peak: maximum while the prompt is computed.
        after_prefill: at the first decode step, when the compaction of the prompt has
            freed its blocks.
        decode_peak: maximum of all decode steps.
        end: after the last decode step.
        positions: blocks that vLLM's start-up check requires: for prompt and answer
            with the last token of the answer, which is never computed; or the policy's
            bound for prompts.
    """

    full: int
    prefill_peak: int
    after_prefill: int
    decode_peak: int
    end: int
    positions: int

    def without(self, shared_blocks: int) -> Footprint:
        """The blocks that a request holds beyond a prefix that all requests share."""
        blocks = (count - shared_blocks for count in astuple(self))
        return Footprint(*blocks)


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many requests fit into a pool, each at its full length.

    Attributes:
        pool: usable blocks.
        decoding: number of requests that could decode if prefill needed no blocks.
        requests: number of requests that run at the same time, admitted one by one.
        limit: why no further request fits.
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
    others: OtherLayers = NO_OTHER_LAYERS,
    prefill_chunk: int = 1,
) -> Footprint:
    """Count the blocks of one request under its plan.

    Args:
        plan: for this prompt length.
        prompt_tokens: at least 1.
        answer_tokens: at least 2: the prefill generates the first token, and at least
            one decode step follows.
        prompt_blocks: the policy's bound for prompts up to that length, if any.
        others: the layers that the policy does not manage.
        prefill_chunk: largest number of prompt tokens in one step.

    Cost: O(blocks of the answer).
    """
    size = plan.block_size
    last = prompt_tokens + answer_tokens - 1
    positions = -(-(last + 1) // size)
    # A step first frees blocks, then allocates the block of its token. The number of
    # blocks therefore grows only in steps that begin a block.
    decode_peak = plan.resident_blocks(prompt_tokens)
    for computed in range(-(-prompt_tokens // size) * size, last, size):
        decode_peak = max(decode_peak, plan.resident_blocks(computed) + 1)
    in_prefill = others.blocks(prompt_tokens, prefill_chunk, size)
    in_decode = others.blocks(last, 1, size)
    start_up = positions if prompt_blocks is None else prompt_blocks
    return Footprint(
        full=-(-last // size) + in_decode,
        prefill_peak=plan.peak_blocks(prompt_tokens) + in_prefill,
        after_prefill=plan.resident_blocks(prompt_tokens)
        + others.blocks(prompt_tokens, 1, size),
        decode_peak=decode_peak + in_decode,
        end=plan.resident_blocks(last) + in_decode,
        positions=start_up + others.blocks(last + 1, prefill_chunk, size),
    )


def capacity(
    request: Footprint, pool_bytes: int, block_bytes: int, host_requests: int | None
) -> Capacity:
    """How many equal requests fit into a pool.

    Prompts are computed one at a time. The last prompt must fit next to the other
    requests, which then decode.

    Args:
        held: blocks of each request.
        pool_bytes: memory of vLLM's KV cache.
        block_bytes: bytes of a block, over all layers and ranks.
        host_requests: number of requests that fit into host memory; None: no limit.
    """
    pool = max(pool_bytes // block_bytes - 1, 0)
    decoding = pool // request.decode_peak
    if request.prefill_peak > pool:
        return Capacity(pool, decoding, 0, Limit.PREFILL_NEVER_FITS)
    if request.positions > pool:
        return Capacity(pool, decoding, 0, Limit.START_UP)
    decoding_during_prefill = (pool - request.prefill_peak) // request.decode_peak
    requests = min(decoding, decoding_during_prefill + 1)
    limit = Limit.PREFILL if requests < decoding else Limit.DECODING
    if host_requests is not None and host_requests < requests:
        requests, limit = host_requests, Limit.HOST_MEMORY
    return Capacity(pool, decoding, requests, limit)


def blocks_for(request: Footprint, requests: int) -> int:
    """Smallest pool for a number of requests, in blocks with the null block."""
    decoding = requests * request.decode_peak
    prefilling = (requests - 1) * request.decode_peak + request.prefill_peak
    return max(decoding, prefilling, request.positions) + 1
