"""Sessions of retrieval policies: offloaded tokens move without a copy or a loss."""

from __future__ import annotations

from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from fake_engine import GROUP, LAYERS, Request
from fake_sessions import SessionEngine
from hypothesis import given, settings
from hypothesis import strategies as st
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
from vllm_kvplugins.plan.geometry import Geometry, Lengths
from vllm_kvplugins.plan.residency_plan import BlockSpan, Compaction
from vllm_kvplugins.policies import get_policy_class
from vllm_kvplugins.sessions import stored_pages
from vllm_kvplugins.sessions.commands import Save, Session, SessionCommands
from vllm_kvplugins.sessions.store import SessionStore

PROMPTS = (40, 75, 120)


class Engine(SessionEngine, RetrievingEngine):
    """Checks attention over fetched tokens, also in continued requests."""


def engine(name: str, **more: Any) -> Engine:
    config = {"name": name, "budget": 9, "sinks": SINKS, "window": WINDOW}
    config |= {"skip_layers": SKIP, **more}
    if "page_tokens" in get_policy_class(name).model_fields:
        config["page_tokens"] = 3
    return Engine(config, BLOCK, BLOCKS, sessions=True)


@pytest.fixture(autouse=True)
def _as_in_an_engine():
    with torch.inference_mode():
        yield


@pytest.mark.each_value
@pytest.mark.parametrize("in_place", [False, True], ids=["loaded", "parked"])
@pytest.mark.parametrize("name", RETRIEVERS)
@pytest.mark.parametrize("more", [{}, {"prefetch": "step"}, {"budget": 0.2}])
def test_a_conversation_keeps_its_index(name, more, in_place):
    """The fake engine compares every step with the oracle's attention."""
    fake = engine(name, **more)
    source, saved, tables = Request.make("r", 140, 0), None, []
    for turn, prompt in enumerate(PROMPTS):
        if saved is None:
            request = fake.add("r", prompt, 15)
            request.keys, request.values = source.keys, source.values
            request.queries, request.visible = source.queries, source.visible
        else:
            request = fake.resume(request, saved, prompt, 15, in_place=in_place)
            assert request.computed == PROMPTS[turn - 1] + 14, "nothing is recomputed"
        state = fake.retrieval._requests.get("r")
        tables.append(state and state.table(SKIP)[:, :2].clone())
        while not request.done:
            fake.step({"r": 10})
        saved = fake.save("r")
        assert fake.retrieval.num_requests == 0
        fake.retrieval.check_integrity()
        fake.remove("r")
    assert torch.equal(tables[1], tables[2]), "host pages stay where they are"
    assert fake.retrieval.tier.num_free < len(fake.retrieval.tier.pages)
    fake.transfer.discard(saved)
    fake.check_idle()
    assert fake.retrieval.tier.num_free == len(fake.retrieval.tier.pages)


@pytest.mark.parametrize("by_thread", [False, True])
def test_a_copy_that_fails_leaves_nothing_on_the_host(monkeypatch, by_thread):
    """The session has the request's tokens on the host before its pages are copied."""
    fake = engine("icecache")
    request = fake.add("r", 60, 9)
    while not request.done:
        fake.step({"r": 10})

    class EngineTransfer:
        discard = staticmethod(fake.transfer.discard)

        def save(self, *arguments: Any) -> Any:
            return fake.pending_save("r")

    def fails(*arguments: Any) -> None:
        raise MemoryError("none left")

    monkeypatch.setattr(stored_pages, "copy_pages", fails)
    store = SessionStore(
        EngineTransfer(), copied_at_once_bytes=0 if by_thread else 1 << 40
    )  # type: ignore[arg-type]
    done = Session("s", "o", np.arange(68, dtype=np.int32), None, 1, 68)
    store.save(SessionCommands(saves=[Save(done, "r", ())]))
    store.wait_for_copies()
    (ack,) = store.take_acks()
    assert ack.problem is not None
    fake.remove("r")
    fake.check_idle()
    assert fake.retrieval.tier.num_free == len(fake.retrieval.tier.pages)
    store.close()


@pytest.mark.parametrize(
    ("owner", "what"),
    [
        (stored_pages, "copy_pages"),
        (RetrievalController, "attach"),
        (RetrievalController, "after_compaction"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_a_load_that_fails_leaves_nothing_on_the_host(monkeypatch, owner, what):
    """A failure before or after the tokens have moved."""
    fake, source = engine("icecache"), Request.make("r", 140, 0)
    request = fake.add("r", 40, 15)
    request.keys, request.values = source.keys, source.values
    request.queries, request.visible = source.queries, source.visible
    while not request.done:
        fake.step({"r": 10})
    saved = fake.save("r")
    fake.remove("r")
    tier = fake.retrieval.tier
    assert tier.num_free < len(tier.pages)

    def no_room(*arguments):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(owner, what, no_room)
        with pytest.raises(RuntimeError, match="out of memory"):
            fake.resume(request, saved, 75, 15)
    assert tier.num_free == len(tier.pages)
    fake.runtime.check_integrity()
    fake.preempt("r")
    again = fake.requests["r"]
    again.restored = None
    while not again.done:
        fake.step({"r": 10})
    fake.remove("r")
    fake.check_idle()


def test_a_save_waits_for_fetches_pending(monkeypatch):
    """Otherwise positions and pages would belong to different fetches."""
    fake, gate = engine("exact-topk", prefetch="step"), Event()
    request, source = fake.add("r", PROMPTS[0], 15), Request.make("r", 140, 0)
    request.keys, request.values = source.keys, source.values
    request.queries, request.visible = source.queries, source.visible
    retrieval = fake.retrieval
    fetch, refresh = retrieval.fetcher._fetched, retrieval.refresh_positions

    def late(*arguments):
        gate.wait(0.2)
        return fetch(*arguments)

    def then_fetched(*arguments):
        refresh(*arguments)
        gate.set()
        for *_, future in retrieval.fetcher._pending:
            future.result()

    while request.generated < 14:
        fake.step({"r": 10})
    monkeypatch.setattr(retrieval.fetcher, "_fetched", late)
    fake.step({"r": 10})
    assert request.done
    assert retrieval.fetcher._pending
    monkeypatch.setattr(retrieval, "refresh_positions", then_fetched)
    saved = fake.save("r")
    monkeypatch.undo()
    fake.remove("r")
    request = fake.resume(request, saved, PROMPTS[1], 15)
    while not request.done:
        fake.step({"r": 10})  # compares hot tokens with the tokens that attention reads
    fake.remove("r")
    fake.check_idle()


def test_a_long_answer_is_searched_with_some_of_its_queries():
    """An answer that is recomputed after a preemption has many tokens in a step. The
    oracle takes 32 queries: first, last, and evenly between them.
    """
    fake = engine("exact-topk", age_blocks=20)
    queries_seen = []
    choose = fake.retrieval.fetcher._select

    def noted(batch, layer, queries):
        queries_seen.append(queries.shape[2] // GROUP)
        return choose(batch, layer, queries)

    request = fake.add("r", 40, 76)
    while request.generated < 75:
        fake.step({"r": 40})
    fake.preempt("r")
    fake.step({"r": 40})
    fake.retrieval.fetcher._select = noted
    for new_tokens in (32, 33):
        before = request.computed
        fake.step({"r": new_tokens})
        assert request.computed - before == new_tokens
    assert queries_seen == [32] * 2 * (LAYERS - SKIP), "so many searches cost too much"
    fake.remove("r")
    fake.check_idle()


def test_requests_reuse_slot_indices_of_ended_ones():
    """Continued sessions get new log entries."""
    fake = engine("exact-topk")
    sources, saved = {}, {}
    for number in range(3):
        request = fake.add(f"r{number}", 50 + 7 * number, 9)
        sources[request.name] = request
    while not all(r.done for r in fake.requests.values()):
        fake.step({n: 6 for n, r in fake.requests.items() if not r.done})
    for name in list(fake.requests):
        saved[name] = fake.save(name)
        fake.remove(name)
    fake.add("new", 60, 12)
    for name in ("r2", "r0"):
        old = sources[name]
        longer = Request.make(name, 110, 0)
        for each in ("keys", "values", "queries", "visible"):
            whole = getattr(longer, each)
            part = getattr(old, each)
            where = (Ellipsis, slice(0, part.shape[1 if each == "queries" else 2]))
            if each == "queries":
                whole[:, : part.shape[1]] = part
            elif each == "visible":
                whole[where] = part
            else:
                whole[:, :, : part.shape[2]] = part
        longer.kept = old.kept
        fake.resume(longer, saved.pop(name), 95, 10)
    while not all(r.done for r in fake.requests.values()):
        fake.step({n: 6 for n, r in fake.requests.items() if not r.done})
    for name in list(fake.requests):
        fake.remove(name)
    fake.transfer.discard(saved.pop("r1"))
    fake.check_idle()
    assert fake.retrieval.tier.num_free == len(fake.retrieval.tier.pages)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_plans_of_continued_requests_hold(data):
    """For any two lengths, also if the budget is a share of the prompt."""
    budget = data.draw(st.sampled_from([9, 40, 0.1, 0.5]))
    age = data.draw(st.integers(1, 4))
    policy = parse_policy(
        {"name": "icecache", "budget": budget, "age_blocks": age, "window": 8}
    )
    geometry = Geometry(BLOCK, 5, 2, 64)
    first = data.draw(st.integers(1, 400))
    plan = policy.plan(Lengths(first), geometry)
    computed = first + data.draw(st.integers(0, 200))
    done = plan.num_done(computed)
    last = plan.compaction(done - 1) if done else None
    restored = last and Compaction(
        last.at_tokens, BlockSpan(0, last.retained.stop), last.retained
    )
    prompt = computed + data.draw(st.integers(1, 300))
    after = policy.plan(Lengths(prompt, (), restored), geometry)
    held = set(range(last.retained.start if last else 0, -(-computed // BLOCK)))
    for tokens in range(computed + 1, prompt + 150):
        held.add((tokens - 1) // BLOCK)
        due = after.due(tokens - 1, tokens)
        if due is not None:
            assert due.candidates.start == min(held)
            held -= set(range(due.freed.start, due.freed.stop))
        assert len(held) == after.resident_blocks(tokens)
