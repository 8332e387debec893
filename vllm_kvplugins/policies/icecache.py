"""IceCache: similar keys share pages; a tree finds the pages that a query wants."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field

from vllm_kvplugins.errors import coded
from vllm_kvplugins.index import DCIIndex, KeyIndex, Keys
from vllm_kvplugins.index.compiled import extension_problem
from vllm_kvplugins.policies.retrieval import (
    Retriever,
    tokens_of_pages,
)


class TreePages(KeyIndex):
    """A DCI tree per KV head; fetches the pages of the keys that it finds."""

    def __init__(self, tree: DCIIndex) -> None:
        self._tree = tree
        self._tokens = torch.empty(tree.num_heads, 0, tree.page_size, dtype=torch.int64)

    def append(self, keys: torch.Tensor, first: int) -> None:
        """Put new keys below the nodes nearest to them, and record which tokens are in
        which page."""
        self._tree.append(keys, first)
        places = self._tree.places(first)
        heads, num_pages, size = self._tokens.shape
        more = max(self._tree.num_pages) - num_pages
        if more > 0:
            fresh = self._tokens.new_full((heads, more + num_pages // 4, size), -1)
            self._tokens = torch.cat([self._tokens, fresh], 1)
        numbers = torch.arange(first, first + keys.shape[1]).expand(heads, -1)
        self._tokens.flatten(1).scatter_(1, places, numbers)

    def select(
        self, queries: torch.Tensor, keys: Keys, scale: float, count: int
    ) -> torch.Tensor:
        """Algorithm 3 of the IceCache paper: the best ``count`` keys per query,
        then all tokens of their pages, until ``count`` are there."""
        best = self._tree.query_pages(queries, keys, count, count)
        pages = best.pages[..., None].expand(-1, -1, self._tokens.shape[2])
        tokens = self._tokens.gather(1, pages.clamp(min=0))
        return tokens_of_pages(tokens.masked_fill(pages < 0, -1), count)


class IceCache(Retriever):
    """Fetch clusters of similar keys from host memory (IceCache, ICLR 2026).

    Sections 3.3 and 4, algorithms 1 to 4. The whole cache is on the host; per
    request, layer and KV head a DCI tree clusters it into pages. At every step the
    tree finds the best keys for the queries of a KV head's group, and they are
    made resident in addition to sinks and window; resident tokens are not copied
    again. Tokens that age out of the window enter the tree.

    Differs from the paper: it fetches whole pages of the best keys, which fills
    most of a budget with their neighbours; here the budget goes to the keys that
    the tree found, unless ``fetch`` is "pages" (the last page then in part, so
    that the hot zone is always exactly full). See ``DCIIndex`` for the tree.

    Cost: per step and selecting layer about ``max_visits`` key products per query;
    per prompt the building of the trees.
    """

    name: ClassVar[str] = "icecache"
    summary: ClassVar[str] = "nothing dropped; fetches clusters of keys through a tree"
    # 47 % of bfloat16 keys and values at 64 dimensions, less at more.
    index_share: ClassVar[float] = 0.5

    page_tokens: int = Field(
        default=16, ge=1, description="Tokens per page of the tree, at most."
    )
    promotion: float = Field(
        default=1 / 32,
        gt=0,
        le=0.5,
        description="Share of keys promoted per level of the tree.",
    )
    fetch: Literal["tokens", "pages"] = Field(
        default="tokens",
        description="The best keys alone, or as in the paper their whole pages.",
    )
    max_visits: int = Field(
        default=1024, ge=0, description="Keys looked at per query, about; 0: all."
    )
    lazy_index: bool = Field(
        default=False,
        description="Generate before the trees are built; until then, scan all keys.",
    )
    seed: int = Field(default=0, ge=0, description="Of the promotions.")

    def problems(self) -> list[str]:
        reasons = super().problems()
        missing = extension_problem()
        if missing:
            reasons.append(
                coded(
                    "KVP403",
                    f"icecache needs the compiled extension ({missing}); install a "
                    "wheel that has it, or build it in the source tree (pip install "
                    "--no-build-isolation . with a C++ compiler and CMake), or use "
                    "exact-topk",
                )
            )
        return reasons

    @property
    def builds_lazily(self) -> bool:
        return self.lazy_index

    def new_index(self, num_kv_heads: int, head_dim: int) -> KeyIndex:
        tree = DCIIndex(
            num_kv_heads,
            head_dim,
            self.page_tokens,
            promotion=self.promotion,
            max_visits=self.max_visits,
            seed=self.seed,
        )
        return TreePages(tree) if self.fetch == "pages" else tree
