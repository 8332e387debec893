"""Exact top-k retrieval: the oracle that every index is measured against."""

from __future__ import annotations

from typing import ClassVar

import torch

from vllm_kvplugins.policies.retrieval import Retriever, TokenIndex


class ExactScan(TokenIndex):
    """No index: all keys are scored."""

    def insert(self, keys: torch.Tensor, first: int) -> None:
        """Nothing to build."""

    def select(
        self, queries: torch.Tensor, keys: torch.Tensor, scale: float, count: int
    ) -> torch.Tensor:
        """The tokens that get most attention, summed over queries and group.

        The softmax runs over the offloaded tokens alone, per query head; sinks
        and window would scale all of a head's weights alike.

        Cost: O(num_q_heads * num_queries * tokens * head_dim).
        """
        heads = keys.shape[0]
        grouped = queries.reshape(heads, -1, queries.shape[-1])
        logits = torch.bmm(grouped, keys.transpose(1, 2)).to(torch.float32).mul_(scale)
        return logits.softmax(-1).sum(1).topk(count, dim=-1).indices


class ExactTopK(Retriever):
    """Fetch the tokens with the largest attention, found by scanning all keys.

    The upper bound of what any index can find with a budget of tokens; with
    ``reuse_every`` above 1, in the manner of OmniKV, the layers between anchor
    layers take over their choice (also the IceCache paper's appendix C).

    Cost: per step and selecting layer one pass over all offloaded keys.
    """

    name: ClassVar[str] = "exact-topk"
    summary: ClassVar[str] = "nothing dropped; fetches the tokens with most attention"

    def new_index(self, num_kv_heads: int, head_dim: int) -> TokenIndex:
        return ExactScan()
