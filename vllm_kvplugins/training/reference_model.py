"""A transformers model whose attention is replaced by a function of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from vllm_kvplugins.errors import KVPolicyError, coded

Value = TypeVar("Value")


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


def attend(model: Any, ids: torch.Tensor, running: Any) -> None:
    """One forward pass, without the output layer.

    Args:
        model: from ``load_attending``.
        ids: int64 [sequences, tokens].
        running: what the attention function of each layer finds as
            ``module.kvp_running`` during the pass.
    """
    body = model.base_model
    attending = [module for module in body.modules() if hasattr(module, "layer_idx")]
    for module in attending:
        module.kvp_running = running
    try:
        with torch.no_grad():
            body(ids.to(model.device), use_cache=False)
    finally:
        for module in attending:
            del module.kvp_running


def of_all_layers(model: Any, found: Mapping[int, Value], problem: str) -> list[Value]:
    """What the attention function found in each layer, in the order of the layers.

    Args:
        problem: what is impossible if a layer is missing, for the message.

    Raises:
        KVPolicyError: a layer is missing, because it has an attention of its own.
    """
    layers = model.config.get_text_config().num_hidden_layers
    if sorted(found) == list(range(layers)):
        return [found[layer] for layer in range(layers)]
    raise KVPolicyError(
        coded(
            "KVP626",
            f"only {len(found)} of {layers} layers use the attention interface of "
            f"transformers; {problem}",
        )
    )
