"""Every policy and every allocator in a real engine, under random traffic.

The unit tests in ``test_contract`` run all pairs without vLLM. Here each policy runs
once and the allocators alternate, because an engine takes seconds to start. Requests
arrive, are aborted, preempted, and compacted during decoding. Free blocks hold NaN.
Each request's tokens must equal those of a run alone. Every other policy uses
block-wise prefill.
"""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from harness import INTERPRETED, run_scenario
from policy_settings import (
    SMALL_BUDGETS,
    configure,
    drop,
    keep_spans,
    policies_that,
    shares_pages,
    write_heads,
    write_weights,
)
from tiny_model import KV_HEADS, LAYERS

from vllm_kvplugins.budgets import ALLOCATORS

pytestmark = pytest.mark.engine

SEED = 20261121
_ALL = os.environ.get("KVP_TEST_TIER") == "all"
ROUNDS, SAMPLES = (60, 6) if _ALL and not INTERPRETED else (20, 3)
BLOCKS = 26
PROCESSES = 11


def turns() -> dict[str, str]:
    """Policy -> its allocator; None for policies without one."""
    names = policies_that(drop) + policies_that(keep_spans)
    sharing = [name for name in names if shares_pages(name)]
    allocators = sorted(ALLOCATORS)
    chosen = {n: allocators[i % len(allocators)] for i, n in enumerate(sharing)}
    return {name: chosen.get(name, "none") for name in names}


def settings(
    name: str, allocator: str, files: dict[str, dict[str, str]]
) -> dict[str, Any]:
    """Settings of a policy; every other policy uses block-wise prefill."""
    chosen = SMALL_BUDGETS | {"allocator": files.get(allocator, allocator)}
    if list(turns()).index(name) // PROCESSES % 2:
        chosen["prefill_block"] = 96
    return configure(name, chosen)


@functools.cache
def traffic_of(model: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Counts of events per policy, in one process."""
    with tempfile.TemporaryDirectory() as folder:
        files = {
            "file": write_weights(Path(folder, "weights.json"), LAYERS, KV_HEADS),
            "head-split": write_heads(Path(folder, "heads.json"), Path(model)),
        }
        policies = {
            # Sessions copy blocks after they are freed; freed blocks are NaN here.
            name: settings(name, turns()[name], files) | {"sessions": False}
            for name in names
        }
        arguments = {
            "model": model,
            "policies": policies,
            "seed": SEED,
            "rounds": ROUNDS,
            "blocks": BLOCKS,
            "samples": SAMPLES,
        }
        counts: dict[str, Any] = run_scenario("scenarios_contract:traffic", arguments)
    return counts


def test_every_allocator_has_its_turn():
    assert set(ALLOCATORS) <= set(turns().values())


def group_of(name: str) -> int:
    """The process that runs a policy; the default tier runs only the first process."""
    return list(turns()).index(name) % PROCESSES


@pytest.mark.proves(policy="name")
@pytest.mark.parametrize(
    ("name", "allocator"),
    [
        pytest.param(
            name,
            allocator,
            marks=[pytest.mark.slow] if group_of(name) else [],
            id=f"{name}-{allocator}",
        )
        for name, allocator in turns().items()
    ],
)
def test_traffic_among_poisoned_blocks(tiny_model, name, allocator):
    print("seed", SEED)
    same_process = list(turns())[group_of(name) :: PROCESSES]
    # Interpreted kernels take minutes, so that each policy gets its own process.
    names = (name,) if INTERPRETED else tuple(same_process)
    counts = traffic_of(tiny_model, names)[name]
    print(counts)
    assert "error" not in counts, counts["error"]
    assert counts["poisoned"] > ROUNDS
    assert counts["requests"] > ROUNDS / 3
    assert counts["compared"] >= SAMPLES - 1
    assert counts["differed"] == counts["close"] == 0
    assert counts["unscored"] == 0, "a score read memory that no request owns"
    for event in ("aborts", "preemptions"):
        assert counts[event] > ROUNDS / 12, counts
    if allocator == "none" and name in policies_that(drop):
        assert counts["compactions"] == 0
    else:
        assert counts["compactions"] > ROUNDS / 3, counts
        assert counts["preempted_compacted"] > ROUNDS / 20, counts
