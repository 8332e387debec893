"""PQCache: keys known by their nearest centroids; scores come from small tables."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field

from vllm_kvplugins.index import KeyIndex, Keys
from vllm_kvplugins.plan.geometry import Geometry
from vllm_kvplugins.policies.retrieval import Retriever
from vllm_kvplugins.scoring.attention_votes import slot_tiles

# Similarities of a tile should stay in the cache: 1 MiB of float32.
_COPIES = 16


def nearest(points: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """The nearest centroid of every point.

    Args:
        points: [groups, n, dim].
        centroids: [groups, count, dim].

    Returns:
        int64 [groups, n].

    Cost: O(groups * n * count * dim).
    """
    groups, count = centroids.shape[:2]
    half = centroids.square().sum(-1).unsqueeze(1) / 2
    nearest = points.new_empty(points.shape[:2], dtype=torch.int64)
    for tile in slot_tiles(points.shape[1], _COPIES * groups * count):
        # |x - c|^2 is smallest where x . c - |c|^2 / 2 is largest
        likeness = torch.bmm(points[:, tile], centroids.transpose(1, 2)) - half
        nearest[:, tile] = likeness.max(-1).indices
    return nearest


def k_means(
    points: torch.Tensor, count: int, iterations: int, seed: int
) -> torch.Tensor:
    """Centroids of several sets of points: Lloyd's iterations, from points drawn at
    random, the same numbers in all sets. A centroid that is no key's nearest stays
    where it is.

    In torch and not scikit-learn, which takes 0.6 of the time (8192 tokens, 6 sets of
    32 dimensions, 64 centroids, 10 iterations, one thread: 78 ms against 123) but
    would be a new dependency, and limits the threads of the whole process while it
    runs in parallel to the model.

    Args:
        points: float32 [groups, n, dim], n >= count.
        count: centroids per group.
        iterations: at most; fewer if nothing changes.
        seed: of the first centroids.

    Returns:
        float32 [groups, count, dim].

    Cost: O(iterations * groups * n * count * dim).
    """
    groups, tokens, dim = points.shape
    generator = torch.Generator().manual_seed(seed)
    centroids = points[:, torch.randperm(tokens, generator=generator)[:count]]
    offsets = torch.arange(groups)[:, None] * count
    before = None
    for _ in range(iterations):
        codes = nearest(points, centroids)
        if before is not None and torch.equal(codes, before):
            break
        before = codes
        rows = (codes + offsets).flatten()
        sums = points.new_zeros(groups * count, dim)
        sums.index_add_(0, rows, points.flatten(0, 1))
        members = torch.bincount(rows, minlength=groups * count).view(groups, -1, 1)
        means = sums.view(groups, count, dim) / members.clamp(min=1)
        centroids = torch.where(members > 0, means, centroids)
    return centroids


class QuantizedKeys(KeyIndex):
    """Product quantization: a key is one of a few centroids in each subspace.

    The centroids are found among the first tokens that are more than there are to be
    centroids, and stay; until then every key is a centroid. Later keys take the
    nearest.

    Args:
        subspaces: runs of channels. Where they do not divide head_dim, the last ones
            are filled up with zeros, which change neither distances nor products.
        bits: of a code; 2 ** bits centroids per subspace.
        iterations: of K-Means, at most.
        seed: of K-Means.
    """

    def __init__(
        self,
        num_kv_heads: int,
        head_dim: int,
        subspaces: int,
        bits: int,
        iterations: int,
        seed: int,
    ) -> None:
        self._max_centroids = 2**bits
        self._iterations = iterations
        self._seed = seed
        self._subspaces = min(subspaces, head_dim)
        self._dim = -(-head_dim // self._subspaces)
        self._padding = self._subspaces * self._dim - head_dim
        shape = (num_kv_heads, self._subspaces, 0)
        self._centroids = torch.empty(*shape, self._dim)
        self._codes = torch.empty(shape, dtype=torch.uint8)

    def append(self, keys: torch.Tensor, first: int) -> None:
        """Find the centroids or take the nearest ones; see the class.

        Raises:
            ValueError: a key is not finite, and would spoil the centroids of others.
                Nothing was added.
        """
        if not bool(keys.isfinite().all()):
            raise ValueError("an element of a key is not finite; nothing was added")
        fresh, tokens = self._split(keys), first + keys.shape[1]
        if first > self._max_centroids:
            codes = torch.cat([self._codes, self._encode(fresh)], 2)
        else:
            # so far every key is a centroid
            fresh = torch.cat([self._centroids, fresh], 2)
            if tokens <= self._max_centroids:
                codes = torch.arange(tokens, dtype=torch.uint8)
                codes = codes.expand(*fresh.shape[:2], -1)
                self._centroids = fresh
            else:
                points = fresh.flatten(0, 1)
                centroids = k_means(
                    points, self._max_centroids, self._iterations, self._seed
                )
                self._centroids = centroids.unflatten(0, fresh.shape[:2])
                codes = self._encode(fresh)
        self._codes = codes

    def scores(self, queries: torch.Tensor) -> torch.Tensor:
        """The products of queries with the centroids that stand for the keys.

        Args:
            queries: [num_kv_heads, group, head_dim].

        Returns:
            float32 [num_kv_heads, group, tokens].

        Cost: O(group * (centroids * head_dim + tokens * subspaces)) per KV head.
        """
        table = self._split(queries) @ self._centroids.transpose(2, 3)
        codes = self._codes.long().unsqueeze(2).expand(-1, -1, queries.shape[1], -1)
        return table.gather(3, codes).sum(1)

    def select(
        self, queries: torch.Tensor, keys: Keys, scale: float, count: int
    ) -> torch.Tensor:
        """The tokens that would get most attention if keys were as their codes say,
        summed over queries and group."""
        worth = self.scores(queries).mul_(scale).softmax(-1).sum(1)
        best = worth.topk(min(count, worth.shape[1]), dim=-1).indices
        return F.pad(best, (0, count - best.shape[1]), value=-1)

    def _split(self, vectors: torch.Tensor) -> torch.Tensor:
        """[num_kv_heads, n, head_dim] as [num_kv_heads, subspaces, n, dim]."""
        padded = F.pad(vectors.to(torch.float32), (0, self._padding))
        return padded.unflatten(2, (self._subspaces, self._dim)).transpose(1, 2)

    def _encode(self, parts: torch.Tensor) -> torch.Tensor:
        codes = nearest(parts.flatten(0, 1), self._centroids.flatten(0, 1))
        return codes.to(torch.uint8).unflatten(0, parts.shape[:2])


class PQCache(Retriever):
    """Fetch tokens by product quantization of their keys (arXiv:2407.12820).

    Per KV head the channels are split into subspaces, and K-Means finds centroids of
    the prompt's keys in each. A key is known by its nearest centroids only; a query's
    products with all keys are sums of table entries. Tokens are ranked by the softmax
    of those products, added up over the queries that share a KV head, as in the
    authors' code; 2 subspaces of 6 bits are the defaults of its scripts.

    Differs from the paper: K-Means does a fixed number of iterations, where the paper
    fits their number to the time of the prefill, and does not see the window; the hot
    zone is the only cache on the device. Where a prompt leaves no more tokens to
    offload than there are centroids, K-Means waits for more.

    Cost: per step and selecting layer ``subspaces`` table entries per query and
    offloaded token; per prompt K-Means (see ``k_means``: 28 layers of 3 KV heads,
    8192 tokens, 3.7 s of one thread).
    """

    name: ClassVar[str] = "pqcache"
    summary: ClassVar[str] = "nothing dropped; fetches tokens by quantized keys"

    subspaces: int = Field(
        default=2, ge=1, description="Parts of a key, each with centroids of its own."
    )
    bits: int = Field(
        default=6, ge=1, le=8, description="Of a code: 2 ** bits centroids per part."
    )
    iterations: int = Field(default=10, ge=1, description="Of K-Means, at most.")
    seed: int = Field(default=0, ge=0, description="Of K-Means.")

    def host_bytes(self, tokens: int, geometry: Geometry) -> int:
        stored = super().host_bytes(tokens, geometry)
        # One byte per part: of bfloat16 keys and values at 64 dimensions; less at more.
        codes = stored * self.subspaces // 256
        # A token has a float32 centroid's bytes, or more.
        trained = self.sinks + self.window + 2**self.bits
        return stored + codes + super().host_bytes(min(tokens, trained), geometry)

    def new_index(self, num_kv_heads: int, head_dim: int) -> KeyIndex:
        return QuantizedKeys(
            num_kv_heads,
            head_dim,
            self.subspaces,
            self.bits,
            self.iterations,
            self.seed,
        )
