"""Another KV connector next to a policy, with model runner V2 and on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import runners
from connecting import POLICIES, SNAPKV, call, exact_blocks, recomputed, stored
from scenarios_speculation import NGRAM
from tiers import tiered

pytestmark = pytest.mark.engine

asynchronous = pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])


@pytest.fixture(scope="module")
def exact(tiny_model, tmp_path_factory):
    return exact_blocks(tiny_model, tmp_path_factory.mktemp("exact"))


# -- model runner V2 ---------------------------------------------------------------


def on_v2(
    model: str, name: str, exact: str, ahead: bool = False, **arguments: Any
) -> dict[str, Any]:
    environment = runners.environment("V2", asynchronous=ahead)
    result = stored(model, name, exact, environment=environment, **arguments)
    assert result["runner"] == "V2"
    kind = "Async" if ahead else ""
    assert result["scheduler"] == f"KVPolicy{kind}Scheduler"
    return result


@pytest.mark.slow
@asynchronous
@pytest.mark.parametrize("name", ["snapkv", "flowkv", "icecache", "full"])
def test_it_is_shown_exact_blocks_and_serves_them_back(tiny_model, exact, name, ahead):
    result = on_v2(tiny_model, name, exact, ahead=ahead)
    assert result["saves"] > 0
    assert result["loads"] > 0


@pytest.mark.parametrize("loads", tiered(["sync", "async"], ["sync"]))
def test_whole_prompts_are_loaded_and_then_compacted(tiny_model, exact, loads):
    result = on_v2(tiny_model, "snapkv", exact, store={"loads": loads}, filled=True)
    assert result["cached"][2] == 700 - 64


@pytest.mark.slow
def test_it_is_shown_no_block_of_the_past(tiny_model, exact):
    result = on_v2(tiny_model, "snapkv", exact, store={"keeps": True})
    assert result["released"] > 0


@pytest.mark.slow
def test_preempted_requests_load_again(tiny_model, exact):
    """V2 lists them as new requests."""
    result = on_v2(tiny_model, "snapkv", exact, preempt_at=[2, 4, 20])
    assert result["preemptions"] >= 8


@pytest.mark.slow
@pytest.mark.parametrize("loads", ["sync", "async"])
def test_blocks_that_cannot_be_loaded_are_computed(tiny_model, exact, loads):
    report = call(
        "failed",
        environment=runners.environment("V2", asynchronous=False),
        model=tiny_model,
        policy=SNAPKV,
        path=exact,
        store={"loads": loads, "broken": [320], "failure_policy": "recompute"},
    )
    assert report["tokens"] == recomputed(tiny_model, "snapkv")
    assert report["wrong"] == []
    assert report["tracked"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["snapkv", "full"])
def test_it_is_shown_accepted_tokens_only(tiny_model, exact, name):
    drafts = {"answers": recomputed(tiny_model, name)}
    result = on_v2(tiny_model, name, exact, drafts=drafts)
    assert result["answers"] > 0
    assert 0.2 * result["drafts"] < result["accepted"] < 0.9 * result["drafts"]


# -- tensor parallelism ------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tiny_model, tmp_path_factory):
    """What each of two ranks stores without a policy."""
    folder = str(tmp_path_factory.mktemp("ranks"))
    call("on_ranks", model=tiny_model, policy=None, folder=folder)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_each_rank_loads_and_stores_exact_blocks(tiny_model, ranks, tmp_path):
    """The stores start with what ranks without a policy stored."""
    report = call(
        "on_ranks",
        model=tiny_model,
        policy=SNAPKV,
        folder=str(tmp_path),
        exact=ranks,
        filled=True,
    )
    check_ranks(report, tiny_model, "snapkv")
    assert report["cached"] == 700 - 64
    assert report["compactions"] == 2


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_each_rank_stores_accepted_tokens_only(tiny_model, ranks, tmp_path):
    """With vLLM's lookup of n-grams, which is seldom right here."""
    report = call(
        "on_ranks",
        model=tiny_model,
        policy=POLICIES["full"],
        folder=str(tmp_path),
        exact=ranks,
        drafts={"drafter": NGRAM},
    )
    check_ranks(report, tiny_model, "full")
    assert report["accepted"] < report["drafts"]


def check_ranks(report: dict[str, Any], model: str, name: str) -> None:
    """Both ranks stored the same blocks, exactly, and the tokens are those of one."""
    assert report["wrong"] == [[], []]
    assert report["saves"][0] == report["saves"][1] > 0
    assert report["first"] == report["again"]
    single = recomputed(model, name)
    for prompt, tokens in report["first"].items():
        assert tokens == single[prompt][: len(tokens)]
    assert report["tracked"] == [0, 0]
