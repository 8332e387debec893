"""Blocks that layers without a policy take in vLLM's pool, and the size of blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_kvplugins.model_config import STATE, other_layers
from vllm_kvplugins.vllm_adapter.config import compat, speculation
from vllm_kvplugins.vllm_adapter.config.engine_config import layer_types_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def align_block_size(vllm_config: VllmConfig) -> None:
    """Give the blocks of a recurrent model their final size.

    vLLM enlarges blocks until the keys and values of one layer need as many bytes as
    the state of a recurrent layer, and does so in the worker, after the model is
    loaded. Front end and scheduler plan with the same size, so it is computed here.
    vLLM then finds nothing to enlarge; the worker compares the sizes.
    """
    model = vllm_config.model_config
    if model.is_hybrid and not model.use_mla and STATE in layer_types_of(vllm_config):
        compat.align_block_size(vllm_config)


def other_blocks(vllm_config: VllmConfig, tokens: int) -> int:
    """Blocks that the layers of one request without a policy hold at most.

    Args:
        tokens: of the request, prompt and answer.

    Returns:
        0 if all layers have full attention.
    """
    # With a prefix cache, as many states as vLLM's ``MambaSpec`` expects: the state,
    # the one before, and one inside of a long chunk.
    caches = getattr(vllm_config.cache_config, "mamba_cache_mode", "none") != "none"
    layers = other_layers(
        vllm_config.model_config.hf_text_config,
        # A drafter's layers are in the group of the full-attention layers.
        (*layer_types_of(vllm_config), *speculation.draft_layer_types(vllm_config)),
        state_blocks=3 if caches else 1,
    )
    return layers.blocks(
        tokens, vllm_config.max_in_flight_tokens, vllm_config.cache_config.block_size
    )
