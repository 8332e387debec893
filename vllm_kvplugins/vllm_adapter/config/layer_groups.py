"""How vLLM groups the layers of a hybrid model, from its configuration alone.

All layers of a KV cache group share one block table, and a block belongs to one group
at a time. vLLM makes groups of equal layer counts (``kv_cache_utils``): with 3 full and
15 windowed layers, one group for the full ones and five for the others. Layers of one
type count as equal here. The scheduler refuses to start if vLLM makes several groups of
full layers after all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_kvplugins.model_config import CHUNKED, FULL
from vllm_kvplugins.vllm_adapter.config.engine_config import layer_types_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def groups_of(types: Sequence[str]) -> dict[str, int]:
    """Number of KV cache groups of each attention type.

    Args:
        types: attention type of each layer.
    """
    counts = Counter(types)
    fewest, most = min(counts.values()), max(counts.values())
    # vLLM pads a group rather than double the number of groups.
    size = most if most < 1.5 * fewest else fewest
    return {kind: -(-count // size) for kind, count in counts.items()}


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
