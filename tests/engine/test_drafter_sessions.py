"""Sessions with a drafter that has a KV cache: its layers are saved and restored, too.

Tokens do not show whether they are, because the model verifies every draft. The drafter
is a copy of the model, and under ``flowkv`` all its drafts are right, as long as its
layers keep the tokens that the model's layers keep.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import runners
from draft_models import drafter, write_copy_with_more_heads, write_pair
from harness import run_scenario
from policy_settings import SMALL_BUDGETS, configure

pytestmark = pytest.mark.engine

FLOW = {"name": "flowkv", "ratio": 0.3}
QUESTIONS = [200, 90, 60]
TALKS = 2


def talks(
    model: str,
    policy: dict[str, Any],
    environment: dict[str, str | None] | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """Conversations with a drafter, by default a copy of the model.

    Args:
        arguments: of ``scenarios_speculation:drafted_talks``.
    """
    defaults = {
        "drafter": drafter(Path(model)),
        "questions": QUESTIONS,
        "number": TALKS,
    }
    run: dict[str, Any] = run_scenario(
        "scenarios_speculation:drafted_talks",
        {"model": model, "policy": policy} | defaults | arguments,
        environment,
        timeout=580,
    )
    print(run["turns"], run["counts"])
    return run


@pytest.fixture(scope="module")
def plain(tiny_model) -> list[list[list[int]]]:
    """Answers without speculation and sessions, by conversation and turn."""
    settings = {"enable_prefix_caching": False}
    policy = FLOW | {"sessions": False}
    arguments = {"questions": QUESTIONS, "number": TALKS, "settings": settings}
    run = run_scenario(
        "scenarios_sessions:talks",
        {"model": tiny_model, "policy": policy} | arguments,
    )
    answers: list[list[list[int]]] = run["answers"]
    return answers


@pytest.fixture(scope="module")
def recomputed(tiny_model, plain) -> dict[str, Any]:
    """Every request computes its whole history, in the layers of the drafter, too."""
    run = talks(
        tiny_model,
        FLOW | {"sessions": False},
        settings={"enable_prefix_caching": False},
    )
    assert run["answers"] == plain
    assert run["turns"][-1]["accepted"] > 0
    return run


def check_continues(
    run: dict[str, Any], recomputed: dict[str, Any], first_turn: int = 0
) -> None:
    """Tokens, drafts and accepted drafts are those of recomputed histories."""
    answers = [each[first_turn:] for each in recomputed["answers"]]
    assert run["answers"] == answers
    start = recomputed["turns"][first_turn - 1] if first_turn else {}
    expected = [
        {name: count - start.get(name, 0) for name, count in turn.items()}
        for turn in recomputed["turns"][first_turn:]
    ]
    assert run["turns"] == expected
    assert run["counts"]["hits"] == TALKS * (len(run["turns"]) - (not first_turn))
    assert run["counts"]["failures"] == 0
    assert run["tracked"] == 0


@pytest.mark.parametrize(
    "on_device",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["from the host", "on the device"],
)
def test_accepted_drafts_are_those_of_recomputed_histories(
    tiny_model, recomputed, on_device
):
    run = talks(tiny_model, FLOW | {"session_keep_on_device": on_device})
    check_continues(run, recomputed)
    assert (run["counts"]["device_hits"] > 0) == on_device


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["session_dir", "session_url"])
def test_after_a_restart(tiny_model, recomputed, tmp_path, kind):
    stores = {
        "session_dir": {"session_dir": str(tmp_path)},
        "session_url": {
            "session_url": f"file://{tmp_path}",
            "session_lookup_s": 30,
            "session_load_s": 60,
        },
    }
    policy = FLOW | stores[kind]
    before = talks(tiny_model, policy, questions=QUESTIONS[:2])
    histories = before["histories"]
    after = talks(tiny_model, policy, questions=QUESTIONS[2:], histories=histories)
    check_continues(after, recomputed, first_turn=2)
    # A server without a drafter, and one with another drafter, do not read these files.
    run = run_scenario(
        "scenarios_sessions:talks",
        {
            "model": tiny_model,
            "policy": policy,
            "questions": QUESTIONS[2:],
            "number": TALKS,
            "histories": histories,
        },
    )
    assert run["answers"] == [each[2:] for each in recomputed["answers"]]
    assert run["counts"]["hits"] == 0
    other = write_copy_with_more_heads(tmp_path / "other", tiny_model)
    run = talks(
        tiny_model,
        policy,
        drafter=drafter(other),
        questions=QUESTIONS[2:],
        histories=histories,
    )
    assert run["answers"] == [each[2:] for each in recomputed["answers"]]
    assert run["counts"]["hits"] == 0


@pytest.mark.slow
def test_in_a_small_pool_and_little_memory(tiny_model, recomputed, tmp_path):
    """Preempted requests continue their session again; others come from files."""
    settings = {"num_gpu_blocks_override": 22, "max_model_len": 600}
    policy = FLOW | {"session_dir": str(tmp_path), "session_memory": "1MiB"}
    run = talks(tiny_model, policy, settings=settings)
    assert run["answers"] == recomputed["answers"]
    assert run["counts"]["evictions"] > 0, "too much memory for a test of it"
    assert run["counts"]["failures"] == 0
    assert run["turns"][-1]["accepted"] == run["turns"][-1]["drafts"]
    assert run["tracked"] == 0


@pytest.mark.slow
def test_edits_aborts_and_branches_of_conversations(tiny_model):
    """Every draft is right, in each branch and after each cut."""
    report = run_scenario(
        "scenarios_speculation:drafted_odds",
        {"model": tiny_model, "policy": FLOW, "drafter": drafter(Path(tiny_model))},
        timeout=580,
    )
    print(report["drafts"], report["accepted"])
    for what in ("continued", "edited", "sibling", "left", "declined", "cached"):
        assert report[what][0] == report[what][1], what
    assert 400 <= report["edited_restored"] <= 439
    assert report["left_restored"] == 520 + 35
    for restored, recomputed in report["twins"]:
        assert restored == recomputed
    assert min(report["twins_restored"]) > 500
    assert report["accepted"] == report["drafts"] > 100
    assert report["tracked"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_quantized_sessions_of_a_drafter_with_more_heads(tiny_model, tmp_path, dtype):
    """``talks`` compares the bytes that the worker holds with the scheduler's count."""
    path = write_copy_with_more_heads(tmp_path / "copy", tiny_model)
    policy = FLOW | {"session_dtype": dtype, "session_keep_on_device": False}
    run = talks(tiny_model, policy, drafter=drafter(path))
    plain = run_scenario(
        "scenarios_sessions:talks",
        {
            "model": tiny_model,
            "policy": policy,
            "questions": QUESTIONS,
            "number": TALKS,
        },
    )
    assert run["answers"] == plain["answers"]
    assert run["counts"] == plain["counts"]
    assert run["turns"][-1]["accepted"] >= 0.9 * run["turns"][-1]["drafts"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["snapkv", "h2o", "icecache"])
def test_other_policies_answer_as_without_a_drafter(tiny_model, name):
    policy = configure(name, SMALL_BUDGETS | {"budget": 64, "skip_layers": 0})
    policy |= {"sessions": True, "session_keep_on_device": False}
    arguments = {"questions": QUESTIONS, "number": TALKS}
    plain = run_scenario(
        "scenarios_sessions:talks",
        {"model": tiny_model, "policy": policy} | arguments,
        timeout=580,
    )
    run = talks(tiny_model, policy)
    assert run["answers"] == plain["answers"]
    assert run["counts"]["hits"] == plain["counts"]["hits"] > 0
    assert run["turns"][-1]["accepted"] > 0
    assert run["tracked"] == 0


@pytest.mark.slow
def test_episodes_answer_as_those_read_from_scratch(tiny_model):
    policy = {"name": "epicache", "budget": 192, "prefill_block": 128}
    run = run_scenario(
        "scenarios_epicache:conversation",
        {
            "model": tiny_model,
            "policy": policy,
            "guides": [[5, 9, 11, 300, 7], [400, 17, 23], []],
            "route": [2, 0, 1, 0, 0, 1],
            "settings": {"speculative_config": drafter(Path(tiny_model))},
        },
        timeout=580,
    )
    assert run["answers"] == run["recomputed"]
    assert run["restored"][:3] == [0, 0, 0]
    assert min(run["restored"][3:]) > 900
    assert run["tracked"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
def test_heads_accept_as_many_drafts_as_after_recomputed_histories(
    tiny_model, tmp_path, method
):
    """But for the last restored token, whose keys depend on the token after it."""
    model, head = write_pair(tmp_path, tiny_model, method)
    runs = [
        talks(model, FLOW | settings, drafter=head)
        for settings in (
            {"sessions": False},
            {"sessions": True, "session_keep_on_device": False},
        )
    ]
    assert runs[0]["answers"] == runs[1]["answers"]
    assert runs[1]["counts"]["hits"] == TALKS * (len(QUESTIONS) - 1)
    accepted, restored = (run["turns"][-1]["accepted"] for run in runs)
    assert restored >= 0.8 * accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [1, 2])
def test_heads_continue_behind_a_shared_prefix(tiny_model, tmp_path, blocks):
    """vLLM drops the last block of what it finds, and here it finds the prefix only."""
    model, head = write_pair(tmp_path, tiny_model, "eagle")
    tokens = 32 * blocks
    runs = [
        talks(
            model,
            FLOW | {"shared_prefix": tokens, "sessions": sessions},
            drafter=head,
            prefix=tokens,
            evicts_behind=blocks,
        )
        for sessions in (False, True)
    ]
    assert runs[0]["answers"] == runs[1]["answers"]
    assert runs[1]["counts"]["hits"] == TALKS * (len(QUESTIONS) - 1)
    # Also without sessions, requests find the whole prefix.
    assert min(min(turn) for turn in runs[0]["cached"][1:]) == tokens
    accepted, restored = (run["turns"][-1]["accepted"] for run in runs)
    assert restored >= 0.8 * accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize("on_device", [False, True], ids=["from the host", "device"])
def test_on_model_runner_v2(tiny_model, recomputed, on_device):
    run = talks(
        tiny_model,
        FLOW | {"session_keep_on_device": on_device},
        runners.environment("V2", asynchronous=False),
    )
    assert run["runner"] == "V2"
    check_continues(run, recomputed)
    assert (run["counts"]["device_hits"] > 0) == on_device
