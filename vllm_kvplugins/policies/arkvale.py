"""ArkVale: pages in the order of the text, ranked by a volume around their keys."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field

from vllm_kvplugins.index import KeyIndex
from vllm_kvplugins.policies.pages import OrderedPages, PageRetriever

Bound = Literal[
    "cuboid-mean",
    "cuboid-center",
    "cuboid-max",
    "sphere-mean",
    "sphere-center",
    "sphere-max",
]


class PageVolumes(OrderedPages):
    """Per page a centre, and the distance of its keys from it.

    The centre c is the middle between the smallest and the largest key element of
    each channel. A cuboid has a radius per channel, from the distances |c - k| there;
    a sphere has one, from the lengths of c - k. It is their largest ("max": all keys
    lie within), their mean, or the middle between smallest and largest ("center").

    Args:
        bound: volume and radius.
    """

    def __init__(
        self, num_kv_heads: int, head_dim: int, page_tokens: int, bound: Bound
    ) -> None:
        self._volume, self._radius = bound.split("-")
        super().__init__(num_kv_heads, head_dim, page_tokens)

    def digest(self, pages: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Centres [num_kv_heads, n, head_dim] and radii [num_kv_heads, n, head_dim
        or 1] (ArkVale, equations 2 and 4)."""
        centre = (pages.amin(2) + pages.amax(2)) / 2
        apart = pages - centre.unsqueeze(2)
        if self._volume == "sphere":
            apart = torch.linalg.vector_norm(apart, dim=-1, keepdim=True)
        else:
            apart = apart.abs_()
        if self._radius == "mean":
            return centre, apart.mean(2)
        if self._radius == "max":
            return centre, apart.amax(2)
        return centre, (apart.amin(2) + apart.amax(2)) / 2

    def promise(self, queries: torch.Tensor) -> torch.Tensor:
        """The largest q . k in the volume: q . c + |q| . r (equations 1 and 3)."""
        centre, radius = self._digests
        if self._volume == "sphere":
            reach = torch.linalg.vector_norm(queries, dim=-1, keepdim=True)
        else:
            reach = queries.abs()
        middle = torch.bmm(queries, centre.transpose(1, 2))
        return middle.baddbmm_(reach, radius.transpose(1, 2))


class ArkVale(PageRetriever):
    """Fetch pages by a volume around their keys (ArkVale, NeurIPS 2024).

    Section 5.2: a page counts for as much as the largest q . k in its volume, a
    cuboid or a sphere. Only volumes with the radius "max" hold all keys of the page
    ("cuboid-max" is Quest's bound); the smaller ones promise less than the page
    may have and rank pages better (figure 7), "cuboid-mean" best.

    Differs from the paper: queries that share a KV head add up their softmax over
    the estimates (the authors' code takes the mean of the estimates); pages that are
    not full are ranked too. Besides sinks and window, only the tokens that the newest
    query selected are resident; the paper keeps a larger cache of pages and evicts
    the worst.

    Cost: per step and selecting layer one pass over two vectors per page.
    """

    name: ClassVar[str] = "arkvale"
    summary: ClassVar[str] = "nothing dropped; fetches pages by volumes of their keys"

    page_tokens: int = Field(default=32, ge=1, description="Tokens per page.")
    bound: Bound = Field(
        default="cuboid-mean", description="Volume around a page's keys, and radius."
    )

    def new_index(self, num_kv_heads: int, head_dim: int) -> KeyIndex:
        return PageVolumes(num_kv_heads, head_dim, self.page_tokens, self.bound)
