"""A stand-in for FlashAttention: checks the arguments as the real function requires,
and attends in torch.
"""

from __future__ import annotations

import torch


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    seqused_k: torch.Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    block_table: torch.Tensor,
    num_splits: int,
    fa_version: int,
) -> None:
    """Attention as vLLM's FlashAttention 3 computes it over pages."""
    assert fa_version == 3
    assert 1 <= num_splits <= 32, "0 = memory for up to 128 parts"
    parts = num_splits * q.numel() * 4 if num_splits > 1 else 0
    assert parts <= 256 << 20
    assert causal
    for pages in (k, v):
        assert pages.stride(-1) == 1
        assert pages.dim() == 4
        assert pages.stride(2) * pages.itemsize % 16 == 0, "TMA"
    for counts in (cu_seqlens_q, seqused_k, block_table):
        assert counts.dtype == torch.int32
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    assert max_seqlen_k >= int(seqused_k.max())
    for i, length in enumerate(seqused_k.tolist()):
        asks = slice(int(cu_seqlens_q[i]), int(cu_seqlens_q[i + 1]))
        pages = block_table[i, : -(-length // k.shape[1])].long()
        keys, values = (t[pages].flatten(0, 1)[:length, 0].float() for t in (k, v))
        count = asks.stop - asks.start
        later = torch.arange(length) > length - count + torch.arange(count)[:, None]
        scores = q[asks].float().transpose(0, 1) @ keys.T * softmax_scale
        weights = scores.masked_fill(later, -torch.inf).softmax(-1).nan_to_num(0)
        out[asks] = (weights @ values).transpose(0, 1).to(out.dtype)
