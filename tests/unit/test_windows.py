"""The newest queries of requests: stored step by step, sliced on request."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvplugins.engine.device_memory import bytes_of_requests
from vllm_kvplugins.engine.requests import RequestState, Row, UnobservedStep
from vllm_kvplugins.engine.windows import (
    SPARE_TOKENS,
    StepQueries,
    Window,
    first_kept,
    first_saved,
)

LAYERS = 2


def queries_of(name: int, start: int, stop: int, layer: int) -> torch.Tensor:
    """[tokens, 1 head, 2]: whose query of which layer, and its position."""
    at = torch.arange(start, stop, dtype=torch.float32)
    return torch.stack([torch.full_like(at, 10.0 * name + layer), at], 1)[:, None]


@settings(deadline=None)
@given(
    steps=st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1),
    window=st.integers(1, 7),
    behind=st.integers(0, 12),
)
def test_windows_hold_the_queries_that_the_scheduler_expects(steps, window, behind):
    """Three requests that join and leave steps with chunks of any size."""
    tracked, computed = [RequestState() for _ in range(3)], [0] * 3
    for chunks in steps:
        step, parts, rows = StepQueries(LAYERS), [], []
        for name, new in enumerate(chunks):
            if new:
                first = rows[-1].first_query + rows[-1].new_tokens if rows else 0
                rows.append(Row(str(name), 99, computed[name], new, first))
                computed[name] += new
                tracked[name].keep_queries(
                    rows[-1], first_kept(computed[name], window), step
                )
        for layer in range(LAYERS if rows else 0):
            parts = [
                queries_of(int(r.request_id), r.computed_tokens, r.after_tokens, layer)
                for r in rows
            ]
            buffer = torch.cat(parts)
            step.put(layer, buffer)
            buffer.fill_(torch.nan)  # the model reuses the memory
    for name, at in enumerate(computed):
        tokens = max(at - behind, 0)
        first = first_saved(tokens, at, window, 0, 0)
        # the whole window, unless more tokens were in flight than in any engine
        assert first == max(min(at - window - SPARE_TOKENS, tokens), 0)
        if first < tokens:
            queries = tracked[name].window.take(first, tokens)
            for layer in range(LAYERS):
                assert torch.equal(
                    queries[layer], queries_of(name, first, tokens, layer)
                )
            kept = sum(count for _, _, count in tracked[name].window.parts)
            assert kept < window + SPARE_TOKENS + 9, "old steps are held"


def test_nobody_counts_on_queries_that_were_never_computed():
    assert first_saved(100, 100, 30, known_from=0, compacted_at=0) == 62
    assert first_saved(100, 102, 30, known_from=0, compacted_at=0) == 64
    assert first_saved(100, 100, 30, known_from=96, compacted_at=0) == 96
    assert first_saved(100, 100, 30, known_from=0, compacted_at=90) == 90
    assert first_saved(100, 101, 0, known_from=0, compacted_at=0) == 100
    assert first_saved(100, 140, 30, known_from=0, compacted_at=0) == 100


def test_a_restored_window_ends_where_the_request_goes_on():
    saved = queries_of(1, 40, 50, 0)[None]
    whole = Window.restored(saved, 40, 50)
    assert torch.equal(whole.take(43, 50), saved[:, 3:])
    branch = Window.restored(saved, 40, 44)
    assert torch.equal(branch.take(40, 44), saved[:, :4])
    assert not branch.has(40, 45)
    assert Window.restored(saved, 40, 40) is None
    with pytest.raises(AssertionError, match="queries 38 to 44 are missing"):
        branch.take(38, 44)


def test_rejected_drafts_leave_the_window():
    """Step by step: 3 drafts and all rejected, 2 drafts and one accepted, none."""
    tracked = RequestState()
    for start, stop, drafts in ((0, 9, 0), (9, 13, 3), (10, 13, 2), (12, 13, 0)):
        step = StepQueries(LAYERS)
        row = Row("r", 9, start, stop - start, 0, drafts)
        tracked.keep_queries(row, 5, step)
        seed = 1 if drafts else 2
        for layer in range(LAYERS):
            step.put(layer, queries_of(seed, start, stop, layer))
    assert (tracked.window.first, tracked.window.stop) == (5, 13)
    sources = dict.fromkeys((9, 10, 11), 1)
    for layer in range(LAYERS):
        expected = [
            queries_of(sources.get(p, 2), p, p + 1, layer) for p in range(5, 13)
        ]
        assert torch.equal(tracked.window.take(5, 13)[layer], torch.cat(expected))


def test_a_step_that_waits_to_be_observed_counts_as_device_memory():
    step = StepQueries(LAYERS)
    row = Row("r", 9, 9, 3, 0, draft_tokens=2)
    state = RequestState()
    state.unobserved = UnobservedStep(
        row, step, step.keep(0, 3), torch.arange(4, dtype=torch.int64)
    )
    for layer in range(LAYERS):
        step.put(layer, queries_of(1, 9, 12, layer))
    device = torch.device("cpu")
    assert step.queries is not None
    assert bytes_of_requests([state], device) == step.queries.nbytes + 4 * 8


def test_a_gap_starts_a_new_window():
    """A recomputed request does not continue its old window."""
    tracked = RequestState()
    for start, stop in ((0, 9), (4, 6)):
        step = StepQueries(LAYERS)
        tracked.keep_queries(Row("r", 99, start, stop - start, 0), 0, step)
        for layer in range(LAYERS):
            step.put(layer, queries_of(1, start, stop, layer))
    assert (tracked.window.first, tracked.window.stop) == (4, 6)
