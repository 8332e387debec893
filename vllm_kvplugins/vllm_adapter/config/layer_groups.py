"""Blocks that layers without a policy take in vLLM's pool, from the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_kvplugins.model_config import CHUNKED, FULL, groups_of
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
    text = vllm_config.model_config.hf_text_config
    size = vllm_config.cache_config.block_size
    in_flight = vllm_config.max_in_flight_tokens
    blocks = 0
    for kind, groups in groups_of(layer_types_of(vllm_config)).items():
        if kind == FULL:
            continue
        if kind == CHUNKED:
            held = min(text.attention_chunk_size + in_flight, tokens)
            blocks += groups * -(-held // size)
        else:
            # A window may begin inside of a block.
            held = min(text.sliding_window - 1 + in_flight, tokens)
            blocks += groups * (-(-held // size) + 1)
    return blocks
