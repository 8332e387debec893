"""ClusterKV's clusters and selections, and OmniKV's, against loops."""

from __future__ import annotations

import math

import pytest
import torch

from vllm_kvplugins.index import Keys
from vllm_kvplugins.policies.clusterkv import ClusteredKeys
from vllm_kvplugins.policies.omnikv import SharedScan
from vllm_kvplugins.scoring.k_means import k_means, nearest_direction

SEED = 29
HEADS, GROUP, DIM, SCALE = 2, 3, 8, 0.4


def normal(*shape: int, seed: int = SEED) -> torch.Tensor:
    print("seed", seed)
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make(cluster_tokens: int = 10, batch_tokens: int = 40) -> ClusteredKeys:
    return ClusteredKeys(HEADS, DIM, cluster_tokens, batch_tokens, 10, 0)


def bundles(directions: torch.Tensor, each: int, noise: float) -> torch.Tensor:
    """[HEADS, n, DIM]: keys around some directions, of different lengths, in turns."""
    count = len(directions)
    lengths = torch.linspace(0.5, 3, count * each).unsqueeze(1)
    keys = directions.repeat(each, 1) * lengths + noise * normal(count * each, DIM)
    return keys.expand(HEADS, -1, -1).contiguous()


def test_keys_of_one_direction_are_one_cluster_whatever_their_length():
    keys = bundles(torch.eye(DIM)[:4], 20, 0.01)
    # four seeds of eight find the four bundles with one centroid in each
    found = [
        k_means(keys, 4, 20, seed, nearest_direction).assigned for seed in range(8)
    ]
    pure = [
        all(
            len({int(c) for c in chosen[head, bundle::4]}) == 1
            for head in range(HEADS)
            for bundle in range(4)
        )
        for chosen in found
    ]
    assert sum(pure) >= 2
    assert torch.equal(found[0], k_means(keys, 4, 20, 0, nearest_direction).assigned)


def test_no_key_is_nearer_to_another_cluster_at_the_end():
    keys = normal(HEADS, 200, DIM)
    chosen = k_means(keys, 7, 100, 1, nearest_direction).assigned
    for head in range(HEADS):
        means = torch.stack([keys[head][chosen[head] == c].mean(0) for c in range(7)])
        for key, own in zip(keys[head], chosen[head].tolist(), strict=True):
            cosines = (means @ key / means.norm(dim=1)).tolist()
            assert cosines[own] >= max(cosines) - 1e-5


def clusters_of(index: ClusteredKeys, head: int) -> list[list[int]]:
    """The tokens of each cluster of a head."""
    own = index._clusters[head]
    starts = [0, *own.ends.tolist()[:-1]]
    return [
        own.tokens[a:b].tolist() for a, b in zip(starts, own.ends.tolist(), strict=True)
    ]


def test_every_token_is_in_one_cluster_and_later_ones_wait_for_a_batch():
    keys, index, parts = normal(HEADS, 250, DIM), make(), [100, 16, 16, 16, 100, 2]
    first, counts = 0, []
    for size in parts:
        index.append(keys[:, first : first + size], first)
        first += size
        for head in range(HEADS):
            every = [t for tokens in clusters_of(index, head) for t in tokens]
            assert sorted(every) == list(range(first))
        counts.append(len(clusters_of(index, 0)))
    assert counts[0] <= 10
    # two calls wait as clusters of their own; the third makes a batch of 48 tokens
    assert counts[1:3] == [counts[0] + 1, counts[0] + 2]
    assert clusters_of(make_with(keys, parts[:2]), 0)[-1] == [*range(100, 116)]
    assert counts[0] < counts[3] <= counts[0] + 4
    assert counts[3] < counts[4] <= counts[3] + 10
    assert counts[5] == counts[4] + 1


def make_with(keys: torch.Tensor, parts: list[int]) -> ClusteredKeys:
    index, first = make(), 0
    for size in parts:
        index.append(keys[:, first : first + size], first)
        first += size
    return index


def test_a_prompt_shorter_than_a_batch_is_clustered_at_once():
    keys = bundles(torch.eye(DIM)[:2], 15, 0.01)
    clusters = clusters_of(make_with(keys, [30]), 0)
    assert 1 < len(clusters) <= 3


def test_clusters_are_taken_by_the_attention_of_their_means():
    keys, queries = normal(HEADS, 180, DIM), normal(HEADS, GROUP, DIM, seed=1)
    index = make_with(keys, [120, 16, 44])
    for count in (1, 7, 64, 180, 200):
        chosen = index.select(queries, Keys.dense(keys), SCALE, count)
        assert chosen.shape == (HEADS, count)
        for head in range(HEADS):
            clusters = clusters_of(index, head)
            means = [keys[head, tokens].mean(0) for tokens in clusters]
            scores = [0.0] * len(clusters)
            for query in queries[head]:
                powers = [math.exp(SCALE * float(query @ mean)) for mean in means]
                for number, power in enumerate(powers):
                    scores[number] += power / sum(powers)
            order = sorted(range(len(clusters)), key=lambda c: -scores[c])
            expected = [token for c in order for token in clusters[c]][:count]
            expected += [-1] * (count - len(expected))
            assert chosen[head].tolist() == expected


def test_keys_that_are_not_finite_are_refused_and_nothing_is_added():
    keys = normal(HEADS, 60, DIM)
    index = make_with(keys, [50])
    before = clusters_of(index, 1)
    bad = keys[:, 50:].clone()
    bad[1, 3, 2] = torch.inf
    with pytest.raises(ValueError, match="not finite"):
        index.append(bad, 50)
    assert clusters_of(index, 1) == before


def test_omnikv_selects_the_same_tokens_for_all_heads():
    keys, queries = normal(HEADS, 90, DIM), normal(HEADS, GROUP, DIM, seed=1)
    index = SharedScan()
    index.append(keys, 0)
    scores = torch.zeros(90)
    for head in range(HEADS):
        for query in queries[head]:
            scores += (SCALE * keys[head] @ query).softmax(0)
    order = scores.sort(descending=True).indices.tolist()
    memory = torch.cat([keys, torch.full((HEADS, 6, DIM), torch.nan)], 1)
    for count in (5, 100):
        chosen = index.select(queries, Keys.dense(memory), SCALE, count)
        expected = (order + [-1] * count)[:count]
        assert chosen.tolist() == [expected] * HEADS
