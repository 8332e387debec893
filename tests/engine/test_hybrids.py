"""Models with windowed and full-attention layers: the policy manages the full ones.

Their other layers stay vLLM's. The tiny models have a window of two blocks and random
weights, so these tests prove token identity, reclaim and absence of leaks, not quality.
"""

from __future__ import annotations

import functools
import itertools
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from harness import run_scenario
from kept_positions import agreement
from policy_settings import SMALL_BUDGETS, configure
from tiny_hybrids import MODELS, write_tiny_hybrid
from tiny_model import VOCABULARY

from vllm_kvplugins.model_config import read_model_config
from vllm_kvplugins.model_memory import ModelMemory
from vllm_kvplugins.policies.registry import available_policies

pytestmark = pytest.mark.engine

SEED = 7
FAST = "gemma3"  # the others run in the full tier
_ALL = os.environ.get("KVP_TEST_TIER") == "all"
POLICIES: dict[str, dict[str, Any]] = {
    "full": {"name": "full"},
    "snapkv": {"name": "snapkv", "budget": 128},
    "icecache": {"name": "icecache", "budget": 32, "skip_layers": 0},
}
# Codes round keys, so the last bits of a key, which depend on the batch where the CPU
# has AVX-512, may change what they find. The tree reads the keys themselves.
READS_KEYS = POLICIES | {"icecache": POLICIES["icecache"] | {"index": "dci"}}
# They cap attention logits, which retrievers do not model.
REFUSED = {("gemma2", "icecache")}


def _cases(policies: list[str], slow: tuple[str, ...] = ("icecache",)) -> Any:
    """Models, with these policies if there are any.

    The default tier has one model, without the slow policies.
    """
    params = [
        pytest.param(
            model,
            *policy,
            marks=[] if model == FAST and not {*policy} & {*slow} else pytest.mark.slow,
            id="-".join((model, *policy)),
        )
        for model in MODELS
        for policy in ([(name,) for name in policies] or [()])
        if (model, *policy) not in REFUSED
    ]
    names = "model, policy" if policies else "model"
    return pytest.mark.parametrize(names, params)


models = _cases([])
compressing = _cases([name for name in POLICIES if name != "full"])
all_policies = _cases(list(POLICIES))
fuzzed = _cases(list(POLICIES), slow=("full", "icecache"))


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@functools.cache
def folder_of(model: str) -> str:
    print("seed", SEED)
    return str(write_tiny_hybrid(Path(_folder().name, model), model, SEED))


@functools.cache
def seen(scenario: str, model: str, policy: str) -> dict[str, Any]:
    environment: dict[str, str | None] = {}
    if policy == "stock":
        environment["VLLM_PLUGINS"] = ""
        if model == "llama4":  # as with a policy; otherwise its hits are shorter
            environment["VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE"] = "1"
    policies = READS_KEYS if scenario == "traffic" else POLICIES
    arguments = {"model": folder_of(model), "policy": policies.get(policy)}
    result: dict[str, Any] = run_scenario(
        f"scenarios_hybrids:{scenario}", arguments, environment
    )
    return result


PHASES = ("alone", "together", "hits", "misses", "preempted")


@pytest.mark.proves(architecture="model", policy="full")
@models
@pytest.mark.parametrize("phase", PHASES)
def test_keeping_everything_is_stock(model, phase):
    """Same tokens as stock vLLM: alone, together, after hits and preemptions."""
    stock, run = (seen("traffic", model, policy) for policy in ("stock", "full"))
    assert run[phase] == stock[phase]


@models
def test_prefix_hits_are_those_of_stock(model):
    stock, run = (seen("traffic", model, policy) for policy in ("stock", "full"))
    assert run["cached"] == stock["cached"]
    # Not "longer": vLLM reuses blocks behind a window first.
    for name, tokens in (("same", 672), ("shorter", 512), ("turn", 672)):
        assert run["cached"][name] >= tokens, run["cached"]
    assert run["hits"] == run["misses"], "hits change tokens"


@models
def test_the_traffic_is_what_it_claims_to_be(model):
    """Otherwise the tests above would prove little."""
    stock = seen("traffic", model, "stock")
    assert stock["preemptions"] == 4
    assert len({tuple(answer) for answer in stock["alone"]}) == 4
    assert sum(len(set(answer)) for answer in stock["alone"]) > 12
    assert min(map(min, stock["margins"])) > 1e-3, "two tokens are too close"


@pytest.mark.slow
@compressing
def test_tokens_do_not_depend_on_the_cache(model, policy):
    run = seen("traffic", model, policy)
    assert run["hits"] == run["misses"]
    assert run["alone"] == run["together"] == run["preempted"]
    assert run["compactions"] > 0
    if policy == "snapkv":  # a retriever may well find what is attended to
        assert run["alone"] != seen("traffic", model, "stock")["alone"]
    assert any(tokens > 0 for tokens in run["cached"].values())


@pytest.mark.proves(architecture="model", policy="policy")
@compressing
def test_blocks_are_freed_as_planned(model, policy):
    """Blocks are freed as planned, in the group of full attention only."""
    run = seen("reclaim", model, policy)
    decoding = [step for step in run["steps"] if step["computed"] > 1500]
    managed = run["managed"]
    for before, step in itertools.pairwise(decoding):
        own, planned = step["held"][managed], step["planned"]
        # Blocks of a compaction come back when the next step is scheduled.
        assert own in (planned, max(planned, before["planned"])), step
        assert step["resident_tokens"] == own * run["block_size"]
        for group, held in enumerate(step["held"]):
            if group != managed:  # a window of two blocks, and the one it grows into
                assert held <= 4, step
    assert run["freed"] >= 1500 // run["block_size"] - decoding[-1]["planned"]
    assert run["freed"] > 30


@compressing
def test_reported_bytes_are_those_of_the_pool(model, policy):
    """The blocks in vLLM's gauge are of all layers, and have the size that we state."""
    run = seen("reclaim", model, policy)
    memory = ModelMemory.of(read_model_config(folder_of(model), "float32"), 32)
    assert run["pool_bytes"] == run["blocks"] * memory.block_bytes
    for step in run["steps"]:
        used = step["used_share"] * (run["blocks"] - 1)  # without the null block
        assert used == pytest.approx(sum(step["held"]), abs=0.01), step


@pytest.mark.slow
@all_policies
def test_nothing_stays_behind(model, policy):
    run = seen("traffic", model, policy)["left_behind"]
    assert run == {"tracked": 0, "held": 0, "missing": 0}


@pytest.mark.slow
@fuzzed
def test_random_traffic_leaks_nothing_and_changes_no_token(model, policy):
    arguments = {
        "model": folder_of(model),
        "policy": READS_KEYS[policy] | ({"budget": 96} if policy == "snapkv" else {}),
        "seed": SEED,
        "rounds": 200 if _ALL else 25,
        # The longest request takes 25 blocks, and a few in each window; Llama 4 has
        # three groups of chunked layers.
        "blocks": 46 if model == "llama4" else 42,
        # A preempted request reads its own answer with full attention, so a retriever
        # may go on with other tokens (docs/policies/exact-topk.md).
        "compares_preempted": policy != "icecache",
    }
    counts = run_scenario("scenarios_fuzz:fuzz", arguments, timeout=900)
    print(counts)
    for event in ("requests", "hits", "compared"):
        assert counts[event] > 0, counts
    assert counts["differed"] == 0
    assert policy == "full" or counts["compactions"] > 0


# Not those whose attention matrices transformers does not return: with learned sinks,
# and with chunks for a sequence of this length.
PROBED = [
    pytest.param(model, marks=[] if model == FAST else pytest.mark.slow, id=model)
    for model in MODELS
    if model not in ("gpt_oss", "llama4")
]


@pytest.mark.parametrize("model", PROBED)
def test_probes_see_what_transformers_sees(model):
    """KVzip repeats the prompt; each layer with a window attends to its window."""
    runs = run_scenario(
        "scenarios_probe:kept_and_wanted",
        {
            "model": folder_of(model),
            "policy": {
                "name": "kvzip",
                "budget": 192,
                "chunk": 256,
                "allocator": "uniform",
            },
            "seed": SEED,
            "lengths": [333, 608],
            "vocabulary": VOCABULARY,
            "max_model_len": 4096,
            "max_num_batched_tokens": 512,
        },
    )
    for length, run in runs.items():
        agree = agreement(run["kept"], run["scores"], int(length))
        print(length, "agreement", agree)
        assert agree > 0.99


# One per way of working that the other tests of this file do not run.
QUICK = ("kvzip",)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        pytest.param(
            model,
            name,
            marks=[] if model == FAST and name in QUICK else pytest.mark.slow,
            id=f"{model}-{name}",
        )
        for model in (FAST, "gpt_oss")
        for name in available_policies()
    ],
)
def test_every_policy_runs_next_to_windows(model, name):
    settings = SMALL_BUDGETS | {"skip_layers": 0, "sessions": False}
    policy = configure(name, settings) | {"sessions": False}
    run = run_scenario(
        "scenarios_hybrids:any_policy", {"model": folder_of(model), "policy": policy}
    )
    assert run["alone"] == run["together"]
    assert run["left_behind"] == {"tracked": 0, "held": 0, "missing": 0}
    assert name == "full" or run["compactions"] >= 4
    assert name == "full" or run["freed"] > 10
