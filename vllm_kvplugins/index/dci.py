"""The DCI-tree of IceCache, compiled (csrc/dci.cpp)."""

from __future__ import annotations

from typing import Literal

from vllm_kvplugins.index.compiled import CompiledIndex, require_extension


class DCIIndex(CompiledIndex):
    """IceCache's DCI-tree (multi-level dynamic continuous indexing), per KV head.

    IceCache sections 3.3 and 4.1, appendix B, equations 2 and 3, algorithms 2 to
    4. Keys are promoted at random with ratio r, level after level, and every key
    hangs below the nearest promoted one; the keys below one node share pages. A
    query goes down from the top and opens the nodes nearest to it until it has
    reached ``max_visits`` keys, which it scores exactly.

    Differs from the paper: parents are found exactly instead of by a query of the
    tree; promoted keys stay at the levels below too, so that each key has one
    page; the number of keys looked at is a setting instead of following from k;
    nodes are ranked by the mean of their keys unless ``route`` is "parent";
    prioritized DCI within a node is off unless ``visit_ratio`` is below 1,
    because nodes are small and it is slower than scoring them (measured in
    docs/measurements-index.md). Norms above all earlier ones are allowed for: the
    constant c of eq. 2 is the running maximum and every bound follows it.

    Results depend on the seed and the keys alone, up to rounding: the order of
    additions in a score is that of the CPU's vector width.

    Args:
        num_heads: KV heads.
        head_dim: elements per key.
        page_size: keys per page.
        promotion: ratio r in (0, 0.5]; 1 / r keys per node on average.
        composite, simple: composite indices of prioritized DCI, and simple ones in
            each; 4 bytes per key for each of their product. 0 for none: then
            ``visit_ratio`` must be 1, and pages of large nodes are not compact.
        visit_ratio: share of an opened node's keys that prioritized DCI visits.
        max_visits: default for queries: keys looked at per query, about; 0 is no
            limit: the exact result, whatever ``visit_ratio`` is.
        route: what stands for a node when nodes are ranked: the ``mean`` of its
            keys, or its ``parent`` key as in the paper, which finds less.
        seed: of the promotions and of the directions of the simple indices.

    Raises:
        ValueError: a setting is out of range.
        RuntimeError: the extension is not built, or KVP_OPS=torch forbids it.
            There is no slow version: one would be slower than no index.

    Cost: building n keys O(n * (r * n) * head_dim) multiply-adds, a query
    O(max_visits * head_dim) at most per level. Calls release the interpreter's
    lock and use OpenMP threads over (request, head).
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
