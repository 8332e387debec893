"""Speculative decoding: a policy's tokens, blocks and sessions are those without it.

An oracle drafts the tokens that follow, one in four of them wrong, so most steps accept
some drafts and reject others. Rejected drafts must leave no trace: in votes, in kept
queries, in the host tier, in spans, in sessions.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import runners
import speculating
from harness import run_scenario
from policy_settings import SMALL_BUDGETS, configure
from speculating import LENGTHS
from tiny_hybrids import write_tiny_hybrid

from vllm_kvplugins.policies.registry import available_policies

pytestmark = pytest.mark.engine

SEED = 5
# With more than 256 keys pqcache runs k-means, which turns the rounding of another
# batch shape into another choice; also without drafts.
FEW_KEYS = [40, 100, 130]
_ALL = os.environ.get("KVP_TEST_TIER") == "all"
# One per way of working; the others run in the full tier.
QUICK = ("icecache",)
# Codes round keys, so the last bits of a key, which depend on the batch where the CPU
# has AVX-512, may change what they find. The tree reads the keys themselves.
USE_CODES = ("icecache", "icecache-means")
FOLDING = SMALL_BUDGETS | {"budget": 64, "skip_layers": 0, "sessions": False}


def cases(names: tuple[str, ...]) -> list[Any]:
    return [
        pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in names
    ]


def settings_of(name: str) -> dict[str, Any]:
    index = {"index": "dci"} if name in USE_CODES else {}
    return configure(name, FOLDING) | {"sessions": False} | index


def speculate(model: str, policy: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    return speculating.speculate(model, policy, SEED, **arguments)


def check(run: dict[str, Any]) -> None:
    """The claims of every run."""
    speculating.check_changes_nothing(run)
    assert 0.2 * run["drafts"] < run["accepted"] < 0.9 * run["drafts"]


@pytest.mark.parametrize("name", cases(available_policies()))
def test_tokens_are_those_without_drafts(tiny_model, name):
    """Also with compactions while a request generates, where the policy has them."""
    lengths = FEW_KEYS if name == "pqcache" else LENGTHS
    run = speculate(tiny_model, settings_of(name), lengths=lengths)
    check(run)
    assert name == "full" or run["compactions"] >= len(lengths)


@pytest.mark.parametrize("name", cases(USE_CODES))
def test_codes_select_for_each_draft(tiny_model, name):
    """Rounding changes the tokens of some requests; wrong queries change most."""
    run = speculate(tiny_model, settings_of(name) | {"index": "codes"})
    speculating.check_blocks(run)
    for kind in ("together", "alone"):
        same = [run[kind][request] == run["plain"][request] for request in run["plain"]]
        assert sum(same) >= len(same) / 2, kind


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("arctic_inference") is None,
    reason="needs arctic-inference",
)
@pytest.mark.parametrize("name", ["full", "snapkv", "flowkv", "icecache", "sekv"])
def test_suffixes_of_answers_are_drafted(tiny_model, name):
    """vLLM drafts what followed the last tokens in this and in earlier answers."""
    suffix = {"method": "suffix", "num_speculative_tokens": 4}
    run = speculate(tiny_model, settings_of(name), drafter=suffix)
    speculating.check_changes_nothing(run)
    assert 0 < run["accepted"] < run["drafts"]


@pytest.mark.slow
def test_a_device_selects_for_each_draft(tiny_model):
    device = {"index": "device", "host_memory": "64MiB"}
    run = speculate(tiny_model, settings_of("icecache") | device)
    check(run)
    assert run["compactions"] >= len(LENGTHS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["full", "snapkv", "flowkv", "h2o", "icecache", "sekv"]
)
def test_model_runner_v2_changes_no_token(tiny_model, name):
    """The runner that vLLM has on GPUs tells which drafts were accepted, too."""
    run = speculate(
        tiny_model,
        settings_of(name),
        lengths=[40, 130, 300, 410],
        max_tokens=60,
        environment=runners.environment("V2", asynchronous=False),
    )
    check(run)
    assert run["runner"] == "V2"
    assert name == "full" or run["compactions"] >= 4


@pytest.mark.slow
def test_layers_that_keep_all_tokens_attend_to_them(tiny_model):
    """The stock kernel attends there, also in steps whose rows all have drafts."""
    check(speculate(tiny_model, settings_of("exact-topk") | {"skip_layers": 1}))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "snapkv", "flowkv", "sekv"])
def test_preempted_requests_go_on_as_without_drafts(tiny_model, name):
    blocks = 34 if name == "full" else 28
    run = speculate(
        tiny_model,
        settings_of(name) | ({"decode_budget": None} if name == "snapkv" else {}),
        num_gpu_blocks_override=blocks,
        max_model_len=860,
        lengths=[300, 310, 320, 330, 340, 350] if name == "full" else LENGTHS,
        max_tokens=120 if name == "full" else 150,
    )
    check(run)
    assert run["preemptions"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "name"),
    [("gpt_oss", "icecache"), ("gpt_oss", "sekv"), ("gemma3", "snapkv")],
)
def test_windows_and_sinks_are_as_without_drafts(model, name):
    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny_hybrid(Path(folder, model), model, SEED)
        check(speculate(str(path), settings_of(name)))


@functools.cache
def talks(model: str, name: str) -> dict[str, Any]:
    budgets = {} if name == "flowkv" else {"budget": 96}
    run: dict[str, Any] = run_scenario(
        "scenarios_speculation:talks",
        {
            "model": model,
            "policy": {"name": name, "sessions": True} | budgets,
            "questions": [300, 60, 90, 40],
            "number": 3,
            "seed": SEED,
        },
        timeout=580,
    )
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["snapkv", "flowkv", "expected-attention", "streaming-llm"]
)
def test_sessions_go_on_as_without_drafts(tiny_model, name):
    run = talks(tiny_model, name)
    assert run["accepted"] > 20
    plain, speculating = run["plain"], run["speculating"]
    for key in ("answers", "tracked"):
        assert speculating[key] == plain[key], key
    for turn, with_drafts in zip(plain["cached"], speculating["cached"], strict=True):
        for cached, more in zip(turn, with_drafts, strict=True):
            # The last token of an answer has KV if it was an accepted draft.
            assert cached <= more <= cached + 1
    assert all(cached > 0 for cached in plain["cached"][-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "snapkv", "icecache"])
def test_random_traffic_leaks_nothing_and_changes_no_token(tiny_model, name):
    """With the lookup of n-grams that vLLM has, which is seldom right here."""
    rounds = 300 if _ALL else 30
    counts = run_scenario(
        "scenarios_speculation:fuzz",
        {
            "model": tiny_model,
            "policy": settings_of(name),
            "seed": SEED,
            "rounds": rounds,
            "blocks": 26,
            # A preempted request reads its own answer with full attention.
            "compares_preempted": name != "icecache",
        },
        timeout=1700,
    )
    print(counts)
    for event in ("requests", "aborts", "hits", "compared", "accepted"):
        assert counts[event] > rounds / 25, counts
    assert counts["differed"] == 0, counts
    assert counts["preemptions"] > 0
