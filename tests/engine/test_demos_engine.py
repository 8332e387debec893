"""Demos on a real server with the default model: each policy does its work."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from harness import run_scenario

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

from _demo_kinds import Result, plan_of, problems

from vllm_kvplugins.policies import available_policies

pytestmark = pytest.mark.engine

# Its demo has several turns, with sessions. The test of the wheel serves icecache.
SAMPLE = ("flowkv",)


def served(model: str, policy: str, talks: list[str]) -> list[Result]:
    arguments = {"model": model, "policy": policy, "settings": "", "talks": talks}
    report = run_scenario("scenarios_demos:run_demos", arguments)
    assert len(report) == len(talks)
    return [Result.from_json(data) for data in report]


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow)
        for name in available_policies()
    ],
)
def test_a_policy_does_its_work_in_its_demo(policy, model_path):
    plan = plan_of(policy)
    if plan.encoder:
        pytest.importorskip("sentence_transformers", reason="needs the extra episodes")
    (result,) = served(model_path, policy, [plan.talk])
    assert problems(result, known_model=True) == []
    assert all(answer.text for answer in result.answers if answer.expected)


@pytest.mark.slow
def test_stock_vllm_answers_every_question(model_path):
    results = served(model_path, "none", ["document", "turns", "topics"])
    assert [result.judged for result in results] == [[True], [True], [True] * 4]
