"""Exact top-k retrieval: the reference for every index."""

from __future__ import annotations

from typing import ClassVar

from vllm_kvplugins.index import KeyIndex
from vllm_kvplugins.policies.retrieval import Retriever


class ExactTopK(Retriever):
    """Fetch the tokens with the most attention; scans all keys to find them.

    No index can select better tokens with the same budget. With ``reuse_every`` above
    1, only every n-th layer selects, and the layers after it reuse its selection, as in
    OmniKV and in appendix C of the IceCache paper.

    Cost: per step and selecting layer, one pass over all offloaded keys.
    """

    name: ClassVar[str] = "exact-topk"
    summary: ClassVar[str] = (
        "keeps all tokens on the host; fetches those with the most attention"
    )

    def new_index(self, num_kv_heads: int, head_dim: int) -> KeyIndex:
        return self.scan(num_kv_heads, head_dim)
