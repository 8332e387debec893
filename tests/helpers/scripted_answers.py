"""A logits processor with which a model says what a test has written.

``vllm serve ... --logits-processors scripted_answers:ScriptedAnswers``. A request names
the tokens of its answer in ``vllm_xargs: {"script": [...]}``. Log probabilities are
those of the model: vLLM takes them before.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.interface import MoveDirectionality


class ScriptedAnswers(LogitsProcessor):
    """Chooses the next token of each request's script."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool):
        # By index in the batch: the script, and the tokens said so far, which grow.
        self.scripts: dict[int, tuple[list[int], list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.scripts.pop(index, None)
        for index, params, _, said in batch_update.added:
            self.scripts.pop(index, None)
            if script := (params.extra_args or {}).get("script"):
                self.scripts[index] = (script, said)
        for source, target, way in batch_update.moved:
            moved, other = (
                self.scripts.pop(source, None),
                self.scripts.pop(target, None),
            )
            if moved is not None:
                self.scripts[target] = moved
            if other is not None and way is MoveDirectionality.SWAP:
                self.scripts[source] = other

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for index, (script, said) in self.scripts.items():
            if len(said) < len(script):
                logits[index] = -torch.inf
                logits[index, script[len(said)]] = 0
        return logits
