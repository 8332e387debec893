"""Inputs of a plan: the shape of the cache, and the token counts of a request."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_kvplugins.plan.residency_plan import Compaction


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shape of a KV cache.

    Attributes:
        block_size: tokens per block.
        num_layers: attention layers in the heap.
        num_kv_heads: KV heads per layer on this rank.
        kv_bytes_per_token: bytes of keys and values of one token, over all layers and
            the KV heads of all ranks.
        head_dim: elements of a key, or of a value, of one KV head. Only the size of
            quantized tokens (``host_dtype``) depends on it.
        element_bytes: bytes of such an element; as ``head_dim``.
    """

    block_size: int
    num_layers: int
    num_kv_heads: int
    kv_bytes_per_token: int
    head_dim: int | None = None
    element_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Lengths:
    """Token counts of one request that scheduler and worker both know.

    Attributes:
        turn_ends: token counts at which turns of the prompt end, ascending; see the
            policy's ``turn_ends``.
        restored: the last compaction of the session that the request continues, with
            ``candidates`` from the shared prefix on; None: no session, or one that was
            never compacted. It is the first compaction of the plan. At least its
            ``at_tokens`` tokens are restored.
        shared_blocks: blocks of the prefix that other requests share. A policy's
            ``plan`` always gets 0: the counts are then those of the tokens behind the
            prefix, and the plan is moved behind it (``KVCachePolicy.plan_request``).
    """

    prompt_tokens: int
    turn_ends: tuple[int, ...] = ()
    restored: Compaction | None = None
    shared_blocks: int = 0

    def behind_prefix(self, block_size: int) -> Lengths:
        """The counts of the tokens behind the shared prefix."""
        tokens = self.shared_blocks * block_size
        restored = self.restored
        if restored is not None:
            restored = restored.moved(-self.shared_blocks, block_size)
        ends = tuple(end - tokens for end in self.turn_ends if end > tokens)
        return Lengths(self.prompt_tokens - tokens, ends, restored)
