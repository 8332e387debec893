"""Sessions of retrieval policies that are continued before their end, and branches.

What a session has after it was taken back equals what an engine has that computed these
tokens and no others.
"""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from fake_engine import HEAD_DIM, KV_HEADS, LAYERS, Request
from fake_sessions import SessionEngine
from mean_engine import MeanEngine
from retrieving_engine import (
    BLOCK,
    BLOCKS,
    RETRIEVERS,
    SINKS,
    SKIP,
    WINDOW,
    RetrievingEngine,
)

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.engine.retrieval.controller import RetrievalController
from vllm_kvplugins.engine.retrieval.host_tier import HostTier
from vllm_kvplugins.index import CodedIndex, CodeScan, ExactScan, KeyIndex, Keys
from vllm_kvplugins.plan.geometry import Geometry
from vllm_kvplugins.policies import get_policy_class
from vllm_kvplugins.policies.clusterkv import ClusteredKeys
from vllm_kvplugins.policies.omnikv import SharedScan
from vllm_kvplugins.policies.pqcache import QuantizedKeys

PROMPT, ANSWER = 75, 20


class Engine(SessionEngine, RetrievingEngine):
    """Checks attention over fetched tokens, also in continued requests."""


class WithMeans(SessionEngine, MeanEngine):
    """Checks attention to means, too."""


def engine(name: str, session_dtype: Any = "auto", **more: Any) -> Engine | WithMeans:
    config = {"name": name, "budget": 9, "sinks": SINKS, "window": WINDOW}
    config |= {"skip_layers": SKIP, **more}
    if "page_tokens" in get_policy_class(name).model_fields:
        config["page_tokens"] = 3
    kind = WithMeans if "mean_tokens" in more else Engine
    args = config, BLOCK, BLOCKS
    return kind(*args, sessions=True, session_dtype=session_dtype)


@pytest.fixture(autouse=True)
def _as_in_an_engine():
    with torch.inference_mode():
        yield


def branch_of(source: Request, name: str, tokens: int) -> Request:
    """A conversation that shares the first tokens with another one."""
    branch = Request.make(name, 150, 0)
    branch.begin_with(source, tokens)
    return branch


def add(fake: Engine, source: Request, prompt: int, answer: int) -> Request:
    """A request that computes the first tokens of a conversation."""
    request = fake.add(source.name, prompt, answer)
    request.begin_with(source, prompt + answer)
    return request


def run(fake: Engine, *names: str, chunk: int = 11) -> None:
    while not all(fake.requests[name].done for name in names):
        undone = [name for name in names if not fake.requests[name].done]
        fake.step(dict.fromkeys(undone, chunk))


def finished(fake: Engine, source: Request, prompt: int = PROMPT) -> Any:
    """The session of a first request."""
    add(fake, source, prompt, ANSWER)
    run(fake, source.name)
    saved = fake.save(source.name)
    fake.remove(source.name)
    return saved


def on_host(fake: Engine, name: str) -> torch.Tensor:
    """Keys and values of all layers in host memory."""
    state = fake.retrieval._requests[name]
    rows = [
        torch.stack(fake.retrieval.tier.read(pages, range(state.tokens)))
        for pages in state.pages
    ]
    return torch.stack(rows)


def fetched(fake: Engine, name: str) -> list[list[list[int]]]:
    """Tokens in hot slots, per layer and head, sorted."""
    fake.retrieval._wait_for_pending()
    layers = range(SKIP, LAYERS)
    each = [fake.retrieval.hot_tokens(name, layer) for layer in layers]
    return [tokens.sort().values.tolist() for tokens in each]


def resident(fake: Engine, name: str) -> torch.Tensor:
    """Positions in the retained region, sorted per row; hot slots are left out."""
    state = fake.runtime.request_state(name).resident
    assert state is not None
    positions = state.positions.long().clone()
    host = range(SINKS, SINKS + fake.retrieval._requests[name].tokens)
    moved = positions[SKIP * KV_HEADS :]
    moved[(moved >= host.start) & (moved < host.stop)] = -1
    return positions.sort(1).values


def free_pages(fake: Engine) -> int:
    return fake.retrieval.tier.num_free


def idle(fake: Engine) -> None:
    fake.check_idle()
    assert free_pages(fake) == len(fake.retrieval.tier.pages), "host memory leaked"


# -- single requests ----------------------------------------------------------------


CASES = [
    *((name, 47, False) for name in RETRIEVERS),
    ("quest", 30, True),
    ("pqcache", 30, False),
    ("pqcache", PROMPT - 1, True),
    ("icecache", PROMPT - 1, False),
    ("icecache", PROMPT, True),
    ("clusterkv", 88, False),
]
ALL_CASES = [
    (name, tokens, moves)
    for name in RETRIEVERS
    for tokens in (30, 47, PROMPT - 1, PROMPT, 88)
    for moves in (False, True)
]


@pytest.mark.parametrize(
    ("name", "tokens", "moves"),
    [
        *CASES,
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ALL_CASES
            if case not in CASES
        ),
    ],
)
def test_a_session_continues_at_any_token(name, tokens, moves):
    """The fake engine compares the attention of steps with a dense copy."""
    # These keep what they learned from the keys of the first prompt, if they can.
    grows = name in ("pqcache", "clusterkv") and tokens >= PROMPT - 1
    continues(name, tokens, moves, same_selection=not grows)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("icecache", {"prefill_block": 16}),
        ("quest", {"budget": 0.3, "prefetch": "step"}),
        ("omnikv", {"reuse_every": 2, "prefetch": "layer"}),
        ("exact-topk", {"age_blocks": 3}),
        ("icecache", {"index": "dci", "fetch": "pages", "page_tokens": 4}),
        ("icecache", {"index": "device", "host_memory": "4MiB"}),
    ],
)
def test_with_other_settings(name, more):
    continues(name, 47, False, same_selection=True, **more)


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("tokens", [30, 47, PROMPT])
def test_means_of_a_session_that_is_taken_back(tokens, moves):
    """The last chunk of the branch has tokens of the session and of its own."""
    continues("exact-topk", tokens, moves, same_selection=True, mean_tokens=3)


def test_a_session_without_its_index_builds_it_when_a_query_selects():
    """A branch took the index, and no compaction comes before the first selection."""
    fake, source = engine("quest", age_blocks=3), Request.make("r", 150, 0)
    add(fake, source, PROMPT, 12)
    run(fake, "r")
    saved = fake.save("r")
    fake.remove("r")
    branch = branch_of(source, "b", 84)
    fake.resume(branch, saved, 86, 2, max_tokens=84, moves=False)
    run(fake, "b")
    fake.remove("b")
    layers = saved.extension_states[0].layers.values()
    assert {layer.tokens for layer in layers} == {0}, "it still has an index"
    fake.resume(source, saved, saved.tokens + 1, 4)
    run(fake, "r", chunk=1)
    state = fake.retrieval._requests["r"]
    assert {layer.tokens for layer in state.layers.values()} == {state.tokens}
    assert fake.retrieval.traffic.failed == 0
    fake.remove("r")
    idle(fake)


def test_tokens_behind_the_retained_region():
    """The session ended soon after its compaction; its tail has two tokens of these."""
    fake, source = engine("icecache"), Request.make("r", 150, 0)
    add(fake, source, PROMPT, 1)
    run(fake, "r")
    saved = fake.save("r")
    fake.remove("r")
    assert saved.compaction.retained.stop * BLOCK < PROMPT - 2
    branch = branch_of(source, "b", PROMPT - 1)
    fake.resume(branch, saved, PROMPT, 12, max_tokens=PROMPT - 1)
    run(fake, "b", chunk=1)  # the fake engine compares the attention of all steps
    fake.remove("b")
    idle(fake)


def test_an_index_that_is_built_lazily_is_built_again():
    """Until then, all its keys are scanned."""
    continues("icecache", 47, False, same_selection=False, lazy_index=True)


def test_codes_of_a_device_are_measured_on_fewer_keys():
    """The session has a space of codes, the request too few keys for one."""
    fake, source = engine("icecache", index="device", host_memory="4MiB"), long_source()
    saved = finished(fake, source, prompt=150)
    assert all(space.is_fit for space in saved.extension_states[0].spaces.values())
    fresh = engine("icecache", index="device", host_memory="4MiB")
    branch = branch_of(source, "b", 60)
    fake.resume(branch, saved, 70, 25, max_tokens=60, moves=False)
    add(fresh, branch, 70, 25)
    for each in (fake, fresh):
        run(each, "b")
    assert fetched(fake, "b") == fetched(fresh, "b")
    spaces = fake.retrieval._requests["b"].spaces
    assert not any(space.is_fit for space in spaces.values())
    fake.remove("b")
    # its pages have the codes of the session still
    fake.resume(source, saved, 180, 5)
    whole = engine("icecache", index="device", host_memory="4MiB")
    add(whole, source, 180, 5)
    for each in (fake, whole):
        run(each, "r", chunk=40)
    assert fetched(fake, "r") == fetched(whole, "r")
    fake.remove("r")
    idle(fake)


@pytest.mark.parametrize("name", RETRIEVERS)
def test_the_least_text_to_go_back_to_is_the_documented_one(name):
    """docs/sessions.md, with defaults, blocks of 16 tokens and 30 layers."""
    rewound = partial(
        parse_policy(name).retrieval.rewound,
        geometry=Geometry(16, 30, 3, 2 * 3 * 64 * 4 * 30, 64, 4),
    )
    assert rewound(368, 384)
    assert not rewound(367, 384)
    assert not rewound(368, 383)


def long_source() -> Request:
    return Request.make("r", 200, 0)


def continues(
    name: str, tokens: int, moves: bool, same_selection: bool, **more: Any
) -> None:
    """Continue a session after some of its tokens; compare with a new request."""
    fake, source = engine(name, **more), Request.make("r", 150, 0)
    # With means, tokens are selected where they attend.
    seldom, often = (1, 1) if "mean_tokens" in more else (1000, 4)
    fake.attend_every = seldom
    saved = finished(fake, source)
    fake.attend_every = often
    branch = branch_of(source, "b", tokens)
    prompt = max(tokens + 1, 70)
    request = fake.resume(branch, saved, prompt, 25, max_tokens=tokens, moves=moves)
    assert request.computed == tokens, "nothing is computed again"
    fake.retrieval.check_integrity()
    run(fake, "b")
    fresh = engine(name, **more)
    fresh.attend_every = seldom
    add(fresh, branch, prompt, 25)
    run(fresh, "b")
    assert torch.equal(on_host(fake, "b"), on_host(fresh, "b"))
    assert torch.equal(resident(fake, "b"), resident(fresh, "b"))
    if same_selection:
        assert fetched(fake, "b") == fetched(fresh, "b")
    assert fake.retrieval.traffic.failed == 0
    fake.remove("b")
    if not moves:
        fake.retrieval.check_integrity()
        again = fake.resume(source, saved, 130, 12)
        assert again.computed == PROMPT + ANSWER - 1, "the session lost tokens"
        run(fake, "r")
        fake.remove("r")
    idle(fake)


@pytest.mark.parametrize("session_dtype", ["auto", "int8"])
def test_quantized_host_memory(session_dtype):
    """What returns to the device was quantized once. The rest is as it was."""
    fake, source = engine("icecache", session_dtype, host_dtype="int8"), long_source()
    saved = finished(fake, source)
    state = saved.extension_states[0]
    before = {
        layer: torch.stack(fake.retrieval.tier.read(pages, range(state.tokens)))
        for layer, pages in enumerate(state.pages, state.first_layer)
    }
    branch = branch_of(source, "b", 47)
    fake.attend_every = 1000  # the device holds what the fake engine does not know
    fake.resume(branch, saved, 70, 25, max_tokens=47, moves=False)
    state = fake.retrieval._requests["b"]
    kept = fake.retrieval._requests["b"].tokens
    assert 0 < kept < 47
    for layer, pages in enumerate(state.pages, state.first_layer):
        here = torch.stack(fake.retrieval.tier.read(pages, range(kept)))
        assert torch.equal(here, before[layer][:, :, :kept])
    held = fake.runtime.request_state("b").resident
    pages, _ = fake.runtime.tables.retained(held.slot_index)
    keys = fake.heap.keys(0, pages).view(LAYERS, KV_HEADS, -1, HEAD_DIM)[SKIP:]
    positions = held.positions.view(LAYERS, KV_HEADS, -1)[SKIP:].long()
    used = positions >= 0
    exact = source.keys[SKIP:].gather(
        2, positions.clamp(min=0)[..., None].expand(-1, -1, -1, HEAD_DIM)
    )
    step = (exact.amax(-1) - exact.amin(-1)) / 255
    allowed = 1e-6 if session_dtype == "auto" else 0.52
    is_sink = used & (positions < SINKS)
    off = (keys - exact).abs().amax(-1)
    assert bool((off[is_sink] <= allowed * step[is_sink] + 1e-6).all())
    assert bool((off[used] <= 0.52 * step[used] + 1e-6).all())
    run(fake, "b")
    fake.remove("b")
    fake.transfer.discard(saved)
    idle(fake)


# -- several requests ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["icecache", "quest"])
def test_branches_share_host_pages(name):
    """Six requests continue one session at once, at six tokens."""
    fake, source = engine(name), Request.make("r", 150, 0)
    fake.attend_every = 3
    saved = finished(fake, source)
    whole = len(fake.retrieval.tier.pages) - free_pages(fake)
    names = [f"b{number}" for number in range(6)]
    for number, each in enumerate(names):
        tokens = 90 - 7 * number
        branch = branch_of(source, each, tokens)
        fake.resume(branch, saved, tokens + 3, 6, max_tokens=tokens, moves=False)
    fake.retrieval.check_integrity()
    used = len(fake.retrieval.tier.pages) - free_pages(fake)
    partly_filled = 6 * KV_HEADS * (LAYERS - SKIP)
    assert used <= whole + partly_filled, "full pages were copied"
    run(fake, *names)
    fake.transfer.discard(saved)
    fake.retrieval.check_integrity()
    for each in names:
        fake.remove(each)
    idle(fake)


def test_a_branch_without_host_memory_leaves_the_session_whole(monkeypatch):
    fake, source = engine("icecache"), Request.make("r", 150, 0)
    saved = finished(fake, source)
    tier, branch = fake.retrieval.tier, branch_of(source, "b", 88)
    with monkeypatch.context() as patch:
        patch.setattr(type(tier), "num_free", 0)
        with pytest.raises(RuntimeError, match="host tier has 0 free pages"):
            fake.resume(branch, saved, 90, 5, max_tokens=88, moves=False)
    fake.preempt("b")
    fake.remove("b")
    fake.runtime.finish(fake.gone)
    fake.runtime.check_integrity()
    again = fake.resume(source, saved, 100, 5)
    run(fake, "r")
    assert again.done
    fake.remove("r")
    idle(fake)


@pytest.mark.parametrize("moves", [True, False])
@pytest.mark.parametrize("what", ["continued", "attach", "after_compaction"])
def test_a_rewind_that_fails_frees_what_it_took(monkeypatch, what, moves):
    fake, source = engine("icecache"), Request.make("r", 150, 0)
    saved = finished(fake, source)
    held, branch = free_pages(fake), branch_of(source, "b", 47)

    def fails(*arguments):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(RetrievalController, what, fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            fake.resume(branch, saved, 70, 5, max_tokens=47, moves=moves)
    fake.runtime.check_integrity()
    whole = len(fake.retrieval.tier.pages)
    assert free_pages(fake) == (whole if moves else held)
    fake.preempt("b")
    fake.remove("b")
    if not moves:
        fake.transfer.discard(saved)
    idle(fake)


@pytest.mark.parametrize("seed", range(3))
def test_a_host_page_is_free_when_its_last_owner_gives_it_up(seed):
    """Random owners that share first pages, against sets in Python."""
    tier, rng = HostTier(64 * 256, 4, 8, torch.float32), Random(seed)
    owned: dict[int, list[int]] = {}
    for number in range(300):
        if owned and rng.random() < 0.45:
            pages = owned.pop(rng.choice(list(owned)))
            tier.release(torch.tensor(pages))
        else:
            shared = rng.choice(list(owned.values())) if owned else []
            shared = shared[: rng.randint(0, len(shared))]
            fresh = tier.take(rng.randint(1, min(3, max(tier.num_free, 1))))
            if shared:
                tier.share(torch.tensor(shared))
            owned[number] = [*shared, *fresh.tolist()]
        if tier.num_free < 4:
            number = next(iter(owned))
            tier.release(torch.tensor(owned.pop(number)))
        used = {page for pages in owned.values() for page in pages}
        assert tier.num_free == len(tier.pages) - len(used)
        tier.check_integrity([torch.tensor(pages) for pages in owned.values()])


# -- indices ------------------------------------------------------------------------


def keys_of(tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(KV_HEADS, tokens, HEAD_DIM, generator=generator)


def made(kind: str) -> KeyIndex:
    """A new index of each kind that policies use."""
    if kind == "clusters":
        return ClusteredKeys(KV_HEADS, HEAD_DIM, 6, 20, 4, 0)
    if kind == "quantized":
        return QuantizedKeys(KV_HEADS, HEAD_DIM, 2, 4, 4, 0)
    if kind == "codes":
        return CodedIndex(KV_HEADS, HEAD_DIM)
    if kind == "device codes":
        return CodeScan(KV_HEADS, HEAD_DIM)
    if kind == "scan":
        return ExactScan()
    if kind == "shared scan":
        return SharedScan()
    config = {"name": kind}
    if kind == "icecache tree":
        config = {"name": "icecache", "index": "dci", "fetch": "pages"}
    fake = engine(**config)
    return fake.runtime.policy.retrieval.new_index(KV_HEADS, HEAD_DIM)


KINDS = [
    "arkvale",
    "clusters",
    "codes",
    "device codes",
    "exact-topk",
    "icecache tree",
    "quantized",
    "quest",
    "scan",
    "shared scan",
]


@pytest.mark.each_value
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_an_index_forgets_its_newest_keys(kind, seed):
    """It then selects as one that got the same calls, cut off there."""
    rng = torch.Generator().manual_seed(100 + seed)

    def random(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=rng))

    index, stops = made(kind), []
    total = random(30, 200)
    keys, position = keys_of(300, seed), 0
    while position < total:
        stop = min(position + random(1, 60), total)
        index.append(keys[:, position:stop], position)
        stops.append(stop)
        position = stop
    for _ in range(3):
        if position < 2:
            return
        tokens = random(1, position)
        kept = index.keep_first(tokens)
        assert 0 <= kept <= tokens
        if not kept:
            assert selected(index, keys, position) == selected(
                built(kind, keys, stops), keys, position
            ), "it has changed"
            return
        stops = [stop for stop in stops if stop < kept] + [kept]
        assert selected(index, keys, kept) == selected(
            built(kind, keys, stops), keys, kept
        )
        # what the engine does next
        position = min(kept + random(1, 60), 300)
        index.append(keys[:, kept:position], kept)
        stops.append(position)
        assert selected(index, keys, position) == selected(
            built(kind, keys, stops), keys, position
        )


def built(kind: str, keys: torch.Tensor, stops: list[int]) -> KeyIndex:
    """A new index that got its keys by these calls."""
    index, first = made(kind), 0
    for stop in stops:
        index.append(keys[:, first:stop], first)
        first = stop
    return index


def selected(index: KeyIndex, keys: torch.Tensor, tokens: int) -> list[list[int]]:
    chosen = index.select(
        keys_of(4, 9), Keys.dense(keys), HEAD_DIM**-0.5, min(tokens, 9)
    )
    return chosen.tolist()


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [("quantized", 120), ("quest", 100), ("shared scan", 7), ("clusters", 100)],
)
def test_indices_that_need_not_be_built_again(kind, tokens):
    """Otherwise the test above would also pass if nothing was ever kept."""
    keys, index = keys_of(150, 3), made(kind)
    for first, stop in ((0, 60), (60, 101), (101, 150)):
        index.append(keys[:, first:stop], first)
    kept = index.keep_first(tokens)
    assert tokens - 50 < kept <= tokens
