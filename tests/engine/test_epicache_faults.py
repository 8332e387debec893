"""EpiCache when requests end early and memory is short: only time is lost."""

from __future__ import annotations

from typing import Any

import pytest
import runners
from harness import run_scenario

pytestmark = [pytest.mark.engine, pytest.mark.slow]

POLICY: dict[str, Any] = {
    "name": "epicache",
    "budget": 192,
    "prefill_block": 128,
    "session_memory": "64MiB",
}
GUIDES = [[5, 9, 11, 300, 7], [400, 17, 23]]
# Tokens of the first history, and of a question with its answer
HISTORY, TURN = 600, 57
# while waiting; after one compression of the 600 tokens; after two
LEAVES_AT = [0, 400, 500]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_readers_that_leave_leave_nothing_behind(tiny_model, asynchronous):
    report = run_scenario(
        "scenarios_epicache_faults:aborted",
        {
            "model": tiny_model,
            "policy": POLICY,
            "guides": GUIDES,
            "leaves_at": LEAVES_AT,
        },
        runners.environment(runners.CHOSEN, asynchronous),
    )
    assert len(report) == 2 * len(LEAVES_AT)
    for each in report:
        about = (each["kind"], each["place"])
        assert each["decoded"] == [], f"{about} had been read to its end"
        assert each["held"] == each["tracked"] == each["commands"] == 0, about
        assert each["answers"][0] == each["answers"][1], about
        assert each["company"][0] == each["company"][1], about
        # nothing is prefilled twice
        if each["place"] == 0:
            assert each["read"] == each["restored"] == 0
        else:
            assert each["place"] <= each["restored"] <= each["read"] < HISTORY, about


def test_episodes_without_memory_are_answered_and_read_again(tiny_model):
    # a session of 12 blocks takes 384 KiB
    memory = ["64MiB", "100KiB", "500KiB"]
    enough, none, one = run_scenario(
        "scenarios_epicache_faults:full",
        {"model": tiny_model, "policy": POLICY, "guides": GUIDES, "memory": memory},
    )
    assert none["answers"] == one["answers"] == enough["answers"]
    # turns go to episodes 0, 0, 1, 0
    assert enough["counts"]["refused"] == enough["counts"]["evictions"] == 0
    assert [bool(tokens) for tokens in enough["restored"]] == [False, True, False, True]
    assert none["counts"]["refused"] == 4
    assert none["restored"] == [0, 0, 0, 0]
    # the second episode replaces the first one
    assert one["counts"]["refused"] == 0
    assert one["counts"]["evictions"] >= 2
    assert one["restored"][1] >= HISTORY + TURN - 1
    assert one["restored"][2:] == [0, 0]
    assert enough["tracked"] == none["tracked"] == one["tracked"] == 0
