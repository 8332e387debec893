"""ClusterKV: fetches whole clusters of similar keys, ranked by their means."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from pydantic import Field

from vllm_kvplugins.index import KeyIndex, Keys
from vllm_kvplugins.plan.geometry import Geometry
from vllm_kvplugins.policies.retrieval import Retriever
from vllm_kvplugins.scoring.k_means import k_means, nearest_direction


class Clusters(NamedTuple):
    """Tokens of one KV head, by cluster.

    Attributes:
        means: float32 [clusters, head_dim], mean key of each cluster.
        tokens: int64 [n], token numbers; those of a cluster lie together, in ascending
            order.
        ends: int64 [clusters], where each cluster ends in ``tokens``.
    """

    means: torch.Tensor
    tokens: torch.Tensor
    ends: torch.Tensor


class ClusteredKeys(KeyIndex):
    """Selects clusters of keys by the products of their means with the queries.

    The keys of the first call are clustered at once. Later keys wait, as one cluster of
    consecutive tokens per call, until ``batch_tokens`` of them are there; they then
    form clusters of their own. Clusters never change afterwards.

    Args:
        cluster_tokens: average number of tokens per cluster.
        batch_tokens: later tokens that are clustered together.
        iterations: maximum number of k-means iterations.
        seed: random seed of k-means.
    """

    def __init__(
        self,
        num_kv_heads: int,
        head_dim: int,
        cluster_tokens: int,
        batch_tokens: int,
        iterations: int,
        seed: int,
    ) -> None:
        self._cluster_tokens = cluster_tokens
        self._batch_tokens = batch_tokens
        self._iterations = iterations
        self._seed = seed
        none = Clusters(
            torch.empty(0, head_dim),
            torch.empty(0, dtype=torch.int64),
            torch.empty(0, dtype=torch.int64),
        )
        self._clusters = [none] * num_kv_heads
        self._waiting: list[torch.Tensor] = []  # keys of each call
        self._clustered = [0]  # tokens after each k-means

    def append(self, keys: torch.Tensor, first: int) -> None:
        """Cluster new keys, or let them wait (see the class).

        Raises:
            ValueError: a key is not finite. It would spoil the mean of other keys, so
                nothing is added.
        """
        if not bool(keys.isfinite().all()):
            raise ValueError("an element of a key is not finite; nothing was added")
        waiting = [*self._waiting, keys.to(torch.float32)]
        new_keys = torch.cat(waiting, 1)
        tokens = new_keys.shape[1]
        if first and tokens < self._batch_tokens:
            # One cluster for each call.
            sizes = torch.tensor([part.shape[1] for part in waiting])
            numbers = torch.arange(len(waiting)).repeat_interleave(sizes)
            assigned = numbers.expand(len(new_keys), -1)
        else:
            count = max(tokens // self._cluster_tokens, 1)
            found = k_means(
                new_keys, count, self._iterations, self._seed, nearest_direction
            )
            assigned, waiting = found.assigned, []
        before = self._clustered[-1]
        self._clusters = [
            _with(_up_to(old, before), head_keys, head_assigned, before)
            for old, head_keys, head_assigned in zip(
                self._clusters, new_keys, assigned, strict=True
            )
        ]
        self._waiting = waiting
        if not waiting:
            self._clustered.append(before + tokens)

    def keep_first(self, tokens: int) -> int:
        """Keep what was clustered together as a whole; later tokens wait again."""
        kept = [stop for stop in self._clustered if stop <= tokens]
        if len(kept) == 1:
            return 0
        self._clustered = kept
        self._clusters = [_up_to(old, kept[-1]) for old in self._clusters]
        self._waiting = []
        return kept[-1]

    def select(
        self, queries: torch.Tensor, keys: Keys, scale: float, count: int
    ) -> torch.Tensor:
        """Select the tokens of the best clusters.

        The score of a cluster is the softmax over the products with all means, summed
        over the queries of the group. The last cluster is cut to its first tokens.

        Cost: O(group * clusters * head_dim) per KV head.
        """
        chosen = torch.full((len(self._clusters), count), -1)
        for head, (own, head_queries) in enumerate(
            zip(self._clusters, queries.to(torch.float32), strict=True)
        ):
            scores = (head_queries @ own.means.T).mul_(scale).softmax(-1).sum(0)
            order = scores.sort(descending=True, stable=True).indices
            sizes = own.ends.diff(prepend=own.ends.new_zeros(1))[order]
            needed = int((sizes.cumsum(0) < count).sum()) + 1
            stops = own.ends[order[:needed]].tolist()
            parts = [
                own.tokens[stop - size : stop]
                for stop, size in zip(stops, sizes.tolist(), strict=False)
            ]
            best = torch.cat(parts)[:count]
            chosen[head, : len(best)] = best
        return chosen


def _up_to(clusters: Clusters, tokens: int) -> Clusters:
    """The clusters of a head's first tokens; none has later tokens, too."""
    ends = clusters.ends[clusters.ends <= tokens]
    return Clusters(clusters.means[: len(ends)], clusters.tokens[:tokens], ends)


def _with(
    old: Clusters, keys: torch.Tensor, assigned: torch.Tensor, first: int
) -> Clusters:
    """The clusters of a head with those of more tokens behind them.

    Args:
        keys: [n, head_dim].
        assigned: int64 [n], cluster of each new token; unused numbers are left out.
        first: number of the first new token.
    """
    tokens = assigned.sort(stable=True).indices
    _, rows, sizes = assigned.unique(return_inverse=True, return_counts=True)
    sums = keys.new_zeros(len(sizes), keys.shape[1]).index_add_(0, rows, keys)
    return Clusters(
        torch.cat([old.means, sums / sizes.unsqueeze(1)]),
        torch.cat([old.tokens, tokens + first]),
        torch.cat([old.ends, sizes.cumsum(0) + len(old.tokens)]),
    )


class ClusterKV(Retriever):
    """Fetch clusters of tokens with similar keys (ClusterKV, arXiv:2412.03213).

    K-means with the cosine distance clusters the keys of the prompt after prefill, one
    cluster per 80 tokens, and the keys of every 320 later tokens into four more
    clusters, separately for each KV head. In each step, clusters are ranked by the
    products of the query and their means, and fetched until the budget is full. The
    last one is cut.

    Differs from the paper:

    - The score of a cluster is the softmax over all means, summed over the queries that
      share a KV head. The paper has no GQA; for one query the order is the same.
    - Later tokens stay on the device in the paper until they are clustered. Here each
      block of them is a cluster of its own until then.
    - With ``prefill_block``, the tokens of each block are clustered separately.
    - Only sinks, window and the tokens that the newest query selected are resident. The
      paper keeps the clusters of earlier steps on the device, too.

    Cost: per step and selecting layer, one pass over the means. Per prompt, k-means.
    """

    name: ClassVar[str] = "clusterkv"
    summary: ClassVar[str] = (
        "keeps all tokens on the host; fetches clusters of similar keys"
    )

    cluster_tokens: int = Field(
        default=80, ge=1, description="Average number of tokens per cluster."
    )
    batch_tokens: int = Field(
        default=320,
        ge=1,
        description="Tokens behind the prompt that are clustered together.",
    )
    iterations: int = Field(
        default=10, ge=1, description="Maximum number of k-means iterations."
    )
    seed: int = Field(default=0, ge=0, description="Random seed of k-means.")

    def index_bytes(self, tokens: int, geometry: Geometry) -> int:
        # In bfloat16, key and value of a token are as large as a float32 key.
        def float32_keys(tokens: int) -> int:
            stored = 2 * self.offloaded_bytes(tokens, geometry)
            return -(-stored // (geometry.element_bytes or 2))

        means = -(-float32_keys(tokens) // self.cluster_tokens)
        waiting = self.sinks + self.window + self.batch_tokens
        kept = float32_keys(min(tokens, waiting))
        # A key has head_dim elements of 4 bytes, a token number has 8 bytes.
        numbers = -(-2 * float32_keys(tokens) // (geometry.head_dim or 64))
        return means + kept + numbers

    def new_index(self, num_kv_heads: int, head_dim: int) -> KeyIndex:
        return ClusteredKeys(
            num_kv_heads,
            head_dim,
            self.cluster_tokens,
            self.batch_tokens,
            self.iterations,
            self.seed,
        )
