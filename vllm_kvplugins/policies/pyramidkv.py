"""PyramidKV: SnapKV's scores, more room in the lower layers."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field

from vllm_kvplugins.budgets import PageAllocator, Pyramid, parse_allocator
from vllm_kvplugins.policies.snapkv import SnapKV


class PyramidKV(SnapKV):
    """Pooled window attention with budgets that narrow upwards.

    arXiv:2406.02069: section 3.3's scores are SnapKV's, section 3.2's budgets
    are the ``pyramid`` allocator, which is only this policy's default. The
    window is 8 queries, as in the paper's experiments and its published
    scripts; as there, every layer keeps it on top of its share.

    Differs from the paper: pooling is SnapKV's average; budgets are whole pages,
    at least one per layer and head; ``budget`` counts the window, so ``beta``
    divides what is left of it. Differs from kvpress, which counts the window in
    the layers' shares, falls back to equal budgets when the top layer's share is
    below the window, and flattens the slope when the bottom layer's share exceeds
    the prompt (here the bottom layers keep everything and the rest goes to the
    layers above).

    Cost: SnapKV's.
    """

    name: ClassVar[str] = "pyramidkv"
    summary: ClassVar[str] = "SnapKV with more pages for lower layers"

    window: int = Field(default=8, ge=1, description="Newest queries that vote.")
    allocator: Annotated[PageAllocator, BeforeValidator(parse_allocator)] = Field(
        default=Pyramid(),
        description="How pages are shared between layers and KV heads.",
    )
