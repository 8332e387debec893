"""Drafters with a KV cache: their layers follow a policy, and its tokens do not change.

A drafter that is a copy of the model shows what its layers keep: it is right as long
as they keep the tokens that the model's layers keep, and wrong only in drafts that it
made before a compaction. A noisy copy is sometimes right and sometimes wrong.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import runners
import speculating
from draft_models import (
    drafter,
    write_copy_with_more_heads,
    write_noisy_copy,
    write_pair,
    write_windowed_pair,
)
from harness import run_scenario
from policy_settings import SMALL_BUDGETS, configure
from speculating import LENGTHS

pytestmark = pytest.mark.engine

SEED = 5
FULL = {"name": "full"}
DRAFTS = 3
_ALL = os.environ.get("KVP_TEST_TIER") == "all"
SMALL = SMALL_BUDGETS | {"budget": 64, "skip_layers": 0}


def settings_of(name: str) -> dict[str, Any]:
    return configure(name, SMALL) | {"sessions": False}


@pytest.fixture(scope="module")
def noisy(tiny_model, tmp_path_factory) -> dict[str, Any]:
    """A drafter that the model accepts about half of the time."""
    folder: Path = tmp_path_factory.mktemp("noisy") / "model"
    print("seed", SEED)
    return drafter(write_noisy_copy(folder, tiny_model, SEED, noise=0.05))


def speculate(
    model: str, policy: dict[str, Any], drafts: dict[str, Any], **arguments: Any
) -> dict[str, Any]:
    """A run whose tokens, blocks and state are those without speculation."""
    run = speculating.speculate(model, policy, SEED, drafter=drafts, **arguments)
    speculating.check_changes_nothing(run)
    return run


def check_mixed(run: dict[str, Any]) -> None:
    """Many drafts were accepted, and many were rejected."""
    assert 0.1 * run["drafts"] < run["accepted"] < 0.9 * run["drafts"], run


def check_copied(run: dict[str, Any]) -> None:
    """Only drafts made before a compaction were rejected."""
    rejected = run["drafts"] - run["accepted"]
    assert rejected <= DRAFTS * run["compactions"] < run["drafts"] / 2, run


@pytest.mark.slow
def test_tokens_and_accepted_drafts_are_those_of_stock(tiny_model, noisy):
    check_is_stock(tiny_model, noisy)


def check_is_stock(model: str, drafts: dict[str, Any]) -> None:
    """Under ``full``, tokens are stock's, and so are drafts and accepted drafts."""
    run = speculate(model, FULL, drafts, compares_stock=True)
    check_mixed(run)
    stock = run_scenario(
        "scenarios_speculation:stock_acceptance",
        {
            "model": model,
            "drafter": drafts,
            "seed": SEED,
            "lengths": LENGTHS,
            "max_tokens": 120,
        },
    )
    assert {key: run[key] for key in stock} == stock


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
def test_tokens_and_accepted_drafts_of_heads_are_those_of_stock(
    tiny_model, tmp_path, method
):
    check_is_stock(*write_pair(tmp_path, tiny_model, method))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("eagle", "snapkv"),
        ("eagle", "flowkv"),
        ("eagle", "icecache"),
        ("eagle3", "snapkv"),
        ("eagle3", "sekv"),
        ("mtp", "snapkv"),
    ],
)
def test_tokens_with_heads_are_those_without_drafts(tiny_model, tmp_path, method, name):
    model, head = write_pair(tmp_path, tiny_model, method)
    run = speculate(model, settings_of(name), head)
    assert run["compactions"] >= len(LENGTHS)
    assert run["accepted"] > run["drafts"] / 100


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
def test_preempted_requests_with_heads_go_on_as_without_drafts(
    tiny_model, tmp_path, method
):
    model, head = write_pair(tmp_path, tiny_model, method)
    run = speculate(
        model,
        settings_of("snapkv") | {"decode_budget": None},
        head,
        lengths=[300, 310, 320, 330, 340, 350],
        num_gpu_blocks_override=20,
        max_model_len=480,
    )
    assert run["preemptions"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "snapkv",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("flowkv", "pyramidkv", "h2o", "kvzip", "icecache", "sekv")
        ),
    ],
)
def test_tokens_are_those_without_drafts(tiny_model, noisy, name):
    """Also with compactions while a request generates, where the policy has them."""
    run = speculate(tiny_model, settings_of(name), noisy)
    assert run["compactions"] >= len(LENGTHS)
    assert run["accepted"] > run["drafts"] / 20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("snapkv", "the same"),
        pytest.param("snapkv", "more", marks=pytest.mark.slow),
        pytest.param("flowkv", "the same", marks=pytest.mark.slow),
        pytest.param("full", "more", marks=pytest.mark.slow),
    ],
)
def test_a_copy_of_the_model_keeps_the_same_tokens(tiny_model, tmp_path, name, heads):
    """With as many KV heads as the model, and with twice as many."""
    path = Path(tiny_model)
    if heads == "more":
        path = write_copy_with_more_heads(tmp_path / "copy", tiny_model)
    run = speculate(tiny_model, settings_of(name), drafter(path))
    check_copied(run)
    assert (run["compactions"] > 0) == (name != "full")


ON_V2: dict[str, Any] = {
    "lengths": [40, 130, 300, 410],
    "max_tokens": 60,
    "environment": runners.environment("V2", asynchronous=False),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
def test_heads_on_model_runner_v2(tiny_model, tmp_path, method):
    model, head = write_pair(tmp_path, tiny_model, method)
    run = speculate(model, settings_of("snapkv"), head, **ON_V2)
    assert run["runner"] == "V2"
    assert run["compactions"] >= 4
    assert run["accepted"] > run["drafts"] / 100


@pytest.mark.slow
@pytest.mark.parametrize("name", ["snapkv", "flowkv"])
def test_a_copy_keeps_the_same_tokens_on_model_runner_v2(tiny_model, name):
    run = speculate(tiny_model, settings_of(name), drafter(Path(tiny_model)), **ON_V2)
    assert run["runner"] == "V2"
    check_copied(run)
    assert run["compactions"] >= 4


ON_GPU_KERNEL = ON_V2 | {
    "environment": ON_V2["environment"]
    | {"KVP_TEST_KERNEL": "triton", "KVP_TEST_INTERPRETER": "torch"}
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "name"),
    [("draft_model", "pyramidkv"), ("eagle", "flowkv"), ("eagle3", "icecache")],
)
def test_as_many_drafts_are_right_with_our_triton_kernel(
    tiny_model, noisy, tmp_path, method, name
):
    """The kernel that GPUs use, in an interpreter; the others need a GPU.

    EAGLE-3's head has other KV heads than the model.
    """
    model, drafts = tiny_model, noisy
    if method != "draft_model":
        model, drafts = write_pair(tmp_path, tiny_model, method)
    runs = [
        speculate(model, settings_of(name), drafts, **arguments)
        for arguments in (ON_V2, ON_GPU_KERNEL)
    ]
    cpu, gpu = runs
    assert set(cpu["draft_backends"]) == {"PagedDraftBackend"}
    assert set(gpu["draft_backends"]) == {"TritonDraftBackend"}
    assert gpu["together"] == cpu["together"]
    assert gpu["accepted"] == cpu["accepted"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "snapkv", "flowkv", "sekv"])
def test_preempted_requests_go_on_as_without_drafts(tiny_model, noisy, name):
    run = speculate(
        tiny_model,
        settings_of(name) | ({"decode_budget": None} if name == "snapkv" else {}),
        noisy,
        num_gpu_blocks_override=34 if name == "full" else 28,
        max_model_len=860,
        lengths=[300, 310, 320, 330, 340, 350] if name == "full" else LENGTHS,
        max_tokens=120 if name == "full" else 150,
        compares_stock=name == "full",
    )
    assert run["preemptions"] > 0
    assert run["accepted"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "name"),
    [("draft_model", "full"), ("draft_model", "snapkv"), ("eagle", "snapkv")],
)
def test_random_traffic_leaks_nothing_and_changes_no_token(
    tiny_model, noisy, tmp_path, method, name
):
    model, drafts = tiny_model, noisy
    if method != "draft_model":
        model, drafts = write_pair(tmp_path, tiny_model, method)
    check_random_traffic(model, settings_of(name), drafts, blocks=27)


def check_random_traffic(
    model: str, policy: dict[str, Any], drafts: dict[str, Any], blocks: int
) -> None:
    """All kinds of events happen, and none changes a token."""
    rounds = 100 if _ALL else 20
    counts = run_scenario(
        "scenarios_speculation:fuzz",
        {
            "model": model,
            "policy": policy,
            "drafter": drafts,
            "seed": SEED,
            "rounds": rounds,
            "blocks": blocks,
        },
        timeout=1700,
    )
    print(counts)
    for event in ("requests", "aborts", "hits", "compared", "accepted"):
        assert counts[event] > rounds / 25, counts
    assert counts["differed"] == 0, counts
    assert counts["preemptions"] > 0


@pytest.fixture(scope="module")
def windowed(tmp_path_factory) -> tuple[str, dict[str, Any]]:
    """A model with windowed layers, and a head with full attention."""
    return write_windowed_pair(tmp_path_factory.mktemp("windowed"), SEED)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "snapkv", "pyramidkv", "icecache"])
def test_heads_of_models_with_windows(windowed, name):
    """The head's layer is in the group of the full-attention layers."""
    model, head = windowed
    run = speculate(model, settings_of(name), head, compares_stock=name == "full")
    check_mixed(run)
    assert (run["compactions"] >= len(LENGTHS)) == (name != "full")


@pytest.mark.slow
def test_random_traffic_with_a_head_next_to_windows(windowed):
    model, head = windowed
    check_random_traffic(model, settings_of("snapkv"), head, blocks=60)


@pytest.mark.slow
def test_prompts_that_move_to_the_host_in_blocks(tiny_model, noisy):
    """The model's layers read host memory; the draft layers see what is resident."""
    policy = settings_of("icecache") | {"prefill_block": 96}
    run = speculate(tiny_model, policy, noisy)
    assert run["compactions"] >= 2 * len(LENGTHS)
    assert run["accepted"] > run["drafts"] / 100
