"""Retrieval in a real engine: tokens, memory, and leaks."""

from __future__ import annotations

import os

import pytest
from harness import INTERPRETED, run_scenario
from policy_settings import policies_that, retrieve
from texts import random_tokens
from tiers import tiered
from tiny_model import VOCABULARY

pytestmark = pytest.mark.engine

RETRIEVERS = policies_that(retrieve)
QUICK = ("icecache",)
SMALL = {"skip_layers": 1, "sinks": 16, "window": 32}
ON_DEVICE = {"name": "icecache", "index": "device", "host_memory": "64MiB", **SMALL}
LENGTHS = [100, 700, 1500]
_ALL = os.environ.get("KVP_TEST_TIER") == "all"
ROUNDS, SAMPLES = (40, 6) if _ALL and not INTERPRETED else (12, 3)


@pytest.mark.proves(policy="name")
@pytest.mark.parametrize("name", tiered(RETRIEVERS, ("icecache", "quest")))
def test_fetching_everything_is_stock(tiny_model, name):
    """With a budget above the context, all tokens are offloaded and fetched again."""
    arguments = {"model": tiny_model, "lengths": LENGTHS, "max_tokens": 60}
    stock = run_scenario("scenarios_tiny:answers", arguments | {"policy": None})
    policy = {"name": name, **SMALL, "budget": 1600}
    whole = run_scenario("scenarios_tiny:answers", arguments | {"policy": policy})
    assert whole["tokens"] == stock["tokens"]


def test_a_device_that_fetches_everything_is_stock(tiny_model):
    """Selected by the device, which is the CPU here. Chunks of prompts, and a prompt in
    blocks whose tokens attend to host memory.
    """
    arguments = {"model": tiny_model, "lengths": LENGTHS, "max_tokens": 60}
    stock = run_scenario("scenarios_tiny:answers", arguments | {"policy": None})
    for more in ({}, {"prefill_block": 256}):
        policy = ON_DEVICE | {"budget": 1600} | more
        whole = run_scenario("scenarios_tiny:answers", arguments | {"policy": policy})
        assert whole["tokens"] == stock["tokens"], more


def test_whole_pages_of_everything_are_stock(tiny_model):
    """Host memory has tokens in the order of pages. Prompts in one piece, and in blocks
    whose tokens attend to host memory.
    """
    arguments = {"model": tiny_model, "lengths": LENGTHS, "max_tokens": 60}
    stock = run_scenario("scenarios_tiny:answers", arguments | {"policy": None})
    for more in ({}, {"prefill_block": 256}):
        policy = {"name": "icecache", "fetch": "pages", **SMALL, "budget": 1600} | more
        whole = run_scenario("scenarios_tiny:answers", arguments | {"policy": policy})
        assert whole["tokens"] == stock["tokens"], more


def test_means_of_one_token_each_are_stock(tiny_model):
    """Then every token has attention: through its mean if it is not selected. Answers
    are long enough that generated tokens move to the host, too.
    """
    arguments = {"model": tiny_model, "lengths": LENGTHS, "max_tokens": 60}
    stock = run_scenario("scenarios_tiny:answers", arguments | {"policy": None})
    policy = {"name": "icecache", **SMALL, "budget": 16, "mean_tokens": 1}
    for more in ({}, {"prefill_block": 256}, ON_DEVICE):
        arguments["policy"] = {**more, **policy}
        with_means = run_scenario("scenarios_tiny:answers", arguments)
        assert with_means["tokens"] == stock["tokens"], more
    without = arguments | {"policy": policy | {"mean_tokens": 0}}
    assert run_scenario("scenarios_tiny:answers", without)["tokens"] != stock["tokens"]


def test_a_device_answers_as_the_host(tiny_model):
    """With a fifth of the tokens, codes on the device and exact keys on the host choose
    the same often enough that most answers are the same. Random weights make a chaotic
    model: one other token changes all that follow.
    """
    prompts = [random_tokens(seed, 300, VOCABULARY) for seed in range(6)]
    runs = {}
    for policy in (ON_DEVICE, {"name": "exact-topk", **SMALL}):
        arguments = {"model": tiny_model, "prompts": prompts, "max_tokens": 40}
        runs[policy["name"]] = run_scenario(
            "scenarios_retrieval:host_memory",
            arguments | {"policy": policy | {"budget": 64}},
        )
    device, host = runs["icecache"], runs["exact-topk"]
    same = [device["tokens"][name] == host["tokens"][name] for name in "012345"]
    print(same)
    assert sum(same) >= 4
    assert device["reserved"] == host["reserved"], "codes are not on the host"


@pytest.mark.slow
def test_resident_memory_stays_flat(tiny_model):
    """One of two layers keeps everything, so that half of the generated tokens stay."""
    policy = {"name": "icecache", **SMALL, "budget": 64}
    steps = run_scenario(
        "scenarios_retrieval:held_while_generating",
        {"model": tiny_model, "policy": policy, "prompt": 1000, "max_tokens": 1500},
    )
    pages = -(-(16 + 64 + 32) // 32)
    for tokens, held in steps:
        full = tokens // 32
        allowed = (pages + full) / 2 + 2  # the tail, a block that becomes old, rounding
        assert held <= allowed, (tokens, held)
    assert steps[-1][0] > 2400


def test_requests_take_turns_in_a_small_host_tier(tiny_model):
    run = run_scenario(
        "scenarios_retrieval:turns",
        {
            "model": tiny_model,
            # one layer of two, 512 bytes per token, for at most two requests
            "policy": {"name": "quest", **SMALL, "budget": 64, "host_memory": "1MiB"},
            "lengths": [700, 710, 720, 730, 740],
            "max_tokens": 40,
        },
    )
    assert run["most_at_once"] == 2
    assert run["most_held"] == 3
    assert run["finished"] == 5
    assert run["reserved_after"] == run["held_after"] == 0
    assert "lower max_tokens" in run["refused"]


def test_quantized_host_memory_answers_as_before(tiny_model):
    """Random weights make a chaotic model: 4 of 6 answers of 40 tokens are the same.
    With 4 bits, none is. Rows have 32 channels: 128 bytes in float32, 36 in int8.
    """
    runs = {}
    for host_dtype in ("auto", "int8"):
        policy = {"name": "icecache", **SMALL, "budget": 64, "host_dtype": host_dtype}
        prompts = [random_tokens(seed, 300, VOCABULARY) for seed in range(6)]
        runs[host_dtype] = run_scenario(
            "scenarios_retrieval:host_memory",
            {
                "model": tiny_model,
                "policy": policy,
                "prompts": prompts,
                "max_tokens": 40,
            },
        )
    exact, quantized = runs["auto"], runs["int8"]
    same = [quantized["tokens"][name] == exact["tokens"][name] for name in "012345"]
    assert sum(same) >= 4
    assert quantized["used"] * 128 == exact["used"] * 36 > 0
    # The index takes up to half of bfloat16 keys and values, whatever the cache holds.
    assert quantized["reserved"] / exact["reserved"] == (36 / 128 + 0.25) / 1.25
    assert exact["reserved"] > exact["used"]
    assert quantized["reserved"] > quantized["used"]


@pytest.mark.slow
@pytest.mark.parametrize("host_dtype", ["auto", "int8", "int4"])
def test_pass_keys_in_quantized_host_memory(model_path, host_dtype):
    policy = {"name": "icecache", "budget": 64, "host_dtype": host_dtype}
    arguments = {"model": model_path, "policy": policy, "tokens": 1000, "depths": 20}
    found = run_scenario("scenarios_retrieval:pass_keys", arguments, timeout=900)
    print(host_dtype, found, "of 20")
    assert found >= (15 if host_dtype == "int4" else 20)


def test_traffic_leaves_nothing_behind(tiny_model):
    report = run_scenario(
        "scenarios_contract:traffic",
        {
            "model": tiny_model,
            "policies": {
                name: {"name": name, **SMALL, "budget": 64}
                for name in (RETRIEVERS if _ALL else QUICK)
            }
            | {"on the device": ON_DEVICE | {"budget": 64}},
            "seed": 3,
            "rounds": ROUNDS,
            "samples": SAMPLES,
            "blocks": 40,
        },
    )
    for name, counts in report.items():
        assert "error" not in counts, (name, counts["error"])
        assert counts["compactions"] > ROUNDS / 2
        assert counts["aborts"] > ROUNDS / 13
