"""Rows of a step whose tokens attend one after the other.

Tokens of a row share its hot slots, so each selects its own tokens and attends before
the next one selects: drafts that are verified, and all generated tokens of a policy
with means.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_kvplugins.engine.heap import Heap
from vllm_kvplugins.engine.nth_tokens import NthTokens
from vllm_kvplugins.engine.retrieval.offloaded import Batch
from vllm_kvplugins.engine.retrieval.unselected import BatchEntries
from vllm_kvplugins.ops.layout import PagedKV
from vllm_kvplugins.ops.mixed_attention import attend_mixed
from vllm_kvplugins.scoring.logits import LogitRules


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """The n-th new tokens of these rows.

    Attributes:
        tokens: these tokens, with their rows of queries and page lists.
        batch: their requests, to select for.
        entries: means of the tokens that they do not select; None: there are none.
    """

    tokens: NthTokens
    batch: Batch
    entries: BatchEntries | None

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        heap: Heap,
        kv: PagedKV,
        tables: tuple[torch.Tensor, torch.Tensor],
        scale: float,
        rules: LogitRules,
    ) -> torch.Tensor:
        """Attention of the round's tokens to pages and means. They have selected.

        Args:
            queries: [step tokens, num_q_heads, head_dim].
            kv: pages of one layer of the heap, or of all.
            tables: page lists and lengths of the step's rows.
            scale: softmax scale, times that of fp8 keys.

        Returns:
            [rows, num_q_heads, head_dim], to be multiplied by the scale of fp8 values.
        """
        asked = queries[self.tokens.queries]
        if heap.fp8 is not None:
            asked = asked.float()  # so that outputs are rounded once, when scaled
        coarse = None if self.entries is None else self.entries.of_layer(layer)
        attended, lse = attend_mixed(
            asked, heap.as_elements(kv), *self.tokens.tables(*tables), scale, coarse
        )
        return rules.with_sinks(attended, lse)
