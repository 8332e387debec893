"""KeyDiff: keeps tokens whose keys differ from the mean key."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F

from vllm_kvplugins.policies.base import LayerView
from vllm_kvplugins.policies.compressor import Compressor
from vllm_kvplugins.scoring.attention_votes import drop_invalid, slot_tiles, valid_keys


class KeyDiff(Compressor):
    """Negative cosine to the mean direction of all keys (arXiv:2504.15364).

    Section 3.2 of that paper: the anchor of a KV head is the mean of its L2-normalized
    keys. Needs no queries. A zero key has cosine 0.

    Differs from the paper: the paper evicts tokens block by block during the prefill.
    Here this needs ``prefill_block``; without it, all slots compete at the end of the
    prompt, as in kvpress.

    Cost: two passes over the keys; float32 copies of one tile at a time.
    """

    name: ClassVar[str] = "keydiff"
    summary: ClassVar[str] = "keeps tokens whose keys differ most from the mean key"

    @property
    def scores_heads_separately(self) -> bool:
        return True

    def score(self, view: LayerView) -> torch.Tensor:
        keys = valid_keys(view.keys, view.valid)
        num_kv_heads, num_slots, head_dim = keys.shape
        wide = torch.promote_types(keys.dtype, torch.float32)
        tiles = slot_tiles(num_slots, num_kv_heads * head_dim)
        anchor = torch.zeros(num_kv_heads, head_dim, dtype=wide, device=keys.device)
        for tile in tiles:
            anchor += F.normalize(keys[:, tile].to(wide), dim=-1).sum(dim=1)
        anchor = F.normalize(anchor, dim=-1).unsqueeze(2)
        scores = torch.empty(
            num_kv_heads, num_slots, dtype=torch.float32, device=keys.device
        )
        for tile in tiles:
            unit = F.normalize(keys[:, tile].to(wide), dim=-1)
            scores[:, tile] = torch.bmm(unit, anchor).squeeze(2).neg_()
        return drop_invalid(scores, view.valid)
