"""EpiCache: block-wise prefill of histories, one cache per patched prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_engine import FakeEngine, Request
from fake_sessions import SessionEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from test_flowkv import COMPRESSORS, SMALL, contents

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.errors import KVPolicyError
from vllm_kvplugins.plan.geometry import Geometry, Lengths
from vllm_kvplugins.plan.residency_plan import BlockSpan, Compaction, ResidencyPlan
from vllm_kvplugins.policies import get_policy_class

BLOCK = 4
BUDGET, PREFILL_BLOCK = 40, 64
# lengths of histories, and of the prompts of the requests
HISTORIES = (0, 190, 300)
PROMPTS = (170, 210, 330)
LONGEST = 370
GEOMETRY = Geometry(32, num_layers=4, num_kv_heads=2, kv_bytes_per_token=1024)


@pytest.fixture(autouse=True)
def _as_in_an_engine():
    with torch.inference_mode():
        yield


def episodic(base: str = "infinipot", **more: Any) -> dict[str, Any]:
    fields = get_policy_class(base).model_fields
    config = {key: value for key, value in SMALL.items() if key in fields}
    sizes = {"budget": BUDGET, "prefill_block": PREFILL_BLOCK}
    return {"name": "epicache", "base": base, "base_config": config} | sizes | more


def run(engine: FakeEngine, request: Request, chunk: int) -> None:
    while not request.done:
        engine.step({request.name: chunk})
        blocks = -(-BUDGET // BLOCK) + PREFILL_BLOCK // BLOCK + 1
        if request.turn_ends and request.computed <= request.turn_ends[-1]:
            assert len(request.held) <= blocks, "more than budget and block"


def ends(turn: int) -> tuple[int, ...]:
    return HISTORIES[turn : turn + 1] if turn else ()


def share(request: Request, source: Request) -> None:
    """Give a request the tokens of the whole conversation."""
    request.keys, request.values = source.keys, source.values
    request.queries, request.visible = source.queries, source.visible


def talk(engine: SessionEngine, chunk: int, patched: tuple[int, ...]) -> Request:
    """Three requests, each with the previous ones as history; the first one has
    none.
    """
    request = engine.add("r", PROMPTS[0], 9, ends(0), patched)
    share(request, Request.make("r", LONGEST, 0))
    run(engine, request, chunk)
    for turn in (1, 2):
        saved, cut = engine.save("r"), BUDGET + PREFILL_BLOCK
        engine.remove("r")
        request = engine.resume(request, saved, PROMPTS[turn], 9, ends(turn))
        if saved.compaction:
            cut = saved.compaction.at_tokens + PREFILL_BLOCK
        if engine.runtime.policy.observation is None:
            assert request.computed >= min(saved.tokens, cut) - 6, "recomputed"
        run(engine, request, chunk)
    return request


@pytest.mark.each_value
@pytest.mark.parametrize("base", COMPRESSORS)
@pytest.mark.parametrize("chunk", [23, 400])
def test_a_history_that_grew_has_the_cache_of_one_read_at_once(base, chunk):
    policy, patched = episodic(base), (5, 3, 9)
    parts = SessionEngine(policy, BLOCK, 200, sessions=True)
    request = talk(parts, chunk, patched)
    one = SessionEngine(policy, BLOCK, 200, sessions=True)
    alone = one.add("r", PROMPTS[-1], 9, ends(2), patched)
    share(alone, Request.make("r", LONGEST, 0))
    run(one, alone, chunk)
    assert len(alone.kept) == (HISTORIES[-1] - BUDGET) // PREFILL_BLOCK
    assert request.kept == alone.kept
    assert contents(parts, request) == contents(one, alone)
    assert request.visible[:, :, HISTORIES[-1] :].all(), "the query is whole"
    for engine in (parts, one):
        engine.remove("r")
        engine.check_idle()


def kept_with(patched: tuple[int, ...], base: str = "infinipot") -> list[Any]:
    engine = FakeEngine(episodic(base), BLOCK, 200)
    request = engine.add("r", 300, 5, (290,), patched)
    run(engine, request, 50)
    return request.kept


def test_the_patched_prompt_decides_what_is_kept():
    first, second = kept_with((1, 2, 3)), kept_with((7, 8))
    assert first == kept_with((1, 2, 3)) != second
    assert kept_with((), "keydiff") == kept_with((1, 2), "keydiff")


def test_without_one_the_base_asks_its_own():
    words = parse_policy({"name": "infinipot"}).instruction.split()
    assert kept_with(()) == kept_with(tuple(len(word) for word in words))


@pytest.mark.parametrize(("room", "passes"), [(128, 1), (5, 3)])
def test_requests_that_are_due_together_share_a_forward_pass(room, passes):
    engine = FakeEngine(episodic(), BLOCK, 300)
    calls = []
    model = engine.runtime.prober._model
    forward = model.forward

    def counted(token_ids: torch.Tensor, positions: torch.Tensor) -> None:
        calls.append((token_ids.tolist(), positions.tolist()))
        forward(token_ids, positions)

    for name, value in (("forward", counted), ("max_tokens", room)):
        object.__setattr__(model, name, value)
    patched = {"a": (1, 2, 3), "b": (4, 5, 6), "c": (7, 8, 9)}
    for name, tokens in patched.items():
        engine.add(name, 120, 3, (110,), tokens)
    engine.step(dict.fromkeys(patched, 200))
    assert len(calls) == passes
    assert [token for ids, _ in calls for token in ids] == list(range(1, 10))
    at = BUDGET + PREFILL_BLOCK
    assert [p for _, places in calls for p in places] == [at, at + 1, at + 2] * 3
    together = [engine.requests[name].kept for name in patched]
    for name, kept in zip(patched, together, strict=True):
        alone = FakeEngine(episodic(), BLOCK, 300)
        alone.add(name, 120, 3, (110,), patched[name])
        alone.step({name: 200})
        assert alone.requests[name].kept == kept


# -- plans -----------------------------------------------------------------------


def plan(prompt: int, history: int = 0, **more: Any) -> ResidencyPlan:
    sizes = {"budget": 1024, "prefill_block": 512}
    policy = parse_policy({"name": "epicache"} | sizes | more)
    turn_ends = (history,) if history else ()
    return policy.plan(Lengths(prompt, turn_ends), GEOMETRY)


@settings(deadline=None)
@given(
    history=st.integers(1, 20_000),
    more=st.integers(0, 9000),
    budget=st.integers(64, 3000),
    block=st.integers(1, 1500),
)
def test_cuts_do_not_move_when_a_history_grows(history, more, budget, block):
    sizes = {"budget": budget, "prefill_block": block}
    next_plan = plan(history + 50, history, **sizes)
    later = plan(history + more + 50, history + more, **sizes)
    assert later.compactions[: len(next_plan.compactions)] == next_plan.compactions
    limit = -(-budget // 32) + max(block // 32, 1) + 1
    counts = range(0, history, 61)
    assert max(map(next_plan.resident_blocks, counts)) <= limit
    assert next_plan.peak_blocks(history) <= limit
    for cut in next_plan.compactions:
        assert cut.at_tokens <= history
        assert len(cut.retained) == -(-budget // 32)


def test_a_restored_cache_is_cut_where_it_would_have_been():
    policy = parse_policy({"name": "epicache", "budget": 1024, "prefill_block": 512})
    whole = plan(5000, 4900)
    third = whole.compactions[2]
    restored = Compaction(
        third.at_tokens, BlockSpan(0, third.retained.stop), third.retained
    )
    after = policy.plan(Lengths(5000, (4900,), restored), GEOMETRY)
    assert after.compactions == (restored, *whole.compactions[3:])
    later = policy.plan(Lengths(5000, (), restored), GEOMETRY)
    assert later.compactions == (restored,)


def test_a_prompt_without_a_history_stays_whole():
    assert plan(1000).is_static
    assert not plan(1000).notes
    (note,) = plan(5000).notes
    assert "5000 tokens has no history" in note
    assert plan(1600, 1535).is_static
    assert len(plan(1600, 1536).compactions) == 1


def test_a_text_to_complete_is_history_up_to_its_last_block():
    """Requests that are no chats, and name no history."""
    policy = parse_policy({"name": "epicache", "budget": 1024, "prefill_block": 512})
    for tokens in (500, 2000, 6000, 7000):
        ends = policy.find_turn_ends(range(tokens), None)
        assert ends == ((tokens - 512,) if tokens > 512 else ())
        assert policy.find_turn_ends(range(tokens), []) == ()
        assert policy.find_turn_ends(range(tokens), [5, 9]) == (5, 9)
        cuts = policy.plan(Lengths(tokens, ends), GEOMETRY)
        # the budget, a block of history, the query, a partial block
        assert cuts.peak_blocks(tokens) <= (1024 + 512 + 512) // 32 + 1
        assert len(cuts.compactions) == max(tokens - 512 - 1024, 0) // 512


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"budget": 0.5}, "histories grow"),
        ({"episodes": 0}, "episodes"),
        ({"base": "snapkv", "prefill_block": 32}, "prefill_block 32"),
        ({"base": "flowkv"}, "KVP111"),
        ({"base_config": {"allocator": "uniform"}}, "its own budget"),
        ({"base_config": {"sinks": -1}}, "KVP113"),
    ],
)
def test_settings_that_do_not_work_are_refused(wrong, message):
    with pytest.raises(KVPolicyError, match=message):
        parse_policy({"name": "epicache"} | wrong)


def test_only_a_base_that_asks_it_takes_a_patched_prompt():
    policy = parse_policy({"name": "epicache", "episodes": "auto"})
    assert policy.max_patched_prompt_tokens == 512
    assert policy.episode_routing.settings.episodes == "auto"
    other = parse_policy({"name": "epicache", "base": "keydiff"})
    assert other.max_patched_prompt_tokens == 0
    assert other.episode_routing is None
    assert other.turns.history_only
