"""Run a transformers model with full attention, or with a replaced attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from vllm_kvplugins.errors import KVPolicyError, coded
from vllm_kvplugins.training.reference_model import load_attending

ATTENTION = "kvp-router"
# Tokens per chunk of logits; bounds the memory of long texts.
_AT_A_TIME = 512

# (layer, softmax scale, queries, keys, values) -> output; all tensors are
# [heads, tokens, head_dim].
Attend = Callable[[int, float, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def load_model(folder: str, dtype: str, device: str) -> Any:
    """Load a frozen transformers model for :func:`attending`.

    Raises:
        KVPolicyError: the model cannot be loaded, or not on this device.
    """
    model = load_attending(folder, dtype, ATTENTION, _attention)
    try:
        return model.requires_grad_(False).to(device)
    except (RuntimeError, AssertionError) as error:  # torch: the device is missing
        raise KVPolicyError(
            coded("KVP603", f"cannot move the model to --device {device}: {error}")
        ) from error


@contextmanager
def attending(model: Any, attend: Attend) -> Iterator[None]:
    """Replace the attention of every layer by ``attend`` within the context.

    Raises:
        KVPolicyError: a layer did not call ``attend``.
    """
    called: set[int] = set()

    def recorded(layer: int, scale: float, *tensors: torch.Tensor) -> torch.Tensor:
        called.add(layer)
        return attend(layer, scale, *tensors)

    modules = [m for m in model.base_model.modules() if hasattr(m, "layer_idx")]
    for module in modules:
        module.kvp_attend = recorded
    try:
        yield
    finally:
        for module in modules:
            del module.kvp_attend
    layers = model.config.get_text_config().num_hidden_layers
    if sorted(called) != list(range(layers)):
        raise KVPolicyError(
            coded(
                "KVP626",
                f"only {len(called)} of {layers} layers use the attention interface of "
                "transformers; no router can be trained for this model",
            )
        )


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function for transformers; tensors are [1, heads, tokens, head_dim]."""
    output = module.kvp_attend(module.layer_idx, scaling, query[0], key[0], value[0])
    return output.transpose(0, 1)[None], None


@dataclass(frozen=True, slots=True)
class Reading:
    """Activations of a model for one text.

    Attributes:
        tokens: int64 [tokens].
        surprisal: float32 [tokens], nats; 0 for the first token.
        keys, values: [layers, num_kv_heads, tokens, head_dim], as cached.
        queries: [layers, num_q_heads, tokens - prefix, head_dim], after RoPE, of the
            tokens after the prefix.
        hidden: [tokens - prefix, hidden], input of the output layer for these tokens.
        scale: softmax scale.
    """

    tokens: torch.Tensor
    surprisal: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor
    hidden: torch.Tensor
    scale: float


@torch.no_grad()
def read(model: Any, tokens: list[int], prefix: int) -> Reading:
    """Run one forward pass with full attention and return its activations.

    Args:
        prefix: number of leading tokens whose queries are not needed.

    Raises:
        KVPolicyError: softmax scales differ by layer, or logits are not finite.

    Cost: a forward pass and the output layer for all tokens; memory for keys and
        values of all layers.
    """
    keys, values, queries, scales = [], [], [], set[float]()

    def attend(
        layer: int,
        scale: float,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        keys.append(key.cpu())
        values.append(value.cpu())
        queries.append(query[:, prefix:].cpu())
        scales.add(scale)
        # without a batch dimension torch materializes all scores: 6 times slower
        rows = (query[None], key[None], value[None])
        return F.scaled_dot_product_attention(
            *rows, is_causal=True, scale=scale, enable_gqa=True
        )[0]

    ids = torch.tensor([tokens], device=model.device)
    with attending(model, attend):
        hidden = model.base_model(ids, use_cache=False).last_hidden_state[0]
    surprisal = torch.zeros(len(tokens))
    for first in range(0, len(tokens) - 1, _AT_A_TIME):
        part = hidden[first : min(first + _AT_A_TIME, len(tokens) - 1)]
        logits = model.get_output_embeddings()(part).float()
        targets = ids[0, first + 1 : first + 1 + len(part)]
        loss = F.cross_entropy(logits, targets, reduction="none")
        surprisal[first + 1 : first + 1 + len(part)] = loss.cpu()
    if len(scales) > 1:
        raise KVPolicyError(
            coded(
                "KVP626",
                f"layers have different softmax scales, {sorted(scales)}; no router "
                "can be trained for this model",
            )
        )
    if not bool(torch.isfinite(surprisal).all()):
        raise KVPolicyError(
            coded("KVP627", "the model's logits are not finite; try --dtype float32")
        )
    return Reading(
        ids[0].cpu(),
        surprisal,
        torch.stack(keys),
        torch.stack(values),
        torch.stack(queries),
        hidden[prefix:].cpu(),
        scales.pop(),
    )


def continue_with(
    model: Any, tokens: torch.Tensor, first_position: int, attend: Attend
) -> torch.Tensor:
    """Logits of tokens that continue a text, with a replaced attention.

    Args:
        tokens: int64 [tokens].
        first_position: RoPE position of the first token.
        attend: attention over the preceding text and these tokens.

    Returns:
        float32 [tokens, vocabulary].
    """
    positions = torch.arange(len(tokens), device=model.device) + first_position
    ids = tokens.to(model.device)[None]
    with attending(model, attend):
        hidden = model.base_model(
            ids, position_ids=positions[None], use_cache=False
        ).last_hidden_state[0]
    return model.get_output_embeddings()(hidden).float()
