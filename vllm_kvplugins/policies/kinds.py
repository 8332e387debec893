"""The kind of a policy: what a user sees when it works."""

from __future__ import annotations

from enum import StrEnum

from vllm_kvplugins.policies.base import KVCachePolicy


class PolicyKind(StrEnum):
    """What a policy does with a cache, as its capabilities show it."""

    EVICTION = "eviction"  # drops tokens when the prompt has been read
    TURNS = "turns"  # compresses the turns of a conversation
    EPISODES = "episodes"  # keeps a cache of fixed size per topic of a conversation
    RETRIEVAL = "retrieval"  # keeps all tokens on the host and fetches some per step
    SPANS = "spans"  # keeps spans of tokens at two resolutions
    FULL = "full"  # keeps every token on the device


def kind_of(policy: KVCachePolicy) -> PolicyKind:
    """The kind of a policy; it follows from the optional capabilities and ``score``."""
    if policy.spans is not None:
        return PolicyKind.SPANS
    if policy.retrieval is not None:
        return PolicyKind.RETRIEVAL
    turns = policy.turns
    if turns is not None:
        return PolicyKind.EPISODES if turns.history_only else PolicyKind.TURNS
    return PolicyKind.EVICTION if policy.has_score else PolicyKind.FULL
