"""The retrieval log: fetched tokens, and the share of attention that they cover."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine import (
    GROUP,
    HEAD_DIM,
    KV_HEADS,
    LAYERS,
    SCALE,
    FakeEngine,
)
from policy_settings import only_fetch, policies_that

from vllm_kvplugins.engine.recorded_run import (
    Fetch,
    Header,
    RecordedRun,
    RunFileError,
    lines_of,
    read_run,
)
from vllm_kvplugins.engine.retrieval import log
from vllm_kvplugins.engine.retrieval.log import RetrievalLog, covered
from vllm_kvplugins.policies import get_policy_class

BLOCK, BLOCKS, SINKS, WINDOW, SKIP = 4, 120, 2, 5, 1
TOKEN_BYTES = 2 * HEAD_DIM * 4
RETRIEVERS = list(policies_that(only_fetch))


def engine(name: str, **settings: Any) -> FakeEngine:
    base = {"budget": 9, "sinks": SINKS, "window": WINDOW, "skip_layers": SKIP}
    if "page_tokens" in get_policy_class(name).model_fields:
        base["page_tokens"] = 3
    return FakeEngine({"name": name, **base, **settings}, BLOCK, BLOCKS)


def attended(fake: FakeEngine, name: str, layer: int, positions: list[int]) -> float:
    """The mass that hot tokens cover, from the dense copy, in a loop and float64.

    Args:
        now: positions of the step's queries.
    """
    request, retrieval = fake.requests[name], fake.retrieval
    stop = SINKS + retrieval._requests[name].tokens
    hot = retrieval.hot_tokens(name, layer)
    shares = []
    for head in range(KV_HEADS):
        keys = request.keys[layer, head, SINKS:stop].double()
        for position in positions:
            for member in range(GROUP):
                query = request.queries[layer, position, head * GROUP + member]
                weight = (keys @ query.double() * SCALE).exp()
                shares.append(float(weight[hot[head]].sum() / weight.sum()))
    return sum(shares) / len(shares)


def step_and_check(
    fake: FakeEngine, log: RetrievalLog, chunks: dict[str, int]
) -> list[Fetch]:
    """Run one step and check every fetch that it logs; returns the fetches."""
    retrieval = fake.retrieval
    expected: dict[tuple[str, int], tuple[float, int]] = {}
    fetch_layer = retrieval.before_layer

    def watch(layer: int, queries: torch.Tensor) -> None:
        fetch_layer(layer, queries)
        for row in rows:
            name, start = row.request_id, row.computed_tokens
            state = retrieval._requests.get(name)
            if state is not None and state.hot.get(layer):
                positions = list(range(start, start + row.new_tokens))
                mass = attended(fake, name, layer, positions)
                expected[name, layer] = mass, row.new_tokens

    rows: list[Any] = []
    begin = retrieval.begin_step
    retrieval.begin_step = lambda step: (rows.extend(step.rows), begin(step))
    retrieval.before_layer = watch
    counts = retrieval.traffic.selected, retrieval.traffic.fetched
    fake.step(chunks)
    del retrieval.begin_step, retrieval.before_layer
    fetches = log.take()
    assert {(f.request, f.layer) for f in fetches} == set(expected)
    assert len(fetches) == len(expected)
    for fetch in fetches:
        mass, new = expected[fetch.request, fetch.layer]
        assert fetch.mass_covered_share == pytest.approx(mass, abs=1e-5)
        assert fetch.new_tokens == new
        assert fetch.copied_bytes == fetch.fetched_tokens * TOKEN_BYTES
        assert 0 <= fetch.fetched_tokens <= fetch.hot_tokens
        assert fetch.hot_tokens < fetch.offloaded_tokens
    traffic = retrieval.traffic
    assert sum(f.hot_tokens for f in fetches) == traffic.selected - counts[0]
    assert sum(f.fetched_tokens for f in fetches) == traffic.fetched - counts[1]
    return fetches


@pytest.mark.parametrize("name", RETRIEVERS)
def test_the_log_agrees_with_torch_and_with_the_counters(name):
    fake = engine(name)
    log = fake.retrieval.fetcher.log = RetrievalLog(TOKEN_BYTES)
    request = fake.add("r", 43, 20)
    fetches = 0
    while not request.done:
        fetches += len(step_and_check(fake, log, {"r": 11}))
    assert fetches == (LAYERS - SKIP) * 19, "every step but those of the prompt"
    assert fake.retrieval.traffic.fetched > 0


@pytest.mark.parametrize("prefetch", ["step", "layer"])
def test_what_was_fetched_ahead_counts_for_the_step_it_is_for(prefetch):
    """The mass belongs to the queries that attend, not to those that selected."""
    fake = engine("exact-topk", prefetch=prefetch)
    log = fake.retrieval.fetcher.log = RetrievalLog(TOKEN_BYTES)
    for name, prompt in (("a", 40), ("b", 33)):
        fake.add(name, prompt, 30)
    fetches: list[Fetch] = []
    for step in range(45):
        alive = [n for n, r in fake.requests.items() if not r.done]
        if alive:
            fetches += step_and_check(fake, log, dict.fromkeys(alive, 9))
        if step == 16:
            fake.preempt("b")
    assert fake.requests["b"].done
    assert sum(f.fetched_tokens > 0 for f in fetches) > 50


def test_requests_are_kept_apart_and_recomputed_tokens_ask_together():
    fake = engine("exact-topk", reuse_every=2)
    log = fake.retrieval.fetcher.log = RetrievalLog(TOKEN_BYTES)
    for name, prompt in (("a", 40), ("b", 33), ("c", 50)):
        fake.add(name, prompt, 25)
    fetches: list[Fetch] = []
    for step in range(45):
        alive = [n for n, r in fake.requests.items() if not r.done]
        if alive:
            fetches += step_and_check(fake, log, dict.fromkeys(alive, 9))
        if step == 12:
            fake.remove("b")
        if step == 16:
            fake.preempt("c")
    assert fake.requests["c"].done
    assert {f.request for f in fetches if f.new_tokens > 1} == {"c"}
    by_step = {(f.request, f.layer, f.step) for f in fetches}
    assert len(by_step) == len(fetches)


def test_steps_count_per_request():
    log, keys = RetrievalLog(32), torch.zeros(2, 10, 4)
    hot = torch.tensor([[1, 2], [3, 4]])
    for name, layer in (("a", 3), ("b", 3), ("a", 4), ("a", 3), ("b", 3), ("a", 3)):
        log.add(name, layer, torch.zeros(2, 6, 4), 3, keys, hot, 1.0, 1)
    fetches = log.take()
    assert [f.step for f in fetches] == [0, 0, 0, 1, 1, 2]
    assert {f.new_tokens for f in fetches} == {2}
    assert [f.mass_covered_share for f in fetches] == [pytest.approx(0.2)] * 6
    assert log.take() == []


def test_mass_is_measured_in_float32_and_is_a_share():
    rng = torch.Generator().manual_seed(0)
    keys = (torch.randn(2, 300, 16, generator=rng) * 4).bfloat16()
    queries = torch.randn(2, 4, 16, generator=rng).bfloat16()
    everything = torch.arange(300).expand(2, -1)
    assert covered(queries, keys, everything, 0.25) == pytest.approx(1.0)
    assert covered(queries, keys, everything, 0.25) <= 1.0
    some, others = everything[:, :70], everything[:, 70:]
    parts = [covered(queries, keys, part, 0.25) for part in (some, others)]
    assert sum(parts) == pytest.approx(1.0, abs=1e-5)
    assert covered(queries, keys, everything[:, :0], 0.25) == 0


def test_without_a_log_nothing_is_computed(monkeypatch):
    def never(*_: Any) -> float:
        raise AssertionError("computed without a log")

    fake = engine("exact-topk")
    monkeypatch.setattr(log, "covered", never)
    monkeypatch.setattr(type(fake.retrieval.fetcher), "_log_fetches", never)
    request = fake.add("r", 43, 8)
    while not request.done:
        fake.step({"r": 11})
    assert fake.retrieval.traffic.fetched > 0


# -- the file -------------------------------------------------------------------------

HEADER = Header(
    model="folder/model",
    policy="exact-topk",
    config={"budget": 9},
    prompt_tokens=43,
    generated_tokens=3,
    block_size=4,
    head_dim=8,
    num_layers=3,
    num_kv_heads=2,
    token_bytes=64,
)
FETCHES = [
    Fetch("r", step, layer, 1, 70, 18, 5 + step, 64 * (5 + step), 0.5)
    for step in range(2)
    for layer in (1, 2)
]


def written(path: Path) -> list[str]:
    lines = list(lines_of(RecordedRun(HEADER, FETCHES)))
    path.write_text("".join(lines))
    return lines


def test_a_run_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "run.jsonl"
    written(path)
    assert read_run(path) == RecordedRun(HEADER, FETCHES)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda lines: [], ""),
        (lambda lines: ["{\n"], ""),
        (lambda lines: ['{"model": "m"}\n'], ""),
        (lambda lines: ["[1]\n"], ""),
        (lambda lines: lines[:1], ""),
        (lambda lines: [*lines[:2], lines[2][:30]], "line 3: "),
        (lambda lines: [*lines[:1], "7\n"], "line 2: "),
        (lambda lines: [lines[0].replace("1", "2", 1)], "version 2"),
        (lambda lines: [lines[0].replace("num_layers", "x")], "num_layers is None"),
        (lambda lines: [*lines[:1], lines[1].replace("step", "x")], "step is None"),
        (
            lambda lines: [*lines[:1], lines[1].replace("70", "true")],
            "offloaded_tokens is True",
        ),
        (
            lambda lines: [*lines[:1], lines[1].replace('"layer": 1', '"layer": 3')],
            "line 2: layer is 3",
        ),
        (
            lambda lines: [*lines[:1], lines[1].replace('"step": 0', '"step": 9')],
            "line 2: step is 9",
        ),
        (
            lambda lines: [lines[0].replace('"block_size": 4', '"block_size": 0')],
            "block_size is 0",
        ),
    ],
)
def test_a_broken_file_is_refused_in_one_line(tmp_path, change, part):
    path = tmp_path / "run.jsonl"
    path.write_text("".join(change(written(path))))
    with pytest.raises(RunFileError) as caught:
        read_run(path)
    assert caught.value.codes == ("KVP607",)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
