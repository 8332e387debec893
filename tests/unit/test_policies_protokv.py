"""ProtoKV against algorithm 1 in plain loops, and the paper's claims."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.errors import KVPolicyError
from vllm_kvplugins.policies.base import LayerView
from vllm_kvplugins.policies.protokv import ProtoKV
from vllm_kvplugins.scoring import prototypes as proto
from vllm_kvplugins.scoring.attention_votes import cluster_mean

sys.path.append(str(Path(__file__).parents[1] / "oracles"))
import protokv_oracle as oracle
from views import make_layer_view

SEED = 20261122
WINDOW = 5
HEAD_DIM = 8
SMALL = {"window": WINDOW, "chunk_size": 6, "hash_bits": 2}


@pytest.fixture(autouse=True)
def _print_seed():
    print("seed", SEED)


def make_keys(kind: str, heads: int, slots: int, seed: int) -> torch.Tensor:
    """float64 [heads, slots, HEAD_DIM]."""
    generator = torch.Generator().manual_seed(SEED + seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if kind == "constant":
        return normal(heads, 1, HEAD_DIM).expand(-1, slots, -1).contiguous()
    if kind == "all zero":
        return torch.zeros(heads, slots, HEAD_DIM, dtype=torch.float64)
    if kind == "random":
        return normal(heads, slots, HEAD_DIM)
    # Passages of ten slots with one direction, as real keys have.
    topics = normal(heads, slots // 10 + 1, HEAD_DIM) * 4
    keys = topics.repeat_interleave(10, dim=1)[:, :slots].clone()
    keys += normal(heads, slots, HEAD_DIM) * 0.3
    if kind == "some zero":
        keys[:, ::7] = 0
    if kind == "ties":
        keys[:, slots // 2 :] = keys[:, : slots - slots // 2]
    return keys


def make_view(keys: torch.Tensor, group: int, window: int = WINDOW) -> LayerView:
    generator = torch.Generator().manual_seed(SEED)
    queries = torch.randn(
        keys.shape[0] * group,
        window,
        keys.shape[2],
        generator=generator,
        dtype=torch.float64,
    )
    return make_layer_view(
        layer=0,
        keys=keys,
        positions=torch.arange(keys.shape[1]).expand(keys.shape[0], -1),
        queries=queries.to(keys.dtype),
        query_positions=torch.arange(keys.shape[1] - window, keys.shape[1]),
        scale=0.3,
        load_values=lambda: pytest.fail("ProtoKV reads no values"),
    )


def by_the_paper(policy: ProtoKV, view: LayerView) -> torch.Tensor:
    return oracle.protokv_scores(
        view.keys,
        view.queries,
        view.scale,
        chunk_size=policy.chunk_size,
        max_chunks=policy.max_chunks,
        r=policy.hash_bits,
        gamma=policy.gamma,
        seed=policy.seed,
        ablation=policy.ablation,
    )


KINDS = ["random", "passages", "ties", "some zero", "constant", "all zero"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slots", [WINDOW + 1, WINDOW + 2, 41, 130])
@pytest.mark.parametrize("ablation", ["none", "chunk-only", "lsh-only"])
def test_scores_are_those_of_algorithm_1(kind, slots, ablation):
    policy = ProtoKV(**SMALL, ablation=ablation)
    view = make_view(make_keys(kind, 2, slots, seed=slots), group=3)
    scores = policy.score(view)
    torch.testing.assert_close(
        scores.double(), by_the_paper(policy, view), rtol=2e-5, atol=1e-8
    )


@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("max_chunks", [1, 3])
def test_grouped_heads_and_few_chunks(group, max_chunks):
    policy = ProtoKV(**SMALL, max_chunks=max_chunks, seed=7, gamma=0.5)
    view = make_view(make_keys("passages", 3, 77, seed=group), group)
    torch.testing.assert_close(
        policy.score(view).double(), by_the_paper(policy, view), rtol=2e-5, atol=1e-8
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_keys_are_computed_in_float32(dtype, monkeypatch):
    monkeypatch.setenv("KVP_OPS", "torch")
    keys = make_keys("passages", 2, 130, seed=1).to(dtype)
    policy, view = ProtoKV(**SMALL), make_view(keys, group=3)
    scores, expected = policy.score(view), by_the_paper(policy, view)
    assert scores.dtype == torch.float32
    # Only window_votes multiplies in the dtype of the cache.
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(scores.double(), expected, rtol=tolerance, atol=1e-4)


def test_compiled_bfloat16_keeps_the_slots_of_float32(monkeypatch):
    """Where the CPU multiplies bfloat16, a key may join an equally near cluster."""
    keys = make_keys("passages", 2, 1030, seed=1).to(torch.bfloat16)
    policy, view = ProtoKV(**SMALL), make_view(keys, group=3)
    kept = [policy.score(view).topk(200).indices]
    monkeypatch.setenv("KVP_OPS", "torch")
    kept.append(policy.score(view).topk(200).indices)
    shared = [
        len(set(a.tolist()) & set(b.tolist())) for a, b in zip(*kept, strict=True)
    ]
    print("shared", shared)
    assert min(shared) >= 190


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_shape_gives_numbers_and_keeps_the_window(data):
    kind = data.draw(st.sampled_from(KINDS))
    slots = data.draw(st.integers(WINDOW + 1, 90))
    policy = ProtoKV(
        window=WINDOW,
        chunk_size=data.draw(st.integers(1, 50)),
        max_chunks=data.draw(st.integers(1, 20)),
        hash_bits=data.draw(st.integers(1, 6)),
        ablation=data.draw(st.sampled_from(["none", "chunk-only", "lsh-only"])),
    )
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    view = make_view(make_keys(kind, 2, slots, slots).to(dtype), group=2)
    scores = policy.score(view)
    assert scores.shape == (2, slots)
    assert scores.dtype == torch.float32
    assert not scores.isnan().any()
    assert scores.isinf().sum(1).tolist() == [WINDOW, WINDOW]
    assert scores[:, -WINDOW:].isinf().all()
    assert torch.equal(scores, policy.score(view))


def test_slots_of_a_cluster_share_one_score():
    policy = ProtoKV(**SMALL)
    view = make_view(make_keys("passages", 2, 130, seed=2), group=1)
    prefix = view.keys[:, :-WINDOW]
    prototypes = policy.prototypes(prefix)
    clusters = proto.assign_to_prototypes(prefix, prototypes)
    scores = policy.score(view)[:, :-WINDOW]
    for head in range(2):
        for cluster in clusters[head].unique():
            members = scores[head, clusters[head] == cluster]
            assert members.unique().numel() == 1
    assert all(row.unique().numel() > 5 for row in clusters), "no real clusters"


def planted(slots: int, every: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Passages that contain one direction again and again, far apart, and their
    places.
    """
    keys = make_keys("passages", 1, slots, seed=3)
    keys[..., -1] = 0
    spots = torch.arange(4, slots, every)
    stranger = torch.zeros(HEAD_DIM, dtype=torch.float64)
    stranger[-1] = 8.0
    generator = torch.Generator().manual_seed(SEED)
    noise = torch.randn(len(spots), HEAD_DIM, generator=generator, dtype=torch.float64)
    keys[0, spots] = stranger + 0.05 * noise
    return keys, spots


def test_tokens_that_break_locality_are_found():
    keys, spots = planted(120, every=30)
    delta = proto.irregularity(keys, 12)
    irregular = proto.find_irregular(delta, len(spots)).nonzero()[:, 1]
    assert irregular.tolist() == spots.tolist()


def test_distant_tokens_of_one_meaning_share_votes():
    """The claim of section 3.4: hashing groups these, position cannot."""
    keys, spots = planted(120, every=30)
    clusters = {}
    for ablation in ("none", "chunk-only"):
        policy = ProtoKV(**SMALL, ablation=ablation)
        prototypes = policy.prototypes(keys)
        assigned = proto.assign_to_prototypes(keys, prototypes)[0]
        clusters[ablation] = (assigned, prototypes[0])
    assigned, prototypes = clusters["none"]
    assert assigned[spots].unique().numel() == 1
    home = int(assigned[spots[0]])
    assert home >= 120 // 6, "not a hashed prototype"
    assert (assigned == home).sum() == len(spots), "other tokens joined the group"
    fits = {name: pair[1] @ keys[0, spots[0]] for name, pair in clusters.items()}
    assert fits["none"].max() > 1.5 * fits["chunk-only"].max()


@pytest.mark.parametrize("ablation", ["none", "chunk-only", "lsh-only"])
def test_ablations_keep_the_number_of_prototypes(ablation):
    keys = make_keys("passages", 2, 121, seed=4)
    prototypes = ProtoKV(**SMALL, ablation=ablation).prototypes(keys)
    assert prototypes.shape == (2, 121 // 6 + 4, HEAD_DIM)
    lengths = prototypes.norm(dim=-1)
    assert ((lengths - 1).abs() < 1e-9).logical_or(lengths == 0).all()


def test_irregularity_looks_at_tokens_only():
    keys = make_keys("random", 2, 12, seed=12)
    valid = torch.ones(2, 12, dtype=torch.bool)
    valid[0, :8] = False
    keys[0, :8] = 0
    delta = proto.irregularity(keys, 2, valid)
    alone = proto.irregularity(keys[:1, 8:], 1)
    torch.testing.assert_close(delta[:1, 8:], alone)
    torch.testing.assert_close(delta[1:], proto.irregularity(keys[1:], 2))
    assert delta[0, :8].isneginf().all()


@pytest.mark.parametrize("kind", ["random", "passages", "some zero"])
def test_irregularity_is_equation_10(kind):
    keys = make_keys(kind, 2, 57, seed=9)
    expected = [oracle.chunk_deltas(head.tolist(), 5) for head in keys]
    delta = proto.irregularity(keys, 5)
    assert delta.shape == (2, 55)
    torch.testing.assert_close(delta, torch.tensor(expected, dtype=torch.float64))


def test_slots_without_a_token_change_nothing():
    """Whole chunks of such slots in front only add empty chunks."""
    policy = ProtoKV(**SMALL)
    keys = make_keys("passages", 2, 72 + WINDOW, seed=10)
    view = make_view(keys, group=2)
    front = torch.full((2, 12, HEAD_DIM), float("nan"), dtype=keys.dtype)
    longer = make_view(torch.cat([front, keys], dim=1), group=2)
    valid = (torch.arange(84 + WINDOW) >= 12).expand(2, -1)
    scores = policy.score(replace(longer, valid=valid))
    torch.testing.assert_close(scores[:, 12:], policy.score(view))
    assert scores[:, :12].isneginf().all()


@pytest.mark.parametrize("ablation", ["none", "chunk-only", "lsh-only"])
@pytest.mark.parametrize("missing", [1, 13, 40])
def test_slots_without_a_token_are_not_read(ablation, missing):
    policy = ProtoKV(**SMALL, ablation=ablation)
    view = make_view(make_keys("random", 2, 50, seed=11), group=2)
    valid = torch.ones(2, 50, dtype=torch.bool)
    valid[0, :missing] = False
    scores = []
    for content in (float("nan"), 1e6):
        keys = view.keys.masked_fill(~valid.unsqueeze(2), content)
        scores.append(
            policy.score(
                replace(view, load_keys=partial(torch.clone, keys), valid=valid)
            )
        )
    assert torch.equal(*scores)
    assert not scores[0].isnan().any()
    assert scores[0][~valid].isneginf().all()
    assert not scores[0][valid].isneginf().any()


def test_seed_decides_the_buckets():
    keys = make_keys("random", 2, 200, seed=5)
    buckets = [proto.hash_buckets(keys, 4, 16, 1.0, seed) for seed in (0, 0, 1)]
    assert torch.equal(buckets[0], buckets[1])
    assert not torch.equal(buckets[0], buckets[2])
    state = torch.random.get_rng_state()
    proto.hash_buckets(keys, 4, 16, 1.0, 3)
    assert torch.equal(state, torch.random.get_rng_state()), "global RNG touched"


def test_hash_ignores_the_scale_of_keys():
    keys = make_keys("random", 2, 200, seed=6)
    one = proto.hash_buckets(keys, 4, 16, 1.0, 0)
    assert torch.equal(one, proto.hash_buckets(keys * 1024, 4, 16, 1.0, 0))


def test_result_does_not_depend_on_tiles(monkeypatch):
    view = make_view(make_keys("passages", 2, 130, seed=7), group=3)
    for ablation in ("none", "lsh-only"):
        policy = ProtoKV(**SMALL, ablation=ablation)
        whole = policy.score(view)
        monkeypatch.setattr("vllm_kvplugins.scoring.attention_votes._MAX_TILE", 400)
        torch.testing.assert_close(policy.score(view), whole, rtol=1e-6, atol=0)
        monkeypatch.undo()


def test_strided_keys_as_the_gather_returns_them():
    keys = make_keys("passages", 3, 90, seed=8).float()
    strided = keys.transpose(1, 2).contiguous().transpose(1, 2)
    assert not strided.is_contiguous()
    policy = ProtoKV(**SMALL)
    plain = policy.score(make_view(keys, 2))
    torch.testing.assert_close(policy.score(make_view(strided, 2)), plain)


def test_empty_prototypes_attract_nobody():
    keys = -torch.ones(1, 4, 3)
    prototypes = torch.tensor([[[0.0, 0, 0], [1, 0, 0], [0, 0, 0], [0.6, 0.8, 0]]])
    assert proto.assign_to_prototypes(keys, prototypes).tolist() == [[1] * 4]
    assert proto.assign_to_prototypes(keys * 0, prototypes).tolist() == [[1] * 4]
    nothing = torch.zeros(1, 4, 3)
    assert proto.assign_to_prototypes(keys, nothing).tolist() == [[0] * 4]


@pytest.mark.parametrize("peak", [1.0, 1e-38, 3e38, 0.0])
def test_cluster_mean_is_exact_in_any_order(peak):
    generator = torch.Generator().manual_seed(SEED)
    values = torch.rand(3, 1000, generator=generator) ** 8 * peak
    clusters = torch.randint(0, 40, (3, 1000), generator=generator)
    means = cluster_mean(values, clusters, 41)
    for head in range(3):
        for cluster in range(40):
            members = clusters[head] == cluster
            expected = values[head, members].double().mean()
            labels = means[head, members].unique()
            assert labels.numel() == 1
            torch.testing.assert_close(
                labels[0].double(), expected, rtol=1e-6, atol=1e-44
            )
    order = torch.randperm(1000, generator=generator)
    shuffled = cluster_mean(values[:, order], clusters[:, order], 41)
    assert torch.equal(shuffled, means[:, order])


def test_cluster_mean_of_the_largest_sum_does_not_overflow():
    values = torch.full((1, 1023), 0.9999)
    means = cluster_mean(values, torch.zeros(1, 1023, dtype=torch.int64), 1)
    torch.testing.assert_close(means, values)


def test_nearly_parallel_keys_keep_their_order():
    """In float32, 1 - cos would be 0 for all of these."""
    key = torch.zeros(1, 8, HEAD_DIM)
    key[..., 0] = 1.0
    key[0, :, 1] = torch.tensor([0, 1e-4, 0, 2e-4, 0, 3e-4, 0, 0])
    delta = proto.irregularity(key, 1)
    assert delta[0].argmax() == 5
    assert (delta > 0).sum() >= 3


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(KVPolicyError, match="hash_bits"):
        parse_policy({"name": "protokv", "hash_bits": 0})
    with pytest.raises(KVPolicyError, match="below the 33 tokens"):
        parse_policy({"name": "protokv", "budget": 32})
