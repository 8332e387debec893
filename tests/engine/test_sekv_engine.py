"""SeKV in vLLM: full attention when everything is zoomed, memory bounds, no leaks."""

from __future__ import annotations

from typing import Any

import pytest
import runners
import torch
from harness import run_scenario
from routers import write_random_router

from vllm_kvplugins.model_config import read_model_config

pytestmark = pytest.mark.engine

SEED = 20261123
LENGTHS = (130, 300, 640)


def test_a_zoom_on_every_span_at_full_rank_is_stock(model_path, tmp_path):
    """A router whose thresholds never zoom and that keeps few components."""
    print("seed", SEED)
    path, random = tmp_path / "router.safetensors", torch.Generator().manual_seed(SEED)
    fingerprint = read_model_config(model_path, "float32").fingerprint()
    write_random_router(
        path,
        fingerprint,
        random,
        threshold=torch.full((fingerprint.num_layers, fingerprint.num_heads), -1e4),
        rank_out=torch.zeros(32, 64),
        rank_out_bias=torch.full((64,), 50.0),
    )
    arguments = {
        "model": model_path,
        "seed": 7,
        "lengths": LENGTHS,
        "one_by_one": [],
        "max_tokens": 16,
    }
    stock = run_scenario(
        "scenarios_model:greedy", arguments | {"policy": None}, {"VLLM_PLUGINS": ""}
    )
    policy = {"name": "sekv", "budget": 0.3, "rank": 64, "router": str(path)}
    run = run_scenario(
        "scenarios_sekv:everything_zoomed", arguments | {"policy": policy}
    )
    assert run["together"] == stock["together"]
    assert len({tuple(t) for t in stock["together"].values()}) == len(LENGTHS)
    assert run["compactions"] == len(LENGTHS)


def test_surprisal_is_what_the_model_said(tiny_model):
    lengths = [140, 333, 500]
    arguments: dict[str, Any] = {"model": tiny_model, "lengths": lengths}
    stock = run_scenario(
        "scenarios_sekv:prompt_logprobs", arguments, {"VLLM_PLUGINS": ""}
    )
    recorded = run_scenario(
        "scenarios_sekv:surprisal", arguments | {"policy": {"name": "sekv"}}
    )
    for n in map(str, lengths):
        assert recorded["surprisal"][n] == pytest.approx(
            stock["surprisal"][n], abs=1e-4
        )


@pytest.mark.proves(policy="sekv", runner="runner", asynchronous="asynchronous")
@pytest.mark.parametrize(("runner", "asynchronous"), [("V1", False), ("V2", True)])
def test_company_and_chunks_change_no_token(tiny_model, runner, asynchronous):
    if runner == "V2":
        pytest.importorskip("triton")
    run = run_scenario(
        "scenarios_sekv:answers",
        {
            "model": tiny_model,
            "policy": {"name": "sekv", "budget": 0.3},
            "lengths": [90, 500, 700],
            "max_tokens": 16,
        },
        runners.environment(runner, asynchronous),
    )
    assert run["together"] == run["alone"]
    for length in (500, 700):
        # generated tokens come on top, in blocks that begin where they would in the
        # prompt
        blocks, entries = run["held"][str(length)], run["entries"][str(length)]
        assert entries > 0.4 * 0.3 * length
        assert (blocks - 2) * 32 + entries <= 0.3 * length
    assert run["tracked"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("length", [4096, 7999])
def test_the_budget_holds_at_every_step_of_a_long_prompt(tiny_model, length):
    policy = {"name": "sekv", "budget": 0.1}
    arguments = {
        "model": tiny_model,
        "policy": policy,
        "length": length,
        "max_tokens": 40,
    }
    run = run_scenario("scenarios_sekv:trace", arguments)
    assert len(run["bytes_held"]) > 30
    budget = 0.1 * length * run["token_bytes"]
    assert max(run["bytes_held"]) <= budget
    # and all of the room is used, except for a block
    assert min(run["bytes_held"]) > budget - 32 * run["token_bytes"]
    assert run["host_bytes"] == run["tokens_on_host"]
    assert run["ranks"] == [-1], "short spans are rows"
    assert run["tokens_on_host"] < run["reserved_bytes"]
