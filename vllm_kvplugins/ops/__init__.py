"""Operations on pages of the KV cache: compiled if built, in torch otherwise.

``layout`` describes a page, ``dispatch`` holds the page copies that the rest of the
package calls, and ``checks`` the argument checks of the torch versions. Tests compare
all versions with ``tests/oracles/page_ops.py``. Nothing here imports vLLM.
"""

from vllm_kvplugins.ops.bulk import copy_pages
from vllm_kvplugins.ops.coarse_entries import CoarseEntries
from vllm_kvplugins.ops.components import keep_components
from vllm_kvplugins.ops.dispatch import (
    backend_in_use,
    extension_info,
    gather_keys,
    gather_tokens,
    gather_values,
    move_tokens,
    scatter_tokens,
)
from vllm_kvplugins.ops.host_fetch import fetch_tokens
from vllm_kvplugins.ops.hot_set import HostPages, HotSet, fill_hot
from vllm_kvplugins.ops.layout import PagedKV, PageLayout
from vllm_kvplugins.ops.mixed_attention import attend_mixed
from vllm_kvplugins.ops.page_votes import VoteQueries, VoteSlots, page_votes
from vllm_kvplugins.ops.quantized_rows import QuantizedRows
from vllm_kvplugins.ops.svd import (
    LowRank,
    reconstruct,
    truncated_svd,
)
from vllm_kvplugins.ops.zoom import ZoomEntries, ZoomRegions, within_room, zoom_spans

__all__ = [
    "CoarseEntries",
    "HostPages",
    "HotSet",
    "LowRank",
    "PageLayout",
    "PagedKV",
    "QuantizedRows",
    "VoteQueries",
    "VoteSlots",
    "ZoomEntries",
    "ZoomRegions",
    "attend_mixed",
    "backend_in_use",
    "copy_pages",
    "extension_info",
    "fetch_tokens",
    "fill_hot",
    "gather_keys",
    "gather_tokens",
    "gather_values",
    "keep_components",
    "move_tokens",
    "page_votes",
    "reconstruct",
    "scatter_tokens",
    "truncated_svd",
    "within_room",
    "zoom_spans",
]
