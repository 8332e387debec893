"""IceCache: all tokens on the host; an index finds those that a query needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

import torch
from pydantic import Field

from vllm_kvplugins.errors import coded
from vllm_kvplugins.index import (
    CodedIndex,
    CodeScan,
    DCIIndex,
    DeviceSelection,
    KeyIndex,
    Keys,
    PageSelection,
)
from vllm_kvplugins.index.compiled import extension_problem
from vllm_kvplugins.policies.retrieval import (
    Retriever,
    tokens_of_pages,
)

# Keys that are divided into stored pages together: near each other in the text, they
# make better pages than in larger segments (docs/research/retrieval.md).
_STORED_SEGMENT = 512


class TreePages(KeyIndex):
    """A DCI tree per KV head; selects the whole pages of the best keys."""

    def __init__(self, tree: DCIIndex) -> None:
        self._tree = tree
        self._tokens = torch.empty(tree.num_heads, 0, tree.page_size, dtype=torch.int64)

    def append(self, keys: torch.Tensor, first: int) -> None:
        """Insert new keys below their nearest nodes; record the page of each token."""
        self._tree.append(keys, first)
        places = self._tree.places(first)
        heads, num_pages, size = self._tokens.shape
        missing = max(self._tree.num_pages) - num_pages
        if missing > 0:
            new_pages = self._tokens.new_full(
                (heads, missing + num_pages // 4, size), -1
            )
            self._tokens = torch.cat([self._tokens, new_pages], 1)
        numbers = torch.arange(first, first + keys.shape[1]).expand(heads, -1)
        self._tokens.flatten(1).scatter_(1, places, numbers)

    def select(
        self, queries: torch.Tensor, keys: Keys, scale: float, count: int
    ) -> torch.Tensor:
        """Select pages of similar keys (IceCache, algorithm 3).

        Finds the best ``count`` keys per query, then selects all tokens of their pages
        until there are ``count`` tokens.
        """
        best = self._tree.query_pages(queries, keys, count, count)
        pages = best.pages[..., None].expand(-1, -1, self._tokens.shape[2])
        tokens = self._tokens.gather(1, pages.clamp(min=0))
        return tokens_of_pages(tokens.masked_fill(pages < 0, -1), count)


class IceCache(Retriever):
    """Fetch the keys that a query needs from host memory (IceCache, ICLR 2026).

    Sections 3.3 and 4, algorithms 1 to 4. The whole cache is on the host. For each
    request, layer and KV head, an index finds the best keys for the queries of the KV
    head's group at every step, and the engine copies their tokens to the device, in
    addition to sinks and window. It does not copy resident tokens again. Tokens that
    leave the window enter the index.

    Differs from the paper:

    - The index compares codes of one byte per dimension (``CodedIndex``), which is
      faster and finds more than the paper's DCI tree. ``index: "dci"`` uses the tree;
      see ``DCIIndex`` for differences there.
    - ``index: "device"`` keeps codes on the device, which scans all of them. The host
      then takes no part in a decode step.
    - The budget is spent on the keys that the index finds. The paper fetches their
      whole pages, so neighbors fill most of the budget. ``fetch: "pages"`` does the
      same: host memory has eight similar tokens next to each other, which are copied
      at once, and the pages with the most attention are fetched. A token moves once,
      when its 512 neighbors have arrived. With the tree, which moves nothing, tokens
      are copied one by one, and the last page is cut so that the hot slots are full.

    Cost: per step and selecting layer, about ``max_visits`` products of keys and
    queries. Per prompt, building the indices.
    """

    name: ClassVar[str] = "icecache"
    summary: ClassVar[str] = (
        "keeps all tokens on the host; an index of similar keys finds those to fetch"
    )

    index: Literal["auto", "dci", "codes", "device"] = Field(
        default="auto",
        description="How to find keys: the tree of the paper (dci); one-byte codes, "
        "scanned below 4096 tokens and in pages of similar keys above (codes, auto); "
        "or one-byte codes of all keys on the GPU, which selects and fetches without "
        "the host (device; needs host_memory, and device memory in proportion to it).",
    )
    page_tokens: int = Field(
        default=16, ge=1, description="Maximum number of tokens per page of the tree."
    )
    promotion: float = Field(
        default=1 / 32,
        gt=0,
        le=0.5,
        description="Share of keys that each level of the tree promotes to the next.",
    )
    fetch: Literal["tokens", "pages"] = Field(
        default="tokens",
        description="What to fetch: the best keys (tokens), or whole pages of similar "
        "keys, each with one copy (pages: finds less; with index dci as in the paper).",
    )
    max_visits: int = Field(
        default=1024,
        ge=0,
        description="Approximate number of keys that a query visits; 0: all.",
    )
    lazy_index: bool = Field(
        default=False,
        description="Start to generate before the indices are built; scan all keys "
        "until then.",
    )
    seed: int = Field(default=0, ge=0, description="Random seed of the promotions.")

    def problems(self) -> list[str]:
        reasons = super().problems()
        missing = extension_problem()
        if self.index == "device":
            reasons += self._device_problems()
        elif missing:
            reasons.append(
                coded(
                    "KVP403",
                    f"icecache needs the compiled extension ({missing}); install a "
                    "wheel that has it, or build it in the source tree (pip install "
                    "--no-build-isolation . with a C++ compiler and CMake), or use "
                    "exact-topk",
                )
            )
        if self.page_selection is not None:
            reasons += self._page_problems(self.page_selection.page_tokens)
        return reasons

    def _page_problems(self, page_tokens: int) -> Iterator[str]:
        """Settings that do not go with pages that are stored together."""
        if self.sinks % page_tokens:
            yield coded(
                "KVP140",
                f"fetch 'pages' needs sinks that are a multiple of {page_tokens}, the "
                f"tokens of a page, and sinks is {self.sinks}; set it to such a "
                "number, or fetch to 'tokens'",
            )
        if self.reuse_every > 1:
            yield coded(
                "KVP140",
                "fetch 'pages' needs the pages of each layer, and reuse_every "
                f"{self.reuse_every} lets layers reuse those of another; set "
                "reuse_every to 1, or fetch to 'tokens'",
            )

    def _device_problems(self) -> Iterator[str]:
        """Settings that do not go with ``index: "device"``."""
        if self.host_memory is None:
            yield coded(
                "KVP142",
                "index 'device' allocates device memory for the codes of host_memory, "
                "which is not set; set it, for example to '8GiB' (kvplugins size shows "
                "what a request then needs)",
            )
        for name, value, why in (
            ("fetch", "tokens", "has no pages of similar keys"),
            ("prefetch", "off", "has no search on the host to run ahead"),
            ("host_dtype", "auto", "lets the device read host memory as it is"),
            ("lazy_index", False, "has no index to build"),
        ):
            if getattr(self, name) != value:
                yield coded(
                    "KVP143",
                    f"index 'device' {why}, and {name} is {getattr(self, name)!r}; set "
                    f"{name} to {value!r} or index to 'auto'",
                )

    @property
    def device_selection(self) -> DeviceSelection | None:
        if self.index != "device":
            return None
        return DeviceSelection(self.host_page_tokens, "index 'device'", "index 'auto'")

    @property
    def page_selection(self) -> PageSelection | None:
        if self.fetch != "pages" or self.index not in ("auto", "codes"):
            return None
        return PageSelection(_STORED_SEGMENT)

    @property
    def index_share(self) -> float:
        """Of keys and values with 64 channels; less with more channels.

        The tree takes 47 %. Codes take 29 %, and up to 43 % with few tokens, because
        memory is allocated in slabs. Those of ``index: "device"`` are on the device.
        The order of stored pages takes another 3 %.
        """
        return 0.0 if self.index == "device" else 0.5

    @property
    def builds_lazily(self) -> bool:
        return self.lazy_index

    def new_index(self, num_kv_heads: int, head_dim: int) -> KeyIndex:
        if self.index == "device":
            return CodeScan(num_kv_heads, head_dim)
        if self.page_selection is not None:
            return CodedIndex(
                num_kv_heads,
                head_dim,
                max_visits=self.max_visits,
                segment=_STORED_SEGMENT,
                flat_keys=_STORED_SEGMENT,
                stored=True,
            )
        if self.index in ("auto", "codes"):
            return CodedIndex(num_kv_heads, head_dim, max_visits=self.max_visits)
        tree = DCIIndex(
            num_kv_heads,
            head_dim,
            self.page_tokens,
            promotion=self.promotion,
            max_visits=self.max_visits,
            seed=self.seed,
        )
        return TreePages(tree) if self.fetch == "pages" else tree
