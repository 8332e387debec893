"""StreamingLLM: keeps the first and the newest tokens."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from vllm_kvplugins.policies.base import LayerView
from vllm_kvplugins.policies.compressor import Compressor


class StreamingLLM(Compressor):
    """Keep attention sinks and the newest tokens (arXiv:2309.17453).

    Differs from the paper: keys keep the RoPE position at which they were computed, as
    in kvpress; the paper re-rotates them to their place in the cache. The window slides
    at compactions instead of at every token.
    """

    name: ClassVar[str] = "streaming-llm"
    summary: ClassVar[str] = "keeps attention sinks and the newest tokens"

    sinks: int = Field(default=4, ge=0, description="First tokens; they always stay.")

    @property
    def minimum_budget_tokens(self) -> int:
        return self.sinks + 1

    @property
    def scores_heads_separately(self) -> bool:
        return True

    def score(self, view: LayerView) -> torch.Tensor:
        scores = view.positions.to(torch.float32)
        return scores.masked_fill(view.positions < self.sinks, torch.inf)
