"""How surprising a step's tokens were, asked of the loaded model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vllm_kvplugins.residency.surprisal import TokenLosses

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_kvplugins.policies.base import KVCachePolicy

# Logits of so many tokens at a time; of a vocabulary of 150K these are 600 MB.
_MOST_ROWS = 1024


def token_losses(model: Any) -> TokenLosses:
    """Remember each step's hidden states, and ask the output layer about them.

    vLLM computes logits only where it samples; this computes them for all others.

    Args:
        model: vLLM's, with its output layer.
    """
    last: list[torch.Tensor] = []

    def remember(module: Any, inputs: Any, output: Any) -> None:
        assert isinstance(output, torch.Tensor), f"{type(module).__name__} returns more"
        last[:] = [output]

    model.register_forward_hook(remember)

    @torch.inference_mode()
    def losses(first: int, targets: torch.Tensor) -> torch.Tensor:
        (hidden,) = last
        targets = targets.to(hidden.device)
        parts = []
        for start in range(0, targets.numel(), _MOST_ROWS):
            wanted = targets[start : start + _MOST_ROWS]
            stop = first + start + wanted.numel()
            logits = model.compute_logits(hidden[first + start : stop]).float()
            said = logits.gather(1, wanted[:, None].long()).squeeze(1)
            parts.append(logits.logsumexp(1) - said)
        return torch.cat(parts).cpu()

    return losses


def problems(vllm_config: VllmConfig, policy: KVCachePolicy) -> list[str]:
    """What stands in the way of a policy that needs surprisal."""
    parallel = vllm_config.parallel_config
    if not policy.needs_surprisal or parallel.tensor_parallel_size == 1:
        return []
    return [
        f"{policy.name} asks the output layer for every token's surprisal, of which "
        f"each of {parallel.tensor_parallel_size} ranks has a part only; use "
        "--tensor-parallel-size 1"
    ]
