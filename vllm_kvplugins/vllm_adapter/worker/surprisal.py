"""Computes the surprisal of prompt tokens with the loaded model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from vllm_kvplugins.errors import coded

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_kvplugins.policies.base import KVCachePolicy

# Tokens per chunk of logits. For a vocabulary of 50K a chunk takes 25 MB, and the
# allocator reuses its memory. Larger chunks take three times as long, in page faults.
_MAX_ROWS = 128


class LogitsSurprisal:
    """Records the hidden states of each step, and computes surprisal from them.

    vLLM computes logits only for tokens that it samples after; this class computes them
    for other tokens. With tensor parallelism, all ranks run the same steps and get the
    logits of the whole vocabulary, so all compute the same surprisal.

    Args:
        model: vLLM's model with its output layer.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._last: torch.Tensor | None = None
        self._hook = model.register_forward_hook(self._record)

    def close(self) -> None:
        """Stop recording the model's hidden states."""
        self._hook.remove()
        self._last = None

    def _record(self, module: Any, inputs: Any, output: Any) -> None:
        if isinstance(output, tuple):  # with the states that an EAGLE-3 head reads
            output = output[0]
        assert isinstance(output, torch.Tensor), (
            f"{type(module).__name__} returns more than hidden states"
        )
        self._last = output

    def states(self, first: int, count: int) -> torch.Tensor:
        assert self._last is not None, "no step has run"
        return self._last[first : first + count].clone()

    @torch.inference_mode()
    def surprisal(self, states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        targets = targets.to(states.device).long()
        parts = []
        for rows, row_targets in zip(
            states.split(_MAX_ROWS), targets.split(_MAX_ROWS), strict=True
        ):
            logits = self._model.compute_logits(rows).float()
            parts.append(F.cross_entropy(logits, row_targets, reduction="none"))
        return torch.cat(parts).cpu()


def problems(vllm_config: VllmConfig, policy: KVCachePolicy) -> list[str]:
    """Reasons why a policy cannot read what it needs from the model."""
    return [
        *_replay_problems(vllm_config, policy),
        *_head_problems(vllm_config, policy),
        *_adapter_problems(vllm_config, policy),
    ]


def _replay_problems(vllm_config: VllmConfig, policy: KVCachePolicy) -> list[str]:
    """Reasons why hidden states cannot be read.

    CUDA graphs that break at attention replay whole steps without the model's hooks, so
    the policy would read hidden states of an earlier step.
    """
    from vllm import envs
    from vllm.config import CUDAGraphMode

    if policy.spans is None or not envs.VLLM_USE_BREAKABLE_CUDAGRAPH:
        return []
    if vllm_config.compilation_config.cudagraph_mode == CUDAGraphMode.NONE:
        return []
    return [
        coded(
            "KVP041",
            "VLLM_USE_BREAKABLE_CUDAGRAPH=1 replays steps without calling the model, "
            f"whose hidden states {policy.name} reads; set it to 0",
        )
    ]


def _head_problems(vllm_config: VllmConfig, policy: KVCachePolicy) -> list[str]:
    """Reasons why numbers of query heads cannot be used with tensor parallelism."""
    ranks = vllm_config.parallel_config.tensor_parallel_size
    if policy.spans is None or not policy.spans.uses_query_heads or ranks == 1:
        return []
    return [
        coded(
            "KVP041",
            f"the router of {policy.name} needs all query heads of the model, but each "
            f"of the {ranks} ranks has only a part; remove `router`, or use "
            "--tensor-parallel-size 1",
        )
    ]


def _adapter_problems(vllm_config: VllmConfig, policy: KVCachePolicy) -> list[str]:
    """Reasons why surprisal would not be that of a request's LoRA adapter.

    vLLM selects the adapter of the output layer by the tokens that it samples, and
    surprisal needs logits of other tokens.
    """
    if policy.spans is None or vllm_config.lora_config is None:
        return []
    return [
        coded(
            "KVP041",
            f"{policy.name} computes logits of all prompt tokens, for which vLLM "
            "selects no LoRA adapter; remove --enable-lora",
        )
    ]
