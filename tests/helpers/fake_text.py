"""Tokens and positions of a fake model."""

from __future__ import annotations

import torch

from vllm_kvplugins.scoring.rotary import Rotary

POSITIONS = 2048


def encode(text: str) -> list[int]:
    """The fake model's tokenizer."""
    return [len(word) for word in text.split()]


def make_rotary(head_dim: int) -> Rotary:
    half = head_dim // 2
    frequency = 10000.0 ** (-torch.arange(half) / half)
    angle = torch.arange(POSITIONS)[:, None] * frequency
    return Rotary(angle.cos(), angle.sin(), True)
