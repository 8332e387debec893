"""Budgets: how much a request keeps, and how layers and KV heads share it.

A request that keeps M blocks owns M * L * H pages of L layers and H KV heads, and every
(layer, KV head) can use any of them. An allocator distributes whole pages with the sum
M * L * H, so the freed memory does not depend on the distribution.
"""

from __future__ import annotations

from vllm_kvplugins.budgets.allocators import (
    CrossLayer,
    FileWeights,
    HeadAdaptive,
    Pyramid,
    Uniform,
)
from vllm_kvplugins.budgets.amounts import Budget, parse_bytes
from vllm_kvplugins.budgets.base import PageAllocator
from vllm_kvplugins.budgets.head_split import HeadSplit
from vllm_kvplugins.budgets.registry import ALLOCATORS, parse_allocator
from vllm_kvplugins.budgets.rounding import round_to_pages
from vllm_kvplugins.budgets.sensitivity import Sensitivity

__all__ = [
    "ALLOCATORS",
    "Budget",
    "CrossLayer",
    "FileWeights",
    "HeadAdaptive",
    "HeadSplit",
    "PageAllocator",
    "Pyramid",
    "Sensitivity",
    "Uniform",
    "parse_allocator",
    "parse_bytes",
    "round_to_pages",
]
