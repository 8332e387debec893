"""Random eviction: the control that every scored policy has to beat."""

from __future__ import annotations

import zlib
from typing import ClassVar

import torch
from pydantic import Field

from vllm_kvplugins.policies.base import LayerView
from vllm_kvplugins.policies.compressor import Compressor
from vllm_kvplugins.scoring.attention_votes import drop_invalid


class Random(Compressor):
    """Every (position, KV head) has a uniform random score for good.

    Scores are a pure function of (seed, layer, KV head, position): the same
    prompt keeps the same slots in every run. As a token's score never changes,
    what is left after any number of compactions is a uniform sample of all
    tokens seen. Nothing is sure to stay. Drawn on the CPU, so that all devices
    agree.

    Cost: one random number per KV head and position, a copy to the device.
    """

    name: ClassVar[str] = "random"
    summary: ClassVar[str] = "random tokens; the control for all scores"

    seed: int = Field(default=0, ge=0, description="Same seed, same selection.")

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
