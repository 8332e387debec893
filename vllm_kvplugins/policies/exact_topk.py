"""Exact top-k retrieval: the oracle that every index is measured against."""

from __future__ import annotations

from typing import ClassVar

from vllm_kvplugins.index import KeyIndex
from vllm_kvplugins.policies.retrieval import Retriever


class ExactTopK(Retriever):
    """Fetch the tokens with the largest attention, found by scanning all keys.

    The upper bound of what any index can find with a budget of tokens; with
    ``reuse_every`` above 1, in the manner of OmniKV, the layers between anchor
    layers take over their choice (also the IceCache paper's appendix C).

    Cost: per step and selecting layer one pass over all offloaded keys.
    """

    name: ClassVar[str] = "exact-topk"
    summary: ClassVar[str] = "nothing dropped; fetches the tokens with most attention"

    def new_index(self, num_kv_heads: int, head_dim: int) -> KeyIndex:
        return self.scan(num_kv_heads, head_dim)
