"""ArkVale: fetches pages, ranked by a volume around their keys."""

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
    """Stores the center and the radius of each page's keys.

    The center c is the midpoint of the smallest and the largest key element of each
    channel. A cuboid has one radius per channel, computed from the distances |c - k|
    in that channel. A sphere has one radius, computed from the norms of c - k. The
    radius is the maximum of the distances ("max": the volume contains all keys), their
    mean ("mean"), or the midpoint of the smallest and the largest ("center").

    Args:
        bound: volume and radius.
    """

    def __init__(
        self, num_kv_heads: int, head_dim: int, page_tokens: int, bound: Bound
    ) -> None:
        self._volume, self._radius = bound.split("-")
        super().__init__(num_kv_heads, head_dim, page_tokens)

    def digest(self, pages: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Centers and radii (ArkVale, equations 2 and 4).

        Returns:
            Centers [num_kv_heads, n, head_dim]; radii [num_kv_heads, n, head_dim] for
            cuboids, [num_kv_heads, n, 1] for spheres.
        """
        center = (pages.amin(2) + pages.amax(2)) / 2
        distance = pages - center.unsqueeze(2)
        if self._volume == "sphere":
            distance = torch.linalg.vector_norm(distance, dim=-1, keepdim=True)
        else:
            distance = distance.abs_()
        if self._radius == "mean":
            return center, distance.mean(2)
        if self._radius == "max":
            return center, distance.amax(2)
        return center, (distance.amin(2) + distance.amax(2)) / 2

    def upper_bounds(self, queries: torch.Tensor) -> torch.Tensor:
        """The largest q . k inside the volume: q . c + |q| . r (equations 1 and 3)."""
        center, radius = self._digests
        if self._volume == "sphere":
            query_length = torch.linalg.vector_norm(queries, dim=-1, keepdim=True)
        else:
            query_length = queries.abs()
        at_center = torch.bmm(queries, center.transpose(1, 2))
        return at_center.baddbmm_(query_length, radius.transpose(1, 2))


class ArkVale(PageRetriever):
    """Fetch pages by a volume around their keys (ArkVale, NeurIPS 2024).

    Section 5.2: the score of a page is the largest q . k inside its volume, a cuboid
    or a sphere. Only volumes with the radius "max" contain all keys of the page
    ("cuboid-max" is Quest's bound). Smaller volumes underestimate some pages, but they
    rank pages better (figure 7); "cuboid-mean" ranks best.

    Differs from the paper:

    - Queries that share a KV head sum their softmax over the estimates. The authors'
      code averages the estimates.
    - Partly filled pages are ranked too.
    - Only sinks, window and the tokens that the newest query selected are resident.
      The paper keeps a larger cache of pages and evicts the worst.

    Cost: per step and selecting layer, one pass over two vectors per page.
    """

    name: ClassVar[str] = "arkvale"
    summary: ClassVar[str] = (
        "keeps all tokens on the host; fetches pages by a volume around their keys"
    )

    page_tokens: int = Field(default=32, ge=1, description="Tokens per page.")
    bound: Bound = Field(
        default="cuboid-mean",
        description="Shape and radius of the volume around the keys of a page.",
    )

    def new_index(self, num_kv_heads: int, head_dim: int) -> KeyIndex:
        return PageVolumes(num_kv_heads, head_dim, self.page_tokens, self.bound)
