"""vLLM's worker for CPUs with a policy."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_kvplugins.vllm_adapter.worker.worker import PolicyWorker


class KVPolicyCPUWorker(PolicyWorker, CPUWorker):
    """CPU worker under a policy."""

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """Compute a step; prepare requests with a seed for the sampling after it."""
        output = super().execute_model(*args, **kwargs)
        self.kv_policy.runner.replace_generators(_rewindable)
        return output


class _RewindableGenerator(torch.Generator):
    """A generator for the CPU that can be rewound to before the step's sampling.

    vLLM samples after every chunk of a prompt, and rewinds the generators of requests
    whose prompt goes on, because it drops that token. Policies cut prompts into more
    chunks. The way in which vLLM rewinds works on CUDA only: torch's generator for the
    CPU has no offset, and the error ends the engine.
    """

    _before_sampling: torch.Tensor

    def mark(self) -> None:
        """Remember the current state."""
        self._before_sampling = self.get_state()

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        """Return to the marked state. vLLM passes the offset of a step earlier."""
        assert offset < 0, "vLLM rewinds in another way"
        self.set_state(self._before_sampling)


def _rewindable(generator: torch.Generator) -> _RewindableGenerator:
    """The generator, marked; one of vLLM's is replaced by a copy."""
    if isinstance(generator, _RewindableGenerator):
        rewindable = generator
    else:
        rewindable = _RewindableGenerator(device="cpu")
        rewindable.set_state(generator.get_state())
    rewindable.mark()
    return rewindable
