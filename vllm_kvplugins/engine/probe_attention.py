"""Dense attention for probes: over a view, and over the window of a local layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from vllm_kvplugins.engine.heap import Heap
from vllm_kvplugins.policies.base import LayerView
from vllm_kvplugins.scoring.attention_votes import query_parts, valid_keys
from vllm_kvplugins.scoring.logits import PLAIN, LogitRules

# Masks hold at most this many entries at a time; 2**26 bools are 64 MiB. On a CPU,
# short parts cost nothing, and their queries see nearly the same slots.
_MAX_MASK = {"cpu": 1 << 21}
_MAX_MASK_ON_GPU = 1 << 26


@dataclass(frozen=True, slots=True)
class Reach:
    """Which earlier positions a token attends to, besides itself.

    Attributes:
        window: the newest tokens, itself included; 0: all.
        chunk: positions are divided into chunks of this many; a token attends to its
            own chunk. 0: no chunks.
    """

    window: int = 0
    chunk: int = 0

    def first(self, position: int) -> int:
        """The first position that a token at ``position`` attends to."""
        if self.window:
            return max(position - self.window + 1, 0)
        return position // self.chunk * self.chunk if self.chunk else 0

    def mask(self, at: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Whether queries see slots.

        Args:
            at: int64 [queries, 1], positions of the queries.
            positions: int64 [heads, 1, slots]; -1 in slots without a token.

        Returns:
            bool [heads, queries, slots].
        """
        seen = (positions <= at) & (positions >= 0)
        if self.window:
            seen &= positions > at - self.window
        if self.chunk:
            seen &= positions // self.chunk == at // self.chunk
        return seen


ALL = Reach()


@dataclass(frozen=True, slots=True, eq=False)
class LocalLayer:
    """A layer with a window or chunks, which the policy leaves to vLLM.

    Attributes:
        heap: the pages of this layer alone.
        blocks: physical block ids, int64 [blocks], of the request whose first token of
            this step has the given index among the step's tokens. Blocks before the
            window may be gone.
        scale: softmax scale.
    """

    heap: Heap
    blocks: Callable[[int], torch.Tensor]
    reach: Reach
    scale: float
    rules: LogitRules = PLAIN

    def attend(
        self,
        first_query: int,
        tokens: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of a probe behind ``tokens`` cached tokens.

        Args:
            first_query: identifies the request; see ``blocks``.
            queries: [num_q_heads, probe tokens, head_dim].
            keys, values: [num_kv_heads, probe tokens, head_dim] of the probe.

        Returns:
            [num_q_heads, probe tokens, head_dim].
        """
        size = self.heap.layout.block_size
        begin = self.reach.first(tokens) // size
        blocks = self.blocks(first_query)[begin : -(-tokens // size)]
        pages = self.heap.page_ids(blocks)
        cached = tokens - begin * size
        positions = torch.arange(
            begin * size, tokens + keys.shape[1], device=keys.device
        )
        return _attention(
            queries,
            torch.cat([self.heap.keys(0, pages)[:, :cached], keys], 1),
            torch.cat([self.heap.values(0, pages)[:, :cached], values], 1),
            positions[None],
            positions[cached:],
            self.scale,
            self.rules,
            self.reach,
        )


def dense_attention(view: LayerView) -> torch.Tensor:
    """Causal attention of a view's queries over its slots, in any order.

    Returns:
        [num_q_heads, num_queries, head_dim], dtype of the queries.

    Cost: memory for a mask of 2 MiB, on a GPU 64 MiB, and that of torch's attention.
    """
    # Before a compaction, all heads have the same slots: one mask is enough.
    positions = view.positions if view.valid is not None else view.positions[:1]
    if view.valid is None and not bool((view.positions == positions).all()):
        positions = view.positions
    return _attention(
        view.queries,
        # Slots without a token may hold NaN, which a mask does not remove.
        valid_keys(view.keys, view.valid),
        valid_keys(view.values, view.valid),
        positions,
        view.query_positions,
        view.scale,
        view.rules,
        ALL,
    )


def _attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    query_positions: torch.Tensor,
    scale: float,
    rules: LogitRules,
    reach: Reach,
) -> torch.Tensor:
    """Masked attention, some queries at a time.

    Args:
        queries: [num_q_heads, num_queries, head_dim].
        keys, values: [num_kv_heads, num_slots, head_dim].
        positions: int64 [num_kv_heads or 1, num_slots].

    Returns:
        [num_q_heads, num_queries, head_dim], dtype of the queries.
    """
    num_kv_heads, num_slots, _ = keys.shape
    grouped = queries.unflatten(0, (num_kv_heads, -1))
    group = grouped.shape[1]
    output = torch.empty_like(grouped)
    most = _MAX_MASK.get(keys.device.type, _MAX_MASK_ON_GPU)
    size = most // (positions.shape[0] * group * num_slots)
    if not rules.plain:  # float32 logits of all heads instead of a mask
        size = most // (4 * num_kv_heads * group * num_slots)
    attend = _plain if rules.plain else _with_rules
    for part, slots in query_parts(query_positions, positions, size):
        mask = reach.mask(query_positions[part, None], positions[:, None, :slots])
        output[:, :, part] = attend(
            grouped[:, :, part], keys[:, :slots], values[:, :slots], mask, scale, rules
        )
    return output.flatten(0, 1)


def _plain(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    rules: LogitRules,
) -> torch.Tensor:
    """Torch's attention; the queries of a group in one sequence.

    Args:
        queries: [num_kv_heads, group, num_queries, head_dim].
        mask: bool [num_kv_heads or 1, num_queries, num_slots].
    """
    num_kv_heads, group, _, head_dim = queries.shape
    attended = F.scaled_dot_product_attention(
        queries.reshape(num_kv_heads, 1, -1, head_dim),
        keys.unsqueeze(1),
        values.unsqueeze(1),
        attn_mask=mask.repeat(1, group, 1).unsqueeze(1),
        scale=scale,
    )
    return attended.view(queries.shape)


def _with_rules(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    rules: LogitRules,
) -> torch.Tensor:
    """Attention in float32 with a cap of logits, or with sinks."""
    logits = torch.einsum("hgqd,hsd->hgqs", queries.float(), keys.float()) * scale
    rules.cap(logits).masked_fill_(~mask[:, None], float("-inf"))
    # Sinks are per query head; the softmax wants the heads in one dimension.
    weights = rules.softmax(logits.flatten(0, 1)).view_as(logits)
    return torch.einsum("hgqs,hsd->hgqd", weights, values.float()).to(queries.dtype)
