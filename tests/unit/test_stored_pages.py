"""Whole pages of similar tokens: stored next to each other, and fetched at once.

Segments have 32 tokens here instead of 512, so that tokens move to other rows of host
memory again and again while a request generates.
"""

from __future__ import annotations

import pytest
import torch
from fake_engine import GROUP, KV_HEADS, Request
from fake_sessions import SessionEngine
from retrieving_engine import BLOCKS, SKIP, WINDOW, RetrievingEngine, engine
from test_retrieval import clustered

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.engine.retrieval.row_order import RowOrder
from vllm_kvplugins.errors import KVPolicyError, codes_in
from vllm_kvplugins.index import (
    PAGE_TOKENS,
    BruteForceIndex,
    CodedIndex,
    ExactScan,
    Keys,
)
from vllm_kvplugins.policies import icecache

SEGMENT = 32
SEED = 3
REWOUND = [(137, False), (210, False), (70, True), (137, True), (270, True)]


@pytest.fixture(scope="module", autouse=True)
def short_segments():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(icecache, "_STORED_SEGMENT", SEGMENT)
        yield


def paging_engine(**settings):
    fake = engine(
        "icecache", block=8, **{"fetch": "pages", "sinks": 8, "budget": 24, **settings}
    )
    fake.attend_every = 3
    return fake


@pytest.fixture(scope="module")
def answered():
    """An engine with a request that has generated all of its tokens."""
    fake = paging_engine()
    fake.add("r", 210, 70)
    generate(fake)
    return fake


def generate(fake, name="r", chunk=48):
    while not fake.requests[name].done:
        fake.step({name: chunk})


def layers_of(fake, name="r"):
    state = fake.retrieval._requests[name]
    return state, range(SKIP, SKIP + len(state.pages))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"host_dtype": "int8"},
        {"prefetch": "step"},
        {"prefetch": "layer"},
        {"lazy_index": True},
        {"prefill_block": 64},
        {"max_visits": 0},
        {"index": "codes", "age_blocks": 3},
    ],
    ids=str,
)
def test_attention_is_over_the_pages_that_were_selected(settings):
    """The fake engine compares attention with that over the tokens of the pages."""
    fake = paging_engine(**settings)
    fake.add("r", 210, 70)
    generate(fake)
    traffic = fake.retrieval.traffic
    assert traffic.selected > traffic.fetched > 0
    assert traffic.failed == 0
    state, layers = layers_of(fake)
    assert state.tokens % PAGE_TOKENS == 0
    for layer in layers:
        assert len(state.orders[layer]) == state.tokens // SEGMENT * SEGMENT
    fake.remove("r")
    fake.check_idle()
    assert fake.retrieval.tier.num_free == len(fake.retrieval.tier.pages)


def test_a_token_moves_once(answered):
    state, layers = layers_of(answered)
    ordered = sum(len(state.orders[layer]) for layer in layers)
    assert answered.retrieval.moved_tokens == KV_HEADS * ordered


def test_host_memory_has_the_tokens_of_a_page_together(answered):
    """And in the order of tokens for whoever asks for tokens."""
    state, layers = layers_of(answered)
    request = answered.requests["r"]
    tier, sinks = answered.retrieval.tier, answered.runtime.policy.sinks
    for layer in layers:
        order = state.orders[layer]
        rows = torch.arange(len(order)).expand(KV_HEADS, -1)
        held = tier.read(state.table(layer), range(len(order)))
        token = order.tokens_at(rows)
        assert token.sort(1).values.equal(rows)
        assert not token.equal(rows)
        at = (token + sinks)[..., None]
        for plane, dense in zip(held, (request.keys, request.values), strict=True):
            expected = dense[layer].gather(1, at.expand(-1, -1, dense.shape[-1]))
            assert plane.equal(expected)
        keys = tier.read_keys(state.table(layer), range(state.tokens), order)
        assert keys.equal(request.keys[layer][:, sinks : sinks + state.tokens])


def test_requests_do_not_share_pages():
    fake = paging_engine()
    for name, prompt in (("a", 210), ("b", 150), ("c", 180)):
        fake.add(name, prompt, 60)
    for step in range(64):
        alive = [n for n, r in fake.requests.items() if not r.done]
        if not alive:
            break
        fake.step(dict.fromkeys(alive, 40))
        if step == 12:
            fake.remove("b")
        if step == 20:
            fake.preempt("c")
    for name in ("a", "c"):
        generate(fake, name)
        fake.remove(name)
    fake.check_idle()


def test_an_index_that_fails_is_replaced_by_a_scan_of_the_same_rows():
    fake = paging_engine()
    request = fake.add("r", 210, 70)
    while request.computed < 250:
        fake.step({"r": 48})
    state, layers = layers_of(fake)
    before = {layer: state.orders[layer].tokens for layer in layers}
    for layer in layers:
        state.layers[layer].index.close()
    generate(fake)
    assert fake.retrieval.traffic.failed == len(layers)
    for layer in layers:
        assert state.orders[layer].tokens.equal(before[layer])
    fake.remove("r")
    fake.check_idle()


# -- sessions -------------------------------------------------------------------------


class Engine(SessionEngine, RetrievingEngine):
    """Checks attention over fetched pages, also in continued requests."""


@pytest.fixture
def conversations():
    """An engine with sessions, in the mode that engines run in."""
    config = {"name": "icecache", "fetch": "pages", "sinks": 8, "window": WINDOW}
    with torch.inference_mode():
        fake = Engine(config | {"budget": 24, "skip_layers": SKIP}, 8, BLOCKS, True)
        fake.attend_every = 3
        yield fake


def converse(fake, request):
    while not request.done:
        fake.step({request.name: 40})


def finished(fake, source, prompt, answer):
    """The session of a first request, which computes the source's first tokens."""
    request = fake.add(source.name, prompt, answer)
    request.begin_with(source, prompt + answer)
    converse(fake, request)
    saved = fake.save(source.name)
    fake.remove(source.name)
    return saved


def branch_of(source, tokens):
    branch = Request.make("b", source.keys.shape[2], 0)
    branch.begin_with(source, tokens)
    return branch


@pytest.mark.parametrize("in_place", [False, True], ids=["loaded", "parked"])
def test_a_conversation_keeps_its_pages(conversations, in_place):
    """The fake engine compares every step with attention over the selected pages."""
    fake, source = conversations, Request.make("r", 400, 0)
    saved, moved = finished(fake, source, 150, 20), []
    for prompt in (220, 300):
        moved.append(fake.retrieval.moved_tokens)
        request = fake.resume(source, saved, prompt, 20, in_place=in_place)
        converse(fake, request)
        state, layers = layers_of(fake)
        ordered = sum(len(state.orders[layer]) for layer in layers)
        saved = fake.save("r")
        fake.retrieval.check_integrity()
        fake.remove("r")
    # What was in the order of pages stayed there.
    assert fake.retrieval.moved_tokens == KV_HEADS * ordered
    assert moved[1] > moved[0] > 0
    fake.transfer.discard(saved)
    fake.check_idle()


@pytest.mark.parametrize(
    ("tokens", "moves"),
    [
        (70, False),
        (210, True),
        (270, False),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in REWOUND),
    ],
)
def test_a_session_continues_at_any_token(conversations, tokens, moves):
    """Pages of complete segments are shared; the rest is copied in the order of
    arrival. Both sides go on, and neither changes pages of the other."""
    fake, source = conversations, Request.make("r", 420, 0)
    saved = finished(fake, source, 210, 70)
    branch = branch_of(source, tokens)
    request = fake.resume(
        branch, saved, tokens + 20, 40, max_tokens=tokens, moves=moves
    )
    assert request.computed == tokens, "nothing is computed again"
    fake.retrieval.check_integrity()
    converse(fake, request)
    sides = [("b", branch)]
    if not moves:
        converse(fake, fake.resume(source, saved, 300, 40))
        sides.append(("r", source))
    sinks = fake.runtime.policy.sinks
    for name, dense in sides:
        state, layers = layers_of(fake, name)
        for layer in layers:
            held = range(state.tokens)
            keys = fake.retrieval.tier.read_keys(
                state.table(layer), held, state.orders[layer]
            )
            assert keys.equal(dense.keys[layer][:, sinks : sinks + state.tokens])
        fake.remove(name)
    assert fake.retrieval.traffic.failed == 0
    fake.check_idle()
    assert fake.retrieval.tier.num_free == len(fake.retrieval.tier.pages)


# -- indices --------------------------------------------------------------------------


def stored(index, keys):
    """Keys [heads, n, dim] in the rows that an index gives them, and their order."""
    heads, count, dim = keys.shape
    order = RowOrder.of_arrival(heads).extended(index.order(0))
    token = order.tokens_at(torch.arange(count).expand(heads, -1))
    return keys.gather(1, token[..., None].expand(-1, -1, dim)), order


@pytest.mark.parametrize("count", [96, 128, 700, 1500])
def test_pages_are_those_with_the_most_attention(count):
    """Codes rank pages by rounded scores, so that pages of nearly equal attention may
    change places: what they cover is compared."""
    print("seed", SEED)
    keys = clustered(SEED, count)
    queries = torch.randn(2, GROUP, 16, generator=torch.Generator().manual_seed(SEED))
    index = CodedIndex(2, 16, segment=64, flat_keys=64, stored=True)
    for first in range(0, count, 37):
        index.append(keys[:, first : first + 37], first)
    rows, _ = stored(index, keys)
    wanted = min(10, count // PAGE_TOKENS)
    exact = ExactScan(count).select_pages(queries, Keys.dense(rows), 0.25, wanted)
    scan = BruteForceIndex(2, 16)
    scan.append(rows, 0)
    assert scan.select_pages(queries, Keys.dense(rows), 0.25, wanted).equal(exact)
    chosen = index.select_pages(queries, Keys.dense(rows), 0.25, wanted)
    weights = (queries @ rows.transpose(1, 2) * 0.25).softmax(-1).sum(1)
    votes = weights[:, : count // 8 * 8].unflatten(1, (-1, 8)).sum(2)
    best = votes.gather(1, exact).sum(1)
    assert all(len(set(head)) == wanted for head in chosen.tolist())
    assert (votes.gather(1, chosen).sum(1) / best).min() > 0.98


def test_pages_of_similar_keys_cover_more_than_runs_of_text():
    print("seed", SEED)
    keys = clustered(SEED, 1024)
    queries = torch.randn(2, GROUP, 16, generator=torch.Generator().manual_seed(SEED))
    index = CodedIndex(2, 16, segment=512, flat_keys=512, stored=True)
    index.append(keys, 0)
    rows, _ = stored(index, keys)
    covered = []
    for each in (rows, keys):
        pages = ExactScan(1024).select_pages(queries, Keys.dense(each), 0.25, 16)
        weights = (queries @ each.transpose(1, 2) * 0.25).softmax(-1).sum(1)
        token = (pages[..., None] * 8 + torch.arange(8)).flatten(1)
        covered.append(float(weights.gather(1, token).sum() / weights.sum()))
    print("pages of similar keys", covered[0], "runs of text", covered[1])
    assert covered[0] > 1.5 * covered[1]


def test_the_order_does_not_depend_on_how_keys_arrive():
    keys = clustered(SEED, 40_000 // 8, heads=1)
    orders = []
    for step in (len(keys[0]), 300, 7):
        index = CodedIndex(1, 16, segment=64, flat_keys=64, stored=True)
        for first in range(0, keys.shape[1], step):
            index.append(keys[:, first : first + step], first)
        orders.append(index.order(0))
        assert index.order(128).equal(orders[-1][:, 128:])
    assert orders[0].shape[1] == keys.shape[1] // 64 * 64
    assert orders[0].equal(orders[1])
    assert orders[0].equal(orders[2])
    segments = orders[0].unflatten(1, (-1, 64)) // 64
    assert segments.eq(torch.arange(segments.shape[1])[:, None]).all()


def test_an_order_knows_rows_and_tokens():
    order = RowOrder.of_arrival(2).extended(torch.tensor([[2, 0, 1], [1, 2, 0]]))
    tokens = torch.tensor([0, 2, 5])
    rows = order.rows_of(tokens)
    assert rows.tolist() == [[1, 0, 5], [2, 1, 5]]
    assert order.tokens_at(rows).equal(tokens.expand(2, -1))
    assert order.first(0).rows_of(tokens).equal(tokens.expand(2, -1))
    longer = order.extended(torch.tensor([[4, 3], [3, 4]]))
    assert longer.rows_of(tokens).equal(rows)
    assert longer.rows_of(torch.tensor([3, 4])).tolist() == [[4, 3], [3, 4]]


@pytest.mark.parametrize("settings", [{"sinks": 12}, {"reuse_every": 2}])
def test_settings_that_pages_do_not_allow(settings):
    with pytest.raises(KVPolicyError) as caught:
        parse_policy({"name": "icecache", "fetch": "pages", **settings})
    assert codes_in(str(caught.value)) == ("KVP140",)
    assert parse_policy(
        {"name": "icecache", "fetch": "pages", "index": "dci"} | settings
    )
