"""Long tool loops under FlowKV: where they are cut, and what stays complete."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.plan.geometry import Geometry, Lengths, ToolLoop
from vllm_kvplugins.plan.residency_plan import BlockSpan, Compaction, ResidencyPlan

# -- plans -------------------------------------------------------------------------


@dataclass
class Prompt:
    """Token counts of one request of a conversation.

    Attributes:
        questions: first and last token of each turn's question; the last is live.
        finished: where the last round ends that the model has answered; 0: none.
    """

    tokens: int
    turn_ends: list[int] = field(default_factory=list)
    loop_ends: list[int] = field(default_factory=list)
    questions: list[tuple[int, int]] = field(default_factory=list)
    finished: int = 0

    def lengths(self, restored: Compaction | None = None, shared: int = 0) -> Lengths:
        loops = ToolLoop.of_ends(self.turn_ends, self.loop_ends)
        return Lengths(self.tokens, tuple(self.turn_ends), restored, shared, loops)


def requests_of(
    turns: list[tuple[int, list[tuple[int, int]], int]], preamble: int
) -> list[Prompt]:
    """The prompts of a conversation: one per answer or call.

    Args:
        turns: length of the question, lengths of the calls and results of each round,
            length of the answer.
    """
    now = Prompt(preamble, [preamble] if preamble else [])
    prompts = []
    for question, rounds, answer in turns:
        start = now.tokens
        now.tokens += question
        now.questions = [*now.questions, (start, now.tokens)]
        now.finished = 0
        prompts.append(Prompt(**vars(now)))
        parts, before = [now.tokens], now.loop_ends
        for number, (call, result) in enumerate(rounds):
            if number:
                parts.append(now.tokens)
                now.loop_ends, now.finished = [*before, *parts], now.tokens
            now.tokens += call + result
            prompts.append(Prompt(**vars(now)))
        if rounds:
            now.loop_ends = [*before, *parts, now.tokens]
        now.tokens += answer
        now.turn_ends = [*now.turn_ends, now.tokens]
    return prompts


ROUNDS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 300)), max_size=14)
TURNS = st.lists(
    st.tuples(st.integers(1, 400), ROUNDS, st.integers(1, 200)), min_size=1, max_size=4
)
POLICIES = st.builds(
    lambda ratio, floor, loop_tokens: parse_policy(
        {
            "name": "flowkv",
            "ratio": ratio,
            "floor": floor,
            "loop_tokens": loop_tokens,
            "base_config": {"window": 8},
        }
    ),
    st.floats(0.05, 0.95),
    st.integers(1, 64),
    st.integers(1, 900),
)
BLOCKS = st.sampled_from([16, 32])


def held_blocks(plan: ResidencyPlan) -> list[tuple[Compaction, list[int | None]]]:
    """After each compaction, the blocks of its region: their index, if unchanged.

    None: tokens that competed.
    """
    held: list[int | None] = []
    first = plan.shared_blocks
    history = []
    for compaction in plan.compactions:
        held += range(first, compaction.candidates.stop)
        kept = held[: compaction.fixed_blocks]
        competed = len(compaction.retained) - compaction.fixed_blocks
        held, first = kept + [None] * competed, compaction.candidates.stop
        history.append((compaction, list(held)))
    return history


@settings(max_examples=100, deadline=None)
@given(TURNS, st.integers(0, 500), POLICIES, BLOCKS, st.integers(0, 12))
def test_a_live_question_and_the_newest_round_stay_whole(
    turns, preamble, policy, block, shared
):
    for prompt in requests_of(turns, preamble):
        shared = min(shared, (prompt.tokens - 1) // block)
        lengths = prompt.lengths(shared=shared)
        plan = policy.plan_request(lengths, Geometry(block, 4, 2, 1024))
        live, question_end = prompt.questions[-1]
        for compaction, held in held_blocks(plan):
            if compaction.at_tokens <= live:
                continue
            question = range(live // block, -(-question_end // block))
            assert set(question) - set(range(shared)) <= set(held)
            assert compaction.at_tokens <= prompt.finished, "before the newest round"


@settings(max_examples=100, deadline=None)
@given(TURNS, st.integers(0, 500), POLICIES, BLOCKS)
def test_a_kept_token_never_changes_while_the_conversation_grows(
    turns, preamble, policy, block
):
    """Every plan begins with those of earlier requests, also from a session."""
    geometry = Geometry(block, 4, 2, 1024)
    before: tuple[Compaction, ...] = ()
    for prompt in requests_of(turns, preamble):
        plan = policy.plan(prompt.lengths(), geometry)
        assert plan.compactions[: len(before)] == before
        if before:
            last = before[-1]
            span = BlockSpan(0, last.retained.stop)
            restored = Compaction(last.at_tokens, span, last.retained)
            again = policy.plan(prompt.lengths(restored), geometry)
            assert again.compactions == (restored, *plan.compactions[len(before) :])
        before = plan.compactions
    for (_, earlier), (compaction, later) in itertools.pairwise(held_blocks(plan)):
        assert later[: len(earlier)] == earlier
        assert compaction.fixed_blocks >= len(earlier)


@settings(max_examples=100, deadline=None)
@given(TURNS, st.integers(0, 500), POLICIES, BLOCKS)
def test_the_ratio_holds_besides_questions(turns, preamble, policy, block):
    minimum = -(-max(policy.floor, 9) // block)
    prompt = requests_of(turns, preamble)[-1]
    plan = policy.plan(prompt.lengths(), Geometry(block, 4, 2, 1024))
    for compaction, held in held_blocks(plan):
        at = compaction.at_tokens
        exact = block * sum(
            any(
                index * block < stop and (index + 1) * block > start
                for start, stop in prompt.questions
            )
            for index in held
            if index is not None
        )
        resident = len(held) * block + at % block
        floored = len(held) == compaction.fixed_blocks + minimum
        # A block at the end of a question counts as part of it.
        share = policy.ratio * (at - exact) + exact
        assert floored or resident < share + block + 1
        assert resident >= min(int(policy.ratio * at), at)


@settings(max_examples=100, deadline=None)
@given(TURNS, POLICIES, BLOCKS)
def test_no_more_rounds_are_complete_than_the_setting_says(turns, policy, block):
    prompts = requests_of(turns, 0)
    for prompt in prompts:
        for loop in prompt.lengths().loops:
            cuts = loop.cuts(policy.loop_tokens)
            assert set(cuts) <= set(loop.round_ends)
            for cut, after in itertools.pairwise((loop.question_end, *cuts)):
                assert after - cut > policy.loop_tokens
            rest = loop.round_ends[-1] - (cuts or (loop.question_end,))[-1]
            assert rest <= policy.loop_tokens


LOOP = (50, 300, 420, 900, 1400)  # the question, then rounds


@pytest.mark.parametrize(
    ("settings", "loop_ends", "compacted_at"),
    [
        ({"loop_tokens": 200}, LOOP, [300, 900, 1400]),
        ({"loop_tokens": 400}, LOOP, [900, 1400]),
        ({"loop_tokens": 400}, LOOP[:3], []),
        ({}, LOOP, []),
        ({}, (50, 4000, 5000), [5000]),
        ({"loop_tokens": None}, (50, 5000, 9000), []),
        ({"loop_tokens": 200, "nested": True}, LOOP, []),
    ],
)
def test_the_setting_says_when_a_loop_is_compressed(settings, loop_ends, compacted_at):
    policy = parse_policy({"name": "flowkv", "base_config": {"window": 8}} | settings)
    loops = policy.turns.tool_loops([], (), loop_ends)
    plan = policy.plan(Lengths(9900, loops=loops), Geometry(32, 4, 2, 1024))
    assert [c.at_tokens for c in plan.compactions] == compacted_at
    assert all(c.fixed_blocks >= 2 for c in plan.compactions)


@pytest.mark.parametrize(("question", "retained"), [(1024, 32 + 16), (1000, 32 + 16)])
def test_a_long_question_takes_nothing_from_the_rounds(question, retained):
    """It counts in whole blocks."""
    policy = parse_policy({"name": "flowkv", "loop_tokens": 200})
    loops = (ToolLoop(question, (2048,)),)
    plan = policy.plan(Lengths(9000, loops=loops), Geometry(32, 4, 2, 1024))
    (compaction,) = plan.compactions
    assert compaction.fixed_blocks == 32
    assert len(compaction.retained) == retained
    # In a later turn, it still takes nothing.
    plan = policy.plan(Lengths(9000, (4096,), loops=loops), Geometry(32, 4, 2, 1024))
    assert len(plan.compactions[1].retained) == 32 + 48


def test_a_question_in_the_shared_prefix_needs_no_further_blocks():
    policy = parse_policy(
        {"name": "flowkv", "loop_tokens": 200, "base_config": {"window": 8}}
    )
    lengths = Lengths(1600, (), None, 10, ToolLoop.of_ends((), LOOP))
    plan = policy.plan_request(lengths, Geometry(32, 4, 2, 1024))
    # 420 is only 100 tokens behind the prefix.
    assert [c.at_tokens for c in plan.compactions] == [900, 1400]
    assert [c.fixed_blocks for c in plan.compactions] == [0, 9]
    assert plan.compactions[0].candidates.start == 10


def test_a_part_of_a_region_cannot_be_fixed():
    first = Compaction(100, BlockSpan(0, 6), BlockSpan(2, 6))
    second = Compaction(200, BlockSpan(2, 12), BlockSpan(5, 12), fixed_blocks=3)
    with pytest.raises(ValueError, match="stays whole or competes whole"):
        ResidencyPlan(16, (first, second))


# -- the engine's memory -------------------------------------------------------------

SMALL = {"loop_tokens": 20, "ratio": 0.4, "floor": 4}
BASES: dict[str, dict[str, Any]] = {
    "snapkv": {"window": 4, "kernel_size": 3},
    "keydiff": {"allocator": "head-adaptive"},
    "h2o": {"recent": 3},
}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(
    ("turn_ends", "shared"), [((), 0), ((18,), 0), ((18,), 3)], ids=str
)
def test_a_question_stays_bit_for_bit_in_the_cache(base, turn_ends, shared):
    """The fake engine compares all attention with a dense copy of what is kept."""
    policy = {"name": "flowkv", "base": base, "base_config": BASES[base], **SMALL}
    engine = FakeEngine(policy, 4, 80)
    loop_ends = (33, 45, 60, 90, 100, 130)
    prefix = "system" if shared else ""
    request = engine.add(
        "r", 150, 10, turn_ends, prefix=prefix, shared=shared, loop_ends=loop_ends
    )
    company = engine.add("other", 50, 30, (20, 45))
    while not request.done:
        engine.step({"r": 11} | ({} if company.done else {"other": 7}))
        held = engine.plan("r").resident_blocks(request.computed)
        assert len(request.held) == held
    start = (turn_ends or (0,))[-1]
    compactions = engine.plan("r").compactions
    in_loop = [
        kept
        for compaction, kept in zip(compactions, request.kept, strict=True)
        if compaction.at_tokens > start
    ]
    assert len(in_loop) == 3
    dropped = 0
    for kept in in_loop:
        for positions in itertools.chain(*kept):
            assert set(range(start, 33)) <= set(positions)
            dropped += not set(range(36, 60)) <= set(positions)
    assert dropped, "the rounds are compressed"
    assert request.visible[:, :, 130:].all(), "the newest round"
    engine.remove("r")
    engine.remove("other")
    engine.check_idle()


# -- prompts without messages --------------------------------------------------------

END = 9
OPENINGS = {"u": (8, 5), "r": (8, 5, 4), "t": (7, 3), "a": (6,), "s": (7,)}


@pytest.mark.parametrize(
    ("messages", "loops"),
    [
        ("u", []),
        ("uat", []),
        ("uatat", [(0, 2)]),
        ("uattat", [(0, 3)]),
        ("suatat", [(1, 3)]),
        ("uatau", [(0, 2)]),
        ("uatatau", [(0, 2, 4)]),
        ("uuatata", [(1, 3, 5)]),
        ("uauatat", [(2, 4)]),
        ("uatatauatat", [(0, 2, 4), (6, 8)]),
        ("uatu", []),
    ],
)
@pytest.mark.parametrize("tool", ["r", "t"])
@pytest.mark.parametrize("space", [(), (2,)], ids=["", "white space"])
def test_tokens_show_the_rounds_of_a_prompt(messages, loops, tool, space):
    """t: results of tools; some templates write them like a user's messages."""
    policy = parse_policy(
        {
            "name": "flowkv",
            "loop_tokens": 1,
            "turn_end_token": END,
            "user_opening": OPENINGS["u"],
            "tool_opening": OPENINGS[tool],
        }
    )
    prompt: list[int] = []
    ends = []
    for number, kind in enumerate(messages):
        opening = OPENINGS[tool if kind == "t" else kind]
        prompt += [*opening, *[1] * (2 + number), END]
        ends.append(len(prompt))
        prompt += space
    prompt += [6, 1]  # the opening words of the answer
    turn_ends = policy.turns.turn_ends(prompt, None)
    found = policy.turns.tool_loops(prompt, turn_ends, None)
    expected = [[ends[index] for index in loop] for loop in loops]
    assert [[loop.question_end, *loop.round_ends] for loop in found] == expected
    assert policy.turns.tool_loops(prompt, turn_ends, []) == ()


# -- requests ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (None, None),
        ({"turn_ends": [5]}, None),
        ({"turn_ends": [], "loop_ends": [3, 9]}, None),
        ({"loop_ends": [3, 9]}, "needs turn_ends"),
        ({"turn_ends": [], "loop_ends": [9, 3]}, "ascending"),
        ({"turn_ends": [], "loop_ends": [3, 11]}, "from 1 to 10"),
        ({"turn_ends": [], "loop_ends": [0]}, "from 1 to 10"),
        ({"turn_ends": [], "loop_ends": "3"}, "ascending"),
        ({"turn_ends": [], "loop_ends": [True]}, "ascending"),
    ],
)
def test_loop_ends_of_a_request_are_checked(extra, reason):
    pytest.importorskip("vllm")
    from vllm_kvplugins.vllm_adapter.config.request_params import loop_ends_problem

    problem = loop_ends_problem(SimpleNamespace(extra_args=extra), 10)
    assert (problem is None) == (reason is None)
    assert reason is None or ("KVP514" in problem and reason in problem)
