"""Knorm: keeps tokens whose keys have a small norm."""

from __future__ import annotations

from typing import ClassVar

import torch

from vllm_kvplugins.policies.base import LayerView
from vllm_kvplugins.policies.compressor import Compressor
from vllm_kvplugins.scoring.attention_votes import drop_invalid


class Knorm(Compressor):
    """Negative L2 norm of the key (arXiv:2406.11430, section 3).

    Keys with a small norm tend to get much attention. Needs no queries. RoPE preserves
    norms, so keys before and after RoPE have equal scores. Norms are computed in
    float32, because bfloat16 norms of different slots would be equal.

    Differs from the paper: its experiments do not compress the first two layers
    (section 4). Here, as in kvpress, all layers are compressed alike, unless the
    allocator differs.

    Cost: one pass over the keys.
    """

    name: ClassVar[str] = "knorm"
    summary: ClassVar[str] = "keeps tokens whose keys have the smallest norm"

    @property
    def scores_heads_separately(self) -> bool:
        return True

    def score(self, view: LayerView) -> torch.Tensor:
        wide = torch.promote_types(view.keys.dtype, torch.float32)
        norms = torch.linalg.vector_norm(view.keys, dim=-1, dtype=wide)
        return drop_invalid(norms.neg_().to(torch.float32), view.valid)
