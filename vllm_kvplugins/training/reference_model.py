"""Load a transformers model whose attention is replaced by a function of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_kvplugins.errors import KVPolicyError, coded


def load_attending(
    folder: str, dtype: str, name: str, attention: Callable[..., Any]
) -> Any:
    """Load a model on the CPU, for inference.

    Args:
        name: under which ``attention`` is registered with transformers.
        attention: called by each layer, with the arguments of transformers' own
            attention functions.

    Raises:
        KVPolicyError: the model is missing or cannot be loaded.
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
            coded("KVP625", f"transformers cannot load the model {folder}: {error}")
        ) from error
    return model.eval()
