"""The GPU smoke test records a failure, continues, and ends within its time limit."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import _gpu_copies
import _gpu_engines
import gpu_smoke
import pytest
import torch
from _engine import EngineProcess

from vllm_kvplugins import ops
from vllm_kvplugins.config import parse_policy

CPU = torch.device("cpu")


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return str(folder)


@pytest.fixture
def machine(tmp_path, model):
    return _gpu_engines.Machine(model, tmp_path, "cpu", time.monotonic() + 600)


def stages_of(out: Path) -> dict:
    return json.loads((out / "gpu_smoke.json").read_text())["stages"]


def run(out: Path, model: str, stages: str, **more) -> dict:
    gpu_smoke.main(model, out, stages, lengths="64", layers=1, device="cpu", **more)
    return stages_of(out)


def test_a_stage_that_fails_does_not_cost_the_others(monkeypatch, tmp_path, model):
    def breaks(folder, end):
        yield {"suite": "x", "answer": [1, 2]}
        (row,) = stages_of(tmp_path)["kernels"]["rows"]
        assert row == {"suite": "x", "answer": [1, 2]}
        raise RuntimeError("a|b\nc")

    monkeypatch.setattr(gpu_smoke, "kernels", breaks)
    monkeypatch.setattr(gpu_smoke, "gather", lambda device: iter([{"copy": "x"}]))
    result = run(tmp_path, model, "kernels,gather")
    assert result["kernels"]["rows"][1:] == [{"problem": "RuntimeError: a|b\nc"}]
    assert result["gather"]["rows"] == [{"copy": "x"}]
    table = (tmp_path / "gpu_smoke.md").read_text()
    assert "| RuntimeError: a\\|b c |" in table
    assert "[1, 2]" not in table
    assert "- commit: " in table


def test_bad_arguments_are_refused(tmp_path, model):
    with pytest.raises(gpu_smoke.typer.BadParameter, match="warm-up"):
        run(tmp_path, model, "gather,warm-up")
    with pytest.raises(gpu_smoke.typer.BadParameter, match="no model in"):
        run(tmp_path, str(tmp_path), "gather")


def test_an_engine_that_does_not_start_is_one_row(monkeypatch, tmp_path, model):
    class Dies:
        def __init__(self, policy, deadline, **engine) -> None:
            raise RuntimeError("no such GPU")

    monkeypatch.setattr(_gpu_engines, "EngineProcess", Dies)
    stages = ("policies", "decode", "graphs", "serving")
    rows = {k: v["rows"] for k, v in run(tmp_path, model, ",".join(stages)).items()}
    policies = [row["policy"] for row in rows["policies"]]
    assert policies[0] == "stock"
    assert {"full", "snapkv"} < set(policies)
    assert [len(rows[stage]) for stage in stages[1:]] == [6, 6, 2]
    for stage in stages:
        assert all("no such GPU" in row["problem"] for row in rows[stage])


def test_nothing_is_started_without_time(tmp_path, model):
    began = time.monotonic()
    result = run(tmp_path, model, "policies,kernels", minutes=0.0)
    assert time.monotonic() - began < 20
    assert all("no time left" in row["problem"] for row in result["policies"]["rows"])
    assert [row["status"] for row in result["kernels"]["rows"]] == [124] * 3


class Answering:
    """An engine that returns numbers that depend on its policy."""

    def __init__(self, policy, deadline, **engine) -> None:
        self.name = policy["name"] if policy else "stock"

    def ask(self, command, **arguments):
        if command == "steps":
            return {"held_blocks": 7}
        if self.name == "knorm":
            raise RuntimeError("it died")
        answers = {"stock": [1, 2, 3], "full": [1, 2, 3], "snapkv": [1, 5, 3]}
        return {"answer": answers.get(self.name, [9, 9, 9])}

    def close(self) -> None:
        pass


def test_answers_are_compared(monkeypatch, tmp_path, machine):
    monkeypatch.setattr(_gpu_engines, "EngineProcess", Answering)
    rows = list(_gpu_engines.policies(machine))
    result = {row["policy"]: row for row in rows}
    assert result["full"]["as_stock"] == "all"
    assert result["snapkv"]["as_stock"] == "first 1"
    assert "it died" in result["knorm"]["problem"]
    assert "as_stock" not in result["stock"]
    report = tmp_path / "other.json"
    rows[0]["answer"] = [1, 2, 4]
    report.write_text(json.dumps({"stages": {"policies": {"rows": rows}}}))
    again = {r["policy"]: r for r in _gpu_engines.policies(machine, report)}
    assert again["snapkv"]["as_expected"] == "all"
    assert again["stock"]["as_expected"] == "first 2"
    assert "as_expected" not in again["knorm"]


def test_every_policy_can_be_configured():
    for name in _gpu_engines.available_policies():
        settings = _gpu_engines._settings(name, "/no/model")
        assert parse_policy(settings).problems() == []


def test_time_boxes():
    sleeps = "import time; print('began', flush=True); time.sleep(60)"
    status, output = gpu_smoke.run_boxed([sys.executable, "-c", sleeps], 2)
    assert (status, output) == (124, "began\n")
    child = "import os; os.spawnlp(os.P_WAIT, 'sleep', 'sleep', '60')"
    began = time.monotonic()
    assert gpu_smoke.run_boxed([sys.executable, "-c", child], 2)[0] == 124
    assert time.monotonic() - began < 30  # the grandchild still holds the pipe
    assert gpu_smoke.run_boxed([sys.executable, "-c", "exit(3)"], 60)[0] == 3
    assert gpu_smoke.run_boxed(["no-such-command"], 60)[0] == 127


def test_an_engine_is_killed_at_its_deadline(monkeypatch, tmp_path):
    child = tmp_path / "child.py"
    child.write_text("import time; time.sleep(60)")
    monkeypatch.setattr("_engine._CHILD", child)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="stock ran out of time"):
        EngineProcess(None, time.monotonic() + 1)
    assert time.monotonic() - began < 30
    child.write_text("import sys; sys.exit('no memory')")
    with pytest.raises(RuntimeError, match="stock died:\nno memory"):
        EngineProcess(None, time.monotonic() + 60)


def test_failures_of_suites_are_named(tmp_path):
    suite = tmp_path / "test_it.py"
    suite.write_text("def test_a(): pass\ndef test_b(): assert 1 == 2\n")
    results = tmp_path / "it.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    gpu_smoke.run_boxed([*command, f"--junitxml={results}", str(suite)], 60)
    result = gpu_smoke.tested(results)
    assert (result["tests"], result["failed"], result["skipped"]) == (2, 1, 0)
    assert result["which"] == ["test_b: assert 1 == 2"]


def test_copies_are_measured():
    rows = list(_gpu_copies.gather(CPU, total=1 << 20))
    assert len(rows) == 2
    assert all(row["gib_per_s"] > 0 for row in rows)


def test_fetches_are_measured():
    """A CPU has one way to fetch; a simulated GPU has both
    (simulated_direct_suite.py).
    """
    direct, staged = _gpu_copies.fetch(CPU, sizes=[16])
    assert staged["tokens_per_head"] == 16
    assert staged["kib"] == 64
    assert staged["gib_per_s"] >= 0
    assert direct["host_fetch"] == "direct"
    assert "cannot be read directly" in direct["problem"]
    fetch = _gpu_copies.fetcher(CPU, "staged", 32)
    assert [int(fetch()) for _ in range(9)] == [8 * 32] * 9


def attend(queries, keys, values, scale):
    """Attention of [query heads, dim] to [tokens, KV heads, dim]."""
    group = len(queries) // keys.shape[1]
    keys, values = (t.float().repeat_interleave(group, 1) for t in (keys, values))
    scores = torch.einsum("hd,thd->ht", queries.float(), keys) * scale
    return torch.einsum("ht,thd->hd", scores.softmax(-1), values)


def attend_all(q, k, v, out, seqused_k, block_table, softmax_scale, **_):
    for i, length in enumerate(seqused_k.tolist()):
        pages = block_table[i].long()
        keys, values = (t[pages].flatten(0, 1)[:length] for t in (k, v))
        out[i] = attend(q[i], keys, values, softmax_scale).to(out.dtype)


@pytest.fixture
def flash(monkeypatch):
    fa_utils = pytest.importorskip("vllm.v1.attention.backends.fa_utils")
    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", attend_all, raising=False)


def test_attention_is_measured(flash):
    rows = {row["kernel"]: row for row in _gpu_copies.attention(CPU, 1, 32, 2)}
    assert rows["plain copy"]["of_the_copy"] == 1
    assert "problem" in rows["triton"]  # not available on a CPU
    for kernel in ("flash", "flash, as vLLM calls it"):
        assert rows[kernel]["us"] > 0


@pytest.mark.parametrize("kernel", ["flash", "stock"])
def test_what_is_measured_is_decode_attention(flash, kernel):
    """All pages of a part, each once, and as many bytes as reported."""
    case = _gpu_copies.DecodeCase(CPU, rows=2, tokens=64, parts=3)
    slots = []
    for part in range(3):
        getattr(case, kernel)(part)
        table = case.tables[part].long()
        if kernel == "stock":
            heads = torch.arange(case.heads)[:, None]
            table = case.blocks[part].long()[:, None] * case.heads + heads
        table = table.view(2 * case.heads, -1)
        keys, values = (
            of(case.kv, table).unflatten(0, (2, case.heads))
            for of in (ops.gather_keys, ops.gather_values)
        )
        for row in range(2):
            rows_read = (t[row].transpose(0, 1) for t in (keys, values))
            right = attend(case.queries[row], *rows_read, case.scale)
            torch.testing.assert_close(case.out[row].float(), right, atol=1e-2, rtol=0)
        assert 2 * keys.nbytes == case.read_bytes
        slots += table.flatten().tolist()
    assert sorted(slots) == list(range(len(case.heap)))
