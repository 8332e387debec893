"""R-KV against its definition in loops, and what it promises about repetition."""

from __future__ import annotations

import pytest
import torch
from views import make_layer_view

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.errors import KVPolicyError
from vllm_kvplugins.policies import r_kv
from vllm_kvplugins.policies.base import LayerView
from vllm_kvplugins.scoring.selection import keep_top

SEED, DIM, SCALE, WINDOW = 20261126, 8, 0.4, 4


def make_keys(heads: int, slots: int, seed: int = 0) -> torch.Tensor:
    """Keys of which many are similar to each other."""
    generator = torch.Generator().manual_seed(SEED + seed)
    kinds = torch.randn(heads, 5, DIM, generator=generator)
    chosen = torch.randint(5, (slots,), generator=generator)
    noise = torch.randn(heads, slots, DIM, generator=generator)
    return kinds[:, chosen] + 0.7 * noise


def make_view(keys: torch.Tensor, group: int = 2) -> LayerView:
    generator = torch.Generator().manual_seed(SEED)
    heads, slots, dim = keys.shape
    queries = torch.randn(heads * group, WINDOW, dim, generator=generator)
    return make_layer_view(
        layer=0,
        keys=keys,
        positions=torch.arange(slots).expand(heads, -1),
        queries=queries.to(keys.dtype),
        query_positions=torch.arange(slots - WINDOW, slots),
        scale=SCALE,
        load_values=lambda: pytest.fail("r-kv does not read values"),
    )


def by_the_paper(view: LayerView, policy: r_kv.RKV) -> torch.Tensor:
    """float64 [heads, slots - window], one entry at a time."""
    heads, slots, _ = view.keys.shape
    group = view.queries.shape[0] // heads
    scores = torch.zeros(heads, slots - WINDOW, dtype=torch.float64)
    for head in range(heads):
        keys = view.keys[head].double()
        queries = view.queries[head * group : (head + 1) * group].double()
        votes = torch.zeros(slots - WINDOW, dtype=torch.float64)
        for query in range(WINDOW):
            logits = torch.stack([keys[: slots - WINDOW] @ q[query] for q in queries])
            votes += (logits.max(0).values * SCALE).softmax(0) / WINDOW
        half = policy.kernel_size // 2
        pooled = [
            votes[max(j - half, 0) : j + half + 1].max() for j in range(len(votes))
        ]
        similar = torch.zeros(slots, slots, dtype=torch.float64)
        for i in range(slots):
            for j in range(slots):
                sizes = keys[i].norm() * keys[j].norm()
                if i != j and sizes > 0:
                    similar[i, j] = keys[i] @ keys[j] / sizes
            near = [j for j in range(slots) if similar[i, j] > policy.threshold]
            for j in near[len(near) - min(policy.retain, len(near)) :]:
                similar[i, j] = 0
        redundancy = similar.mean(0).softmax(0)
        share = policy.importance_share
        for j, vote in enumerate(pooled):
            scores[head, j] = share * vote - (1 - share) * redundancy[j]
    return scores


@pytest.mark.each_pair
@pytest.mark.parametrize(("slots", "group"), [(6, 1), (30, 3), (71, 2)])
@pytest.mark.parametrize("retain", [0, 1, 3])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.8])
def test_scores_are_the_papers(slots, group, retain, share, monkeypatch):
    monkeypatch.setattr(r_kv, "_MAX_COSINES", 300)  # several tiles
    policy = parse_policy(
        {"name": "r-kv", "window": WINDOW, "retain": retain, "importance_share": share}
    )
    view = make_view(make_keys(2, slots, seed=slots), group)
    scores = policy.score(view)
    assert scores[:, -WINDOW:].isposinf().all()
    torch.testing.assert_close(
        scores[:, :-WINDOW].double(), by_the_paper(view, policy), rtol=1e-4, atol=1e-6
    )


def test_tiles_do_not_change_the_scores(monkeypatch):
    keys = make_keys(1, 200)[0]
    unit = keys / keys.norm(dim=-1, keepdim=True)
    whole = r_kv.newest_neighbors(unit, 0.5, 2)
    for cosines in (1, 201, 777, 20_001):
        monkeypatch.setattr(r_kv, "_MAX_COSINES", cosines)
        part = r_kv.newest_neighbors(unit, 0.5, 2)
        torch.testing.assert_close(part, whole, rtol=1e-5, atol=1e-5)


def test_the_search_stops_once_every_key_has_its_neighbors(monkeypatch):
    """A long cache of similar keys takes one tile, not the square of its length."""
    seen = []
    argument = torch.Tensor.cumsum

    def counting(self, *args, **kwargs):
        seen.append(self.numel())
        return argument(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "cumsum", counting)
    monkeypatch.setattr(r_kv, "_MAX_COSINES", 40_000)
    unit = torch.nn.functional.normalize(torch.rand(2000, DIM) + 1, dim=-1)
    r_kv.newest_neighbors(unit, 0.5, 1)
    assert sum(seen) < 100_000 < 2000 * 2000


def test_of_tokens_that_repeat_each_other_the_newest_stays():
    policy = parse_policy(
        {"name": "r-kv", "window": WINDOW, "importance_share": 0.0, "threshold": 0.9}
    )
    generator = torch.Generator().manual_seed(SEED)
    keys = torch.eye(32)[None, :32].clone()  # no two similar
    repeated = [3, 11, 19]
    keys[0, repeated] = keys[0, 3] + 0.01 * torch.randn(3, 32, generator=generator)
    view = make_view(keys, group=1)
    scores = policy.score(view)[0, :-WINDOW]
    lowest = scores.topk(2, largest=False).indices.sort().values.tolist()
    assert lowest == [3, 11], "the older copies go first"
    assert scores[19] > scores[[3, 11]].max()


def test_attention_decides_where_nothing_is_redundant():
    policy = parse_policy({"name": "r-kv", "window": WINDOW, "kernel_size": 1})
    keys = torch.eye(32)[None, :32].clone()
    view = make_view(keys, group=1)
    view.queries[:, :, 7] += 50
    assert policy.score(view)[0, :-WINDOW].argmax() == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_slots_without_a_token_are_not_read(dtype):
    """A head with fewer tokens scores as it would alone."""
    policy = parse_policy({"name": "r-kv", "window": WINDOW})
    keys = make_keys(2, 40).to(dtype)
    alone = policy.score(make_view(keys[1:, 10:]))
    view = make_view(keys)
    valid = torch.ones(2, 40, dtype=torch.bool)
    valid[1, :10] = False
    keys[1, :10] = torch.nan
    padded = make_layer_view(
        **{name: getattr(view, name) for name in ("layer", "query_positions", "scale")},
        keys=keys,
        positions=view.positions.masked_fill(~valid, -1),
        valid=valid,
        queries=torch.cat([view.queries[:2], make_view(keys[1:]).queries]),
    )
    scores = policy.score(padded)
    assert scores[1, :10].isneginf().all()
    torch.testing.assert_close(scores[1, 10:], alone[0])
    assert not scores.isnan().any()


def test_a_zero_key_is_no_neighbor_of_anything():
    keys = make_keys(1, 30)
    keys[:, 5] = 0
    scores = parse_policy({"name": "r-kv", "window": WINDOW}).score(make_view(keys))
    assert not scores.isnan().any()
    unit = torch.nn.functional.normalize(keys[0], dim=-1)
    assert r_kv.newest_neighbors(unit, 0.0, 1)[5] == 0


def test_a_decode_budget_compacts_the_answer_and_its_absence_is_remarked():
    folding = parse_policy({"name": "r-kv", "budget": 128, "decode_budget": 128})
    assert not folding.remarks
    assert "decode_budget" in parse_policy("r-kv").remarks[0]


def test_even_pooling_is_refused():
    with pytest.raises(KVPolicyError, match="must be odd"):
        parse_policy({"name": "r-kv", "kernel_size": 4})


def test_repetition_makes_room_for_what_appears_once():
    """Paper's claim: attention alone keeps repeated tokens, R-KV keeps one of them."""
    keys = torch.cat([torch.eye(32)[:1].expand(60, 32), torch.eye(32)[1:21]])
    keys = (keys + 0.01 * torch.arange(80)[:, None] / 80)[None].contiguous()
    view = make_view(keys, group=1)
    view.queries[..., 0] += 4  # all queries attend to the repeated tokens
    kept = {}
    for name in ("r-kv", "snapkv"):
        policy = parse_policy({"name": name, "window": WINDOW, "kernel_size": 1})
        keep = keep_top(policy.score(view), torch.tensor([24]))[0]
        kept[name] = int(keep[60:].sum())
    assert kept["snapkv"] < kept["r-kv"] == 20
