"""Every baseline against its formula in plain loops, and its paper's claim."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvplugins.config import describe, parse_policy
from vllm_kvplugins.errors import KVPolicyError
from vllm_kvplugins.plan.geometry import Geometry, Lengths
from vllm_kvplugins.policies import available_policies
from vllm_kvplugins.policies.base import LayerView
from vllm_kvplugins.policies.compressor import Compressor
from vllm_kvplugins.scoring.attention_votes import mean_over_heads, slot_tiles
from vllm_kvplugins.scoring.selection import keep_top

sys.path.append(str(Path(__file__).parents[1] / "oracles"))
import score_oracles as oracle
from views import make_layer_view

SEED = 20261123
HEAD_DIM = 8
SCALE = 0.4
BASELINES = ["random", "knorm", "keydiff", "tova", "chunkkv", "pyramidkv"]
# Small windows, so that short prompts have a choice.
SMALL = {"chunkkv": {"window": 6, "chunk_length": 7}, "pyramidkv": {"window": 6}}
WINDOWS = {"random": 0, "knorm": 0, "keydiff": 0, "tova": 1, "chunkkv": 6}
WINDOWS["pyramidkv"] = 6


@pytest.fixture(autouse=True)
def _print_seed():
    print("seed", SEED)


def make_policy(name: str, **options: object) -> Compressor:
    return parse_policy({"name": name, **SMALL.get(name, {}), **options})


def make_view(
    policy: Compressor,
    keys: torch.Tensor,
    group: int = 1,
    layer: int = 0,
    seed: int = 0,
) -> LayerView:
    generator = torch.Generator().manual_seed(SEED + seed)
    num_kv_heads, num_slots, head_dim = keys.shape
    shape = (num_kv_heads * group, policy.queries_needed, head_dim)
    return make_layer_view(
        layer=layer,
        keys=keys,
        positions=torch.arange(num_slots).expand(num_kv_heads, -1),
        queries=torch.randn(shape, generator=generator).to(keys.dtype),
        query_positions=torch.arange(num_slots - shape[1], num_slots),
        scale=SCALE,
        load_values=lambda: pytest.fail("no baseline here reads values"),
    )


def make_keys(kind: str, heads: int, slots: int, seed: int = 0) -> torch.Tensor:
    """float32 [heads, slots, HEAD_DIM]."""
    generator = torch.Generator().manual_seed(SEED + seed)
    keys = torch.randn(heads, slots, HEAD_DIM, generator=generator)
    if kind == "constant":
        keys = keys[:, :1].expand(-1, slots, -1).contiguous()
    elif kind == "all zero":
        keys = torch.zeros_like(keys)
    elif kind == "some zero":
        keys[:, ::3] = 0
    elif kind == "ties":
        keys[:, slots // 2 :] = keys[:, : slots - slots // 2]
    elif kind == "huge":
        keys *= 1e4
    return keys


KINDS = ["random", "ties", "some zero", "constant", "all zero", "huge"]


def by_the_paper(name: str, policy: Compressor, view: LayerView) -> torch.Tensor:
    if name == "knorm":
        return oracle.knorm(view.keys)
    if name == "keydiff":
        return oracle.keydiff(view.keys)
    seen = (view.queries, view.keys, view.scale)
    if name == "tova":
        return oracle.tova(*seen)
    if name == "chunkkv":
        return oracle.chunkkv(*seen, policy.kernel_size, policy.chunk_length)
    return oracle.snapkv(*seen, policy.kernel_size)


@pytest.mark.parametrize("name", BASELINES[1:])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("slots", "group"), [(7, 1), (8, 3), (33, 4), (75, 3)])
def test_scores_are_the_papers_formula(name, kind, slots, group):
    policy = make_policy(name)
    view = make_view(policy, make_keys(kind, 2, slots, seed=slots), group)
    torch.testing.assert_close(
        policy.score(view).double(),
        by_the_paper(name, policy, view),
        rtol=1e-4,
        atol=1e-6,
    )


@pytest.mark.parametrize("name", BASELINES)
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_shape_gives_numbers_and_keeps_the_window(name, data):
    policy = make_policy(name)
    slots = data.draw(st.integers(8, 100))
    kind = data.draw(st.sampled_from(KINDS))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    keys = make_keys(kind, 3, slots, seed=slots).to(dtype)
    if dtype == torch.float16:
        keys = keys.clamp(-1000, 1000)  # beyond that, q @ k overflows float16
    view = make_view(policy, keys, group=data.draw(st.sampled_from([1, 3, 4])))
    scores = policy.score(view)
    assert scores.shape == (3, slots)
    assert scores.dtype == torch.float32
    assert not scores.isnan().any()
    window = WINDOWS[name]
    assert scores.isinf().sum(1).tolist() == [window] * 3
    assert scores[:, slots - window :].isinf().all()
    assert torch.equal(scores, policy.score(view))


def padded(view: LayerView, max_slots: int) -> LayerView:
    """Head h gets ``max_slots * h`` more slots without a token in front."""
    heads, slots, head_dim = view.keys.shape
    total = slots + max_slots * (heads - 1)
    keys = torch.full((heads, total, head_dim), float("nan"), dtype=view.keys.dtype)
    positions = torch.full((heads, total), -1)
    for head in range(heads):
        own_slots = slots + max_slots * head
        more = view.keys[head, : max_slots * head] * 0.9
        keys[head, total - own_slots :] = torch.cat([more, view.keys[head]])
        # Every second token of a head has a position that no other head has.
        own = 3 * torch.arange(total) + head * (torch.arange(total) % 2)
        positions[head, total - own_slots :] = own[total - own_slots :]
    return replace(
        view, load_keys=lambda: keys, positions=positions, valid=positions >= 0
    )


def alone(view: LayerView, head: int) -> LayerView:
    """The tokens of one head."""
    group = view.queries.shape[0] // view.keys.shape[0]
    own_slots = view.valid[head]
    return replace(
        view,
        load_keys=lambda: view.keys[head : head + 1, own_slots],
        positions=view.positions[head : head + 1, own_slots],
        valid=None,
        queries=view.queries[head * group : (head + 1) * group],
    )


@pytest.mark.parametrize("name", ["knorm", "keydiff", "pyramidkv"])
def test_heads_of_different_lengths_score_as_if_alone(name):
    policy = make_policy(name)
    view = padded(make_view(policy, make_keys("random", 3, 40), group=2), max_slots=5)
    scores = policy.score(view)
    for head in range(3):
        valid = view.valid[head]
        torch.testing.assert_close(
            scores[head, valid], policy.score(alone(view, head))[0]
        )


@pytest.mark.parametrize("name", BASELINES)
def test_slots_without_a_token_go_first_and_their_content_is_not_read(name):
    policy = make_policy(name)
    view = padded(make_view(policy, make_keys("random", 3, 40), group=2), max_slots=5)
    scores = policy.score(view)
    assert not scores[view.valid].isnan().any()
    if name != "pyramidkv":  # SnapKV leaves these to the engine
        assert scores[~view.valid].isneginf().all()
    assert not scores[view.valid].isneginf().any()
    assert scores[:, 50 - WINDOWS[name] :].isposinf().all()
    other = torch.where(view.valid[..., None], view.keys, 7.0)
    again = policy.score(replace(view, load_keys=lambda: other))
    assert torch.equal(scores[view.valid], again[view.valid])


@pytest.mark.parametrize("name", ["tova", "chunkkv"])
def test_shared_scores_are_matched_by_position(name):
    """Heads hold different tokens:

    the mean is over the heads that hold the position.
    """
    policy = make_policy(name)
    view = padded(make_view(policy, make_keys("random", 3, 40), group=2), max_slots=5)
    base = make_policy("pyramidkv", window=6, kernel_size=5)
    if name == "tova":
        base = make_policy("pyramidkv", window=1, kernel_size=1)
    places = view.positions // (7 if name == "chunkkv" else 1)
    own = [base.score(alone(view, head))[0] for head in range(3)]
    best = max(row[~row.isinf()].max() for row in own) + 1
    members: dict[int, list[float]] = {}
    for head in range(3):
        own_slots = own[head].masked_fill(own[head].isinf(), best).tolist()
        where = places[head, view.valid[head]].tolist()
        for place, score in zip(where, own_slots, strict=True):
            members.setdefault(place, []).append(score)
    scores = policy.score(view)
    for head, slot in view.valid.nonzero().tolist():
        if slot < scores.shape[1] - WINDOWS[name]:
            same = members[int(places[head, slot])]
            expected = torch.tensor(sum(same) / len(same))
            torch.testing.assert_close(scores[head, slot], expected)


@pytest.mark.parametrize("name", BASELINES)
def test_registered_described_and_planned(name):
    assert name in available_policies()
    policy = parse_policy({"name": name, "budget": 128})
    assert describe(policy).startswith(name)
    plan = policy.plan(Lengths(1000), Geometry(32, 4, 2, 1024))
    assert len(plan.compactions) == 1
    floor = policy.minimum_budget_tokens
    if floor > 1:
        with pytest.raises(KVPolicyError, match=f"budget {floor - 1} is below"):
            parse_policy({"name": name, "budget": floor - 1})


# -- random ----------------------------------------------------------------------


def test_random_depends_on_seed_layer_head_and_position_only():
    policy, other_seed = make_policy("random"), make_policy("random", seed=1)
    keys = make_keys("random", 3, 50)
    scores = policy.score(make_view(policy, keys))
    state = torch.random.get_rng_state()
    again = policy.score(make_view(policy, make_keys("constant", 3, 50, seed=9)))
    assert torch.equal(scores, again), "keys must not matter"
    assert torch.equal(state, torch.random.get_rng_state()), "global RNG touched"
    assert not torch.equal(scores, policy.score(make_view(policy, keys, layer=1)))
    assert not torch.equal(scores, other_seed.score(make_view(other_seed, keys)))
    assert not torch.equal(scores[0], scores[1]), "heads must differ"


@pytest.mark.parametrize("slots", [1, 5, 15, 16, 17, 49])
def test_random_score_of_a_token_never_changes(slots):
    """Repeated folding must keep a uniform sample of all tokens."""
    policy = make_policy("random")
    longest = policy.score(make_view(policy, make_keys("random", 3, 50)))
    scores = policy.score(make_view(policy, make_keys("random", 3, slots)))
    assert torch.equal(scores, longest[:, :slots])
    view = make_view(policy, make_keys("random", 3, 20))
    places = view.positions + 30
    assert torch.equal(policy.score(replace(view, positions=places)), longest[:, 30:])


def test_random_is_uniform_over_slots():
    policy = make_policy("random")
    keys = make_keys("random", 2, 64)
    kept = torch.zeros(64)
    for layer in range(400):
        scores = policy.score(make_view(policy, keys, layer=layer))
        kept += keep_top(scores, torch.tensor([16, 16])).sum(0)
    # 800 draws with p = 1/4: mean 200, standard deviation 12.2.
    assert (kept - 200).abs().max() < 5 * 12.3


# -- knorm -----------------------------------------------------------------------


def test_knorm_keeps_the_smallest_norms_in_order():
    policy = make_policy("knorm")
    sizes = torch.tensor([3.0, 0.5, 9.0, 0.0, 1.0])
    keys = make_keys("random", 1, 5)
    keys = keys / keys.norm(dim=-1, keepdim=True) * sizes[None, :, None]
    scores = policy.score(make_view(policy, keys))
    assert scores[0].argsort(descending=True).tolist() == [3, 1, 4, 0, 2]


def test_knorm_does_not_tie_in_bfloat16():
    policy = make_policy("knorm")
    keys = make_keys("random", 1, 500).bfloat16()
    assert policy.score(make_view(policy, keys)).unique().numel() > 490


# -- keydiff ---------------------------------------------------------------------


def test_keydiff_drops_duplicates_first():
    policy = make_policy("keydiff")
    keys = make_keys("random", 2, 40, seed=1)
    keys[:, 10:30] = keys[:, 10:11] * torch.linspace(0.5, 3, 20)[None, :, None]
    scores = policy.score(make_view(policy, keys))
    dropped = scores.topk(20, largest=False).indices.sort().values
    assert dropped.tolist() == [list(range(10, 30))] * 2


def test_keydiff_in_tiles(monkeypatch):
    policy = make_policy("keydiff")
    view = make_view(policy, make_keys("random", 2, 101))
    whole = policy.score(view)
    monkeypatch.setattr(
        "vllm_kvplugins.scoring.attention_votes._MAX_TILE", 7 * 2 * HEAD_DIM
    )
    torch.testing.assert_close(policy.score(view), whole)


@given(st.integers(0, 300), st.integers(0, 50), st.integers(1, 400))
def test_tiles_cover_every_slot_once(slots, entries, largest):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm_kvplugins.scoring.attention_votes._MAX_TILE", largest)
        tiles = slot_tiles(slots, entries)
    covered = [slot for tile in tiles for slot in range(tile.start, tile.stop)]
    assert covered == list(range(slots))
    longest = max((tile.stop - tile.start for tile in tiles), default=0)
    assert longest * max(entries, 1) <= max(largest, entries, 1)


# -- tova ------------------------------------------------------------------------


def test_tova_follows_the_last_query_with_all_heads_together():
    policy = make_policy("tova")
    keys = make_keys("random", 2, 60)
    view = make_view(policy, keys, group=2)
    # One head of four attends strongly to slot 17; all KV heads must keep it.
    view.queries[3, -1] = keys[1, 17] * 20
    scores = policy.score(view)
    assert torch.equal(scores[0], scores[1])
    assert scores[0, :-1].argmax() == 17
    assert scores[:, -1].isinf().all()


# -- chunkkv ---------------------------------------------------------------------


@pytest.mark.parametrize("slots", [63, 70, 71, 100])
@pytest.mark.parametrize("count", [20, 27, 41])
def test_chunkkv_keeps_whole_chunks(slots, count):
    policy = make_policy("chunkkv")
    view = make_view(policy, make_keys("random", 3, slots, seed=slots), group=3)
    keep = keep_top(policy.score(view), torch.tensor([count] * 3))
    assert (keep == keep[0]).all(), "all heads keep the same chunks"
    window_chunk = (slots - 6) // 7
    cut = [
        chunk
        for chunk in range(window_chunk)
        if keep[0, chunk * 7 : (chunk + 1) * 7].unique().numel() > 1
    ]
    assert len(cut) <= 1, f"chunks {cut} are cut"
    assert keep[0, window_chunk * 7 :].all(), "slots beside the window stay"


def test_means_over_heads_go_by_position():
    scores = torch.tensor([[1.0, 3, 5], [7, 9, 11]])
    positions = torch.tensor([[0, 1, 4], [1, 4, 5]])
    shared = mean_over_heads(scores, positions)
    assert shared.tolist() == [[1, 5, 7], [5, 7, 11]]
    valid = torch.tensor([[False, True, True], [True] * 3])
    scores[0, 0], positions[0, 0] = float("nan"), -1
    shared = mean_over_heads(scores, positions, valid)
    assert shared.tolist() == [[0, 5, 7], [5, 7, 11]]


def test_chunkkv_with_chunks_of_one_ranks_like_snapkv_over_all_heads():
    policy = make_policy("chunkkv", chunk_length=1)
    snapkv = parse_policy({"name": "snapkv", "window": 6})
    view = make_view(policy, make_keys("random", 3, 50), group=3)
    expected = snapkv.score(view)[:, :-6].mean(0)
    torch.testing.assert_close(policy.score(view)[1, :-6], expected)


# -- pyramidkv -------------------------------------------------------------------


def test_pyramidkv_is_snapkv_with_a_pyramid():
    policy = make_policy("pyramidkv")
    snapkv = parse_policy({"name": "snapkv", "window": 6})
    view = make_view(policy, make_keys("random", 3, 90), group=3)
    assert torch.equal(policy.score(view), snapkv.score(view))
    scores = policy.score(view)[:, :64].expand(10, -1, -1)
    available = torch.full((10, 3), 8)
    pages = policy.page_allocator().allocate(scores, 4, 8, available).sum(dim=1)
    assert pages[0] > pages[-1]
    assert pages.tolist() == sorted(pages.tolist(), reverse=True)
    assert int(pages.sum()) == 4 * 10 * 3
    assert make_policy("pyramidkv", allocator="uniform").page_allocator().uniform


def test_pyramidkv_default_window_fits_the_top_layers_share():
    policy = parse_policy("pyramidkv")
    share = policy.budget.tokens / policy.allocator.beta
    assert policy.window <= share
