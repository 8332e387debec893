"""The smoke test for GPUs: one stage's failure is written down, and the others run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu_smoke


def run(out: Path, stages: str) -> dict:
    gpu_smoke.main("MODEL", out, stages, "64", 1, 1 << 20, "cpu")
    return json.loads((out / "gpu_smoke.json").read_text())["stages"]


def test_a_stage_that_fails_does_not_cost_the_others(monkeypatch, tmp_path):
    def breaks() -> None:
        raise RuntimeError("a|b\nc")

    monkeypatch.setattr(gpu_smoke, "kernels", breaks)
    monkeypatch.setattr(gpu_smoke, "gather", lambda device: [{"copy": "x", "gib": 1}])
    found = run(tmp_path, "kernels,gather")
    assert found["kernels"]["rows"] == [{"problem": "RuntimeError: a|b\nc"}]
    assert found["gather"]["rows"] == [{"copy": "x", "gib": 1}]
    table = (tmp_path / "gpu_smoke.md").read_text()
    assert "| RuntimeError: a\\|b c |" in table
    assert "| x | 1 |" in table
    assert "- commit: " in table


def test_an_unknown_stage_is_refused(tmp_path):
    with pytest.raises(gpu_smoke.typer.BadParameter, match="warm-up"):
        run(tmp_path, "gather,warm-up")


def test_an_engine_that_does_not_start_is_one_row(monkeypatch, tmp_path):
    class Dies:
        def __init__(self, policy, **engine) -> None:
            raise RuntimeError("no such GPU")

    monkeypatch.setattr(gpu_smoke, "EngineProcess", Dies)
    rows = run(tmp_path, "policies,decode")
    policies = [row["policy"] for row in rows["policies"]["rows"]]
    assert policies[0] == "stock"
    assert {"full", "snapkv"} < set(policies)
    assert all(row["problem"] == "no such GPU" for row in rows["policies"]["rows"])
    assert len(rows["decode"]["rows"]) == 2
    config = json.loads((tmp_path / "decoded-model" / "config.json").read_text())
    assert config["num_hidden_layers"] == 1


def test_time_boxes():
    sleeps = "import time; print('began', flush=True); time.sleep(60)"
    status, said = gpu_smoke.run_boxed([sys.executable, "-c", sleeps], 2)
    assert status == 124
    assert said == "began\n"
    assert gpu_smoke.run_boxed([sys.executable, "-c", "exit(3)"], 60)[0] == 3


def test_copies_are_measured():
    rows = gpu_smoke.gather(torch.device("cpu"), total=1 << 20)
    assert len(rows) == 2
    assert all(row["gib_per_s"] > 0 for row in rows)


def test_fetches_are_measured():
    """A CPU has one way; a pretended GPU has both (pretended_direct_suite.py)."""
    direct, staged = gpu_smoke.fetch(torch.device("cpu"), sizes=[16])
    assert staged["tokens_per_head"] == 16
    assert staged["kib"] == 64
    assert staged["gib_per_s"] >= 0
    assert direct["host_fetch"] == "direct"
    assert "cannot be read directly" in direct["problem"]
    run = gpu_smoke.fetcher(torch.device("cpu"), "staged", 32)
    assert [int(run()) for _ in range(9)] == [8 * 32] * 9
