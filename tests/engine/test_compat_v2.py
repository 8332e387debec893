"""Both model runners and both schedulers of the installed vLLM give equal results.

Model runner V2 is made for GPUs; here Triton's interpreter runs its kernels
(``tests/helpers/cpu_v2``). Asynchronous scheduling is off on CPUs; the helper turns it
on.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import runners
from harness import run_scenario
from tiers import tiered

pytestmark = pytest.mark.engine

# (runner, asynchronous) -> scenarios next to ``generate``, in the same process
RUNS = {
    ("V1", False): (),
    ("V1", True): ("crowd",),
    ("V2", False): ("dummy_batches",),
    ("V2", True): ("crowd",),
}
# What GPUs have, and what it is compared with. The full tier has the others as well.
QUICK = (("V1", False), ("V2", True))
runs = pytest.mark.parametrize(
    ("runner", "asynchronous"),
    [pytest.param(*r, marks=() if r in QUICK else pytest.mark.slow) for r in RUNS],
)


@cache
def found(model: str, runner: str, asynchronous: bool) -> dict[str, Any]:
    """One process per combination, shared by all tests."""
    return runners.run(model, runner, asynchronous, RUNS[runner, asynchronous])


def reference(model: str) -> dict[str, Any]:
    return found(model, "V1", False)


def test_eviction_shows_in_the_tokens(tiny_model: str):
    """Policies change tokens; otherwise equal tokens would prove nothing."""
    stock, _, snapkv, kvzip = reference(tiny_model)["generate"]
    assert snapkv["tokens"]["short"] == stock["tokens"]["short"]
    assert snapkv["tokens"]["long"] != stock["tokens"]["long"]
    assert snapkv["tokens"]["odd"] != stock["tokens"]["odd"]
    assert kvzip["tokens"]["odd"] not in (
        stock["tokens"]["odd"],
        snapkv["tokens"]["odd"],
    )


@pytest.mark.proves(policy=runners.NAMES, runner="runner", asynchronous="asynchronous")
@runs
def test_same_tokens_and_blocks_everywhere(
    tiny_model: str, runner: str, asynchronous: bool
):
    own = found(tiny_model, runner, asynchronous)
    runners.check_generated(own, reference(tiny_model))


@runs
def test_it_ran_on_what_was_asked_for(tiny_model: str, runner: str, asynchronous: bool):
    stock, *ours = found(tiny_model, runner, asynchronous)["generate"]
    kind = "AsyncScheduler" if asynchronous else "Scheduler"
    assert stock["facts"]["scheduler"] == kind
    package = {
        "V1": "vllm.v1.worker.cpu_model_runner",
        "V2": "vllm.v1.worker.cpu.model_runner",
    }
    for result in ours:
        assert result["facts"]["scheduler"] == f"KVPolicy{kind}"
        assert result["facts"]["runner"] == package[runner]
        assert result["facts"]["steps_in_flight"] == (2 if asynchronous else 1)


@pytest.mark.parametrize("runner", tiered(["V1", "V2"], ["V2"]))
def test_async_scheduling_frees_only_what_no_step_in_flight_reads(
    tiny_model: str, runner: str
):
    crowd = found(tiny_model, runner, True)["crowd"]
    assert crowd["facts"]["scheduler"] == "KVPolicyAsyncScheduler"
    assert len(crowd["early_frees"]) >= 8, "each request compacted, alone and together"
    assert set(crowd["early_frees"]) == {0}


@pytest.mark.parametrize("runner", tiered(["V1", "V2"], ["V2"]))
def test_async_scheduling_survives_abort_and_preemption(tiny_model: str, runner: str):
    crowd = found(tiny_model, runner, True)["crowd"]
    assert crowd["preemptions"] > 0, "the pool was large enough after all"
    assert crowd["left"] == 0
    victim = crowd["together"].pop(crowd["victim"])
    complete = crowd["alone"].pop(crowd["victim"])
    assert 5 <= len(victim) < len(complete)
    assert victim == complete[: len(victim)]
    assert crowd["together"] == crowd["alone"]


@pytest.mark.slow
def test_dummy_batches_do_not_touch_requests(tiny_model: str):
    """V2 numbers dummy rows like requests; policies must not confuse them."""
    dummy = found(tiny_model, "V2", False)["dummy_batches"]
    assert dummy["residents"] == [2, 2]
    assert dummy["disturbed"] == dummy["plain"]


@pytest.mark.slow
@pytest.mark.proves(policy="flowkv", runner="runner", asynchronous=True)
@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_sessions_go_on_while_steps_are_in_flight(tiny_model: str, runner: str):
    """The asynchronous scheduler learns one step late that a request has ended."""
    arguments = {
        "model": tiny_model,
        "policy": {"name": "flowkv", "ratio": 0.3, "base": "h2o"},
        "questions": [200, 70, 130],
        "number": 2,
    }
    kept, recomputed = (
        run_scenario(
            "scenarios_sessions:talks",
            arguments | {"policy": arguments["policy"] | {"sessions": sessions}},
            runners.environment(runner, asynchronous),
        )
        for sessions, asynchronous in ((True, True), (False, False))
    )
    assert kept["answers"] == recomputed["answers"]
    assert kept["counts"]["hits"] == 4
    assert kept["counts"]["recomputed_tokens"] <= 4
    assert kept["tracked"] == 0
