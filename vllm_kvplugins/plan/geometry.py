"""The sizes that a plan is made from: the shape of the cache and token counts."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_kvplugins.plan.residency_plan import Compaction


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shape of the KV cache that a plan is made for.

    Attributes:
        block_size: tokens per block.
        num_layers: attention layers in the heap.
        num_kv_heads: KV heads per layer on this rank.
        kv_bytes_per_token: bytes of K and V of one token over all layers and
            all KV heads of all ranks.
    """

    block_size: int
    num_layers: int
    num_kv_heads: int
    kv_bytes_per_token: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """Token counts of one request that both processes know.

    Attributes:
        turn_ends: token counts at which turns of the prompt end, ascending; see
            the policy's ``turn_ends``.
        restored: the compaction behind the cache that a continued session starts
            from, the plan's first one then. Its ``candidates`` start at block 0,
            ``zone`` is the retained region. Nothing is planned up to its
            ``at_tokens``; so many tokens are restored at least.
    """

    prompt_tokens: int
    turn_ends: tuple[int, ...] = ()
    restored: Compaction | None = None
