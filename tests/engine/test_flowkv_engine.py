"""FlowKV in a real engine: turns within one request and across requests."""

from __future__ import annotations

import itertools

import pytest
from harness import run_scenario

pytestmark = pytest.mark.engine

TURNS = [150, 500, 620, 1100]
# without sessions, every request compresses its whole history
FLOW = {
    "name": "flowkv",
    "ratio": 0.3,
    "base_config": {"window": 16},
    "sessions": False,
}


def rows(kept):
    """Kept positions of one compaction, by layer and KV head."""
    return [set(head) for layer in kept for head in layer]


@pytest.fixture(scope="module")
def runs(tiny_model):
    report = {}
    for name, policy in (("isolated", FLOW), ("nested", FLOW | {"nested": True})):
        arguments = {"model": tiny_model, "policy": policy, "turns": TURNS}
        report[name] = run_scenario(
            "scenarios_flowkv:conversation", arguments | {"company": 2}
        )["requests"]
    return report


def test_a_turn_is_compressed_once(runs):
    for request in runs["isolated"]:
        assert len(request["kept"]) == request["compactions"]
        assert request["held"] == request["planned"]
        for before, after in itertools.pairwise(request["kept"]):
            for old, new in zip(rows(before), rows(after), strict=True):
                # the newest tokens of a turn may be in a block of the next turn
                whole = max(old) // 32 * 32
                assert {p for p in old if p < whole} <= new
    assert runs["isolated"][-1]["compactions"] >= 3


def test_a_later_request_keeps_of_its_history_what_the_earlier_kept(runs):
    """Isolation across requests: the same turns keep the same tokens."""
    for before, after in itertools.pairwise(runs["isolated"]):
        shared = len(before["kept"])
        assert after["kept"][:shared] == before["kept"]


def test_nested_loses_what_it_kept(runs):
    lost = [
        old - new
        for before, after in itertools.pairwise(runs["nested"][-1]["kept"])
        for old, new in zip(rows(before), rows(after), strict=True)
    ]
    assert sum(map(len, lost)) > 100
    assert [r["held"] for r in runs["nested"]] == [r["held"] for r in runs["isolated"]]


def test_the_company_changes_no_token(tiny_model, runs):
    alone = run_scenario(
        "scenarios_flowkv:conversation",
        {
            "model": tiny_model,
            "policy": FLOW,
            "turns": TURNS,
            "company": 0,
            "settings": {"max_num_batched_tokens": 256},
        },
    )["requests"]
    for other, ours in zip(alone, runs["isolated"], strict=True):
        assert other["tokens"] == ours["tokens"]
        assert other["kept"] == ours["kept"]


def test_a_long_tool_loop_is_compressed_before_it_ends(tiny_model):
    """The question stays whole, and restored requests equal recomputed ones."""
    policy = FLOW | {"sessions": True, "loop_tokens": 150}
    report = run_scenario(
        "scenarios_flowkv:tool_loop",
        {"model": tiny_model, "policy": policy, "rounds": 8, "result": 60},
    )
    requests, (preamble, answered, _), parts = (
        report[key] for key in ("requests", "ends", "parts")
    )
    for request in requests:
        restored, recomputed = request["answers"]
        assert restored == recomputed
        assert request["held"] == request["planned"]
    compacted = [at for request in requests for at in request["compacted_at"]]
    assert compacted == sorted(set(compacted)), "never the same twice"
    # Rounds of 64 tokens: every third one ends more than 150 tokens behind the last.
    assert compacted == [preamble, *parts[3:-1:3], answered]
    assert requests[0]["of_question"] == [0], "it follows the preamble"
    assert all(tokens == 80 for r in requests[1:] for tokens in r["of_question"])
    # It restarts at the cut, or behind it, and computes the queries that score there.
    for request in requests[1:]:
        computed = request["tokens"] - request["restored"]
        assert computed <= 60 + 4 + (4 + 60 + 16 if request["compacted_at"] else 0)
    loop, question = requests[8], 80 + 2 * 32
    assert loop["tokens"] > 720
    assert loop["held"] * 32 <= 0.3 * loop["tokens"] + question + 150 + 2 * 64


def test_nonsense_is_refused_and_the_engine_goes_on(tiny_model):
    cases = [[0], [101], [5, 5], [9, 4], "12", [1.5], [True], {"a": 1}, [[1]], -3]
    report = run_scenario(
        "scenarios_flowkv:refusals", {"model": tiny_model, "turn_ends": cases}
    )
    for ends, message in zip(cases, report["messages"], strict=True):
        assert "turn_ends must be ascending token counts from 1 to 100" in message, ends
    assert len(report["tokens"]) == 20


def test_turns_of_a_chat_template(model_path):
    policy = FLOW | {"ratio": 0.4}
    report = run_scenario(
        "scenarios_flowkv:chat", {"model": model_path, "policy": policy}
    )
    assert report["messages"] in (5, 6), "with or without a system prompt"
    # The token that closes an answer stays with the next question.
    answers = [report["ends"][-4] - 1, report["ends"][-2] - 1]
    assert report["compacted_at"] == answers
    assert report["answer"]


@pytest.mark.slow
def test_turns_of_a_template_without_an_end_token(model_path):
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    policy = FLOW | {"ratio": 0.4}
    report = run_scenario(
        "scenarios_flowkv:chat",
        {"model": model_path, "policy": policy, "template": template},
    )
    assert report["messages"] == 0, "the tokens show no turns"
    first, second = report["compacted_texts"]
    assert first.startswith("user: My cat is called Tom")
    assert first.rstrip().endswith("nice to meet you!")
    assert second.rstrip().endswith("deep and blue.")
    assert second.count("The sea is deep") == 12


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "mistral", "smollm2"])
def test_an_agent_compresses_every_turn_once(model_path, family):
    """Ten turns with tool loops; no request compresses its live question."""
    small = {"ratio": 0.4, "floor": 4, "base_config": {"window": 4, "kernel_size": 3}}
    arguments = {"model": model_path, "policy": {"name": "flowkv", **small}}
    requests = run_scenario("scenarios_flowkv:agent", arguments | {"family": family})[
        "requests"
    ]
    compacted = [at for request in requests for at in request["compacted_at"]]
    assert len(compacted) >= 5
    assert compacted == sorted(set(compacted)), "a session continues the earlier turns"
    assert set(compacted) <= set(requests[-1]["ends"])
    for request in requests:
        assert all(at <= request["ends"][-1] for at in request["compacted_at"])
    assert "Look at Turku again." in requests[-1]["history"]
    assert "Sorry, and Oslo?" not in requests[-1]["history"]


@pytest.mark.slow
def test_an_agent_compresses_a_loop_before_it_ends(model_path):
    """The front end finds the rounds, and sessions continue behind their cuts."""
    small = {"ratio": 0.4, "floor": 4, "base_config": {"window": 4, "kernel_size": 3}}
    policy = {"name": "flowkv", "loop_tokens": 40, **small}
    requests = run_scenario(
        "scenarios_flowkv:agent",
        {"model": model_path, "policy": policy, "family": "qwen3"},
    )["requests"]
    compacted = [at for request in requests for at in request["compacted_at"]]
    assert compacted == sorted(set(compacted))
    assert set(compacted) - set(requests[-1]["ends"]), "inside a turn"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_epicache_compresses_the_history_of_an_agent(model_path, family):
    policy = {"name": "epicache", "base": "keydiff", "budget": 128, "prefill_block": 64}
    requests = run_scenario(
        "scenarios_flowkv:agent",
        {"model": model_path, "policy": policy, "family": family},
    )["requests"]
    last = requests[-1]
    assert sum(len(request["compacted_at"]) for request in requests) >= 3
    for request in requests:
        assert all(at <= request["ends"][-1] for at in request["compacted_at"])
    assert "Sorry, and Oslo?" not in last["history"]
    assert last["ends"] == requests[-2]["ends"], "a tool loop does not move it"
