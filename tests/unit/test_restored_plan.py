"""Plans of sessions that continue a restored cache."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.plan.geometry import Geometry, Lengths
from vllm_kvplugins.plan.residency_plan import BlockSpan, Compaction, ResidencyPlan

SIZE = 32
GEOMETRY = Geometry(SIZE, num_layers=4, num_kv_heads=2, kv_bytes_per_token=1024)


@st.composite
def continued(draw: st.DrawFn) -> tuple[int, Compaction, ResidencyPlan]:
    """A prompt, its restored start, and the plan."""
    stop = draw(st.integers(2, 60))
    at = stop * SIZE + draw(st.integers(0, 200))
    retained = BlockSpan(draw(st.integers(0, stop - 1)), stop)
    restored = Compaction(at, BlockSpan(0, stop), retained)
    prompt = at + draw(st.integers(1, 2000))
    settings = {
        "budget": draw(st.integers(70, 1000)),
        "decode_budget": draw(st.none() | st.integers(70, 1000)),
        "fold_blocks": draw(st.integers(1, 5)),
    }
    policy = parse_policy({"name": "snapkv", **settings})
    return prompt, restored, policy.plan(Lengths(prompt, (), restored), GEOMETRY)


@settings(deadline=None)
@given(continued(), st.integers(0, 1500))
def test_plan_goes_on_behind_what_was_restored(case, extra):
    prompt, restored, plan = case
    assert plan.compaction(0) == restored
    assert plan.exact_prefix_blocks == restored.retained.start
    assert plan.num_done(restored.at_tokens) == 1
    start, freed = restored.retained.start, set(range(restored.retained.start))
    for index in range(1, plan.num_done(prompt + extra)):
        compaction = plan.compaction(index)
        assert compaction.at_tokens > restored.at_tokens
        assert compaction.candidates.start == start, "what is held competes"
        gone = set(range(compaction.freed.start, compaction.freed.stop))
        assert not gone & freed
        start, freed = compaction.retained.start, freed | gone
    total = -(-(prompt + extra) // SIZE)
    assert plan.resident_blocks(prompt + extra) == total - len(freed)


@settings(deadline=None)
@given(continued())
def test_restored_session_keeps_its_budget_at_the_end_of_the_prompt(case):
    prompt, restored, plan = case
    held = plan.resident_blocks(prompt)
    fresh = Lengths(prompt)
    last = plan.compactions[-1]
    if last is restored:
        assert held == -(-prompt // SIZE) - restored.retained.start
    else:
        assert last.at_tokens == prompt
    # never more than a session from the beginning holds
    policy = parse_policy({"name": "snapkv", "budget": 100})
    short = policy.plan(Lengths(prompt, (), restored), GEOMETRY)
    assert short.resident_blocks(prompt) <= policy.plan(
        fresh, GEOMETRY
    ).resident_blocks(prompt)


@settings(deadline=None)
@given(continued(), st.integers(-90, 500), st.integers(0, 150), st.integers(0, 600))
def test_a_request_starts_as_late_as_its_queries_allow(case, more, window, known):
    """Against all possible starts:

    the queries of the next compaction must be restored or computed.
    """
    prompt, restored, plan = case
    tokens, at = min(restored.at_tokens + more, prompt - 1), restored.at_tokens
    first_query = max(tokens - known, 0)
    starts = range(at, tokens + 1)
    cut = plan.next_cut(at)
    if cut is not None:
        needed = max(cut - window, at)
        starts = [
            start
            for start in starts
            if start <= cut and (start <= needed or first_query <= needed)
        ]
    earliest = plan.can_start_at(tokens, at, window, first_query)
    assert earliest == max(starts, default=0)
