"""PyramidKV: SnapKV's scores with larger budgets for lower layers."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field

from vllm_kvplugins.budgets import PageAllocator, Pyramid, parse_allocator
from vllm_kvplugins.policies.snapkv import SnapKV


class PyramidKV(SnapKV):
    """Pooled attention of the window, with budgets that shrink from layer to layer.

    arXiv:2406.02069. The scores of section 3.3 are SnapKV's. The budgets of section 3.2
    are the ``pyramid`` allocator, the default of this policy. The window has 8 queries,
    as in the paper's experiments and scripts; every layer keeps it in addition to its
    share.

    Differs from the paper: pooling is SnapKV's average. Budgets are whole pages, at
    least one per layer and head. ``budget`` includes the window, so ``beta`` divides
    the rest.

    Differs from kvpress: kvpress includes the window in the layers' shares, uses equal
    budgets if the top layer's share is below the window, and flattens the slope if the
    bottom layer's share exceeds the prompt. Here the bottom layers then keep all
    tokens, and the rest goes to the layers above.

    Cost: the same as SnapKV.
    """

    name: ClassVar[str] = "pyramidkv"
    summary: ClassVar[str] = "SnapKV with larger budgets for lower layers"

    window: int = Field(
        default=8, ge=1, description="Number of newest queries that vote."
    )
    allocator: Annotated[PageAllocator, BeforeValidator(parse_allocator)] = Field(
        default=Pyramid(),
        description="How pages are shared between layers and KV heads.",
    )
