"""How surprising a step's tokens were, asked of the loaded model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_kvplugins.policies.base import KVCachePolicy

# Logits of so many tokens at a time. Of a vocabulary of 50K these are 25 MB, which
# the allocator gives again; larger ones cost three times as much in page faults.
_MOST_ROWS = 128


class LogitsSurprisal:
    """Remembers each step's hidden states, and asks the output layer about them.

    vLLM computes logits only where it samples; this computes them for all others. Ranks
    of tensor parallelism ask together, as they run the same steps, and each gets the
    logits of the whole vocabulary: all find the same surprisal.

    Args:
        model: vLLM's, with its output layer.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._last: torch.Tensor | None = None
        self._hook = model.register_forward_hook(self._remember)

    def close(self) -> None:
        """Stop recording the model's hidden states."""
        self._hook.remove()
        self._last = None

    def _remember(self, module: Any, inputs: Any, output: Any) -> None:
        assert isinstance(output, torch.Tensor), f"{type(module).__name__} returns more"
        self._last = output

    def states(self, first: int, count: int) -> torch.Tensor:
        assert self._last is not None, "no step has run"
        return self._last[first : first + count].clone()

    @torch.inference_mode()
    def surprisal(self, states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        targets = targets.to(states.device).long()
        parts = []
        for rows, wanted in zip(
            states.split(_MOST_ROWS), targets.split(_MOST_ROWS), strict=True
        ):
            logits = self._model.compute_logits(rows).float()
            parts.append(F.cross_entropy(logits, wanted, reduction="none"))
        return torch.cat(parts).cpu()


def problems(vllm_config: VllmConfig, policy: KVCachePolicy) -> list[str]:
    """What stands in the way of a policy that asks the model about its steps."""
    return [
        *_replay_problems(vllm_config, policy),
        *_head_problems(vllm_config, policy),
    ]


def _replay_problems(vllm_config: VllmConfig, policy: KVCachePolicy) -> list[str]:
    """Graphs that break at attention replay whole steps: hooks of the model do not run,
    and what the last one saw would be taken for this step's."""
    from vllm import envs
    from vllm.config import CUDAGraphMode

    if policy.spans is None or not envs.VLLM_USE_BREAKABLE_CUDAGRAPH:
        return []
    if vllm_config.compilation_config.cudagraph_mode == CUDAGraphMode.NONE:
        return []
    return [
        "VLLM_USE_BREAKABLE_CUDAGRAPH=1 replays steps without calling the model, of "
        f"which {policy.name} reads the hidden states; set it to 0"
    ]


def _head_problems(vllm_config: VllmConfig, policy: KVCachePolicy) -> list[str]:
    """What tensor parallelism stands in the way of."""
    ranks = vllm_config.parallel_config.tensor_parallel_size
    if policy.spans is None or not policy.spans.uses_query_heads or ranks == 1:
        return []
    return [
        f"{policy.name} has numbers for each query head of the model, of which each of "
        f"{ranks} ranks has a part only; leave `router` out, or use "
        "--tensor-parallel-size 1"
    ]
