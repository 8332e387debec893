"""DuoAttention: a few heads keep all tokens, the others the first and the newest."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import BeforeValidator, Field

from vllm_kvplugins.budgets import HeadSplit, PageAllocator, parse_allocator
from vllm_kvplugins.policies.base import LayerView
from vllm_kvplugins.policies.compressor import Compressor


class DuoAttention(Compressor):
    """Split heads into retrieval heads and streaming heads (arXiv:2410.10819).

    Retrieval heads keep all tokens, streaming heads the sinks and the newest tokens
    (section 2.2). The allocator ``head-split`` decides which heads are which, by a
    measured profile of the model and the budget.

    Differs from the paper:

    - Heads are ranked as in the context-independent form of KVzip (arXiv:2505.23416).
      The paper trains a gate per head.
    - The budget decides how many heads keep all tokens. The paper fixes the share of
      these heads, and the memory follows from it.
    - Streaming heads also keep the tokens that are generated, unless ``decode_budget``
      is set.

    Cost: none per token. The ranking is one forward pass over a text, once per model.
    """

    name: ClassVar[str] = "duo-attention"
    summary: ClassVar[str] = "few heads keep all tokens, the others the newest"

    allocator: Annotated[PageAllocator, BeforeValidator(parse_allocator)] = Field(
        default=HeadSplit(),
        description="How pages are shared between layers and KV heads.",
    )
    sinks: int = Field(default=4, ge=0, description="First tokens; they always stay.")
    recent: int = Field(
        default=32, ge=1, description="Newest tokens; they always stay."
    )

    @property
    def minimum_budget_tokens(self) -> int:
        return self.sinks + self.recent + 1

    @property
    def scores_heads_separately(self) -> bool:
        return True

    def score(self, view: LayerView) -> torch.Tensor:
        positions = view.positions
        stays = (positions < self.sinks) | (positions > positions.max() - self.recent)
        return positions.to(torch.float32).masked_fill(stays, torch.inf)
