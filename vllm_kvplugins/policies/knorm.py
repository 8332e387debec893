"""Knorm: keys with a small norm draw attention, so they stay."""

from __future__ import annotations

from typing import ClassVar

import torch

from vllm_kvplugins.policies.base import LayerView
from vllm_kvplugins.policies.compressor import Compressor
from vllm_kvplugins.scoring.attention_votes import drop_invalid


class Knorm(Compressor):
    """Negative L2 norm of the key (arXiv:2406.11430, section 3).

    Needs no queries. RoPE keeps norms, so keys before and after it score the
    same. Differs from the paper: its experiments leave the first two layers
    uncompressed (section 4); here, as in kvpress, all layers are treated alike
    unless the allocator says otherwise. Norms are computed in float32, because
    bfloat16 norms of different slots tie.

    Cost: one pass over the keys.
    """

    name: ClassVar[str] = "knorm"
    summary: ClassVar[str] = "tokens whose keys have the smallest norm"

    def score(self, view: LayerView) -> torch.Tensor:
        wide = torch.promote_types(view.keys.dtype, torch.float32)
        norms = torch.linalg.vector_norm(view.keys, dim=-1, dtype=wide)
        return drop_invalid(norms.neg_().to(torch.float32), view.valid)
