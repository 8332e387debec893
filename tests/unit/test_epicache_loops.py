"""Long tool loops under EpiCache: they join the history, and the question stays."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from fake_engine import FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from test_flowkv import SMALL
from test_tool_loops import BLOCKS, TURNS, requests_of

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.plan.geometry import Geometry, Lengths, ToolLoop
from vllm_kvplugins.plan.residency_plan import BlockSpan, Compaction
from vllm_kvplugins.policies import get_policy_class

POLICIES = st.builds(
    lambda budget, block, loop_tokens: parse_policy(
        {
            "name": "epicache",
            "budget": budget,
            "prefill_block": block,
            "loop_tokens": loop_tokens,
            "base": "keydiff",
        }
    ),
    st.integers(1, 400),
    st.integers(1, 300),
    st.integers(1, 900),
)
PREAMBLES = st.integers(0, 500)


def geometry(block: int) -> Geometry:
    return Geometry(block, 4, 2, 1024)


@settings(max_examples=150, deadline=None)
@given(TURNS, PREAMBLES, POLICIES, BLOCKS, st.integers(0, 12))
def test_the_live_question_has_room_and_the_newest_round_is_not_compressed(
    turns, preamble, policy, block, shared
):
    for prompt in requests_of(turns, preamble):
        shared = min(shared, (prompt.tokens - 1) // block)
        lengths = prompt.lengths(shared=shared)
        plan = policy.plan_request(lengths, geometry(block))
        live, question_end = prompt.questions[-1]
        for compaction in plan.compactions:
            if compaction.at_tokens <= live:
                continue
            assert compaction.at_tokens <= prompt.finished, "before the newest round"
            # Tokens of the question behind the shared prefix, read so far.
            first = max(live, shared * block)
            stop = min(question_end, compaction.at_tokens)
            if first < stop:
                assert compaction.whole_tokens == (first, stop)
            room = len(compaction.retained) * block - max(stop - first, 0)
            assert room >= policy.budget.tokens


@settings(max_examples=150, deadline=None)
@given(TURNS, PREAMBLES, POLICIES, BLOCKS)
def test_a_compaction_never_changes_while_the_conversation_grows(
    turns, preamble, policy, block
):
    """Every plan begins with those of earlier requests, also from a session."""
    before: tuple[Compaction, ...] = ()
    for prompt in requests_of(turns, preamble):
        plan = policy.plan(prompt.lengths(), geometry(block))
        assert plan.compactions[: len(before)] == before
        if before:
            last = before[-1]
            span = BlockSpan(0, last.retained.stop)
            restored = Compaction(last.at_tokens, span, last.retained)
            again = policy.plan(prompt.lengths(restored), geometry(block))
            assert again.compactions == (restored, *plan.compactions[len(before) :])
        before = plan.compactions


@settings(max_examples=150, deadline=None)
@given(TURNS, PREAMBLES, POLICIES, BLOCKS)
def test_a_loop_holds_budget_block_question_and_unfinished_rounds(
    turns, preamble, policy, block
):
    for prompt in requests_of(turns, preamble):
        lengths = prompt.lengths()
        plan = policy.plan(lengths, geometry(block))
        start, stop = prompt.questions[-1]
        live = [loop for loop in lengths.loops if loop.question_end == stop]
        cuts = [cut for loop in live for cut in loop.cuts(policy.loop_tokens)]
        read = cuts[-1] if cuts else (lengths.turn_ends or (0,))[-1]
        limit = -(-policy.budget.tokens // block) + max(
            policy.prefill_block // block, 1
        )
        # Where a question is longer than a block, a compaction in it frees nothing.
        limit += -(-(stop - start) // block) + 1
        earlier = max((b - a for a, b in prompt.questions), default=0)
        limit += -(-earlier // block) + 1
        assert plan.resident_blocks(read) <= limit
        assert (
            plan.resident_blocks(prompt.tokens)
            <= limit + 1 + (prompt.tokens - read) // block
        )


LOOP = (150, 400, 800, 1300, 1900)  # the question, then rounds
SIZES = {"name": "epicache", "budget": 256, "prefill_block": 128, "base": "keydiff"}


@pytest.mark.parametrize(
    ("more", "loop_ends", "compacted_at"),
    [
        ({"loop_tokens": 300}, LOOP[:3], [384, 512, 640, 768]),
        ({"loop_tokens": 300}, LOOP[:4], [384, 512, 640, 768, 896, 1024, 1152, 1280]),
        ({"loop_tokens": 700}, LOOP[:3], []),
        ({"loop_tokens": 700}, LOOP[:4], [384, 512, 640, 768, 896, 1024, 1152, 1280]),
        ({"loop_tokens": None}, LOOP, []),
        ({}, LOOP, []),  # 4096
    ],
)
def test_the_setting_says_when_a_loop_joins_the_history(more, loop_ends, compacted_at):
    policy = parse_policy(SIZES | more)
    loops = policy.find_tool_loops([], (100,), loop_ends)
    plan = policy.plan(Lengths(2000, (100,), loops=loops), geometry(32))
    assert [each.at_tokens for each in plan.compactions] == compacted_at
    for each in plan.compactions:
        assert each.whole_tokens == (100, 150)
        assert len(each.retained) == 8 + 2, "the budget, and two blocks of 50 tokens"


def test_a_finished_turn_keeps_its_question_no_longer():
    policy = parse_policy(SIZES | {"loop_tokens": 300})
    ends = (100, 2000)
    lengths = Lengths(2700, (*ends, 2600), loops=ToolLoop.of_ends(ends, LOOP))
    for each in policy.plan(lengths, geometry(32)).compactions:
        in_loop = each.at_tokens <= 2000
        assert each.whole_tokens == ((100, 150) if in_loop else (0, 0))
        assert len(each.retained) == (10 if in_loop else 8)


def test_requests_that_name_no_rounds_have_no_loops():
    policy = parse_policy(SIZES | {"loop_tokens": 1})
    assert policy.find_tool_loops(range(5000), (100,), None) == ()
    assert policy.find_tool_loops(range(5000), (100,), ()) == ()


# -- the engine's memory -------------------------------------------------------------


def episodic(base: str) -> dict[str, Any]:
    fields = get_policy_class(base).model_fields
    config = {key: value for key, value in SMALL.items() if key in fields}
    sizes = {"budget": 20, "prefill_block": 16, "loop_tokens": 30}
    return {"name": "epicache", "base": base, "base_config": config} | sizes


@pytest.mark.each_value
@pytest.mark.parametrize("base", ["infinipot", "keydiff", "h2o", "snapkv"])
@pytest.mark.parametrize(
    ("turn_ends", "shared"), [((), 0), ((18,), 0), ((18,), 3)], ids=str
)
@pytest.mark.parametrize("allocator", ["uniform", "head-adaptive", "cross-layer"])
def test_a_question_stays_bit_for_bit_in_the_cache(base, turn_ends, shared, allocator):
    """The fake engine compares all attention with a dense copy of what is kept."""
    engine = FakeEngine(episodic(base) | {"allocator": allocator}, 4, 120)
    loop_ends = (33, 45, 70, 100, 130)
    prefix = "system" if shared else ""
    with torch.inference_mode():
        request = engine.add(
            "r",
            150,
            10,
            turn_ends,
            (1, 2, 3),
            prefix=prefix,
            shared=shared,
            loop_ends=loop_ends,
        )
        while not request.done:
            engine.step({"r": 11})
            held = engine.plan("r").resident_blocks(request.computed)
            assert len(request.held) == held
    start = (turn_ends or (0,))[-1]
    compactions = engine.plan("r").compactions
    behind = [
        kept
        for compaction, kept in zip(compactions, request.kept, strict=True)
        if compaction.at_tokens >= 33
    ]
    assert len(behind) >= 4
    dropped = 0
    for kept in behind:
        for positions in itertools.chain(*kept):
            assert set(range(start, 33)) <= set(positions)
            dropped += not set(range(36, 60)) <= set(positions)
    assert dropped, "the rounds are compressed"
    assert request.visible[:, :, 130:].all(), "the newest round"
    engine.remove("r")
    engine.check_idle()
