"""Another KV connector next to a policy: it sees exact keys and values only."""

from __future__ import annotations

from typing import Any

import pytest
import runners
from connecting import (
    POLICIES,
    SNAPKV,
    VLLMS_FP8,
    call,
    exact_blocks,
    recomputed,
    stored,
)
from fp8_kernels import needs_kernel
from scenarios_kv_connectors import LENGTHS
from tiers import tiered

pytestmark = pytest.mark.engine

SLOW = tiered(POLICIES, ("snapkv",))


@pytest.fixture(scope="module")
def exact(tiny_model, tmp_path_factory):
    return exact_blocks(tiny_model, tmp_path_factory.mktemp("exact"))


@pytest.mark.parametrize("name", tiered(POLICIES, ("snapkv", "kvzip")))
def test_it_is_shown_exact_blocks_and_serves_them_back(tiny_model, exact, name):
    """Also where the policy runs tokens of its own through the model (kvzip)."""
    result = stored(tiny_model, name, exact)
    assert result["saves"] > 0
    assert result["loads"] > 0
    # Only what no request may start from is computed, and saved, again.
    assert result["saved_again"] < result["saves"] / 4


def check_scheduler(report: dict[str, Any], ahead: bool) -> None:
    """Steps are in flight while others are planned, or not."""
    kind = "Async" if ahead else ""
    assert report["scheduler"] == f"KVPolicy{kind}Scheduler"


@pytest.mark.slow
@pytest.mark.parametrize("keeps", [False, True], ids=["at-once", "at-the-end"])
@pytest.mark.parametrize("name", ["snapkv", "flowkv", "full"])
def test_it_is_shown_exact_blocks_with_steps_in_flight(tiny_model, exact, name, keeps):
    result = stored(
        tiny_model,
        name,
        exact,
        store={"keeps": keeps},
        environment=runners.environment("V1", asynchronous=True),
    )
    check_scheduler(result, ahead=True)
    assert result["loads"] > 0


@pytest.mark.parametrize("name", SLOW)
def test_it_is_shown_no_block_of_the_past(tiny_model, exact, name):
    """Blocks that a connector saves when a request ends are exact, and still held."""
    result = stored(
        tiny_model,
        name,
        exact,
        store={"keeps": True},
    )
    # IceCache also moves the blocks of the shortest prompt.
    assert (result["released"] > 0) == (name != "icecache")


@pytest.fixture(scope="module")
def exact_fp8(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fp8")
    return exact_blocks(tiny_model, folder, cache="fp8")


@pytest.mark.parametrize(
    ("name", "filled"),
    [
        ("snapkv", True),
        pytest.param("snapkv", False, marks=pytest.mark.slow),
        pytest.param("flowkv", False, marks=pytest.mark.slow),
        pytest.param("kvzip", False, marks=pytest.mark.slow),
        pytest.param("full", False, marks=pytest.mark.slow),
    ],
)
def test_elements_of_an_fp8_cache_are_exact(tiny_model, exact_fp8, name, filled):
    result = stored(tiny_model, name, exact_fp8, cache="fp8", filled=filled)
    assert result["types"] == ["torch.uint8"]
    assert result["loads"] > 0


@needs_kernel
@pytest.mark.slow
@pytest.mark.parametrize("name", ["snapkv", "flowkv", "kvzip", "icecache", "full"])
def test_elements_that_vllms_kernel_writes_are_exact(tiny_model, tmp_path, name):
    exact = exact_blocks(tiny_model, tmp_path, **VLLMS_FP8)
    result = stored(tiny_model, name, exact, **VLLMS_FP8)
    assert result["types"] == ["torch.uint8"]
    assert result["loads"] > 0


# First compaction of the long prompt, and the newest queries that it needs.
CUTS = {
    "snapkv": 700 - 64,
    "flowkv": 200 - 64,
    "icecache": 700 - 1,
    "streaming-llm": 700 - 1,
    "full": 704,
    "prefill-blocks": 96 + 192 - 64,
    "decode-budget": 700 - 64,
    "no-queries": 700 - 1,
    "kvzip": 700 - 1,
    "infinipot": 700 - 1,
    "epicache": 192,  # whole blocks before the end of a block of history, 224
}


@pytest.mark.parametrize("loads", ["sync", "async"])
@pytest.mark.parametrize("name", SLOW)
def test_whole_prompts_are_loaded_and_then_compacted(tiny_model, exact, name, loads):
    """What an engine without a policy stored, as in a pair of prefill and decode."""
    result = stored(
        tiny_model,
        name,
        exact,
        store={"loads": loads},
        filled=True,
    )
    # The store has whole blocks.
    assert result["cached"][2] == min(CUTS[name], 672)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["snapkv", "flowkv", "icecache"])
def test_preempted_requests_load_again(tiny_model, exact, name):
    result = stored(
        tiny_model,
        name,
        exact,
        # while prompts are computed, and while answers are
        preempt_at=[2, 4, 20],
    )
    assert result["preemptions"] >= 8


@pytest.mark.slow
def test_the_longer_of_a_session_and_the_store_wins(tiny_model, exact):
    policy = SNAPKV | {"sessions": True}
    report = call("longer", model=tiny_model, policy=policy, path=exact)
    assert report["cached"] == [480, 600, 480]
    assert report["loads"] == [15, 0, 0]
    assert report["hits"] == [0, 1, 1]
    assert report["tracked"] == 0


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
@pytest.mark.slow
def test_clients_that_leave_while_their_prompts_are_loaded(tiny_model, exact, ahead):
    policy = SNAPKV | {"sessions": True}
    environment = runners.environment("V1", asynchronous=ahead)
    report = call("aborted", environment, model=tiny_model, policy=policy, path=exact)
    check_scheduler(report, ahead)
    assert report["states"] == ["RUNNING", "WAITING", "WAITING_FOR_REMOTE_KVS"]
    assert report["tokens"] == recomputed(tiny_model, "snapkv")["long"]
    assert report["tracked"] == 0


@pytest.mark.parametrize("loads", ["sync", "async"])
@pytest.mark.parametrize("broken", [32, 320], ids=["first", "later"])
@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
@pytest.mark.slow
def test_blocks_that_cannot_be_loaded_are_computed(
    tiny_model, exact, loads, broken, ahead
):
    report = call(
        "failed",
        model=tiny_model,
        policy=SNAPKV,
        path=exact,
        store={"loads": loads, "broken": [broken], "failure_policy": "recompute"},
        environment=runners.environment("V1", asynchronous=ahead),
    )
    check_scheduler(report, ahead)
    assert report["tokens"] == recomputed(tiny_model, "snapkv")
    assert report["loads"] > 0
    assert (report["preemptions"] > 0) == (loads == "sync")
    assert report["wrong"] == []
    assert report["tracked"] == 0


@pytest.mark.slow
def test_a_failed_load_fails_the_request_by_default(tiny_model, exact):
    report = call(
        "failed",
        model=tiny_model,
        policy=SNAPKV,
        path=exact,
        store={"broken": [320]},
    )
    stock = recomputed(tiny_model, "snapkv")
    assert report["tokens"]["short"] == stock["short"]
    # The block is among those that the policy computes again, for their queries.
    assert report["tokens"]["middle"] == stock["middle"]
    assert report["tokens"]["long"] == []
    assert report["finished"] == len(LENGTHS)
    assert report["tracked"] == 0


# -- vLLM's ExampleConnector: prefill and decode in two processes --------------------


@pytest.mark.parametrize(
    ("prefill", "decode", "multi"),
    [
        (None, "snapkv", False),
        pytest.param(None, "flowkv", False, marks=pytest.mark.slow),
        pytest.param(None, "full", False, marks=pytest.mark.slow),
        pytest.param("full", "snapkv", False, marks=pytest.mark.slow),
        pytest.param("snapkv", "snapkv", False, marks=pytest.mark.slow),
        pytest.param(None, "snapkv", True, marks=pytest.mark.slow),
    ],
)
def test_prefill_and_decode(tiny_model, tmp_path, prefill, decode, multi):
    """Args: multi: the connector is in a MultiConnector on the decode side."""
    names = ["middle", "long"]
    shared = {"model": tiny_model, "folder": str(tmp_path), "names": names}
    policy = None if prefill is None else POLICIES[prefill]
    first = call("shared", policy=policy, role="kv_producer", **shared)
    assert first["files"] == 2 * 2  # prompts, layers
    policy = POLICIES[decode]
    second = call("shared", policy=policy, role="kv_consumer", multi=multi, **shared)
    expected = recomputed(tiny_model, decode)
    assert second["tokens"] == {name: expected[name] for name in names}
    if decode != "flowkv":
        assert min(second["cached"].values()) > 150
