"""Another KV connector next to a policy, while the engine speculates.

An oracle drafts the tokens that follow, one in four of them wrong. The connector is
shown accepted tokens only: every block that it saves equals that of vLLM without a
policy and without speculation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from connecting import (
    POLICIES,
    SNAPKV,
    VLLMS_FP8,
    call,
    exact_blocks,
    recomputed,
    stored,
)
from draft_models import drafter, write_noisy_copy, write_pair
from fp8_kernels import needs_kernel
from tiers import tiered

pytestmark = pytest.mark.engine

SLOW = tiered(POLICIES, ("snapkv",))


of_both_kernels = pytest.mark.parametrize(
    "cache",
    [
        pytest.param({"cache": "fp8"}, id="in torch"),
        pytest.param(VLLMS_FP8, id="vLLM's kernel", marks=needs_kernel),
    ],
)


@pytest.fixture(scope="module")
def exact(tiny_model, tmp_path_factory):
    return exact_blocks(tiny_model, tmp_path_factory.mktemp("exact"))


def oracle(model: str, name: str, **cache: Any) -> dict[str, Any]:
    """Drafts from the answers under a policy."""
    return {"answers": recomputed(model, name, **cache)}


def drafted(
    model: str,
    name: str,
    exact: str,
    cache: dict[str, Any] | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """``stored`` with the oracle: most steps accept some drafts and reject others."""
    settings = cache or {}
    drafts = oracle(model, name, **settings)
    result = stored(model, name, exact, drafts=drafts, **settings, **arguments)
    assert 0.2 * result["drafts"] < result["accepted"] < 0.9 * result["drafts"]
    return result


@pytest.mark.parametrize("name", SLOW)
def test_it_is_shown_accepted_tokens_only(tiny_model, exact, name):
    result = drafted(tiny_model, name, exact)
    assert result["saves"] > 0
    assert result["loads"] > 0
    # The shortest prompt is never compacted, but for IceCache.
    assert (result["answers"] > 0) == (name != "icecache")


@pytest.mark.slow
@of_both_kernels
@pytest.mark.parametrize("name", ["snapkv", "decode-budget", "flowkv", "icecache"])
def test_elements_of_an_fp8_cache_are_of_accepted_tokens(
    tiny_model, tmp_path, name, cache
):
    exact = exact_blocks(tiny_model, tmp_path, **cache)
    result = drafted(tiny_model, name, exact, cache)
    assert result["types"] == ["torch.uint8"]
    assert result["loads"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["snapkv", "full", "decode-budget"])
def test_blocks_of_an_ended_request_have_accepted_tokens_only(tiny_model, exact, name):
    result = drafted(tiny_model, name, exact, store={"keeps": True})
    assert result["answers"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("loads", ["sync", "async"])
@pytest.mark.parametrize("name", list(POLICIES))
def test_whole_prompts_are_loaded_and_then_drafts_follow(
    tiny_model, exact, name, loads
):
    result = drafted(tiny_model, name, exact, store={"loads": loads}, filled=True)
    assert result["loads"] > 20


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [POLICIES["no-queries"], SNAPKV | {"sessions": True}],
    ids=["loaded", "session"],
)
def test_the_last_token_before_a_compaction_has_no_drafts(tiny_model, exact, policy):
    """vLLM would fill it up with drafts that do not exist."""
    path = None if "sessions" in policy else exact
    shared = {"model": tiny_model, "policy": policy, "path": path}
    plain, drafted = (call("one_left", speculates=s, **shared) for s in (False, True))
    assert drafted == plain
    assert plain["left"] == plain["compactions"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["snapkv", "flowkv", "full"])
def test_preempted_requests_load_and_draft_again(tiny_model, exact, name):
    # while prompts are computed, and while answers are
    result = drafted(tiny_model, name, exact, preempt_at=[2, 4, 9])
    assert result["preemptions"] >= 8


@pytest.mark.slow
def test_clients_that_leave_while_their_prompts_are_loaded(tiny_model, exact):
    report = call(
        "aborted",
        model=tiny_model,
        policy=SNAPKV,
        path=exact,
        drafts=oracle(tiny_model, "snapkv"),
    )
    assert report["states"] == ["RUNNING", "WAITING", "WAITING_FOR_REMOTE_KVS"]
    assert report["tokens"] == recomputed(tiny_model, "snapkv")["long"]
    assert report["tracked"] == 0


@pytest.mark.slow
def test_clients_that_leave_while_their_drafts_are_verified(tiny_model, exact):
    report = call(
        "aborted_in_step",
        model=tiny_model,
        policy=POLICIES["full"],
        path=exact,
        drafts=oracle(tiny_model, "full"),
    )
    assert report["unverified"]
    assert report["saved"] > 0
    assert report["wrong"] == []
    assert report["tracked"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("loads", ["sync", "async"])
@pytest.mark.parametrize("broken", [32, 320], ids=["first", "later"])
def test_blocks_that_cannot_be_loaded_are_computed(tiny_model, exact, loads, broken):
    report = call(
        "failed",
        model=tiny_model,
        policy=SNAPKV,
        path=exact,
        store={"loads": loads, "broken": [broken], "failure_policy": "recompute"},
        drafts=oracle(tiny_model, "snapkv"),
    )
    assert report["tokens"] == recomputed(tiny_model, "snapkv")
    assert report["loads"] > 0
    assert (report["preemptions"] > 0) == (loads == "sync")
    assert report["wrong"] == []
    assert report["tracked"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["snapkv", "full"])
def test_the_decode_side_of_a_pair_speculates(tiny_model, tmp_path, name):
    """vLLM's ExampleConnector; the prefill side has no policy and does not draft."""
    names = ["middle", "long"]
    shared = {"model": tiny_model, "folder": str(tmp_path), "names": names}
    call("shared", policy=None, role="kv_producer", **shared)
    second = call(
        "shared",
        policy=POLICIES[name],
        role="kv_consumer",
        drafts=oracle(tiny_model, name),
        **shared,
    )
    expected = recomputed(tiny_model, name)
    assert second["tokens"] == {name: expected[name] for name in names}
    assert min(second["cached"].values()) > 150
    assert 0 < second["accepted"] < second["drafts"]


# -- drafters with a KV cache: a connector stores and loads their layers, too ---------


@pytest.fixture(scope="module", params=["draft_model", "eagle", "mtp"])
def pair(request, tiny_model, tmp_path_factory):
    """A model, a drafter for it, and the blocks of both without a policy."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    model, head = tiny_model, None
    if request.param == "draft_model":
        head = drafter(write_noisy_copy(folder / "noisy", tiny_model, 5, noise=0.05))
    else:
        model, head = write_pair(folder, tiny_model, request.param)
    drafts = {"drafter": head}
    (folder / "plain").mkdir()
    (folder / "drafted").mkdir()
    path = exact_blocks(model, folder / "plain")
    with_drafter = exact_blocks(model, folder / "drafted", drafts=drafts)
    return model, drafts, path, with_drafter


@pytest.mark.slow
@pytest.mark.parametrize("filled", [False, True], ids=["own", "of-others"])
@pytest.mark.parametrize("name", ["snapkv", "full"])
def test_layers_of_a_drafter_are_exact_too(pair, name, filled):
    model, drafts, path, with_drafter = pair
    result = stored(
        model, name, path, drafts=drafts, drafted=with_drafter, filled=filled
    )
    assert result["loads"] > 0
    assert result["layers"] == [
        4 if drafts["drafter"]["method"] == "draft_model" else 3
    ]
    assert 0 < result["accepted"] < result["drafts"]


@pytest.mark.slow
@of_both_kernels
@pytest.mark.parametrize("name", ["snapkv", "full"])
def test_fp8_elements_of_a_drafter_are_exact_too(tiny_model, tmp_path, name, cache):
    noisy = write_noisy_copy(tmp_path / "model", tiny_model, seed=5, noise=0.05)
    drafts = {"drafter": drafter(noisy)}
    (tmp_path / "drafted").mkdir()
    path = exact_blocks(tiny_model, tmp_path, **cache)
    with_drafter = exact_blocks(
        tiny_model, tmp_path / "drafted", drafts=drafts, **cache
    )
    result = stored(
        tiny_model, name, path, drafts=drafts, drafted=with_drafter, **cache
    )
    assert result["loads"] > 0
    assert result["layers"] == [4]
    assert 0 < result["accepted"] < result["drafts"]


@pytest.mark.slow
def test_preempted_requests_load_the_layers_of_a_drafter_again(pair):
    model, drafts, path, with_drafter = pair
    result = stored(
        model,
        "snapkv",
        path,
        drafts=drafts,
        drafted=with_drafter,
        filled=True,
        preempt_at=[2, 4, 9],
    )
    assert result["preemptions"] >= 8


@pytest.mark.slow
@pytest.mark.parametrize("loads", ["sync", "async"])
def test_layers_of_a_drafter_that_cannot_be_loaded_are_computed(pair, loads):
    model, drafts, path, with_drafter = pair
    report = call(
        "failed",
        model=model,
        policy=SNAPKV,
        path=path,
        store={"loads": loads, "broken": [320], "failure_policy": "recompute"},
        drafts=drafts,
        drafted=with_drafter,
    )
    assert report["tokens"] == recomputed(model, "snapkv")
    assert report["wrong"] == []
    assert report["tracked"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["snapkv", "full"])
def test_a_drafter_reads_what_was_loaded(tiny_model, tmp_path, name):
    """A copy of the model is right as long as its layers have all tokens.

    vLLM's ExampleConnector; both sides of the pair have the drafter.
    """
    drafts = {"drafter": drafter(Path(tiny_model))}
    names = ["middle", "long"]
    shared = {"model": tiny_model, "names": names, "drafts": drafts}
    folder = str(tmp_path)
    first = call("shared", policy=None, role="kv_producer", folder=folder, **shared)
    assert first["files"] == 2 * 4  # prompts, layers of both models
    policy, role = POLICIES[name], "kv_consumer"
    second = call("shared", policy=policy, role=role, folder=folder, **shared)
    expected = recomputed(tiny_model, name)
    assert second["tokens"] == {name: expected[name] for name in names}
    assert min(second["cached"].values()) > 150
    rejected = second["drafts"] - second["accepted"]
    # Only drafts made before the compaction of each prompt.
    assert rejected <= (3 * len(names) if name == "snapkv" else 0)
    assert second["accepted"] > 40
