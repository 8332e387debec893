"""Undoes and averages rotary position embeddings (RoPE)."""

from __future__ import annotations

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
        positions = slice(first, min(first + count, last))
        cos, sin = self.cos[positions].mean(0), self.sin[positions].mean(0)
        identity = torch.eye(head_dim, device=cos.device)
        return self._rotate(identity[None], cos[None], sin[None])[0].T

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
