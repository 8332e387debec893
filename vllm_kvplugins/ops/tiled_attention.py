"""Exact attention of a chunk of queries to keys that arrive in tiles.

Each tile is attended by itself and merged by its log-sum-exp ("online softmax"), so
that no more than one tile has to lie next to the queries.
"""

from __future__ import annotations

import math

import torch

from vllm_kvplugins.scoring.logits import LogitRules

# Memory of the scores of one tile on devices without a flash kernel, in elements.
_MAX_SCORES = 1 << 26


class TiledAttention:
    """Attention of the new tokens of one request in one layer.

    Args:
        queries: [n, num_q_heads, head_dim], after RoPE; not modified.
        num_kv_heads: divides ``num_q_heads``; query heads of one KV head are
            neighbors.
        scale: softmax scale.
        sinks: float32 [num_q_heads], learned logits without a token; None: none.

    Cost: ``4 * n * num_q_heads * head_dim`` operations per key. On CPUs torch's flash
        kernel runs. Elsewhere scores of a tile are computed in float32,
        ``4 * n * num_q_heads`` bytes per key, at most 256 MiB at once.
    """

    def __init__(
        self,
        queries: torch.Tensor,
        num_kv_heads: int,
        scale: float,
        sinks: torch.Tensor | None = None,
    ) -> None:
        tokens, num_q_heads, _ = queries.shape
        assert num_q_heads % num_kv_heads == 0, "query heads share KV heads"
        self._group = num_q_heads // num_kv_heads
        self._scale, self._sinks = scale, sinks
        # [num_q_heads, n, head_dim]
        self._queries = queries.transpose(0, 1).contiguous()
        self._output = torch.zeros_like(self._queries, dtype=torch.float32)
        self._lse = self._output.new_full((num_q_heads, tokens), -math.inf)

    def add(
        self, keys: torch.Tensor, values: torch.Tensor, causal: bool = False
    ) -> None:
        """Attend to more tokens.

        Args:
            keys, values: [num_kv_heads, t, head_dim], dtype and device of the queries.
                Every query sees all of them.
            causal: they belong to the queries' own tokens, t = n; each query sees
                those up to its own.
        """
        if not keys.shape[1]:
            return
        assert not causal or keys.shape[1] == self._queries.shape[1]
        if causal:
            keys, values = (_repeated(each, self._group) for each in (keys, values))
            queries = self._queries
        else:
            queries = self._queries.view(len(keys), -1, self._queries.shape[2])
        if _has_flash(self._queries.device):
            output, lse = _flash(queries, keys, values, self._scale, causal)
            self._merge(output, lse)
            return
        step = max(_MAX_SCORES // self._lse.numel(), 1)
        for first in range(0, keys.shape[1], step):
            tile = slice(first, first + step)
            before = first if causal else None
            self._merge(*self._plain(queries, keys[:, tile], values[:, tile], before))

    def _plain(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        before: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention by matrix products in float32.

        Args:
            before: number of the queries' own tokens that precede the keys; None: every
                query sees all keys.
        """
        logits = (queries.float() @ keys.float().transpose(1, 2)).mul_(self._scale)
        if before is not None:
            seen = torch.ones(logits.shape[1:], dtype=torch.bool, device=keys.device)
            logits.masked_fill_(~seen.tril_(-before), -math.inf)
        lse = logits.logsumexp(-1)
        # The first queries see none of the later keys, and get zeros.
        at_least = lse.clamp(min=torch.finfo(lse.dtype).min).unsqueeze(-1)
        return logits.sub_(at_least).exp_() @ values.float(), lse

    def _merge(self, output: torch.Tensor, lse: torch.Tensor) -> None:
        lse, output = lse.view(self._lse.shape), output.view(self._output.shape)
        total = torch.logaddexp(self._lse, lse)
        self._output.mul_((self._lse - total).exp_().unsqueeze(-1))
        self._output.addcmul_(output.float(), (lse - total).exp_().unsqueeze(-1))
        self._lse = total

    def result(self) -> torch.Tensor:
        """Attention to all tokens so far; there must be one per query.

        Returns:
            [n, num_q_heads, head_dim] of the dtype of the queries.
        """
        output = self._output.transpose(0, 1).to(self._queries.dtype)
        return LogitRules(self._sinks).with_sinks(output, self._lse.transpose(0, 1))


def _repeated(rows: torch.Tensor, group: int) -> torch.Tensor:
    """[num_kv_heads, t, dim] -> [num_kv_heads * group, t, dim]."""
    return rows.repeat_interleave(group, 0) if group > 1 else rows


def _has_flash(device: torch.device) -> bool:
    """Whether torch has a flash kernel that returns the log-sum-exp for any dtype."""
    return bool(device.type == "cpu")


def _flash(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's flash attention on CPUs, [heads, n, dim] each."""
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries.unsqueeze(0),
        keys.unsqueeze(0),
        values.unsqueeze(0),
        is_causal=causal,
        scale=scale,
    )
    return output[0], lse[0].contiguous()
