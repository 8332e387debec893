"""Allocators by name."""

from __future__ import annotations

from typing import Any

from vllm_kvplugins.budgets.allocators import (
    CrossLayer,
    FileWeights,
    HeadAdaptive,
    Pyramid,
    Uniform,
)
from vllm_kvplugins.budgets.base import PageAllocator
from vllm_kvplugins.budgets.head_split import HeadSplit
from vllm_kvplugins.budgets.sensitivity import Sensitivity

ALLOCATORS: dict[str, type[PageAllocator]] = {
    cls.name: cls
    for cls in (
        Uniform,
        Pyramid,
        HeadAdaptive,
        CrossLayer,
        FileWeights,
        HeadSplit,
        Sensitivity,
    )
}


def parse_allocator(value: Any) -> PageAllocator:
    """Read an allocator: a name, or ``{"name": …, options…}``.

    Raises:
        ValueError: unknown allocator or option.
    """
    if isinstance(value, PageAllocator):
        return value
    options = {"name": value} if isinstance(value, str) else value
    if not isinstance(options, dict) or options.get("name") not in ALLOCATORS:
        raise ValueError(
            f"unknown allocator {value!r}; available: {', '.join(sorted(ALLOCATORS))}"
        )
    rest = {key: option for key, option in options.items() if key != "name"}
    return ALLOCATORS[options["name"]].model_validate(rest)
