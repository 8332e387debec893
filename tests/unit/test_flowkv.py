"""FlowKV over every compressor: the kept tokens of a turn never change."""

from __future__ import annotations

import itertools

import pytest
import torch
from fake_engine import HEAD_DIM, KV_HEADS, LAYERS, FakeEngine, Request
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.errors import KVPolicyError
from vllm_kvplugins.ops import gather_tokens
from vllm_kvplugins.plan.geometry import Geometry, Lengths
from vllm_kvplugins.policies import available_policies, get_policy_class

BLOCK = 4
TURNS = (13, 40, 61, 66, 100)
COMPRESSORS = sorted(
    name for name in available_policies() if get_policy_class(name).compresses
)
SMALL = {"window": 4, "kernel_size": 3, "sinks": 2, "recent": 3, "floor": 4}


def flow(base: str, **more: object) -> dict[str, object]:
    fields = get_policy_class(base).model_fields
    config = {key: value for key, value in SMALL.items() if key in fields}
    return {"name": "flowkv", "base": base, "base_config": config, "floor": 4, **more}


def contents(engine: FakeEngine, request: Request) -> dict[tuple[int, ...], bytes]:
    """Keys and values of the retained region by (layer, KV head, position)."""
    runtime, name = engine.runtime, request.name
    resident = runtime._requests[name].resident
    assert resident is not None
    pages, counts = runtime.tables.retained(resident.slot_index)
    results = {}
    for row in range(LAYERS * KV_HEADS):
        used = int(counts[row]) * BLOCK
        slots = torch.arange(used)
        keys, values = gather_tokens(
            engine.heap.kv,
            pages[row, slots // BLOCK].contiguous(),
            slots % BLOCK,
        )
        assert keys.shape == (used, HEAD_DIM)
        for slot, position in enumerate(resident.positions[row, :used].tolist()):
            both = torch.cat([keys[slot], values[slot]])
            results[(*divmod(row, KV_HEADS), position)] = both.numpy().tobytes()
    return results


def run(policy: dict[str, object], chunk: int) -> tuple[list[dict], Request]:
    """Contents of the retained region after each compaction."""
    engine = FakeEngine(policy, BLOCK, 60)
    request = engine.add("r", 110, 12, TURNS)
    company = engine.add("other", 50, 30, (20, 45))
    zones = []
    while not request.done:
        before = len(request.kept)
        chunks = {"r": chunk} | ({} if company.done else {"other": 7})
        engine.step(chunks)
        if len(request.kept) > before:
            zones.append(contents(engine, request))
        assert len(request.held) == engine.plan("r").resident_blocks(request.computed)
    engine.remove("r")
    engine.remove("other")
    engine.check_idle()
    return zones, request


@pytest.mark.each_value
@pytest.mark.parametrize("base", COMPRESSORS)
@pytest.mark.parametrize("chunk", [7, 200])
def test_what_a_turn_kept_stays_bit_for_bit(base, chunk):
    zones, _ = run(flow(base, ratio=0.4), chunk)
    assert len(zones) >= 4
    for before, after in itertools.pairwise(zones):
        assert before.items() <= after.items()
        assert len(after) > len(before)


@pytest.mark.parametrize("base", ["snapkv", "keydiff"])
def test_nested_compresses_it_again(base):
    zones, _ = run(flow(base, ratio=0.4, nested=True), 11)
    isolated, _ = run(flow(base, ratio=0.4), 11)
    assert [len(z) for z in zones] == [len(z) for z in isolated], "the same sizes"
    assert not zones[-2].keys() <= zones[-1].keys()
    assert zones[0].keys() == isolated[0].keys(), "the first turn is the same"


def test_the_current_query_and_its_answer_stay_whole():
    _, request = run(flow("snapkv", ratio=0.2), 30)
    assert request.visible[:, :, TURNS[-1] :].all()


@settings(max_examples=300, deadline=None)
@given(
    ends=st.lists(st.integers(1, 6000), max_size=12, unique=True).map(sorted),
    ratio=st.floats(0.02, 0.98),
    floor=st.integers(1, 200),
    block=st.sampled_from([16, 32]),
)
def test_the_ratio_holds_at_each_turn(ends, ratio, floor, block):
    """Appendix D:

    a share ``ratio`` of all tokens, rounded to a block, or the minimum.
    """
    policy = parse_policy(
        {
            "name": "flowkv",
            "ratio": ratio,
            "floor": floor,
            "base_config": {"window": 8},
        }
    )
    plan = policy.plan(Lengths(6100, tuple(ends)), Geometry(block, 4, 2, 1024))
    minimum = -(-max(floor, 9) // block)
    kept = 0
    for compaction in plan.compactions:
        at = compaction.at_tokens
        assert compaction.fixed_blocks == kept
        resident = len(compaction.retained) * block + at % block
        floored = len(compaction.retained) == kept + minimum
        assert resident >= min(int(ratio * at), at)
        assert floored or resident < ratio * at + block
        assert plan.resident_blocks(at) == -(-resident // block)
        kept = len(compaction.retained)
    assert len(plan.notes) <= len(plan.compactions)


def test_a_floor_is_said():
    policy = parse_policy({"name": "flowkv", "ratio": 0.05, "floor": 64})
    plan = policy.plan(Lengths(3000, (1000, 2000)), Geometry(32, 4, 2, 1024))
    assert len(plan.compactions) == 2
    assert "ratio 0.05 leaves" in plan.notes[0]
    assert "turn of 31 blocks" in plan.notes[0]
    assert "floor of 3" in plan.notes[0], "SnapKV's window and one token more"


def test_it_can_be_hashed():
    """vLLM requires cache descriptions to be hashable."""
    one, same = (parse_policy(flow("snapkv", ratio=0.3)) for _ in range(2))
    assert hash(one) == hash(same)
    assert one == same
    assert hash(one) != hash(parse_policy(flow("snapkv", ratio=0.4)))


END = 9


@pytest.mark.parametrize(
    ("messages", "ends"),
    [
        ("q", ""),
        ("sq", "s"),
        ("sqaq", "sa"),
        ("qaq", "a"),
        ("sqaqaq", "saa"),
        ("qaqaq", "aa"),
    ],
)
def test_turns_end_after_the_system_prompt_and_after_answers(messages, ends):
    """s: system prompt, q: query, a: answer; the last query is the current one."""
    policy = parse_policy({"name": "flowkv", "turn_end_token": END})
    prompt: list[int] = []
    expected: list[int] = []
    for number, kind in enumerate(messages):
        prompt += [1] * (3 + number) + [END]
        if kind in ends and kind != "q":
            expected.append(len(prompt))
    prompt += [1, 2]  # the opening words of the answer
    assert policy.turns.turn_ends(prompt, None) == tuple(expected)
    assert policy.turns.turn_ends(prompt, [2, 4]) == (2, 4), "the question counts"
    assert parse_policy("flowkv").turns.turn_ends(prompt, None) == ()


ROLES = {"s": (7,), "u": (8, 5), "a": (6,), "r": (8, 5, 4), "t": (7, 3)}


@pytest.mark.parametrize(
    ("messages", "ends"),
    [
        ("u", []),
        ("su", [1]),
        ("ua", []),
        ("suau", [1, 3]),
        ("suatatau", [1, 7]),
        ("uarrau", [5]),
        ("uaru", [3]),
        ("uuaauua", [4]),
        ("suar", [1]),
    ],
)
@pytest.mark.parametrize("space", [(), (2,)], ids=["", "white space"])
def test_openings_show_the_turns_of_a_prompt(messages, ends, space):
    """r, t: results of tools; r opens like a user's message and one token more."""
    policy = parse_policy(
        {
            "name": "flowkv",
            "turn_end_token": END,
            "user_opening": [8, 5],
            "tool_opening": [8, 5, 4],
        }
    )
    prompt: list[int] = [1]
    message_ends = []
    for number, kind in enumerate(messages):
        prompt += [*ROLES[kind], *[1] * (2 + number), END]
        message_ends.append(len(prompt))
        prompt += space
    prompt += [6, 1]  # the opening words of the answer
    expected = tuple(message_ends[end - 1] for end in ends)
    assert policy.turns.turn_ends(prompt, None) == expected


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"base": "snapvk"}, "mean 'snapkv'"),
        ({"base": "icecache"}, "KVP111"),
        ({"base": "flowkv"}, "KVP111"),
        ({"base_config": {"budget": 5}}, "KVP112"),
        ({"base_config": {"windw": 5}}, "windw"),
        ({"base_config": {"kernel_size": 4}}, "kernel_size 4 must be odd"),
        ({"ratio": 1.0}, "ratio"),
        ({"floor": 0}, "floor"),
    ],
)
def test_bad_settings(wrong, message):
    with pytest.raises(KVPolicyError, match=message):
        parse_policy({"name": "flowkv", **wrong})
