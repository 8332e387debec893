"""Random eviction: the control for all policies with scores."""

from __future__ import annotations

import zlib
from typing import ClassVar

import torch
from pydantic import Field

from vllm_kvplugins.policies.base import LayerView
from vllm_kvplugins.policies.compressor import Compressor
from vllm_kvplugins.scoring.attention_votes import drop_invalid


class Random(Compressor):
    """Score tokens with uniform random numbers.

    A score is a function of seed, layer, KV head and position only, so a prompt keeps
    the same slots in every run. Because a token's score never changes, the tokens that
    remain after any number of compactions are a uniform sample of all tokens. No token
    is certain to stay. The CPU draws the numbers, so that they are equal on all
    devices.

    Cost: one random number per KV head and position, and a copy to the device.
    """

    name: ClassVar[str] = "random"
    summary: ClassVar[str] = "keeps random tokens; the control for all scores"

    seed: int = Field(
        default=0, ge=0, description="Random seed; equal seeds keep equal tokens."
    )

    def score(self, view: LayerView) -> torch.Tensor:
        num_kv_heads = view.positions.shape[0]
        newest_pos = int(view.positions.max())
        # The CPU generator reads 32 bits of its seed; mix both into them.
        mixed = zlib.crc32(f"{self.seed}/{view.layer}".encode())
        generator = torch.Generator().manual_seed(mixed)
        # Position by position, so that longer prompts only append numbers.
        priority = torch.rand(newest_pos + 1, num_kv_heads, generator=generator)
        priority = priority.T.to(view.positions.device)
        scores = priority.gather(1, view.positions.clamp(min=0))
        return drop_invalid(scores, view.valid)
