"""Device-resident sessions: blocks are reused or lost without changing any token."""

from __future__ import annotations

import pytest
import runners
from harness import run_scenario
from tiers import tiered

pytestmark = pytest.mark.engine

FLOW = {"name": "flowkv", "ratio": 0.3}
EPI = {"name": "epicache", "budget": 192, "prefill_block": 128}
GUIDES = [[5, 9, 11, 300, 7], [400, 17, 23]]


@pytest.mark.parametrize(
    "asynchronous", tiered([False, True], [True]), ids=["sync", "async"]
)
def test_the_next_turn_copies_nothing(tiny_model, asynchronous):
    runs = [
        run_scenario(
            "scenarios_device_sessions:turns",
            {
                "model": tiny_model,
                "policy": FLOW | {"session_keep_on_device": parks},
                "guides": [None] * 5,
                "settings": {},
            },
            runners.environment(runners.CHOSEN, asynchronous),
        )
        for parks in (True, False)
    ]
    check(*runs)
    # history that was never compressed comes from the prefix cache, or from the host
    assert [turn["in_place"] for turn in runs[0]["turns"]] == [0, 0, 1, 1, 1]


def test_the_next_turn_of_an_episode_copies_nothing(tiny_model):
    """A parked session survives as long as no request needs its blocks."""
    route = [0, 0, 1, 0, 1, 1]
    runs = [
        run_scenario(
            "scenarios_device_sessions:turns",
            {
                "model": tiny_model,
                "policy": EPI | {"session_keep_on_device": parks},
                "guides": [GUIDES[episode] for episode in route],
                "settings": {},
            },
        )
        for parks in (True, False)
    ]
    check(*runs)
    assert [turn["in_place"] for turn in runs[0]["turns"]] == [0, 1, 0, 1, 1, 1]


def check(parked, loaded):
    """Both runs are equal turn by turn, except for the copies."""
    for parked_turn, loaded_turn in zip(parked["turns"], loaded["turns"], strict=True):
        assert parked_turn["answer"] == loaded_turn["answer"]
        assert parked_turn["restored"] == loaded_turn["restored"]
        assert loaded_turn["in_place"] == 0
        assert (loaded_turn["copied"] > 0) == (loaded_turn["restored"] > 0)
        assert parked_turn["copied"] == (
            0 if parked_turn["in_place"] else loaded_turn["copied"]
        )
    assert loaded["parked"] == 0 < parked["parked"]
    for run in (parked, loaded):
        assert run["tracked"] == 0


def test_other_requests_reuse_the_oldest_blocks_first(tiny_model):
    report = run_scenario(
        "scenarios_device_sessions:others", {"model": tiny_model, "policy": FLOW}
    )
    assert len(report["parked"]) == 2
    assert report["after some"] == report["parked"][1:]
    assert report["after all"] == []
    assert report["preemptions"] == 0
    for talk in report["later"]:
        assert talk["answer"] == talk["recomputed"]
        assert talk["copied"] > 0
        assert talk["in_place"] == 0
    assert report["tracked"] == 0


@pytest.fixture(scope="module")
def odds(tiny_model):
    arguments = {"model": tiny_model, "policy": FLOW}
    return run_scenario("scenarios_device_sessions:odds", arguments)


@pytest.mark.parametrize(
    ("what", "in_place"),
    [
        ("aborted", 1),
        ("branched", 1),
        ("evicted", 0),
        ("after reset", 0),
        ("after clearing", 0),
    ],
)
def test_the_answer_equals_that_of_a_new_conversation(odds, what, in_place):
    assert odds[what]["answer"] == odds[what]["recomputed"]
    assert odds[what]["in_place"] == in_place
    assert (odds[what]["copied"] == 0) == (in_place or not odds[what]["restored"])


def test_a_preempted_request_loads_its_session_from_the_host(odds):
    report = odds["preempted"]
    assert report["times"] == 1
    assert report["answer"] == report["recomputed"]
    assert report["in_place"] == 1


def test_one_of_two_requests_takes_the_blocks(odds):
    report = odds["twins"]
    assert report["answers"] == [report["recomputed"]] * 2
    assert (report["hits"], report["in_place"]) == (2, 1)
    assert report["copied"] > 0


def test_another_owner_gets_no_blocks(odds):
    assert odds["mallory"]["restored"] == 0
    assert odds["mallory"]["in_place"] == 0


def test_dropped_sessions_keep_no_blocks(odds):
    assert odds["dropped"]["was"] > odds["dropped"]["parked"] == 0
    assert odds["reset"]["parked"] == odds["cleared"]["parked"] == 0
    assert odds["tracked"] == 0
