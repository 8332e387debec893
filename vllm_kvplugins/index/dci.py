"""The DCI-tree of IceCache, compiled (csrc/dci.cpp)."""

from __future__ import annotations

from typing import Literal

from vllm_kvplugins.index.compiled import CompiledIndex, require_extension


class DCIIndex(CompiledIndex):
    """IceCache's DCI-tree (multi-level dynamic continuous indexing), per KV head.

    IceCache sections 3.3 and 4.1, appendix B, equations 2 and 3, algorithms 2 to 4.
    Keys are promoted at random with ratio r, level after level, and every key becomes
    a child of the nearest promoted key. The keys below one node share pages. A query
    descends from the top and opens the nearest nodes until it has reached
    ``max_visits`` keys, which it scores exactly.

    Differs from the paper:

    - Parents are found by exact search instead of a query of the tree.
    - Promoted keys also stay at the levels below, so that each key has one page.
    - The number of keys scored is a setting; in the paper it follows from k.
    - Nodes are ranked by the mean of their keys unless ``route`` is "parent".
    - Prioritized DCI within a node is off unless ``visit_ratio`` is below 1: nodes are
      small, and scoring all their keys is faster (docs/research/key-index.md).
    - Later keys may have larger norms than all earlier ones: the constant c of
      equation 2 is the running maximum, and every bound follows it.

    Results depend only on the seed and the keys, up to rounding: scores are added up in
    the order of the CPU's vector width.

    Args:
        num_heads: KV heads.
        head_dim: elements per key.
        page_size: keys per page.
        promotion: ratio r in (0, 0.5]; 1 / r keys per node on average.
        composite, simple: number of composite indices of prioritized DCI, and of
            simple indices in each. They take ``4 * composite * simple`` bytes per key.
            With 0, ``visit_ratio`` must be 1 and pages of large nodes are not compact.
        visit_ratio: share of an opened node's keys that prioritized DCI visits.
        max_visits: approximate number of keys scored per query, unless the query states
            its own; 0 is no limit and gives the exact result for any ``visit_ratio``.
        route: the vector that represents a node when nodes are ranked: the ``mean`` of
            its keys, or its ``parent`` key as in the paper, which finds fewer keys.
        seed: seed of the promotions and of the directions of the simple indices.

    Raises:
        ValueError: a setting is out of range.
        RuntimeError: the extension is not built, or KVP_OPS=torch forbids it. There is
            no version in torch: it would be slower than a scan.

    Cost: O(n * (r * n) * head_dim) multiply-adds to build n keys, at most
    O(max_visits * head_dim) per level and query. Calls release the interpreter's lock
    and use OpenMP threads over (request, head).
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        page_size: int = 32,
        *,
        promotion: float = 1 / 32,
        composite: int = 2,
        simple: int = 2,
        visit_ratio: float = 1.0,
        max_visits: int = 2048,
        route: Literal["mean", "parent"] = "mean",
        seed: int = 0,
    ) -> None:
        require_extension("DCIIndex")
        if visit_ratio < 1.0 and composite * simple == 0:
            raise ValueError(
                f"visit_ratio is {visit_ratio}, which needs composite and simple "
                f"indices, got {composite} x {simple}"
            )
        if route not in ("mean", "parent"):
            raise ValueError(f"route must be mean or parent, got {route!r}")
        super().__init__(
            0,
            num_heads,
            head_dim,
            page_size,
            promotion,
            composite,
            simple,
            seed,
            route == "mean",
        )
        self.default_visits = max_visits
        self.visit_ratio = visit_ratio
