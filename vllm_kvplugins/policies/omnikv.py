"""OmniKV: a few layers select tokens for all heads and for the layers behind them."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from vllm_kvplugins.index import ExactScan, KeyIndex, Keys
from vllm_kvplugins.policies.retrieval import Retriever


class SharedScan(ExactScan):
    """Selects the same tokens for all KV heads, by exact attention."""

    def select(
        self, queries: torch.Tensor, keys: Keys, scale: float, count: int
    ) -> torch.Tensor:
        """The tokens with the largest attention, summed over all heads.

        Cost: a copy of all keys and O(group * n * head_dim) per KV head.
        """
        own = keys.gather()[0, :, : self._num_tokens].to(torch.float32)
        logits = queries.to(torch.float32) @ own.transpose(1, 2)
        attention = logits.mul_(scale).softmax(-1).sum((0, 1))
        best = attention.sort(descending=True, stable=True).indices[:count]
        chosen = torch.full((count,), -1)
        chosen[: len(best)] = best
        return chosen.expand(len(queries), -1).contiguous()


class OmniKV(Retriever):
    """Select in a few layers, for all heads and later layers (OmniKV, ICLR 2025).

    Tokens that are important in one layer are important in the layers behind it. Filter
    layers compute the attention to all tokens and select those with the most. The
    layers up to the next filter layer fetch the same tokens.

    Differs from the paper:

    - Every ``reuse_every``-th layer is a filter layer. The paper chooses them by
      measurements of each model.
    - Filter layers attend to the tokens that they select. In the paper they attend to
      all tokens, which therefore stay on the device in these layers.
    - The attention of all heads is summed to rank tokens.

    Cost: per step and filter layer, one pass over all offloaded keys.
    """

    name: ClassVar[str] = "omnikv"
    summary: ClassVar[str] = (
        "keeps all tokens on the host; few layers choose what all heads fetch"
    )

    reuse_every: int = Field(
        default=8,
        ge=1,
        description="Every n-th layer is a filter layer; the layers in between reuse "
        "its selection.",
    )

    def new_index(self, num_kv_heads: int, head_dim: int) -> KeyIndex:
        return SharedScan()
