"""Shared prefixes: their blocks stay exact and are held once by all their requests.

The engine tests run every policy that drops tokens on ``FakeEngine``. It checks after
every step that page tables list exactly the blocks of a request, that nothing is
written outside of retained regions, and that attention equals attention over the kept
positions of a dense copy, with all tokens of the prefix.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from fake_engine import FakeEngine, Kept, Request
from fake_sessions import SessionEngine
from fake_text import encode
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_settings import (
    EACH_KIND,
    TINY,
    configure,
    drop,
    folds,
    has_turns,
    keep_spans,
    policies_that,
    retrieve,
    wants_history,
)
from tiers import tiered

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.plan.geometry import Geometry, Lengths
from vllm_kvplugins.plan.residency_plan import (
    BlockSpan,
    Compaction,
    DecodeCompaction,
    ResidencyPlan,
)
from vllm_kvplugins.policies.base import KVCachePolicy
from vllm_kvplugins.policies.capabilities import ProbeOccasion
from vllm_kvplugins.policies.registry import get_policy_class

SEED = 20261126
BLOCK, BLOCKS, SHARED = 4, 80, 3
SMALL: dict[str, Any] = TINY | {
    "budget": 0.5,
    "decode_budget": 8,
    "fold_blocks": 1,
    "ratio": 0.5,
    "floor": 4,
    "base_config": {"window": 3, "kernel_size": 3},
}
DROPPING = [name for name in policies_that(drop) if name != "full"]
# Prompt and answer tokens behind the prefix.
REQUESTS = {"a": (38, 9), "b": (24, 7), "c": (31, 12), "d": (2, 11)}


# -- plans ------------------------------------------------------------------------


def plan_of(policy: KVCachePolicy, lengths: Lengths) -> ResidencyPlan:
    return policy.plan_request(lengths, Geometry(BLOCK, 3, 2, 384))


@st.composite
def planned(draw: st.DrawFn) -> tuple[KVCachePolicy, Lengths]:
    """A policy that drops tokens, and the counts of a request behind its prefix."""
    name = draw(st.sampled_from(DROPPING))
    blockwise = {"prefill_block": draw(st.sampled_from([8, 12, 64]))}
    options = SMALL | (blockwise if draw(st.booleans()) else {})
    if name == "kvzip":
        options.pop("prefill_block", None)  # it repeats at least 64 tokens
    prompt = draw(st.integers(1, 300))
    ends = draw(st.lists(st.integers(1, prompt), max_size=4, unique=True))
    return (
        parse_policy(configure(name, options)),
        Lengths(prompt, tuple(sorted(ends)) if has_turns(name) else ()),
    )


@given(planned(), st.integers(0, 20), st.integers(0, 200))
@settings(max_examples=300)
def test_a_plan_behind_a_prefix_is_that_of_the_rest(case, shared, answer):
    policy, lengths = case
    tokens = shared * BLOCK
    whole = Lengths(
        lengths.prompt_tokens + tokens,
        tuple(end + tokens for end in lengths.turn_ends),
        shared_blocks=shared,
    )
    behind, alone = plan_of(policy, whole), plan_of(policy, lengths)
    last = lengths.prompt_tokens + answer
    assert behind.shared_tokens == tokens
    assert behind.is_static == alone.is_static
    assert behind.num_done(tokens + last) == alone.num_done(last)
    for index in range(alone.num_done(last)):
        ours, theirs = behind.compaction(index), alone.compaction(index)
        assert ours.at_tokens == theirs.at_tokens + tokens
        assert ours.candidates.start >= shared
        assert ours.freed.start - shared == theirs.freed.start
        assert ours.freed.stop - shared == theirs.freed.stop
        assert ours.fixed_blocks == theirs.fixed_blocks
    assert behind.peak_blocks(last + tokens) == alone.peak_blocks(last) + shared
    for computed in range(0, last + 1, 7):
        held = behind.resident_blocks(computed + tokens)
        assert held == alone.resident_blocks(computed) + shared
        cut, other = behind.next_cut(computed + tokens), alone.next_cut(computed)
        assert cut == (None if other is None else other + tokens)
    exact, other = behind.exact_prefix_blocks, alone.exact_prefix_blocks
    assert exact == (None if other is None else other + shared)


@pytest.mark.parametrize("name", DROPPING)
def test_a_restored_compaction_begins_the_plan(name):
    """A session's compaction comes first, behind the same prefix."""
    policy = parse_policy(configure(name, SMALL))
    restored = Compaction(41, BlockSpan(3, 10), BlockSpan(8, 10), shared_blocks=3)
    ends = (12, 41, 90) if has_turns(name) else ()
    plan = plan_of(policy, Lengths(100, ends, restored, shared_blocks=3))
    assert plan.compaction(0) == restored
    assert plan.dropped_blocks(1) == 5
    later = plan.num_done(400)
    assert all(plan.compaction(i).shared_blocks == 3 for i in range(later))
    assert plan.resident_blocks(45) == 12 - 5


def test_layers_that_stay_whole_stay_whole_behind_the_prefix():
    decoding = DecodeCompaction(8, 2, 3, whole_layers=1, num_layers=2)
    plan = ResidencyPlan(BLOCK, decode_compaction=decoding).behind(5)
    # Half of the layers keep all 8 blocks behind the prefix, the others 3.
    assert plan.compaction(0).retained == BlockSpan(13 - 6, 13)
    assert plan.compaction(0).candidates.start == 5


def test_plans_refuse_another_prefix():
    compaction = Compaction(40, BlockSpan(2, 10), BlockSpan(8, 10), shared_blocks=2)
    with pytest.raises(ValueError, match="another shared prefix"):
        ResidencyPlan(BLOCK, (compaction,))
    with pytest.raises(ValueError, match="overlap"):
        Compaction(40, BlockSpan(1, 10), BlockSpan(8, 10), shared_blocks=2)
    with pytest.raises(ValueError, match="first block that is still held"):
        ResidencyPlan(
            BLOCK,
            (Compaction(40, BlockSpan(3, 10), BlockSpan(8, 10), shared_blocks=2),),
            shared_blocks=2,
        )


def test_policies_that_keep_tokens_elsewhere_share_no_prefix():
    for name in (*policies_that(retrieve), *policies_that(keep_spans)):
        assert not get_policy_class(name)().keeps_shared_prefix
    assert all(get_policy_class(name)().keeps_shared_prefix for name in DROPPING)


# -- the engine -----------------------------------------------------------------------


def engine_for(name: str, **more: Any) -> FakeEngine:
    return FakeEngine(configure(name, SMALL | more), BLOCK, BLOCKS)


def add(engine: FakeEngine, name: str, prefix: str = "system") -> Request:
    """A request behind a prefix. Requests with turns have two of them."""
    prompt, answer = REQUESTS[name]
    policy = engine.runtime.policy.name
    ends: tuple[int, ...] = ()
    if wants_history(policy):
        ends = (prompt - 3,) if prompt > 3 else ()
    elif has_turns(policy):
        ends = tuple(end for end in (prompt // 2, prompt - 2) if end > 0)
    tokens = SHARED * BLOCK
    return engine.add(
        name,
        tokens + prompt,
        answer,
        tuple(end + tokens for end in ends),
        prefix=prefix,
        shared=SHARED,
    )


@functools.cache
def alone(policy: str, name: str) -> list[Kept]:
    """What a request keeps that computes its prefix itself, in one chunk."""
    engine = engine_for(policy)
    request = add(engine, name)
    while not request.done:
        engine.step({name: 1 << 20})
    engine.remove(name)
    engine.check_idle()
    return request.kept


@pytest.mark.parametrize("policy", tiered(DROPPING, EACH_KIND))
def test_requests_keep_the_same_wherever_their_prefix_comes_from(policy):
    """Random traffic with preemptions and aborts; most requests find their prefix."""
    print("seed", SEED)
    rng = random.Random(SEED)
    engine = engine_for(policy)
    waiting, kept, most_shared, hits = list(REQUESTS) * 3, [], 0, 0
    while waiting or engine.requests:
        if waiting and waiting[0] not in engine.requests and rng.random() < 0.5:
            engine.runtime.finish(engine.gone)  # the name may come again
            engine.gone.clear()
            request = add(engine, waiting.pop(0))
            hits += request.computed == SHARED * BLOCK
        if engine.requests and rng.random() < 0.06:
            engine.preempt(rng.choice(list(engine.requests)))
        if engine.requests and rng.random() < 0.03:
            engine.remove(rng.choice(list(engine.requests)))
        if engine.requests:
            engine.step({n: rng.randint(1, 11) for n in engine.requests})
        holders = [r for r in engine.requests.values() if len(r.kept) > 0]
        most_shared = max(most_shared, len(holders))
        done = [name for name, each in engine.requests.items() if each.done]
        kept += [(name, engine.remove(name).kept) for name in done]
        assert engine.steps < 800, "the run does not end"
    engine.check_idle()
    assert hits >= 3, "hardly any request found its prefix"
    assert most_shared >= 2, "never two compacted requests at once"
    assert len(kept) >= 6
    for name, compactions in kept:
        assert compactions == alone(policy, name), name


@pytest.mark.parametrize("policy", DROPPING)
def test_a_prefix_is_held_once(policy):
    """Requests hold its blocks once, and each the compressed rest of its own."""
    engine = engine_for(policy)
    names = ["a", "b", "c"]
    for name in names:
        add(engine, name)
        engine.step({name: 1 << 20})
    requests = [engine.requests[name] for name in names]
    held = {r.table[index] for r in requests for index in r.held}
    own = [
        engine.plan(name).resident_blocks(request.computed) - SHARED
        for name, request in zip(names, requests, strict=True)
    ]
    assert len(held) == SHARED + sum(own)
    if folds(policy):
        assert all(request.kept for request in requests), "nothing was compacted"
        whole = [-(-request.computed // BLOCK) - SHARED for request in requests]
        assert all(o < w for o, w in zip(own, whole, strict=True))


@pytest.mark.parametrize("name", ["snapkv", "streaming-llm", "keydiff"])
def test_prompts_in_blocks_keep_the_prefix(name):
    """Block by block, earlier tokens are dropped; the prefix never is."""
    engine = engine_for(name, prefill_block=8, budget=8, decode_budget=None)
    request = add(engine, "a")
    while not request.done:
        engine.step({"a": 5})
    assert len(request.kept) >= 3
    most = engine.runtime.policy.max_prompt_blocks(38, engine.runtime.geometry)
    assert most is not None
    assert engine.plan("a").peak_blocks(SHARED * BLOCK + 38) <= most + SHARED


@pytest.mark.parametrize(
    ("since", "survivors", "first"),
    [(0, range(0), 12), (12, range(12, 12), 12), (30, range(12, 30), 30)],
)
def test_kvzip_does_not_repeat_the_prefix(since, survivors, first):
    """Nor do its tokens compete with those that earlier compactions kept."""
    probing = get_policy_class("kvzip")(chunk=64).probing
    assert probing is not None
    occasion = ProbeOccasion(range(200), since, 200, 120, encode, shared=12)
    probes = probing.probes(occasion)
    assert probes[0].about.start == first
    assert probes[-1].about.stop == 200
    assert {len(probe.survivors) for probe in probes} == {len(survivors)}
    assert all(probe.survivors == survivors for probe in probes)


def test_other_prefixes_are_other_blocks():
    engine = engine_for("snapkv")
    for name, prefix in (("a", "one"), ("b", "two")):
        add(engine, name, prefix)
        engine.step({name: 1 << 20})
    first, second = (engine.requests[name].table[:SHARED] for name in ("a", "b"))
    assert not set(first) & set(second)


# -- sessions -------------------------------------------------------------------------

# Prompt tokens behind the prefix of three requests, each with the one before as
# history, and the ends of turns. The first request is not compacted by flowkv.
TALK, TURN_ENDS = (40, 60, 100), (52, 71)


def says(request: Request) -> Request:
    """The request with the tokens of the whole conversation."""
    whole = Request.make("talk", 150, 0)
    whole.begin_with(Request.make("system", SHARED * BLOCK, 0), SHARED * BLOCK)
    request.keys, request.values = whole.keys, whole.values
    request.queries, request.visible = whole.queries, whole.visible
    return request


def turn_ends(policy: str, turn: int) -> tuple[int, ...]:
    if not has_turns(policy):
        return ()
    ends = TURN_ENDS[:turn] if not wants_history(policy) else TURN_ENDS[:turn][-1:]
    return tuple(end + SHARED * BLOCK for end in ends)


def first_request(engine: SessionEngine, prompt: int, turn: int) -> Request:
    ends = turn_ends(engine.runtime.policy.name, turn)
    tokens, answer = SHARED * BLOCK + prompt, 12 if turn < 2 else 20
    return says(
        engine.add("talk", tokens, answer, ends, prefix="system", shared=SHARED)
    )


def session_engine(policy: str) -> SessionEngine:
    options = {"budget": 20, "decode_budget": None} if policy != "flowkv" else {}
    return SessionEngine(configure(policy, SMALL | options), BLOCK, 120, sessions=True)


@pytest.mark.each_value
@pytest.mark.parametrize("policy", DROPPING)
@pytest.mark.parametrize("in_place", [False, True], ids=["copied", "in-place"])
@torch.inference_mode()
def test_sessions_continue_behind_a_shared_prefix(policy, in_place):
    """The prefix comes from other requests, the rest from the session."""
    engine = session_engine(policy)
    add(engine, "c")  # holds the prefix all the time
    engine.step({"c": 1 << 20})
    prefix = engine.requests["c"].table[:SHARED]
    saved, request = None, None
    for turn, prompt in enumerate(TALK):
        if saved is None:
            request = first_request(engine, prompt, turn)
        else:
            assert request is not None
            request = engine.resume(
                request,
                saved,
                SHARED * BLOCK + prompt,
                12 if turn < 2 else 20,
                turn_ends(policy, turn),
                in_place=in_place and saved.compaction is not None,
            )
            # A request cannot start behind a compaction that is due.
            at = saved.compaction.at_tokens if saved.compaction else 0
            due = engine.plan("talk").next_cut(at)
            assert request.computed in (saved.tokens, due)
        while not request.done:
            engine.step({"talk": 7})
        assert request.table[:SHARED] == prefix
        saved = engine.save("talk")
        if saved.compaction is not None:
            (part,) = saved.parts
            assert part.retained.shape[0] == int(part.counts.sum())
            size = len(saved.compaction.retained)
            assert int(part.counts.sum()) == size * len(part.counts), "a prefix in it"
        if turn < 2:
            engine.remove("talk")
    assert request is not None
    assert request.kept
    if policy == "flowkv":  # its turns keep the same tokens as in one request
        alone = session_engine(policy)
        whole = first_request(alone, TALK[-1], 2)
        while not whole.done:
            alone.step({"talk": 7})
        assert request.kept == whole.kept


@torch.inference_mode()
def test_a_session_without_compaction_brings_its_own_prefix():
    """If nobody holds the prefix, the copy of the session serves."""
    engine = session_engine("flowkv")
    request = first_request(engine, TALK[0], 0)
    while not request.done:
        engine.step({"talk": 7})
    saved = engine.save("talk")
    engine.remove("talk")
    assert saved.compaction is None
    assert not engine.prefixes["system"], "nobody holds it"
    ends = turn_ends("flowkv", 2)
    resumed = engine.resume(request, saved, SHARED * BLOCK + TALK[2], 20, ends)
    assert resumed.computed == saved.tokens
    while not resumed.done:
        engine.step({"talk": 7})
    assert len(resumed.kept) == 2
