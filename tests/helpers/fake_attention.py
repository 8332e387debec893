"""Dense attention, the reference for paged attention in the fake engine."""

from __future__ import annotations

import torch


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
) -> torch.Tensor:
    """Dense attention in float64; slots that are not visible may be NaN.

    Args:
        queries: [layers, new, q_heads, head_dim].
        keys, values: [layers, kv_heads, slots, head_dim].
        seen: bool [layers, kv_heads, new, slots].
    """
    kv_heads, scale = keys.shape[1], keys.shape[3] ** -0.5
    grouped = queries.double().unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)
    logits = grouped @ keys.double().unsqueeze(2).transpose(-1, -2) * scale
    logits = torch.where(visible[:, :, None], logits, -torch.inf)
    ever = visible.any(2)[..., None]
    values = torch.where(ever, values.double(), 0.0)
    return logits.softmax(-1) @ values.unsqueeze(2)
