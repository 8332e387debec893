"""The contract between policies and engine, with every allocator.

Runs all registered policies and all allocators on ``FakeEngine``, which fills all
memory that no live request owns with NaN, and checks after every step: page tables list
each page of a request once; attention over them equals attention over the kept
positions of a dense copy; a compaction keeps exactly M * layers * heads pages; and no
slot index, block or request leaks.
"""

from __future__ import annotations

import atexit
import functools
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine import KV_HEADS, LAYERS, FakeEngine, Kept, Request
from policy_settings import (
    TINY,
    configure,
    drop,
    folds,
    keep_spans,
    policies_that,
    retrieve,
    shares_pages,
    wants_history,
    write_weights,
)
from profiles import write_made

from vllm_kvplugins.budgets import ALLOCATORS
from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.errors import KVPolicyError
from vllm_kvplugins.policies.compressor import Compressor
from vllm_kvplugins.policies.registry import get_policy_class

SEED = 20261121
BLOCK, BLOCKS = 4, 60
BUDGETS: dict[str, dict[str, Any]] = {
    "one-page": {"fold_blocks": 1},  # see one_page
    "half": {"budget": 0.5, "decode_budget": 8, "fold_blocks": 1},
    "whole": {"budget": 1.0},
}
# prompt and answer tokens: with a tail, without, one page, shorter than a window
REQUESTS = {
    "tail": (38, 9),
    "exact": (24, 9),
    "page": (BLOCK, 10),
    "short": (2, 11),
    "one": (1, 5),
}
ONE_CHUNK = 1 << 20


def pairs() -> list[tuple[str, str]]:
    """(policy, allocator); policies that do not use an allocator appear once."""
    return [
        (name, allocator)
        for name in policies_that(drop) + policies_that(keep_spans)
        for allocator in (sorted(ALLOCATORS) if shares_pages(name) else ["none"])
    ]


@functools.cache
def weights_file() -> dict[str, str]:
    folder = tempfile.TemporaryDirectory(prefix="kvp-weights")
    atexit.register(folder.cleanup)
    return write_weights(Path(folder.name, "weights.json"), LAYERS, KV_HEADS)


@functools.cache
def profile_file() -> str:
    folder = tempfile.TemporaryDirectory(prefix="kvp-profile")
    atexit.register(folder.cleanup)
    rising = [0.1 * layer for layer in range(LAYERS)]
    return write_made(Path(folder.name, "profile.json"), rising)


def one_page(name: str) -> int:
    """The smallest budget in whole pages: one, unless sinks and window need more."""
    cls = get_policy_class(name)
    small = {key: value for key, value in TINY.items() if key in cls.model_fields}
    least = getattr(cls(**small), "minimum_budget_tokens", 1)
    return -(-least // BLOCK) * BLOCK


def settings(name: str, allocator: str, budget: str) -> dict[str, Any]:
    options: dict[str, Any] = {**TINY, **BUDGETS[budget], "allocator": allocator}
    if budget == "one-page":
        page = one_page(name)
        options |= {"budget": page, "decode_budget": page}
    if allocator == "file":
        options["allocator"] = weights_file()
    if allocator == "sensitivity":
        options["allocator"] = {"name": allocator, "profile": profile_file()}
    return configure(name, options)


def engine_for(case: tuple[str, str, str]) -> FakeEngine:
    return FakeEngine(settings(*case), BLOCK, BLOCKS)


def add(engine: FakeEngine, name: str) -> Request:
    """For policies that need a history, all but three tokens of the prompt are
    history.
    """
    prompt, answer = REQUESTS[name]
    history = prompt - 3 if wants_history(engine.runtime.policy.name) else 0
    return engine.add(name, prompt, answer, (history,) if history > 0 else ())


@functools.cache
def alone(case: tuple[str, str, str], name: str) -> list[Kept]:
    """The tokens that a request keeps when it runs alone, in as few chunks as
    possible.
    """
    engine = engine_for(case)
    request = add(engine, name)
    while not request.done:
        engine.step({name: ONE_CHUNK})
    engine.remove(name)
    engine.check_idle()
    return request.kept


def all_chunks(engine: FakeEngine, rng: random.Random) -> dict[str, int]:
    """Chunks of a step: all live requests, in random order, up to 11 tokens each."""
    names = list(engine.requests)
    rng.shuffle(names)
    return {name: rng.randint(1, 11) for name in names}


def run_all(
    case: tuple[str, str, str],
    disturb: Callable[[FakeEngine, random.Random], None] = lambda *_: None,
) -> dict[str, list[Kept]]:
    """Run all requests to their end, one more with each step; call ``disturb``
    before each.

    Returns:
        What each request kept that was not removed by ``disturb``.
    """
    print("seed", SEED)
    rng = random.Random(SEED)
    engine, kept = engine_for(case), {}
    waiting = list(REQUESTS)
    while waiting or engine.requests:
        if waiting:
            name = waiting.pop(0)
            add(engine, name)
        disturb(engine, rng)
        if engine.requests:
            engine.step(all_chunks(engine, rng))
        for name in [n for n, r in engine.requests.items() if r.done]:
            kept[name] = engine.remove(name).kept
        assert engine.steps < 500, "the run does not end"
    engine.check_idle()
    return kept


# For a whole prompt the allocator is not used, and with one page all allocators agree
# (see test_budgets_mean_what_they_say). Two allocators are enough, one of which makes
# the runtime build a page table per layer.
CASES = [
    (*pair, budget)
    for pair in pairs()
    for budget in BUDGETS
    if budget == "half" or pair[1] in ("none", "uniform", "cross-layer")
]


@pytest.fixture
def case(name, allocator, budget) -> tuple[str, str, str]:
    """A policy, an allocator and a budget."""
    return name, allocator, budget


cases = pytest.mark.parametrize(("name", "allocator", "budget"), CASES)


@pytest.mark.each_value
@cases
def test_chunked_prefill_keeps_what_one_chunk_keeps(case):
    print("seed", SEED)
    rng = random.Random(SEED)
    for name in ("tail", "exact"):
        engine = engine_for(case)
        request = add(engine, name)
        while not request.done:
            engine.step({name: rng.randint(1, 7)})
        assert request.kept == alone(case, name), name


@pytest.mark.each_value
@cases
def test_concurrent_requests_keep_what_they_keep_alone(case):
    kept = run_all(case)
    assert kept == {name: alone(case, name) for name in REQUESTS}


def abort(engine: FakeEngine, rng: random.Random) -> None:
    """One in the middle of its prompt, and one after its compaction."""
    for name, at in (("tail", 5), ("exact", 24)):
        if name in engine.requests and engine.requests[name].computed >= at:
            engine.remove(name)


class Preempt:
    """Some during prefill, some during decoding; one of them twice."""

    def __init__(self) -> None:
        self.left = {"tail": [9, 44], "exact": [27], "page": [10], "short": [3]}

    def __call__(self, engine: FakeEngine, rng: random.Random) -> None:
        for name, request in engine.requests.items():
            left = self.left.get(name, [])
            if left and request.computed >= left[0]:
                left.pop(0)
                engine.preempt(name)


@pytest.mark.each_value
@cases
def test_aborted_requests_leave_the_others_alone(case):
    kept = run_all(case, abort)
    assert kept == {name: alone(case, name) for name in ("page", "short", "one")}


@pytest.mark.each_value
@cases
def test_preempted_requests_keep_the_same_again(case):
    preempt = Preempt()
    kept = run_all(case, preempt)
    assert not any(preempt.left.values()), "a request was never preempted"
    assert kept == {name: alone(case, name) for name in REQUESTS}


@pytest.mark.each_value
@pytest.mark.parametrize("budget", ["one-page", "half"])
@pytest.mark.parametrize("name", policies_that(retrieve))
def test_policies_that_fetch_own_what_they_read(name, budget):
    """The resident tokens change with every query, so that only the engine's checks
    apply.
    """
    case = (name, "none", budget)
    for request in REQUESTS:
        kept = alone(case, request)
        assert len(kept) > 1 or request not in ("tail", "exact")
    preempt = Preempt()
    for disturb in (lambda *_: None, abort, preempt):
        run_all(case, disturb)
    assert not any(preempt.left.values()), "a request was never preempted"


@pytest.mark.each_value
@pytest.mark.parametrize(("name", "allocator"), pairs())
def test_budgets_mean_what_they_say(name, allocator):
    """Otherwise the tests above would compare nothing."""
    pair = name, allocator
    if wants_history(name):
        assert len(alone((*pair, "half"), "tail")) > 2
    if not issubclass(get_policy_class(name), Compressor):
        pytest.skip("its plan is its own")
    if (*pair, "whole") in CASES:
        for request in REQUESTS:
            assert alone((*pair, "whole"), request) == [], "the whole prompt stays"
    for request in ("tail", "exact"):
        for budget in ("one-page", "half"):
            compactions = len(alone((*pair, budget), request))
            assert compactions > 2 if folds(name) else compactions == 1
    assert alone((*pair, "one-page"), "one") == [], "nothing to compact"
    assert bool(alone((*pair, "one-page"), "short")) == folds(name)
    first = alone((*pair, "half"), "tail")[0]
    counts = {len(head) for layer in first for head in layer}
    if allocator == "uniform":
        assert len(counts) == 1
    if allocator in ("pyramid", "file", "sensitivity"):
        assert len(counts) > 1
    one = alone((*pair, "one-page"), "tail")[0]
    counts = [len(head) for layer in one for head in layer]
    budget = one_page(name) + 38 % BLOCK
    assert sum(counts) == budget * len(counts)
    if allocator == "uniform" or one_page(name) == BLOCK:
        # An allocator can move pages only if heads have more than one page each.
        assert set(counts) == {budget}


def test_the_fake_engine_sees_a_read_of_what_nobody_owns():
    engine = engine_for(("snapkv", "uniform", "half"))
    request = engine.add("tail", *REQUESTS["tail"])
    for _ in range(3):
        engine.step({"tail": ONE_CHUNK})
    engine.pages[0][1, request.table[max(request.held) - 1], 0] = torch.nan
    with pytest.raises(AssertionError, match="read memory that no request owns"):
        engine.step({"tail": 1})


def test_policies_without_an_allocator_refuse_one():
    for name, allocator in pairs():
        if allocator == "none":
            with pytest.raises(KVPolicyError, match="unknown setting 'allocator'"):
                parse_policy({"name": name, "allocator": "pyramid"})
