"""TOVA: keeps the tokens that the newest token attends to."""

from __future__ import annotations

from typing import ClassVar

import torch

from vllm_kvplugins.policies.base import LayerView
from vllm_kvplugins.policies.compressor import Compressor
from vllm_kvplugins.policies.votes import window_votes
from vllm_kvplugins.scoring.attention_votes import (
    drop_invalid,
    mark_window,
    mean_over_heads,
)


class TOVA(Compressor):
    """Attention of the last query, averaged over all heads (arXiv:2401.06104).

    Section 3.3 of that paper: one decision per layer, so every KV head keeps the same
    positions.

    Differs from the paper: the paper evicts one token after every decode step. Here the
    prompt is compressed once, and generated tokens a few blocks at a time if there is a
    ``decode_budget``. The newest slot always stays, as in kvpress; in the paper its
    score decides. Under tensor parallelism, the average runs over the heads of one
    rank, and ranks may keep different positions.

    Cost: attention of one query to all keys.
    """

    name: ClassVar[str] = "tova"
    summary: ClassVar[str] = (
        "keeps tokens that the last token attends to; all heads keep the same"
    )

    @property
    def queries_needed(self) -> int:
        return 1

    @property
    def minimum_budget_tokens(self) -> int:
        return 2

    def score(self, view: LayerView) -> torch.Tensor:
        num_slots = view.positions.shape[1]
        votes = window_votes(view)
        valid = None if view.valid is None else view.valid[:, :-1]
        shared = mean_over_heads(votes.mean(dim=1), view.positions[:, :-1], valid)
        return mark_window(drop_invalid(shared, valid), num_slots)
