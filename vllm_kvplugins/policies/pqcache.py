"""PQCache: product quantization of keys; scores come from small lookup tables."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field

from vllm_kvplugins.index import KeyIndex, Keys
from vllm_kvplugins.plan.geometry import Geometry
from vllm_kvplugins.policies.retrieval import Retriever
from vllm_kvplugins.scoring.k_means import k_means, nearest


class QuantizedKeys(KeyIndex):
    """Product quantization: each subspace of a key becomes the nearest centroid.

    K-means runs once, on the first append after which there are more tokens than
    centroids. Until then every key is its own centroid. The centroids stay fixed
    afterwards, and later keys get the nearest one.

    Args:
        subspaces: number of channel groups. If it does not divide head_dim, zeros fill
            the last group; they change neither distances nor products.
        bits: size of a code; each subspace has 2 ** bits centroids.
        iterations: maximum number of k-means iterations.
        seed: random seed of k-means.
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
        self._trained = 0  # tokens that k-means has seen

    def append(self, keys: torch.Tensor, first: int) -> None:
        """Quantize new keys; run k-means first if it is due (see the class).

        Raises:
            ValueError: a key is not finite. It would spoil the centroids of other keys,
                so nothing is added.
        """
        if not bool(keys.isfinite().all()):
            raise ValueError("an element of a key is not finite; nothing was added")
        new_parts, tokens = self._split(keys), first + keys.shape[1]
        if first > self._max_centroids:
            codes = torch.cat([self._codes, self._encode(new_parts)], 2)
        else:
            # Every key is its own centroid so far.
            new_parts = torch.cat([self._centroids, new_parts], 2)
            if tokens <= self._max_centroids:
                codes = torch.arange(tokens, dtype=torch.uint8)
                codes = codes.expand(*new_parts.shape[:2], -1)
                self._centroids = new_parts
            else:
                points = new_parts.flatten(0, 1)
                found = k_means(
                    points, self._max_centroids, self._iterations, self._seed
                )
                self._centroids = found.centroids.unflatten(0, new_parts.shape[:2])
                codes, self._trained = self._encode(new_parts), tokens
        self._codes = codes

    def keep_first(self, tokens: int) -> int:
        """Keep codes and centroids, unless k-means has seen tokens that go."""
        if tokens < self._trained:
            return 0
        self._codes = self._codes[:, :, :tokens].clone()
        if not self._trained:
            self._centroids = self._centroids[:, :, :tokens].clone()
        return tokens

    def scores(self, queries: torch.Tensor) -> torch.Tensor:
        """Products of queries with the centroids of all keys.

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
        """Select the tokens with the most attention, computed from quantized keys.

        Attention is summed over the queries of the group.
        """
        attention = self.scores(queries).mul_(scale).softmax(-1).sum(1)
        best = attention.topk(min(count, attention.shape[1]), dim=-1).indices
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

    The channels of each KV head are split into subspaces, and k-means finds centroids
    of the prompt's keys in each of them. The index stores only the nearest centroids
    of a key, so the product of a query and a key is a sum of table entries. Tokens are
    ranked by the softmax of these products, summed over the queries that share a KV
    head, as in the authors' code. The defaults, 2 subspaces of 6 bits, are those of the
    authors' scripts.

    Differs from the paper:

    - K-means runs a fixed number of iterations. The paper fits their number to the
      duration of the prefill.
    - K-means does not use the keys of the window.
    - The hot slots are the only cache on the device.
    - With ``prefill_block``, k-means sees the first block only.
    - If a prompt offloads no more tokens than there are centroids, k-means waits until
      there are more.

    Cost: per step and selecting layer, ``subspaces`` table entries per query and
    offloaded token. Per prompt, k-means (28 layers of 3 KV heads, 8192 tokens: 3.7 s on
    one thread).
    """

    name: ClassVar[str] = "pqcache"
    summary: ClassVar[str] = (
        "keeps all tokens on the host; fetches tokens by quantized keys"
    )

    subspaces: int = Field(
        default=2, ge=1, description="Parts of a key; each has its own centroids."
    )
    bits: int = Field(
        default=6,
        ge=1,
        le=8,
        description="Bits per code; each part has 2 ** bits centroids.",
    )
    iterations: int = Field(
        default=10, ge=1, description="Maximum number of k-means iterations."
    )
    seed: int = Field(default=0, ge=0, description="Random seed of k-means.")

    @property
    def remarks(self) -> list[str]:
        if self.prefill_block is None:
            return []
        return [
            f"k-means sees only the first {self.prefill_block} tokens (prefill_block), "
            "and selections get worse, by half with blocks of 512; give larger blocks, "
            "or use icecache with index codes"
        ]

    def index_bytes(self, tokens: int, geometry: Geometry) -> int:
        # One byte per part; 64 channels of bfloat16 keys and values have 256 bytes.
        codes = self.offloaded_bytes(tokens, geometry) * self.subspaces // 256
        # A token has at least as many bytes as a float32 centroid.
        trained = self.sinks + self.window + 2**self.bits
        return codes + self.offloaded_bytes(min(tokens, trained), geometry)

    def new_index(self, num_kv_heads: int, head_dim: int) -> KeyIndex:
        return QuantizedKeys(
            num_kv_heads,
            head_dim,
            self.subspaces,
            self.bits,
            self.iterations,
            self.seed,
        )
