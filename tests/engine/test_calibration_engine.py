"""Engines that measure a model without a profile, and engines that must not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import run_scenario

pytestmark = pytest.mark.engine

SENSITIVE = {"name": "snapkv", "budget": 128, "allocator": "sensitivity"}
EQUAL_LAYERS = {"name": "snapkv", "budget": 128}
EPICACHE = {"name": "epicache", "budget": 128, "prefill_block": 128}
OFF = {"name": "sensitivity", "calibrate": False}


def run(model: str, folder: Path, **arguments: Any) -> Any:
    environment: dict[str, str | None] = {
        "KVP_CALIBRATE": "1",
        "KVP_MODEL_DIR": str(folder / "model"),
    }
    scenario = "scenarios_calibration:measured"
    return run_scenario(scenario, {"model": model, **arguments}, environment)


@pytest.mark.parametrize(
    "policy",
    [
        None,
        pytest.param(EQUAL_LAYERS, marks=pytest.mark.slow),
        pytest.param(SENSITIVE | {"allocator": OFF}, marks=pytest.mark.slow),
    ],
    ids=["stock", "equal-layers", "off"],
)
def test_nothing_is_measured_unasked(tiny_model, tmp_path, policy):
    result = run(tiny_model, tmp_path, policy=policy)
    assert result == {"running": False, "files": [], "profile": None}


@pytest.mark.slow  # it runs only while nothing else does
def test_the_next_start_uses_what_this_one_measures(tiny_model, tmp_path):
    first = run(tiny_model, tmp_path, policy=SENSITIVE, wait=True)
    assert first["running"]
    assert first["profile"] is None, "a running engine keeps equal layers"
    kinds = sorted(name.rpartition(".")[2] for name in first["files"])
    assert kinds == ["json", "lock", "log"]
    second = run(tiny_model, tmp_path, policy=SENSITIVE)
    assert not second["running"]
    assert second["files"] == first["files"]
    assert second["profile"][0] == 0, "keys of embeddings"
    assert second["profile"][1] > 0
    assert second["weights"] == [0.0, 1.0]


@pytest.mark.parametrize(
    "policy",
    [SENSITIVE, pytest.param(EPICACHE, marks=pytest.mark.slow)],
    ids=["asked", "by-default"],
)
def test_a_measurement_ends_with_its_engine(tiny_model, tmp_path, policy):
    result = run(tiny_model, tmp_path, policy=policy, stop=True)
    assert result["running"]
    assert result["ended"]
    assert not [name for name in result["files"] if name.endswith(".failed.json")]
