"""Indices that find the keys a query attends to most.

``KeyIndex`` is the contract: append keys, select tokens. ``PageIndex`` also selects
pages of similar keys, which the engine stores next to each other. ``DCIIndex`` is
IceCache's tree; ``CodedIndex`` compares one-byte codes; ``BruteForceIndex`` scans all
keys with the same interface, and is the oracle of their tests; ``ExactScan`` is the
scan in torch that replaces an index that failed. ``DeviceSelection`` is not an index:
the device selects itself, by codes; ``CodeScan`` selects as it does.
Retrieval policies add page and quantized indices. An index stores no keys and reads
them in place (``Keys``). Nothing here imports vLLM.
"""

from vllm_kvplugins.index.base import PAGE_TOKENS, KeyIndex, PageIndex, Pages, TopKeys
from vllm_kvplugins.index.brute_force import BruteForceIndex
from vllm_kvplugins.index.codes import CodedIndex
from vllm_kvplugins.index.compiled import query_pages, query_topk, select_compiled
from vllm_kvplugins.index.dci import DCIIndex
from vllm_kvplugins.index.device_codes import CodeScan, DeviceSelection
from vllm_kvplugins.index.keys import Keys
from vllm_kvplugins.index.scan import ExactScan, scan_in_torch
from vllm_kvplugins.index.selection import PageSelection, select

__all__ = [
    "PAGE_TOKENS",
    "BruteForceIndex",
    "CodeScan",
    "CodedIndex",
    "DCIIndex",
    "DeviceSelection",
    "ExactScan",
    "KeyIndex",
    "Keys",
    "PageIndex",
    "PageSelection",
    "Pages",
    "TopKeys",
    "query_pages",
    "query_topk",
    "scan_in_torch",
    "select",
    "select_compiled",
]
