"""Speculative decoding over an fp8 cache: tokens are those without it.

vLLM's CPU kernel attends to fp8 with AVX-512 only. Here it runs in torch
(``fp8_kernels``), one token at a time, and so do linear layers. Then keys have the same
bits however many drafts a step verifies, and equal tokens can be asked for: in an fp8
cache, the last bit of a key may decide to which element it is rounded.

Under retrieval, rows with drafts attend with our own kernel, and the last bits of its
outputs are others. ``tests/unit/test_fp8_retrieval.py`` compares them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import runners
from draft_models import drafter, write_noisy_copy, write_pair
from fp8_kernels import needs_kernel
from harness import run_scenario
from policy_settings import SMALL_BUDGETS, configure
from speculating import check_changes_nothing

pytestmark = pytest.mark.engine

SEED = 5
LENGTHS = [40, 130, 300, 410]
QUICK = {"lengths": [130, 300], "max_tokens": 40}
DRAFTS = 3
# The model has the first two, and no layer of a drafter that of its layer there.
SCALES = [[0.03125, 0.0625], [0.05, 0.07], [0.08, 0.04]]
FULL = {"name": "full"}
SMALL = SMALL_BUDGETS | {"budget": 64, "skip_layers": 0}
RETRIEVAL = {"budget": 96, "skip_layers": 1, "sinks": 8, "window": 24}
FLOW = {"name": "flowkv", "ratio": 0.3}
QUESTIONS = [200, 90, 60]
TALKS = 2


def settings_of(name: str) -> dict[str, Any]:
    return configure(name, SMALL) | {"sessions": False}


@pytest.fixture(scope="module")
def noisy(tiny_model, tmp_path_factory) -> dict[str, Any]:
    """A drafter that the model accepts about half of the time."""
    folder: Path = tmp_path_factory.mktemp("noisy") / "model"
    return drafter(write_noisy_copy(folder, tiny_model, SEED, noise=0.05))


def run(
    scenario: str, environment: dict[str, str | None] | None = None, **arguments: Any
) -> dict[str, Any]:
    """A scenario of ``scenarios_speculation``, over an fp8 cache."""
    print("seed", SEED)
    result: dict[str, Any] = run_scenario(
        "scenarios_fp8:speculating",
        {"scenario": scenario, "scales": SCALES} | arguments,
        environment,
        timeout=580,
    )
    print({key: result[key] for key in ("drafts", "accepted") if key in result})
    return result


def speculate(
    model: str,
    policy: dict[str, Any],
    drafts: dict[str, Any] | None,
    cache: str = "fp8",
    is_copy: bool = False,
    **arguments: Any,
) -> dict[str, Any]:
    """Tokens without and with speculation, which are equal; see ``speculating``.

    Args:
        drafts: vLLM's setting for the drafter; None: an oracle, three in four right.
        is_copy: all drafts may be right.
    """
    settings = {"lengths": LENGTHS, "max_tokens": 60, "max_model_len": 4096}
    settings |= {"kv_cache_dtype": cache} | arguments
    result = run(
        "speculate",
        model=model,
        policy=policy,
        seed=SEED,
        drafter=drafts,
        **settings,
    )
    check_changes_nothing(result)
    assert 0 < result["accepted"] < result["drafts"] + is_copy
    requests = len(settings["lengths"])
    assert policy["name"] == "full" or result["compactions"] >= requests
    return result


def check_is_stock(
    model: str, drafts: dict[str, Any], emulate: bool = True, **arguments: Any
) -> None:
    """Under ``full``, tokens are stock's, and so are drafts and accepted drafts."""
    shared = {"max_tokens": 60, "emulate": emulate} | arguments
    result = speculate(model, FULL, drafts, compares_stock=True, **shared)
    stock = run(
        "stock_acceptance",
        model=model,
        drafter=drafts,
        seed=SEED,
        lengths=LENGTHS,
        **({"kv_cache_dtype": "fp8"} | shared),
    )
    assert {key: result[key] for key in stock} == stock


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["fp8", "fp8_e5m2"])
def test_tokens_and_accepted_drafts_are_those_of_stock(tiny_model, noisy, cache):
    check_is_stock(tiny_model, noisy, kv_cache_dtype=cache)


@needs_kernel
@pytest.mark.slow
def test_accepted_drafts_are_those_of_stock_with_vllms_kernel(tiny_model, noisy):
    check_is_stock(tiny_model, noisy, emulate=False)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
def test_accepted_drafts_of_heads_are_those_of_stock(tiny_model, tmp_path, method):
    check_is_stock(*write_pair(tmp_path, tiny_model, method))


def test_tokens_of_snapkv_and_a_draft_model_are_those_without(tiny_model, noisy):
    speculate(tiny_model, settings_of("snapkv"), noisy, **QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["snapkv", "flowkv", "h2o", "kvzip"])
def test_tokens_with_a_draft_model_are_those_without(tiny_model, noisy, name):
    speculate(tiny_model, settings_of(name), noisy)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["snapkv", "flowkv", "h2o"])
def test_tokens_with_a_head_are_those_without(tiny_model, tmp_path, name):
    model, head = write_pair(tmp_path, tiny_model, "eagle")
    speculate(model, settings_of(name), head)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "snapkv", "flowkv", "h2o"])
def test_tokens_with_known_drafts_are_those_without(tiny_model, name):
    """The drafter has no cache."""
    speculate(tiny_model, settings_of(name), None, cache="fp8_e5m2")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["snapkv", "flowkv"])
def test_a_copy_keeps_the_same_tokens(tiny_model, name):
    """With the model's scales, only drafts made before a compaction are wrong."""
    copy = drafter(Path(tiny_model))
    policy = settings_of(name)
    result = speculate(tiny_model, policy, copy, scales=SCALES[:2], is_copy=True)
    rejected = result["drafts"] - result["accepted"]
    assert rejected <= DRAFTS * result["compactions"] < result["drafts"] / 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["oracle", "draft model"])
@pytest.mark.parametrize("name", ["icecache", "quest", "clusterkv"])
def test_retrieval_verifies_drafts(tiny_model, noisy, name, kind):
    """Three policies with three indices; skipped layers and others."""
    policy = configure(name, RETRIEVAL) | {"sessions": False}
    speculate(tiny_model, policy, None if kind == "oracle" else noisy)


@needs_kernel
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["oracle", "draft model"])
@pytest.mark.parametrize("name", ["snapkv", "flowkv", "h2o", "kvzip", "icecache"])
def test_tokens_are_those_without_with_vllms_kernel(tiny_model, noisy, name, kind):
    """Also if linear layers compute all tokens of a step together."""
    policy = settings_of(name)
    drafts = None if kind == "oracle" else noisy
    speculate(tiny_model, policy, drafts, emulate=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["snapkv", "icecache"])
def test_model_runner_v2_changes_no_token(tiny_model, noisy, name):
    on_v2 = runners.environment("V2", asynchronous=False)
    result = speculate(tiny_model, settings_of(name), noisy, environment=on_v2, **QUICK)
    assert result["runner"] == "V2"


def talks(model: str, policy: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    """Conversations with a draft model that is a copy of the model."""
    defaults = {"questions": QUESTIONS, "number": TALKS}
    settings = {"kv_cache_dtype": "fp8"} | arguments.pop("settings", {})
    result = run(
        "drafted_talks",
        model=model,
        policy=policy,
        drafter=drafter(Path(model)),
        settings=settings,
        **(defaults | arguments),
    )
    print(result["turns"], result["counts"])
    return result


@pytest.mark.slow
def test_sessions_after_a_restart(tiny_model, tmp_path):
    """Tokens, drafts and accepted drafts are those of recomputed histories."""
    off = {"enable_prefix_caching": False}
    right = talks(tiny_model, FLOW | {"sessions": False}, settings=off)
    policy = FLOW | {"session_dir": str(tmp_path)}
    before = talks(tiny_model, policy, questions=QUESTIONS[:2])
    assert before["turns"] == right["turns"][:2]
    assert before["counts"]["hits"] == TALKS
    after = talks(
        tiny_model, policy, questions=QUESTIONS[2:], histories=before["histories"]
    )
    assert after["answers"] == [each[2:] for each in right["answers"]]
    drafted, known = right["turns"][2], right["turns"][1]
    assert after["turns"] == [{key: drafted[key] - known[key] for key in drafted}]
    assert after["turns"][0]["accepted"] > 0
    assert after["counts"]["hits"] == TALKS
    assert after["counts"]["failures"] == after["tracked"] == 0
