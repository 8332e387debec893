"""Finding the keys that a query attends to most, without looking at all of them.

``DCIIndex`` is IceCache's tree, ``BruteForceIndex`` the exact scan with the same
interface (:class:`KeyIndex`). Nothing here imports vLLM, and nothing keeps keys:
they are read where they lie (:class:`Keys`), at every call.
"""

from vllm_kvplugins.index.base import KeyIndex, Pages, TopKeys
from vllm_kvplugins.index.brute_force import BruteForceIndex
from vllm_kvplugins.index.compiled import query_pages, query_topk
from vllm_kvplugins.index.dci import DCIIndex
from vllm_kvplugins.index.keys import Keys
from vllm_kvplugins.index.selection import scan_in_torch, select_tokens

__all__ = [
    "BruteForceIndex",
    "DCIIndex",
    "KeyIndex",
    "Keys",
    "Pages",
    "TopKeys",
    "query_pages",
    "query_topk",
    "scan_in_torch",
    "select_tokens",
]
