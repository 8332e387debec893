"""PQCache's codes, centroids and scores against loops and scikit-learn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_engine import LAYERS, FakeEngine

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.errors import KVPolicyError
from vllm_kvplugins.index import ExactScan, Keys
from vllm_kvplugins.plan.geometry import Geometry
from vllm_kvplugins.policies.pqcache import QuantizedKeys
from vllm_kvplugins.scoring.k_means import k_means, nearest

SEED = 23
HEADS, GROUP = 2, 3


def normal(*shape: int, seed: int = SEED) -> torch.Tensor:
    print("seed", seed)
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make(dim: int, subspaces: int = 2, bits: int = 4, **more: int) -> QuantizedKeys:
    settings = {"iterations": 10, "seed": 0, **more}
    return QuantizedKeys(HEADS, dim, subspaces, bits, **settings)


def stand_in(index: QuantizedKeys, head: int, token: int, dim: int) -> torch.Tensor:
    """[dim]: the reconstruction of a key."""
    parts = [
        index._centroids[head, part, int(index._codes[head, part, token])]
        for part in range(index._centroids.shape[1])
    ]
    return torch.cat(parts)[:dim]


@pytest.mark.parametrize(
    ("dim", "subspaces"), [(8, 2), (8, 1), (10, 3), (10, 4), (5, 4), (3, 7)]
)
def test_scores_are_products_with_what_keys_are_taken_to_be(dim, subspaces):
    keys, queries = normal(HEADS, 90, dim), normal(HEADS, GROUP, dim, seed=1)
    index = make(dim, subspaces)
    index.append(keys[:, :70], 0)
    index.append(keys[:, 70:], 70)
    actual = index.scores(queries)
    assert actual.shape == (HEADS, GROUP, 90)
    for head in range(HEADS):
        for token in range(90):
            key = stand_in(index, head, token, dim)
            for member in range(GROUP):
                expected = float(queries[head, member] @ key)
                assert float(actual[head, member, token]) == pytest.approx(
                    expected, rel=1e-4, abs=1e-5
                )


@pytest.mark.parametrize(("dim", "subspaces"), [(8, 2), (10, 4)])
def test_every_key_has_its_nearest_centroids(dim, subspaces):
    keys = normal(HEADS, 90, dim)
    index = make(dim, subspaces)
    for first, stop in ((0, 50), (50, 51), (51, 90)):
        index.append(keys[:, first:stop], first)
    width = -(-dim // subspaces)
    for head in range(HEADS):
        for part in range(subspaces):
            own = keys[head, :, part * width : (part + 1) * width]
            centroids = index._centroids[head, part][:, : own.shape[1]]
            distances = torch.cdist(own, centroids)
            taken = index._codes[head, part].long()[:, None]
            assert (distances.gather(1, taken)[:, 0] <= distances.amin(1) + 1e-5).all()


def test_tokens_are_ranked_by_their_softmax_over_the_group():
    keys, queries = normal(HEADS, 90, 8), normal(HEADS, GROUP, 8, seed=1)
    index = make(8, bits=6)
    index.append(keys, 0)
    chosen = index.select(queries, Keys.dense(keys), 0.7, 20)
    for head in range(HEADS):
        worth = torch.zeros(90)
        for member in range(GROUP):
            logits = torch.stack(
                [queries[head, member] @ stand_in(index, head, t, 8) for t in range(90)]
            )
            worth += (0.7 * logits).softmax(0)
        assert len(set(chosen[head].tolist())) == 20
        torch.testing.assert_close(worth[chosen[head]], worth.topk(20).values)


@pytest.mark.parametrize("tokens", [1, 15, 16])
def test_few_tokens_are_their_own_centroids(tokens):
    keys, queries = normal(HEADS, tokens, 8), normal(HEADS, GROUP, 8, seed=1)
    index = make(8)
    index.append(keys[:, : tokens // 2], 0)
    index.append(keys[:, tokens // 2 :], tokens // 2)
    torch.testing.assert_close(index.scores(queries), queries @ keys.transpose(1, 2))
    more = index.select(queries, Keys.dense(keys), 1.0, tokens + 2)
    assert more[:, tokens:].eq(-1).all()
    ordered = more[:, :tokens].sort().values
    assert ordered.equal(torch.arange(tokens).expand(HEADS, -1))


def same(one: QuantizedKeys, other: QuantizedKeys) -> bool:
    centroids = torch.equal(one._centroids, other._centroids)
    return centroids and torch.equal(one._codes, other._codes)


def test_portions_do_not_matter_once_or_until_there_are_centroids():
    keys = normal(HEADS, 200, 8)
    whole, parts = make(8), make(8)
    whole.append(keys[:, :120], 0)
    for first, stop in ((0, 9), (9, 16), (16, 120)):
        parts.append(keys[:, first:stop], first)
    assert same(whole, parts), "16 tokens are centroids, and no more"
    whole.append(keys[:, 120:], 120)
    for first, stop in ((120, 121), (121, 170), (170, 200)):
        parts.append(keys[:, first:stop], first)
    assert same(whole, parts)
    later = make(8)
    later.append(keys, 0)
    assert not torch.equal(later._centroids, whole._centroids), "found among all"


def test_centroids_are_those_of_scikit_learn():
    cluster = pytest.importorskip("sklearn.cluster")
    points = normal(3, 300, 5)
    actual = k_means(points, 7, 300, seed=4).centroids
    order = torch.randperm(300, generator=torch.Generator().manual_seed(4))
    for group in range(3):
        start = points[group, order[:7]].numpy()
        peer = cluster.KMeans(7, init=start, n_init=1, tol=0, max_iter=300)
        centres = torch.from_numpy(peer.fit(points[group].numpy()).cluster_centers_)
        torch.testing.assert_close(actual[group], centres, atol=1e-4, rtol=1e-4)


def test_iterations_bring_centroids_nearer():
    points = normal(3, 400, 5)
    distances = []
    for iterations in (1, 3, 30):
        centroids = k_means(points, 16, iterations, seed=0).centroids
        distances.append(float(torch.cdist(points, centroids).amin(-1).square().mean()))
    assert distances[0] > distances[1] > distances[2]


def test_tiles_do_not_matter():
    points, centroids = normal(64, 5000, 4), normal(64, 200, 4, seed=1)
    for start in (0, 2500, 4999):
        part = points[:, start : start + 1]
        expected = torch.cdist(part, centroids).argmin(-1)
        assert torch.equal(nearest(points, centroids)[:, start : start + 1], expected)


def test_empty_clusters_stay_where_they_are():
    keys = normal(HEADS, 1, 8).expand(-1, 50, -1)
    index, queries = make(8), normal(HEADS, GROUP, 8, seed=1)
    index.append(keys, 0)
    where = keys[:, :1].unflatten(2, (2, 4)).transpose(1, 2)
    torch.testing.assert_close(index._centroids, where.expand(-1, -1, 16, -1))
    torch.testing.assert_close(index.scores(queries), queries @ keys.transpose(1, 2))
    far = 10 + normal(HEADS, 3, 8, seed=2)
    index.append(far, 50)
    assert index.scores(queries).isfinite().all()


def test_the_seed_decides():
    keys = normal(HEADS, 300, 8)
    indices = [make(8, seed=seed) for seed in (3, 3, 4)]
    for index in indices:
        index.append(keys, 0)
    assert same(indices[0], indices[1])
    assert not same(indices[0], indices[2])


def test_256_centroids_have_codes_of_a_byte():
    keys, queries = normal(HEADS, 256, 8), normal(HEADS, GROUP, 8, seed=1)
    index = make(8, bits=8)
    index.append(keys, 0)
    torch.testing.assert_close(index.scores(queries), queries @ keys.transpose(1, 2))
    index.append(normal(HEADS, 44, 8, seed=2), 256)
    assert index._centroids.shape[2] == 256
    assert int(index._codes.max()) > 250


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_keys_that_are_not_finite_are_refused(bad):
    keys = normal(HEADS, 40, 8)
    index = make(8)
    index.append(keys, 0)
    before = index.scores(keys[:, :2])
    spoilt = keys[:, :5].clone()
    spoilt[1, 3, 2] = bad
    with pytest.raises(ValueError, match="not finite"):
        index.append(spoilt, 40)
    assert torch.equal(index.scores(keys[:, :2]), before)


def test_the_engine_scans_where_keys_are_refused(monkeypatch):
    def refuse(*_: Any) -> None:
        raise ValueError("an element of a key is not finite")

    monkeypatch.setattr(QuantizedKeys, "append", refuse)
    settings = {"name": "pqcache", "budget": 9, "sinks": 2, "window": 5}
    fake = FakeEngine({**settings, "skip_layers": 1}, 4, 120)
    request = fake.add("r", 40, 10)
    while not request.done:
        fake.step({"r": 40})
    assert fake.retrieval.traffic.failed == LAYERS - 1
    state = fake.retrieval._requests["r"]
    assert all(isinstance(layer.index, ExactScan) for layer in state.layers.values())
    fake.remove("r")
    fake.check_idle()


@pytest.mark.parametrize(("subspaces", "bits"), [(2, 6), (4, 8), (1, 1)])
@pytest.mark.parametrize("offloaded", [16, 400])
def test_host_memory_counts_codes_and_centroids(subspaces, bits, offloaded):
    settings = {"subspaces": subspaces, "bits": bits, "skip_layers": 0}
    policy: Any = parse_policy({"name": "pqcache", **settings})
    exact: Any = parse_policy({"name": "exact-topk", "skip_layers": 0})
    # one layer of bfloat16 keys and values
    shape = Geometry(16, 1, HEADS, kv_bytes_per_token=2 * 2 * HEADS * 64)
    tokens = offloaded + policy.sinks + policy.window
    index = policy.new_index(HEADS, 64)
    index.append(normal(HEADS, offloaded, 64), 0)
    stored_bytes = index._centroids.nbytes + index._codes.nbytes
    more = policy.host_bytes(tokens, shape) - exact.host_bytes(tokens, shape)
    assert stored_bytes <= more


@pytest.mark.parametrize("bad", [{"subspaces": 0}, {"bits": 9}, {"iterations": 0}])
def test_bad_settings(bad):
    with pytest.raises(KVPolicyError, match=next(iter(bad))):
        parse_policy({"name": "pqcache", **bad})
