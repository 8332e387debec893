"""What single requests may not ask for under a policy, refused to their client."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.input_processor import InputProcessor

from vllm_kvplugins.vllm_adapter.activation import policy_of


def install() -> None:
    """Wrap the place where vLLM validates requests; see ``flags.install``."""
    original = InputProcessor.process_inputs
    signature = inspect.signature(original)

    @functools.wraps(original)
    def process_inputs(self: InputProcessor, *args: Any, **kwargs: Any) -> Any:
        asked = signature.bind(self, *args, **kwargs).arguments
        policy = policy_of(self.vllm_config) if asked.get("resumable") else None
        if policy is not None:
            raise VLLMValidationError(
                f"streaming input is not supported with KV policy {policy.name!r}: "
                "each part would lengthen the prompt after it was compacted; send "
                "the whole prompt in one request",
                parameter="resumable",
                value=True,
            )
        return original(self, *args, **kwargs)

    InputProcessor.process_inputs = process_inputs
