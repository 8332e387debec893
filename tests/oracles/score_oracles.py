"""The baselines' scores as direct formulas: float64, loops, one slot at a time.

Shares no code with the package. Arguments: keys [num_kv_heads, num_slots, head_dim],
queries [num_q_heads, window, head_dim] of the newest slots. Results: float64
[num_kv_heads, num_slots], ``inf`` for slots that must be kept.
"""

from __future__ import annotations

import math

import torch


def window_attention(
    queries: torch.Tensor, keys: torch.Tensor, scale: float
) -> torch.Tensor:
    """[num_q_heads, window, num_slots]: causal softmax of every query."""
    keys, queries = keys.double(), queries.double()
    num_q_heads, window, _ = queries.shape
    num_slots = keys.shape[1]
    group = num_q_heads // keys.shape[0]
    weights = torch.zeros(num_q_heads, window, num_slots, dtype=torch.float64)
    for head in range(num_q_heads):
        for i in range(window):
            seen = num_slots - window + i + 1
            logits = keys[head // group, :seen] @ queries[head, i] * scale
            weights[head, i, :seen] = torch.softmax(logits, dim=0)
    return weights


def must_stay(scores: torch.Tensor, window: int) -> torch.Tensor:
    full = torch.full((scores.shape[0], window), math.inf, dtype=torch.float64)
    return torch.cat([scores, full], dim=1)


def knorm(keys: torch.Tensor) -> torch.Tensor:
    rows = [[-math.sqrt(sum(x * x for x in key)) for key in h] for h in keys.tolist()]
    return torch.tensor(rows, dtype=torch.float64)


def keydiff(keys: torch.Tensor) -> torch.Tensor:
    def unit(vector: torch.Tensor) -> torch.Tensor:
        size = vector.norm()
        return vector / size if size > 0 else vector

    rows = []
    for head in keys.double():
        anchor = unit(sum(unit(key) for key in head) / len(head))
        rows.append([-float(unit(key) @ anchor) for key in head])
    return torch.tensor(rows, dtype=torch.float64)


def tova(queries: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    last = window_attention(queries[:, -1:], keys, scale)[:, 0, :-1]
    mean = sum(last) / len(last)
    return must_stay(torch.stack([mean] * keys.shape[0]), 1)


def snapkv(
    queries: torch.Tensor, keys: torch.Tensor, scale: float, kernel_size: int
) -> torch.Tensor:
    """Average pooling with zeros beyond the ends."""
    window = queries.shape[1]
    prefix = keys.shape[1] - window
    votes = window_attention(queries, keys, scale)[..., :prefix].mean(dim=1)
    votes = votes.view(keys.shape[0], -1, prefix).mean(dim=1)
    half = kernel_size // 2
    pooled = torch.zeros_like(votes)
    for t in range(prefix):
        near = votes[:, max(t - half, 0) : t + half + 1]
        pooled[:, t] = near.sum(dim=1) / kernel_size
    return must_stay(pooled, window)


def chunkkv(
    queries: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
    kernel_size: int,
    chunk_length: int,
) -> torch.Tensor:
    """The window enters its chunks' means with the best score plus one."""
    window = queries.shape[1]
    scores = snapkv(queries, keys, scale, kernel_size)
    best = scores[:, :-window].max()
    scores[:, -window:] = best + 1
    for start in range(0, keys.shape[1], chunk_length):
        chunk = scores[:, start : start + chunk_length]
        chunk[:] = chunk.mean()
    return must_stay(scores[:, :-window], window)
