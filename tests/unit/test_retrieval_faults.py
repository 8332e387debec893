"""Indices that fail or are late, and requests that end at a bad moment."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from fake_engine import LAYERS
from retrieving_engine import SKIP, engine

from vllm_kvplugins.engine.retrieval import fetching as fetching_module
from vllm_kvplugins.index import ExactScan, KeyIndex, Keys
from vllm_kvplugins.policies.exact_topk import ExactTopK
from vllm_kvplugins.policies.quest import PageBounds, Quest


class Failing(KeyIndex):
    """Raises at the n-th query; before that returns the newest tokens."""

    def __init__(self, appends: int, selects: int) -> None:
        self.left = {"append": appends, "select": selects}

    def _count(self, what: str) -> None:
        self.left[what] -= 1
        if self.left[what] < 0:
            raise RuntimeError("no memory for a node")

    def append(self, keys: torch.Tensor, first: int) -> None:
        self._count("append")

        self.tokens = first + keys.shape[1]

    def select(
        self, queries: torch.Tensor, keys: Keys, scale: float, count: int
    ) -> torch.Tensor:
        self._count("select")
        newest = torch.arange(self.tokens - count, self.tokens)
        return newest.expand(queries.shape[0], -1)


@pytest.mark.parametrize(("appends", "selects"), [(0, 99), (1, 99), (99, 3)])
def test_a_failing_index_is_replaced_by_a_scan(monkeypatch, appends, selects):
    fake = engine("quest")
    monkeypatch.setattr(
        Quest, "new_index", lambda *_: Failing(appends, selects), raising=True
    )
    request = fake.add("r", 40, 20)
    while not request.done:
        fake.step({"r": 40})
    assert fake.retrieval.traffic.failed == LAYERS - SKIP
    state = fake.retrieval._requests["r"]
    assert all(
        isinstance(layer_state.index, ExactScan)
        for layer_state in state.layers.values()
    )
    fake.remove("r")
    fake.check_idle()


def test_a_failing_index_leaves_the_others_alone(monkeypatch):
    fake = engine("quest")
    indexes: list[KeyIndex] = []

    def new_index(self: Quest, heads: int, dim: int) -> KeyIndex:
        fails = len(indexes) >= LAYERS - SKIP
        indexes.append(Failing(99, 3) if fails else PageBounds(heads, dim, 3))
        return indexes[-1]

    monkeypatch.setattr(Quest, "new_index", new_index)
    fake.add("sound", 40, 30)
    fake.step({"sound": 40})
    fake.add("failing", 40, 30)
    while not fake.requests["failing"].done:
        fake.step({n: 40 for n, r in fake.requests.items() if not r.done})
    retrieval = fake.retrieval
    assert retrieval.traffic.failed == LAYERS - SKIP
    for name, kind in (("sound", PageBounds), ("failing", ExactScan)):
        layers = retrieval._requests[name].layers.values()
        assert all(isinstance(layer_state.index, kind) for layer_state in layers), name
        fake.remove(name)
    fake.check_idle()


class FailsOnce(PageBounds):
    """Lacks the keys of its first append; the later ones succeed."""

    def append(self, keys: torch.Tensor, first: int) -> None:
        if first == 0:
            raise RuntimeError("broken")
        super().append(keys, first)


def test_an_index_without_its_first_keys_is_not_used(monkeypatch):
    """The blocks of a prompt are appended while later ones are read."""
    monkeypatch.setattr(Quest, "new_index", lambda _, *size: FailsOnce(*size, 3))
    fake = engine("quest", prefill_block=8)
    request = fake.add("r", 90, 10)
    while not request.done:
        fake.step({"r": 40})
    for layer_state in fake.retrieval._requests["r"].layers.values():
        assert isinstance(layer_state.index, ExactScan)
    assert fake.retrieval.traffic.failed == LAYERS - SKIP
    fake.remove("r")
    fake.check_idle()


class Slow(ExactScan):
    """Builds only when allowed, and counts queries."""

    may_build = threading.Event()
    calls = 0

    def append(self, keys: torch.Tensor, first: int) -> None:
        assert self.may_build.wait(60)
        super().append(keys, first)

    def select(
        self, queries: torch.Tensor, keys: Keys, scale: float, count: int
    ) -> torch.Tensor:
        Slow.calls += 1
        return super().select(queries, keys, scale, count)


def test_a_lazy_index_is_not_waited_for(monkeypatch):
    """Until it is built, all keys are scanned; an early end discards it."""
    monkeypatch.setattr(ExactTopK, "new_index", lambda *_: Slow())
    monkeypatch.setattr(ExactTopK, "builds_lazily", True)
    Slow.may_build.clear()
    Slow.calls = 0
    fake = engine("exact-topk")
    for name in ("stays", "goes"):
        fake.add(name, 43, 60)
    for _ in range(20):
        fake.step({"stays": 43, "goes": 43})
    assert Slow.calls == 0
    fake.remove("goes")
    fake.step({"stays": 1})
    Slow.may_build.set()
    while not fake.requests["stays"].done:
        fake.step({"stays": 1})
    assert Slow.calls > 0
    fake.remove("stays")
    fake.check_idle()


@pytest.mark.parametrize("prefill_block", [None, 8])
def test_the_first_token_does_not_wait_for_the_index(monkeypatch, prefill_block):
    """Nor do the blocks of a prompt; the first selection does."""
    monkeypatch.setattr(ExactTopK, "new_index", lambda *_: Slow())
    Slow.may_build.clear()
    Slow.calls = 0
    fake = engine("exact-topk", prefill_block=prefill_block)
    request = fake.add("r", 43, 20)
    while request.computed < 43:
        fake.step({"r": 43})
    assert request.known > 43, "a token was generated"
    assert fake.retrieval._requests["r"].tokens > 0, "tokens are on the host"
    Slow.may_build.set()
    while not request.done:
        fake.step({"r": 1})
    assert Slow.calls > 0
    assert fake.retrieval.traffic.failed == 0, "no index was given up"
    fake.remove("r")
    fake.check_idle()


@pytest.mark.parametrize("lazy", [False, True])
def test_keys_that_no_index_takes_are_scanned(lazy):
    """NaN in one request must not end other requests."""
    fake = engine("icecache", lazy_index=lazy)
    fake.attend_every = 10_000
    broken = fake.add("broken", 43, 20)
    sound = fake.add("sound", 43, 20)
    broken.keys[1:, :, 20] = torch.nan
    while not sound.done:
        fake.step({"broken": 43, "sound": 43})
    retrieval = fake.retrieval
    for layer_state in retrieval._requests["broken"].layers.values():
        assert isinstance(layer_state.index, ExactScan)
    for layer_state in retrieval._requests["sound"].layers.values():
        assert not isinstance(layer_state.index, ExactScan)
    assert retrieval.traffic.failed == LAYERS - SKIP
    for name in ("broken", "sound"):
        fake.remove(name)
    fake.check_idle()


def test_what_is_being_fetched_is_not_freed(monkeypatch):
    """A request ends while its tokens are being copied; the copies finish first."""
    fake = engine("exact-topk", prefetch="step")
    arrived: list[int] = []
    fill = fetching_module.fill_hot

    gate = threading.Event()

    def slow_fill(*arguments: Any, **more: Any) -> torch.Tensor:
        assert gate.wait(30)
        arrived.append(1)
        return fill(*arguments, **more)

    for name in ("a", "b"):
        fake.add(name, 43, 30)
    for _ in range(8):
        fake.step({"a": 43, "b": 43})
    fake.retrieval._wait_for_pending()  # tokens that the previous step still fetches
    monkeypatch.setattr(fetching_module, "fill_hot", slow_fill)
    fake.step({"a": 1, "b": 1})
    assert not arrived
    threading.Timer(0.05, gate.set).start()
    fake.runtime.finish(["a"])
    assert len(arrived) == LAYERS - SKIP
    fake.remove("a")
    monkeypatch.setattr(fetching_module, "fill_hot", fill)
    while not fake.requests["b"].done:
        fake.step({"b": 1})
    fake.remove("b")
    fake.check_idle()


class _Aborted(Exception):
    pass


@pytest.mark.parametrize("generates", [False, True], ids=["prompt", "answer"])
def test_a_request_that_ends_before_its_compaction_leaves_nothing(
    monkeypatch, generates
):
    """A connector runs the compactions of a step as the next one begins."""
    fake = engine("icecache")
    request = fake.add("r", 43, 30)
    end_step = fake.runtime.end_step

    def late() -> None:
        if not fake.runtime._due or request.computed < generates * request.prompt:
            end_step()
            return
        fake.runtime.forget(["r"])
        end_step()
        assert fake.retrieval.num_requests == 0
        raise _Aborted

    def answer() -> None:
        while not request.done:
            fake.step({"r": 7})

    with monkeypatch.context() as patch:
        patch.setattr(fake.runtime, "end_step", late)
        with pytest.raises(_Aborted):
            answer()
    assert (request.computed >= request.prompt) == generates
    fake.preempt("r")
    answer()
    fake.remove("r")
    fake.check_idle()
