"""Attention to spans: as means or tokens, in one softmax with resident tokens."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch
from fake_engine import GROUP, HEAD_DIM, KV_HEADS, LAYERS
from zooming_engine import ZoomingEngine, attention_to_spans, run

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.engine.requests import Row
from vllm_kvplugins.errors import KVPolicyError
from vllm_kvplugins.ops import LowRank
from vllm_kvplugins.plan.geometry import Geometry, Lengths
from vllm_kvplugins.policies.sekv import SeKV
from vllm_kvplugins.spans.coarse import CoarseSpans

SEED = 20261122
# full-rank factors, so that zoomed tokens are exact
POLICY: dict[str, Any] = {
    "name": "sekv",
    "budget": 80,
    "sinks": 2,
    "least_span": 3,
    "span_tokens": 8,
    "rank": HEAD_DIM,
    "sensitivity": 0.5,
}


def test_queries_see_means_and_zoomed_tokens_in_one_softmax():
    engine = ZoomingEngine(POLICY)
    run(engine, {"a": 150, "b": 97, "short": 30}, 12, 9, SEED)
    assert len(engine.seen) == 22, "the first tokens come from the prefill"
    zoomed = torch.cat([marks.flatten() for marks in engine.seen.values()])
    assert 0.1 < zoomed.float().mean() < 0.9
    changes = [
        int((engine.seen["a", p] != engine.seen["a", p - 1]).sum())
        for p in range(151, 161)
    ]
    assert min(changes) > 0, "nothing was zoomed out again"


def test_second_order_zooms_where_keys_vary():
    engine = ZoomingEngine(POLICY | {"second_order": True}, attention_to_spans)
    run(engine, {"a": 150, "b": 97}, 12, 9, SEED)
    assert len(engine.seen) == 22
    with pytest.raises(AssertionError):  # means alone choose other spans
        run(ZoomingEngine(POLICY | {"second_order": True}), {"a": 150}, 12, 9, SEED)


def test_learned_sinks_take_their_share():
    print("seed", SEED)
    shape = LAYERS, KV_HEADS * GROUP
    sinks = 2 * torch.randn(shape, generator=torch.Generator().manual_seed(SEED))
    engine = ZoomingEngine(POLICY, sinks=sinks)
    run(engine, {"a": 150, "b": 97}, 6, 9, SEED)
    assert len(engine.seen) == 10


def test_without_a_zoom_all_spans_are_means():
    engine = ZoomingEngine(POLICY | {"zoom_share": 0.0})
    run(engine, {"a": 150, "b": 97}, 6, 9, SEED)
    assert len(engine.seen) == 10
    assert not any(marks.any() for marks in engine.seen.values())


class SeesEverything(SeKV):
    """Room for all tokens that are not resident."""

    def zoom_tokens(self, prompt_tokens: int, geometry: Geometry) -> int:
        return prompt_tokens


def test_a_zoom_on_everything_is_full_attention(monkeypatch):
    monkeypatch.setattr(SeKV, "zoom_tokens", SeesEverything.zoom_tokens)
    engine = ZoomingEngine(POLICY)
    run(engine, {"a": 150}, 4, 150, SEED)
    assert all(bool(marks.all()) for marks in engine.seen.values())
    assert engine.worst < 1e-5


def test_preempted_requests_zoom_as_before():
    """Earlier output returns in one chunk, and each token has its own zoom."""

    def zoomed(preempt: bool) -> dict[tuple[str, int], torch.Tensor]:
        engine = ZoomingEngine(POLICY)
        engine.add("a", 150, 12)
        while not engine.requests["a"].done:
            engine.step({"a": 200})
            if preempt and engine.requests["a"].computed == 156:
                engine.preempt("a")
                preempt = False
        engine.remove("a")
        engine.check_idle()
        return engine.seen

    before, after = zoomed(False), zoomed(True)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_entries_move_and_are_given_back_while_requests_come_and_go():
    engine = ZoomingEngine(POLICY)
    zooming = engine.spans
    places = []
    print("seed", SEED)
    rng = random.Random(SEED)
    for name in "abcdef":
        engine.add(name, rng.randint(90, 200), 40)
        for _ in range(6):
            engine.step({name: rng.randint(1, 60) for name in engine.requests})
        if name in "bd":
            engine.remove("a" if name == "b" else "c")
        places.append(zooming._arena.capacity)
        engine.step(dict.fromkeys(engine.requests, 1))
    assert len(set(places)) > 2, "they never moved"
    states = {name: zooming._requests[name].first for name in zooming._requests}
    assert set(states) >= {"b", "d"}
    for name in sorted(engine.requests):
        engine.remove(name)
    engine.check_idle()
    assert zooming._arena.capacity == 0


def test_a_request_that_starts_over_unannounced_is_forgotten_in_time():
    """The request's row of the step has no spans any more."""
    engine = ZoomingEngine(POLICY)
    engine.add("a", 150, 12)
    engine.add("b", 97, 12)
    for _ in range(4):
        engine.step({"a": 100, "b": 100})
    assert engine.spans.num_requests == 2
    engine.preempt("a")
    engine.preempted.clear()
    engine.step({"a": 20, "b": 1})
    assert engine.spans.num_requests == 1
    while not engine.requests["a"].done:
        going = [n for n, request in engine.requests.items() if not request.done]
        engine.step(dict.fromkeys(going, 100))
    for name in "ab":
        engine.remove(name)
    engine.check_idle()


def test_requests_that_go_while_their_prompt_is_read_leave_nothing():
    engine = ZoomingEngine(POLICY)
    for name in ("a", "b"):
        engine.add(name, 150, 3)
    engine.step({"a": 20, "b": 20})
    assert len(engine.spans._surprisals) == 2
    engine.remove("a")
    engine.preempt("b")
    engine.step({"b": 10})
    assert len(engine.spans._surprisals) == 1
    engine.remove("b")
    engine.check_idle()
    assert len(engine.spans._surprisals) == 0


def test_who_goes_before_a_step_is_settled_is_not_divided(monkeypatch):
    """Compactions may wait for the next step; the request may have ended by then."""
    engine = ZoomingEngine(POLICY)
    runtime = engine.runtime
    assert runtime.policy.spans is not None
    engine.add("a", 150, 12)
    engine.add("b", 97, 12)
    end_step = runtime.end_step

    def late() -> None:
        runtime.finish(["a"])
        end_step()

    monkeypatch.setattr(runtime, "end_step", late)
    monkeypatch.setattr(engine, "_settle", lambda rows: None)
    engine.step({"a": 200, "b": 200})
    assert [record.request_id for record in runtime.records] == ["b"]
    assert list(engine.spans._requests) == ["b"]
    assert len(engine.spans._surprisals) == 0
    assert runtime.num_requests == 1
    runtime.check_integrity()


def test_lower_ranks_see_less():
    errors = []
    for rank in (8, 4, 1):
        # longer than the 9 tokens that rank 4 stores as rows
        policy = POLICY | {"least_span": 12, "budget": 110}
        engine = ZoomingEngine(policy)
        # the oracle sees the tokens themselves
        engine.spans.policy = parse_policy(policy | {"rank": rank})
        with contextlib.suppress(AssertionError):
            run(engine, {"a": 150}, 4, 150, SEED)
        errors.append(engine.worst)
    assert errors[0] < 1e-5 < 1e-3 < errors[1] < errors[2]


def test_components_that_count_little_are_dropped(monkeypatch):
    """Gates that are 1 up to some rank and small beyond it select that rank."""
    calls: list[tuple[int, tuple[int, ...]]] = []

    def gates(self: SeKV, layer: int, factors: LowRank, spans: CoarseSpans) -> Any:
        calls.append((layer, tuple(spans.keys.shape)))
        own = [(torch.arange(r) < 2) * 0.99 + 0.01 for r in factors.ranks.tolist()]
        return torch.cat(own)

    def first_answer(**policy: Any) -> list[torch.Tensor]:
        """The tokens that one query sees in each layer."""
        marks: list[torch.Tensor] = []
        # longer than the 9 tokens that rank 4 stores as rows
        engine = ZoomingEngine(POLICY | {"least_span": 12, "budget": 110} | policy)
        monkeypatch.setattr(
            ZoomingEngine, "_check_row", lambda self, row, layer, out: marks.append(out)
        )
        run(engine, {"a": 150}, 2, 150, SEED)
        return marks

    lower, full = first_answer(rank=2), first_answer(rank=4)
    monkeypatch.setattr(SeKV, "component_gates", gates)
    gated = first_answer(rank=4)
    assert [layer for layer, _ in calls] == list(range(LAYERS))
    assert {shape[0::2] for _, shape in calls} == {(KV_HEADS, HEAD_DIM)}
    for a, b, c in zip(gated, lower, full, strict=True):
        torch.testing.assert_close(a, b)
        assert (a - c).abs().max() > 1e-3


# -- sizes -----------------------------------------------------------------------


@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("share", [0.05, 0.1, 0.2, 0.5])
def test_all_on_the_device_is_within_the_budget(share, element_bytes):
    size, rows = 32, 30 * 3
    row = 2 * 64 * element_bytes  # a key and a value
    geometry = Geometry(size, 30, 3, rows * row, 64, element_bytes)
    policy = SeKV(budget=share)
    # next to a key and a value: a position, or a bias and an owner
    position, entry = row + 4, row + 4 + 8
    for prompt in (4096, 4099, 6000, 8191):
        budget = int(share * prompt) * row
        resident = resident_tokens(policy, prompt, geometry)
        zoom = policy.zoom_tokens(prompt, geometry)
        spans = min(int(0.3 * budget / entry), prompt // 32)
        used = resident * position + (zoom + spans) * entry + 4 * spans / rows
        assert budget - entry < used <= budget, "room is wasted"
        assert int(0.4 * budget / entry) <= zoom < int(0.4 * budget / entry) + size
        surprisal = torch.rand(prompt, generator=torch.Generator().manual_seed(SEED))
        segmented = policy.segment(surprisal, resident, geometry)
        assert int(segmented.resident.sum()) == resident
        assert 0.9 * spans < segmented.num_spans <= spans
        assert int(segmented.sizes.max()) <= zoom, "a span is never zoomed"
        assert bool(segmented.resident[: policy.sinks].all())
        assert bool(segmented.resident[-min(512, int(0.1 * budget / row)) :].all())


def resident_tokens(policy: SeKV, prompt: int, geometry: Geometry) -> int:
    plan, size = policy.plan(Lengths(prompt), geometry), geometry.block_size
    return plan.resident_blocks(prompt) * size - (-prompt % size)


def test_a_zoom_that_would_hold_no_span_is_room_for_tokens_that_stay():
    geometry = Geometry(4, 2, 1, 2 * 8192)
    # 0.4 * 120 and spans of 2000 / 35 tokens; 0.4 * 140 and 2000 / 41
    for budget, zoom in ((120, 0), (140, 55)):
        policy = SeKV(budget=budget)
        assert zoom <= policy.zoom_tokens(2000, geometry) < zoom + max(4 * zoom, 1)
        resident = resident_tokens(policy, 2000, geometry)
        spans = int(0.3 * budget)
        assert budget - 8 < resident + spans + zoom <= budget
    assert SeKV(budget=140, zoom_share=0).zoom_tokens(2000, geometry) == 0


def test_prompts_within_the_budget_stay_whole():
    geometry = Geometry(32, 2, 1, 1024)
    assert SeKV(budget=500).plan(Lengths(500), geometry).is_static
    assert not SeKV(budget=500).plan(Lengths(900), geometry).is_static


@pytest.mark.parametrize("rank", [1, 4, HEAD_DIM])
def test_the_host_holds_no_more_than_planned_and_than_the_tokens(rank):
    engine = ZoomingEngine(POLICY | {"rank": rank, "least_span": 12, "budget": 110})
    engine.add("a", 150, 3)
    engine.step({"a": 150})
    state, geometry = engine.spans._requests["a"], engine.runtime.geometry
    stored = [layer.factors.result() for layer in state.layers]
    num_bytes = sum(each.nbytes for each in stored)
    index = sum(
        tensor.nbytes
        for each in stored
        for tensor in (each.offsets, each.ranks, each.tokens)
    )
    tokens = state.segments.positions.numel() * geometry.kv_bytes_per_token
    assert num_bytes <= tokens
    assert (num_bytes == tokens) == (rank == HEAD_DIM)
    spans = engine.spans.policy
    assert num_bytes + index <= spans.host_bytes(150, geometry)
    large = Geometry(32, 30, 3, 30 * 3 * 2 * 64 * 4, 64, 4)
    assert spans.host_bytes(4096, large) < 1.4 * 4096 * large.kv_bytes_per_token


@pytest.mark.parametrize("budget", [1, 5, 33])
def test_tiny_budgets_work(budget):
    """Prompts beyond the budget have spans; the engine checks its own attention."""
    engine = ZoomingEngine(POLICY | {"budget": budget})
    run(engine, {"a": 61, "b": 34, "c": 3}, 5, 20, SEED)
    assert {name for name, _ in engine.seen} == {"a", "b"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"zoom_share": 0.7, "window_share": 0.3}, "leave nothing of the budget"),
        ({"sessions": True}, "KVP034"),
        ({"session_memory": "1GiB"}, "KVP034"),
        ({"rank": 0}, "rank"),
    ],
)
def test_what_cannot_be_is_refused(wrong, message):
    with pytest.raises(KVPolicyError, match=message):
        parse_policy({"name": "sekv"} | wrong)


def test_spans_that_cannot_be_decomposed_are_not_zoomed(monkeypatch, caplog):
    engine = ZoomingEngine(POLICY)
    decompose, calls = engine.spans._decompose, []

    def failing(*args: Any) -> Any:
        calls.append(args)
        # The last layer of the first request whose prompt is complete
        if len(calls) == LAYERS:
            raise RuntimeError("no factors")
        return decompose(*args)

    monkeypatch.setattr(engine.spans, "_decompose", failing)
    checked = ZoomingEngine._check_row

    def all_but_that(self: Any, row: Row, layer: int, output: torch.Tensor) -> None:
        if (row.request_id, layer) != ("b", LAYERS - 1):
            checked(self, row, layer, output)
        else:
            assert bool(output[row.first_query].isfinite().all())
            state = self.spans._requests["b"]
            count, per_head = state.segments.num_spans, state.entries_per_head
            bias = self.spans._arena.layers[layer].bias[state.first :]
            bias = bias[: KV_HEADS * per_head].view(KV_HEADS, per_head)
            assert bool((bias[:, :count] > -torch.inf).all()), "zoomed"

    monkeypatch.setattr(ZoomingEngine, "_check_row", all_but_that)
    run(engine, {"a": 150, "b": 97}, 4, 30, SEED)
    traffic = engine.spans.take_traffic()
    assert traffic.failed == 1
    assert traffic.selected > traffic.fetched > 0
    assert "could not be decomposed" in caplog.text
    assert engine.spans.take_traffic().selected == 0
