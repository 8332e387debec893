"""``kvplugins recommend``: the choice follows from the rows, and the command runs."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vllm_kvplugins.choice.decision import decide, served
from vllm_kvplugins.choice.evidence import load, read
from vllm_kvplugins.choice.requests import Request, Workload
from vllm_kvplugins.cli import app
from vllm_kvplugins.errors import codes_in

ROOT = Path(__file__).parents[2]
runner = CliRunner()
GIB = 1 << 30
# 131072 bytes per token in bfloat16.
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return str(tmp_path)


def cell(
    policy: str, share: float, keys: int, kl: float, **more: Any
) -> dict[str, Any]:
    found = {"samples": 20, "mean": keys / 20, "found": keys}
    return {
        "policy": policy,
        "settings": {"budget": share},
        "budget_setting": "budget",
        "share": share,
        "device_share": share + 0.02,
        "host_share": 0.0,
        "passkey": found,
        "multikey": found,
        "kl": {"samples": 20, "mean": kl},
    } | more


def contract(**changed: bool) -> dict[str, bool]:
    return {
        "turns": False,
        "sessions": True,
        "keeps_all": False,
        "prefix_cache": True,
        "prefill_block": True,
    } | changed


def content(*cells: dict[str, Any], **contracts: dict[str, bool]) -> dict[str, Any]:
    names = {cell["policy"] for cell in cells}
    stock = cell("stock", 1.0, 20, 0.0) | {"device_bytes": 1}
    return {
        "policies": {name: contracts.get(name, contract()) for name in names},
        "models": [
            {
                "model": "tiny",
                "tokens": 2000,
                "machine": "a CPU",
                "stock": stock,
                "cells": list(cells),
            }
        ],
    }


ROWS = content(
    cell("drop", 0.1, 12, 0.3),
    cell("drop", 0.2, 14, 0.2),
    cell("turn", 0.2, 3, 0.25),
    cell("keep", 0.2, 19, 0.4, host_share=1.0),
    cell("near", 0.2, 13, 0.1),
    turn=contract(turns=True, prefill_block=False),
    keep=contract(keeps_all=True, prefill_block=False),
    near=contract(turns=True, prefix_cache=False, sessions=False),
)


def ask(
    rows: dict[str, Any],
    workload: str,
    memory: float,
    context: int = 32000,
    concurrency: int = 8,
    host_memory: float | None = None,
    min_score: float = 0.0,
) -> dict[str, Any]:
    request = request_of(memory, context, concurrency, host_memory)
    return decide(read(rows), request, Workload(workload), min_score)


def request_of(
    memory: float,
    context: int = 32000,
    concurrency: int = 8,
    host_memory: float | None = None,
    longest: int = 0,
) -> Request:
    return Request(
        model="m",
        prompt_tokens=context,
        answer_tokens=512,
        concurrency=concurrency,
        memory=int(memory * GIB),
        host_memory=None if host_memory is None else int(host_memory * GIB),
        token_bytes=131072,
        block_size=32,
        longest=longest,
    )


@pytest.mark.parametrize(
    ("workload", "policy"), [("document", "keep"), ("chat", "turn"), ("agent", "drop")]
)
def test_the_workload_says_which_scores_count(workload, policy):
    result = ask(ROWS, workload, memory=14)
    assert result["policy"] == policy
    assert result["alternatives"][0]["policy"] == policy


def test_other_rows_give_another_answer():
    rows = json.loads(json.dumps(ROWS))
    for each in rows["models"][0]["cells"]:
        if each["policy"] == "near":
            each["passkey"] = each["multikey"] = {"samples": 20, "mean": 1, "found": 20}
    assert ask(rows, "document", memory=14)["policy"] == "near"


def test_chats_need_sessions_and_agents_the_prefix_cache():
    assert {"near", "drop"} <= set(ask(ROWS, "chat", memory=14)["excluded"])
    assert "near" in ask(ROWS, "agent", memory=14)["excluded"]
    rows = content(
        cell("keep", 0.2, 19, 0.1, host_share=1.0), keep=contract(keeps_all=True)
    )
    assert ask(rows, "chat", memory=14)["settings"]["sessions"] is True


def test_less_memory_leaves_smaller_shares():
    """Eight prompts of 32,000 tokens, 3.9 GiB each."""
    assert ask(ROWS, "agent", memory=14)["alternatives"][0]["share"] == 0.2
    result = ask(ROWS, "agent", memory=9)
    assert (result["policy"], result["alternatives"][0]["share"]) == ("drop", 0.1)
    assert "keep" in result["excluded"]


def test_stock_is_recommended_where_it_fits():
    result = ask(ROWS, "document", memory=33)
    assert result["policy"] == "stock"
    assert "--kv-policy" not in result["command"]
    assert ask(ROWS, "document", memory=31)["policy"] != "stock"


def test_nothing_is_recommended_where_nothing_fits():
    result = ask(ROWS, "document", memory=1)
    assert result["policy"] is None
    assert result["command"] == ""
    assert set(result["excluded"]) == {"drop", "turn", "keep", "near"}


def test_host_memory_can_be_limited():
    assert ask(ROWS, "document", 14, host_memory=40)["policy"] == "keep"
    limited = ask(ROWS, "document", 14, host_memory=20)
    assert limited["policy"] == "drop"
    assert "host memory" in limited["excluded"]["keep"]


def test_a_prompt_larger_than_the_pool_needs_prefill_block():
    """One prompt of 3.9 GiB in 2 GiB; retrievers hold the whole prompt first."""
    result = ask(ROWS, "document", memory=2, concurrency=1)
    assert result["policy"] == "drop"
    assert result["settings"]["prefill_block"] % 256 == 0
    assert any("prefill_block" in note for note in result["notes"])
    assert "whole prompt" in result["excluded"]["keep"]


def test_retrieval_reads_such_a_prompt_without_a_loss():
    """Only the note differs from that of a policy that drops tokens."""
    rows = json.loads(json.dumps(ROWS))
    rows["policies"]["keep"]["prefill_block"] = True
    result = ask(rows, "document", memory=2, concurrency=1)
    assert result["policy"] == "keep"
    assert result["settings"]["prefill_block"] % 256 == 0
    (note,) = [note for note in result["notes"] if "prefill_block" in note]
    assert "attend to all" in note


def test_budgets_in_tokens_grow_with_the_prompt():
    rows = content(cell("drop", 0.2, 12, 0.3, settings={"budget": 400}))
    assert ask(rows, "document", memory=14)["settings"]["budget"] == 6400


def test_policies_measured_on_some_models_only_are_left_out():
    rows = json.loads(json.dumps(ROWS))
    other = json.loads(json.dumps(rows["models"][0])) | {"model": "other"}
    other["cells"] = [each for each in other["cells"] if each["policy"] != "keep"]
    rows["models"].append(other)
    result = ask(rows, "document", memory=14)
    assert result["policy"] == "drop"
    assert "keep" in result["excluded"]
    assert result["alternatives"][0]["pass_keys"] == (28, 40)


# -- ties, losses, and requests that wait --------------------------------------------


def test_the_faster_policy_is_better_among_equals():
    """Divergences within a hundredth of a nat count as equal."""
    speed = {"tokens_per_s_ratio": 1.1, "first_token_ms_ratio": 1.0}
    rows = content(
        cell("near", 0.2, 15, 0.100, host_share=0.5),
        cell("fast", 0.2, 15, 0.108, host_share=1.0, **speed),
        near=contract(turns=True),
        fast=contract(turns=True),
    )
    assert ask(rows, "chat", memory=14)["policy"] == "fast"
    rows["models"][0]["cells"][1]["kl"]["mean"] = 0.112
    assert ask(rows, "chat", memory=14)["policy"] == "near"


def test_shares_of_keys_within_the_noise_count_as_equal():
    """The divergence then decides, also for documents."""
    rows = content(
        cell("near", 0.2, 15, 0.10),
        cell("more", 0.2, 15, 0.20),
        near=contract(),
        more=contract(),
    )
    of_more = rows["models"][0]["cells"][1]
    of_more["passkey"] = of_more["passkey"] | {"mean": 0.78}
    assert ask(rows, "document", memory=14)["policy"] == "near"
    of_more["passkey"] = of_more["passkey"] | {"mean": 0.90}
    assert ask(rows, "document", memory=14)["policy"] == "more"


def test_speeds_within_the_noise_count_as_equal():
    policies = {"lean": (1.01, 0.5), "fast": (1.05, 1.0)}  # speed, host memory
    rows = content(
        *(
            cell(name, 0.2, 15, 0.1, host_share=host, tokens_per_s_ratio=speed)
            for name, (speed, host) in policies.items()
        ),
        **{name: contract(turns=True) for name in policies},
    )
    assert ask(rows, "chat", memory=14)["policy"] == "lean"
    rows["models"][0]["cells"][1]["tokens_per_s_ratio"] = 1.07
    assert ask(rows, "chat", memory=14)["policy"] == "fast"


def test_policies_that_lose_too_many_keys_are_left_out():
    assert ask(ROWS, "document", 14, host_memory=0, min_score=0.7)["policy"] == "drop"
    result = ask(ROWS, "document", 14, host_memory=0, min_score=0.75)
    assert result["policy"] == "stock"
    assert "70%" in result["excluded"]["drop"]
    (why, waits) = result["reasons"]
    assert "drop at 20%" in why
    assert "3 requests" in waits


def test_the_model_where_fewest_keys_are_found_counts():
    rows = json.loads(json.dumps(ROWS))
    other = json.loads(json.dumps(rows["models"][0])) | {"model": "other"}
    for each in other["cells"]:
        each["passkey"] = each["multikey"] = {"samples": 20, "mean": 1, "found": 20}
    rows["models"].append(other)
    assert ask(rows, "document", 14, host_memory=0, min_score=0.75)["policy"] == "stock"


def test_requests_that_do_not_fit_wait_instead_of_losing_answers():
    """A limit of 256 requests is no reason to keep a twentieth of each."""
    rows = content(cell("drop", 0.05, 4, 0.9), cell("drop", 0.1, 18, 0.3))
    evidence = read(rows)
    wanted = request_of(14, concurrency=256)
    able = served(evidence, wanted, Workload.DOCUMENT)
    assert 8 < able < 256
    result = decide(evidence, replace(wanted, concurrency=able), Workload.DOCUMENT)
    assert (result["policy"], result["alternatives"][0]["share"]) == ("drop", 0.1)
    more = replace(wanted, concurrency=able + 1)
    assert decide(evidence, more, Workload.DOCUMENT)["alternatives"][0]["share"] == 0.05


def test_host_memory_limits_the_requests_at_a_time():
    evidence = read(ROWS)
    wanted = request_of(14, concurrency=256, host_memory=20)
    able = served(evidence, wanted, Workload.DOCUMENT)
    # 4.0 GiB of host memory for each under "keep"
    assert able == 5
    chosen = decide(evidence, replace(wanted, concurrency=able), Workload.DOCUMENT)
    assert chosen["policy"] == "keep"


def test_a_pool_for_one_prompt_holds_several_that_are_in_host_memory():
    """One of 3.9 GiB, or the kept tokens of more next to a block of it."""
    rows = json.loads(json.dumps(ROWS))
    evidence = read(rows)
    wanted = request_of(4.1, concurrency=8)
    assert served(evidence, wanted, Workload.DOCUMENT) == 1
    rows["policies"]["keep"]["prefill_block"] = True
    evidence = read(rows)
    able = served(evidence, wanted, Workload.DOCUMENT)
    assert 1 < able < 8
    result = decide(evidence, replace(wanted, concurrency=able), Workload.DOCUMENT)
    assert result["policy"] == "keep"
    assert "prefill_block" in result["settings"]


def test_the_longest_request_must_fit_at_start_up():
    """A pool for one prompt of 8,000 tokens, and requests of up to 32,000."""
    evidence = read(ROWS)
    short = request_of(2, context=8000, concurrency=2)
    assert decide(evidence, short, Workload.DOCUMENT)["policy"] == "keep"
    long = replace(short, longest=32000)
    result = decide(evidence, long, Workload.DOCUMENT)
    assert "whole prompt" in result["excluded"]["keep"]
    assert "prefill_block" in result["settings"]


# -- the command, with the package's own rows --------------------------------------


def run(folder: str, *arguments: str, context: int = 32000, workload: str = "document"):
    fixed = ("--context", str(context), "--workload", workload)
    return runner.invoke(app, ["recommend", folder, *fixed, *arguments])


@pytest.mark.parametrize(
    ("memory", "concurrency"), [(14, 8), (10, 8), (6, 2), (2, 1), (1, 1)]
)
@pytest.mark.parametrize("workload", ["document", "agent"])
def test_the_recommended_settings_fit_the_pool(folder, workload, memory, concurrency):
    """``kvplugins size`` plans the blocks of these requests."""
    options = ("--memory", f"{memory}GiB", "--concurrency", str(concurrency), "--json")
    result = json.loads(run(folder, *options, workload=workload).stdout)
    assert result["policy"] not in (None, "stock")
    words = shlex.split(result["command"])
    settings = json.loads(words[words.index("--kv-policy-config") + 1])
    assert words[words.index("--kv-policy") + 1] == result["policy"]
    done = runner.invoke(
        app,
        [
            *("size", folder, "--policy", result["policy"], "--context", "32000"),
            *("--policy-config", json.dumps(settings), "--pool-gib", str(memory)),
            *("--concurrency", str(concurrency), "--json"),
        ],
    )
    assert done.exit_code == 0, done.output


def test_the_figures_are_those_of_the_package(folder):
    options = ("--memory", "14GiB", "--concurrency", "8", "--json")
    result = json.loads(run(folder, *options).stdout)
    evidence = load()
    for row in result["alternatives"]:
        (own,) = [
            each
            for each in evidence.cells
            if (each.policy, each.share) == (row["policy"], row["share"])
        ]
        assert tuple(row["pass_keys"]) == own.found("passkey")
    measured = [each.mean("passkey", "multikey") for each in evidence.cells]
    best = result["alternatives"][0]
    scores = [
        s["mean"] for m in best["scores"].values() for t, s in m.items() if t != "kl"
    ]
    # Shares of keys within 0.04 count as equal; the divergence then decides.
    assert sum(scores) / len(scores) >= max(m for m in measured if m) - 0.04


def test_it_says_what_it_extrapolates(folder):
    done = run(folder, "--memory", "14GiB", "--concurrency", "8")
    assert done.exit_code == 0, done.output
    text = " ".join(done.stdout.split())
    for model in load().models:
        assert model in text
    assert "extrapolated" in text
    assert "vllm serve" in text


def test_exit_status_1_if_nothing_fits(folder):
    done = run(folder, "--memory", "100MiB")
    assert done.exit_code == 1
    assert "Nothing fits" in done.stdout


@pytest.mark.parametrize("option", ["--memory", "--host-memory"])
def test_an_amount_without_a_unit_is_refused(folder, option):
    memory = () if option == "--memory" else ("--memory", "8GiB")
    done = run(folder, *memory, option, "8 gigs")
    assert done.exit_code == 2
    assert codes_in(done.stderr) == ("KVP603",)


def test_models_that_no_policy_runs_on_are_refused(tmp_path):
    config = LLAMA_8B | {"sliding_window": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = run(str(tmp_path), "--memory", "8GiB")
    assert done.exit_code == 1
    assert codes_in(done.stderr) == ("KVP012",)


def test_it_runs_without_torch_and_vllm(folder):
    code = (
        "import sys; sys.modules['vllm'] = sys.modules['torch'] = None\n"
        "from vllm_kvplugins.cli import main\n"
        f"sys.argv = ['kvplugins', 'recommend', {folder!r}, '--context', '32000', "
        "'--memory', '14GiB', '--concurrency', '8', '--workload', 'document', "
        "'--json']\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["policy"]
