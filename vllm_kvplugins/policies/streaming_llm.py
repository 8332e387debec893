"""StreamingLLM: the first tokens and the newest ones."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from vllm_kvplugins.policies.base import LayerView
from vllm_kvplugins.policies.compressor import Compressor


class StreamingLLM(Compressor):
    """Attention sinks plus the most recent tokens (arXiv:2309.17453).

    Differs from the paper: keys keep the RoPE position at which they were
    computed (as in kvpress) instead of being re-rotated to their place in the
    cache, and the window slides when the request is compacted, not at every
    token.
    """

    name: ClassVar[str] = "streaming-llm"
    summary: ClassVar[str] = "attention sinks and the newest tokens"

    sinks: int = Field(default=4, ge=0, description="First tokens that always stay.")

    @property
    def minimum_budget_tokens(self) -> int:
        return self.sinks + 1

    def score(self, view: LayerView) -> torch.Tensor:
        scores = view.positions.to(torch.float32)
        return scores.masked_fill(view.positions < self.sinks, torch.inf)
