"""Page layouts for tests: vLLM's, and an unusual one."""

from __future__ import annotations

import torch

from vllm_kvplugins.ops.layout import PageLayout


def make_layout(kind: str, block_size: int, head_dim: int, seed: int) -> PageLayout:
    """``natural``, ``interleaved``, ``transposed`` (keys a column per token), or
    ``permuted``: every element somewhere else, by ``seed``."""
    if kind == "natural":
        return PageLayout.natural(block_size, head_dim)
    if kind == "interleaved":
        return PageLayout.interleaved(block_size, head_dim)
    if kind == "transposed":
        return PageLayout.transposed_keys(block_size, head_dim)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(2 * block_size * head_dim, generator=generator).int()
    half = block_size * head_dim
    return PageLayout(block_size, head_dim, order[:half].clone(), order[half:].clone())
