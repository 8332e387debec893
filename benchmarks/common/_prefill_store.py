"""Files with what a model computes for a prompt, see ``_prefill_replay``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class Prefill:
    """What a model computes for one prompt.

    Attributes:
        queries: [layers, tokens, num_q_heads * head_dim], after RoPE.
        kv: [layers, 2, tokens, num_kv_heads * head_dim], keys and values after RoPE.
        hidden: [tokens, hidden_size], the output of the last layer.
    """

    queries: torch.Tensor
    kv: torch.Tensor
    hidden: torch.Tensor


class PrefillStore:
    """Recorded prompts of one model and dtype, one file each.

    Args:
        folder: one for several models.
        model: folder or ID; the last part of its name tells models apart.
        dtype: of the model.

    Cost: about 100 KB of disk per token of a model with 30 layers and 12 heads, in
    float32. Files are mapped, so engines read only what they use.
    """

    def __init__(self, folder: Path, model: str, dtype: str) -> None:
        self._folder, self._prefix = folder, f"{Path(model).name} {dtype}"

    def path(self, token_ids: Sequence[int]) -> Path:
        """The file of a prompt."""
        text = f"{self._prefix} {list(token_ids)}"
        return self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.pt"

    def save(self, token_ids: Sequence[int], prefill: Prefill) -> None:
        """Write a prompt's file; an interrupted write leaves none."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self.path(token_ids)
        part = path.with_suffix(".part")
        fields = {"queries": prefill.queries, "kv": prefill.kv}
        torch.save(fields | {"hidden": prefill.hidden}, part)
        part.rename(path)

    def load(self, token_ids: Sequence[int]) -> Prefill:
        """Map a prompt's file."""
        fields = torch.load(self.path(token_ids), mmap=True, weights_only=True)
        return Prefill(**fields)

    def recorded(
        self, prompts: Iterable[Sequence[int]]
    ) -> dict[tuple[int, ...], Prefill]:
        """Those prompts that have a file."""
        found = {}
        for prompt in prompts:
            if self.path(prompt).exists():
                found[tuple(prompt)] = self.load(prompt)
        return found
