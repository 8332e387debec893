"""A transformers model that attends as we say, to look at or to train beside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_kvplugins.errors import KVPolicyError


def load_attending(
    folder: str, dtype: str, name: str, attention: Callable[..., Any]
) -> Any:
    """Load a model on the CPU, for inference.

    Args:
        name: that the attention function has in transformers' registry.
        attention: what each layer calls, as transformers' own ones are called.

    Raises:
        KVPolicyError: there is none, or it cannot be loaded.
    """
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(name, attention)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            attn_implementation=name,
            local_files_only=True,
        )
    except (OSError, ValueError, ImportError) as error:
        raise KVPolicyError(
            f"transformers cannot load the model {folder}: {error}"
        ) from error
    return model.eval()
