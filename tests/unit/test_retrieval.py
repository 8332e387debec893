"""Retrieval against a torch oracle: attention covers the tokens that queries select.

The fake engine fills all memory that is not resident with NaN, so attention is correct
only if each step has fetched the right tokens to the right slots.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from fake_engine import GROUP, KV_HEADS
from retrieving_engine import BLOCK, RETRIEVERS, SINKS, SKIP, answered, engine

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.errors import KVPolicyError
from vllm_kvplugins.index import Keys
from vllm_kvplugins.index.compiled import CompiledIndex
from vllm_kvplugins.plan.geometry import Geometry
from vllm_kvplugins.policies.quest import PageBounds
from vllm_kvplugins.policies.retrieval import WholeFirstLayers
from vllm_kvplugins.vllm_adapter.config.host_memory import (
    HostReservations,
    host_limit_problem,
    measured,
)

SEED = 5
# minimum share of the attention that the exact choice covers
FOUND = {"exact-topk": 0.9999, "icecache": 0.95, "quest": 0.2}
FOUND |= {"arkvale": 0.2, "pqcache": 0.85, "clusterkv": 0.6, "omnikv": 0.7}
# in keys without structure, pages of 32 tokens are all alike
ASKED = {"arkvale": {"page_tokens": 16}}


@pytest.mark.each_value
@pytest.mark.parametrize("name", RETRIEVERS)
@pytest.mark.parametrize("age_blocks", [1, 3])
@pytest.mark.parametrize("prompt", [6, 40, 43])
def test_attention_is_over_what_was_asked_for(name, prompt, age_blocks):
    fake = engine(name, age_blocks=age_blocks)
    request = fake.add("r", prompt, 60)
    while not request.done:
        fake.step({"r": 11})
    traffic = fake.retrieval.traffic
    assert traffic.selected > traffic.fetched > 0
    assert fake.retrieval.tier.num_free < len(fake.retrieval.tier.pages)
    fake.remove("r")
    fake.check_idle()
    assert fake.retrieval.tier.num_free == len(fake.retrieval.tier.pages)


@pytest.mark.each_value
@pytest.mark.parametrize("name", RETRIEVERS)
@pytest.mark.parametrize("host_dtype", ["int8", "int4"])
def test_quantized_tokens_are_fetched(name, host_dtype):
    """Indices select among quantized keys, and fetched tokens are those that the host
    has. The oracle accepts a hot token that was not fetched yet.
    """
    fake = engine(name, host_dtype=host_dtype)
    request, retrieval = answered(fake), fake.retrieval
    state = retrieval._requests["r"]
    tokens = range(state.tokens)
    for layer, pages in enumerate(state.pages, state.first_layer):
        exact = request.keys[layer][:, SINKS : SINKS + state.tokens]
        assert retrieval.tier.read_keys(pages, tokens).equal(fake._on_host(exact))
        if not fake.runtime.policy.selects(layer):
            continue  # it has no index
        index = retrieval._indexer._ready(state.layers[layer])
        if isinstance(index, CompiledIndex):
            index.check_integrity(retrieval.tier.keys(pages[None]))
    for cached, exact in zip(
        fake._cached(request), (request.keys, request.values), strict=True
    ):
        differs = cached.ne(exact).any(-1)
        assert differs.any(), "some hot tokens were fetched"
        assert not differs[:SKIP].any()
    fake.remove("r")
    fake.check_idle()


@pytest.mark.parametrize("name", ["exact-topk", "icecache"])
@pytest.mark.parametrize("prefetch", ["step", "layer"])
def test_fetching_ahead_asks_with_earlier_queries(name, prefetch):
    """The queries of the previous layer or step; the oracle checks which (see
    ``_asking``).
    """
    fake = engine(name, prefetch=prefetch)
    for prompt in (33, 47):
        fake.add(str(prompt), prompt, 40)
    step = 0
    while alive := [n for n, r in fake.requests.items() if not r.done]:
        fake.step(dict.fromkeys(alive, 11))
        step += 1
        if step == 15:
            fake.preempt("33")
    assert fake.retrieval.traffic.fetched > 0
    assert (fake.times_served > 20) == (prefetch == "step")
    for prompt in (33, 47):
        fake.remove(str(prompt))
    fake.check_idle()


def test_layers_between_anchors_reuse_their_choice():
    """Layer 0 keeps all tokens, layer 1 selects, and layer 2 uses its selection."""
    fake = engine("exact-topk", reuse_every=2)
    fake.attend_every = 10_000
    request = fake.add("r", 43, 20)
    retrieval = fake.retrieval
    while not request.done:
        fake.step({"r": 43})
        if not retrieval._batches:
            continue
        chosen = retrieval._batches[0].selected[0]
        for layer in (1, 2):
            hot = retrieval.hot_tokens("r", layer)
            if not fake.runtime.records and request.computed % BLOCK > 1:
                for head in range(KV_HEADS):
                    expected = chosen[head, : hot.shape[1]].tolist()
                    assert set(expected) <= set(hot[head].tolist())
    state = retrieval._requests["r"]
    assert (state.first_layer, len(state.pages)) == (1, 2), (
        "two layers have host tokens"
    )
    assert set(state.layers) == {1}, "an index that no query asks"
    fake.remove("r")
    fake.check_idle()


def test_only_layers_that_select_reserve_memory_for_an_index():
    """Layers 2 to 29 of 30 offload; every third of them selects: 10 of 28."""
    geometry = Geometry(32, 30, 3, 2 * 30 * 3 * 64 * 2, 64, 2)
    every, third = (
        parse_policy({"name": "icecache", "reuse_every": n}) for n in (1, 3)
    )
    stored = every.offloaded_bytes(5000, geometry)
    index = every.host_bytes(5000, geometry) - stored
    assert third.host_bytes(5000, geometry) - stored == -(-index * 10 // 28) > 0


def test_codes_find_what_the_tree_finds():
    fake = engine("icecache", index="codes")
    request = fake.add("r", 400, 60)
    while not request.done:
        fake.step({"r": 50})
    traffic = fake.retrieval.traffic
    assert traffic.selected > traffic.fetched > 0
    assert traffic.failed == 0
    fake.remove("r")
    fake.check_idle()


def test_icecache_fetches_pages_of_the_tree_if_told_to():
    fake = engine("icecache", index="dci", fetch="pages")
    request = fake.add("r", 43, 40)
    while not request.done:
        fake.step({"r": 11})
    fake.remove("r")
    fake.check_idle()


@pytest.mark.parametrize("name", RETRIEVERS)
def test_requests_do_not_share_what_they_fetch(name):
    fake = engine(name)
    for name, prompt in (("a", 40), ("b", 21), ("c", 33)):
        fake.add(name, prompt, 30)
    for step in range(34):
        alive = [n for n, r in fake.requests.items() if not r.done]
        fake.step(dict.fromkeys(alive, 9))
        if step == 12:
            fake.remove("b")
        if step == 20:
            fake.preempt("c")
    fake.remove("a")
    while not fake.requests["c"].done:
        fake.step({"c": 9})
    fake.remove("c")
    fake.check_idle()


def test_whole_layers_leave_the_rest_to_the_others():
    allocator = WholeFirstLayers(whole_layers=2)
    available = torch.full((5, 3), 20)
    counts = allocator.allocate(torch.zeros(5, 3, 80), 11, 4, available)
    assert counts[:2].eq(20).all()
    assert counts.sum() == 11 * 5 * 3
    assert counts[2:].max() - counts[2:].min() <= 1
    assert counts.eq(counts[:, :1]).all(), "heads of a layer are alike"
    assert "skip_layers 2" in allocator.problems(2, 3)[0]
    assert not allocator.problems(3, 3)
    assert not allocator.problems(0, 3), "such a model is refused as a whole"


def test_bad_settings():
    for bad in ({"window": 0}, {"budget": 0}, {"reuse_every": 0}):
        with pytest.raises(KVPolicyError, match=next(iter(bad))):
            engine("exact-topk", **bad)


# -- indices ------------------------------------------------------------------------


def clustered(seed: int, tokens: int, heads: int = 2, dim: int = 16) -> torch.Tensor:
    """Keys [heads, tokens, dim] around a few centers."""
    rng = torch.Generator().manual_seed(seed)
    centres = 3 * torch.randn(heads, 12, dim, generator=rng)
    which = torch.randint(12, (heads, tokens), generator=rng)
    noise = torch.randn(heads, tokens, dim, generator=rng)
    return centres.gather(1, which[..., None].expand(-1, -1, dim)) + noise


@pytest.mark.parametrize("name", RETRIEVERS)
def test_an_index_finds_most_of_the_attention(name):
    print("seed", SEED)
    keys = clustered(SEED, 1500)
    rng = torch.Generator().manual_seed(SEED + 1)
    queries = torch.randn(2, GROUP, 16, generator=rng)
    index = parse_policy({"name": name, **ASKED.get(name, {})}).new_index(2, 16)
    for first, stop in ((0, 1000), (1000, 1037), (1037, 1500)):
        index.append(keys[:, first:stop], first)
    chosen = index.select(queries, Keys.dense(keys), 0.25, 150)
    assert chosen.shape == (2, 150)
    assert all(len(set(head)) == 150 for head in chosen.tolist())
    weights = (queries @ keys.transpose(1, 2) * 0.25).softmax(-1)
    worth = weights.sum(1)
    share = worth.gather(1, chosen).sum() / worth.topk(150).values.sum()
    anything = worth[:, :150].sum() / worth.topk(150).values.sum()
    assert share > 1.5 * anything
    print(name, "share of what the exact choice covers:", float(share))
    assert share > FOUND[name]


def test_quest_s_bounds_are_those_of_the_pages():
    print("seed", SEED)
    keys = clustered(SEED, 103)
    index = PageBounds(2, 16, page_tokens=10)
    for first, stop in ((0, 4), (4, 57), (57, 60), (60, 103)):
        index.append(keys[:, first:stop], first)
    for page in range(11):
        part = keys[:, page * 10 : page * 10 + 10]
        assert torch.equal(index._minima[:, page], part.amin(1))
        assert torch.equal(index._maxima[:, page], part.amax(1))
    more = index.select(torch.randn(2, 1, 16), Keys.dense(keys), 1.0, 105)
    assert more[:, 103:].eq(-1).all()
    assert more[:, :103].sort().values.equal(torch.arange(103).expand(2, -1))


# -- admission to the host tier -------------------------------------------------------


def request_of(name: str, prompt: int, answer: int) -> SimpleNamespace:
    return SimpleNamespace(request_id=name, num_prompt_tokens=prompt, max_tokens=answer)


def test_requests_wait_for_host_memory():
    shape = Geometry(32, num_layers=4, num_kv_heads=2, kv_bytes_per_token=4096)
    policy = parse_policy(
        {"name": "exact-topk", "sinks": 0, "window": 1, "host_memory": "1MiB"}
    )
    host = HostReservations(policy, shape)
    need = policy.host_bytes(101, shape)
    assert need == 112 * 2048, "two of four layers, whole pages of 16 tokens"
    fitting = (1 << 20) // need
    for index in range(fitting):
        request = request_of(str(index), 50, 51)
        assert host.fits(request)
        host.reserve(request)
    late = request_of("late", 50, 51)
    assert not host.fits(late)
    assert host.waiting == {"late"}
    assert host.fits(request_of("0", 50, 51)), (
        "running and finished requests are not delayed"
    )
    host.release(request_of("0", 50, 51))
    assert host.fits(late)
    assert not host.waiting
    for index in range(1, fitting):
        host.release(request_of(str(index), 50, 51))
    assert host.reserved_bytes == 0
    giant = 10_000
    assert "lower max_tokens" in (host_limit_problem(policy, shape, giant) or "")
    assert host_limit_problem(policy, shape, 101) is None


@pytest.mark.each_value
@pytest.mark.parametrize("name", RETRIEVERS)
@pytest.mark.parametrize(
    "host_dtype", ["auto", pytest.param("int8", marks=pytest.mark.slow), "int4"]
)
def test_no_request_needs_more_than_it_reserves(name, host_dtype):
    """The tier never overflows: admitted requests always find room."""
    fake = engine(name, host_memory="64KiB", host_dtype=host_dtype)
    policy, shape = fake.runtime.policy, fake.runtime.geometry
    for prompt, answer in ((6, 30), (21, 60), (43, 1), (50, 70)):
        request = fake.add("r", prompt, answer)
        peak = 0
        while not request.done:
            fake.step({"r": 50})
            tier = fake.retrieval.tier
            used = (len(tier.pages) - tier.num_free) * tier.page_bytes
            peak = max(peak, used)
        assert peak <= policy.host_bytes(prompt + answer, shape) < 64 * 1024
        fake.remove("r")
        fake.check_idle()


def test_the_limit_is_measured_where_it_is_open():
    share = measured(parse_policy("quest"))
    settled = parse_policy({"name": "quest"} | share)
    assert settled.host_memory_bytes == share["host_memory"] > 1 << 20
    assert measured(parse_policy({"name": "quest", "host_memory": "2GiB"})) == {}
    assert measured(parse_policy("snapkv")) == {}
