"""Undoes and averages rotary position embeddings (RoPE)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Rotary:
    """A model's RoPE.

    Some kinds also scale: YaRN multiplies cos and sin by one factor.

    Attributes:
        cos: float32 [positions, rotated_dim / 2].
        sin: float32 [positions, rotated_dim / 2].
        is_neox: True pairs dimension i with i + rotated_dim / 2 (Llama, Qwen),
            False pairs 2i with 2i + 1 (GPT-J).
    """

    cos: torch.Tensor
    sin: torch.Tensor
    is_neox: bool

    def undo(self, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """States before RoPE.

        Args:
            states: float [heads, n, head_dim], after RoPE.
            positions: int64 [n].

        Returns:
            float32 [heads, n, head_dim].
        """
        cos, sin = self.cos[positions], -self.sin[positions]
        scale = cos.square() + sin.square()  # 1, or the squared factor of YaRN
        return self._rotate(states.to(torch.float32), cos / scale, sin / scale)

    def mean_rotation(self, first: int, count: int, head_dim: int) -> torch.Tensor:
        """Mean rotation matrix over positions ``first`` to ``first + count``.

        Uses only positions in the model's table, at least one.

        Returns:
            float32 [head_dim, head_dim]; ``states @ matrix.T`` rotates states.
        """
        last = self.cos.shape[0]
        first = min(first, last - 1)
        return self._mean_rotation(slice(first, min(first + count, last)), head_dim)

    def mean_rotation_at(self, positions: Sequence[int], head_dim: int) -> torch.Tensor:
        """Mean rotation matrix over some positions.

        Uses only positions in the model's table; the last one if none is in it.

        Returns:
            float32 [head_dim, head_dim]; ``states @ matrix.T`` rotates states.
        """
        last = self.cos.shape[0] - 1
        rows = [position for position in positions if position <= last] or [last]
        return self._mean_rotation(torch.tensor(rows).to(self.cos.device), head_dim)

    def _mean_rotation(self, rows: slice | torch.Tensor, head_dim: int) -> torch.Tensor:
        cos, sin = self.cos[rows].mean(0), self.sin[rows].mean(0)
        identity = torch.eye(head_dim, device=cos.device)
        return self._rotate(identity[None], cos[None], sin[None])[0].T

    def pair_norms(self, states: torch.Tensor) -> torch.Tensor:
        """Lengths of the pairs of elements that RoPE rotates together.

        Rotation does not change them, except for a factor; see :meth:`pair_scales`.

        Args:
            states: float [..., head_dim].

        Returns:
            float32 [..., rotated_dim / 2 + rest]; elements that are not rotated are
            pairs of their own.
        """
        half = self.cos.shape[-1]
        states = states.to(torch.float32)
        rotary, rest = states[..., : 2 * half], states[..., 2 * half :]
        if self.is_neox:
            a, b = rotary[..., :half], rotary[..., half:]
        else:
            a, b = rotary[..., 0::2], rotary[..., 1::2]
        return torch.cat([torch.hypot(a, b), rest.abs()], dim=-1)

    def pair_scales(self, head_dim: int) -> torch.Tensor:
        """Factor by which RoPE multiplies each pair; 1, or the factor of YaRN.

        Returns:
            float32 [rotated_dim / 2 + rest].
        """
        scales = torch.hypot(self.cos[0], self.sin[0])
        return torch.cat([scales, scales.new_ones(head_dim - 2 * scales.shape[0])])

    def _rotate(
        self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        half = cos.shape[-1]
        rotary, rest = states[..., : 2 * half], states[..., 2 * half :]
        if self.is_neox:
            a, b = rotary[..., :half], rotary[..., half:]
            rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        else:
            a, b = rotary[..., 0::2], rotary[..., 1::2]
            rotated = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1)
            rotated = rotated.flatten(-2)
        return torch.cat([rotated, rest], dim=-1)
