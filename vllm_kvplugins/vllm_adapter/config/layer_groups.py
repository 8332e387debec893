"""Blocks that layers without a policy take in vLLM's pool, from the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_kvplugins.model_config import other_layers
from vllm_kvplugins.vllm_adapter.config.engine_config import layer_types_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def window_blocks(vllm_config: VllmConfig, tokens: int) -> int:
    """Blocks that the windowed layers of one request hold at most.

    Args:
        tokens: of the request, prompt and answer.

    Returns:
        0 if all layers have full attention.
    """
    layers = other_layers(
        vllm_config.model_config.hf_text_config, layer_types_of(vllm_config)
    )
    return layers.blocks(
        tokens, vllm_config.max_in_flight_tokens, vllm_config.cache_config.block_size
    )
