"""Every architecture of ``helpers/architectures`` under stock vLLM and under policies.

Prompts in several chunks, a prefix hit in a second request, four requests at once that
are preempted. fp32, on vLLM's CPU kernel.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
from architectures import ARCHITECTURES, write
from harness import run_scenario
from policy_settings import SMALL_BUDGETS, configure
from scenarios_architectures import PROMPT

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SEED = 7
UNDOES_ROPE = "expected-attention"
SETTINGS = SMALL_BUDGETS | {"skip_layers": 0}  # these models have two layers
NAMES = ("full", "snapkv", "icecache", UNDOES_ROPE)


def cases(*policies: str, undo_rope: bool | None = None) -> list[Any]:
    """Pairs of an architecture and a policy.

    Args:
        undo_rope: only architectures whose RoPE policies can undo, or cannot.
    """
    return [
        pytest.param(name, policy, id=f"{name}-{policy}")
        for name, architecture in ARCHITECTURES.items()
        for policy in policies
        if undo_rope in (None, architecture.undoes_rope)
    ]


@functools.cache
def found(name: str) -> dict[str, Any]:
    """Policy -> what happened, on one architecture."""
    print("seed of the model", SEED)
    policies = {policy: configure(policy, SETTINGS) for policy in NAMES}
    with tempfile.TemporaryDirectory() as folder:
        model = str(write(name, Path(folder, "model"), SEED))
        result: dict[str, Any] = run_scenario(
            "scenarios_architectures:runs",
            {"model": model, "policies": {"stock": None, **policies}},
        )
    return result


def succeeded(name: str, policy: str) -> dict[str, Any]:
    run: dict[str, Any] = found(name)[policy]
    assert "error" not in run, run["error"][1]
    return run


@pytest.mark.proves(architecture="name", policy="policy")
@pytest.mark.parametrize(("name", "policy"), cases("full"))
def test_full_is_stock(name, policy):
    """Same tokens and prefix hits as stock vLLM."""
    stock, full = succeeded(name, "stock"), succeeded(name, policy)
    answers = {tuple(tokens) for tokens in stock["tokens"].values()}
    assert len(answers) >= 5, "these prompts show no difference"
    assert full["tokens"] == stock["tokens"]
    assert full["cached"] == stock["cached"]
    assert full["cached"]["prefix"] == 192, "the shared whole blocks"
    assert full["preemptions"] == stock["preemptions"] == 4
    assert full["left"] == full["tracked"] == full["compactions"] == 0


def check_policy(name: str, policy: str) -> dict[str, Any]:
    """Blocks are freed as planned and none leaks; a prefix hit changes nothing."""
    run = succeeded(name, policy)
    assert run["held"], "no decode step was watched"
    wrong = [pair for pair in run["held"] if pair[0] != pair[1]]
    assert not wrong, (wrong, run["held"])
    assert max(held for held, _ in run["held"]) < PROMPT // 32
    assert run["compactions"] >= 3
    assert run["left"] == run["tracked"] == run["unscored"] == 0
    assert run["tokens"]["same"] == run["tokens"]["chunks"]
    assert run["preemptions"] == 4
    return run


@pytest.mark.proves(architecture="name", policy="policy")
@pytest.mark.parametrize(("name", "policy"), cases("snapkv"))
def test_tokens_are_dropped(name, policy):
    """Blocks are freed as planned, none leaks; prefix hits and preemption change no
    token.
    """
    run = check_policy(name, policy)
    assert run["tokens"] != found(name)["stock"]["tokens"], "nothing was dropped"
    assert run["cached"]["same"] > 0
    assert run["tokens"]["preempted"] == run["tokens"]["chunks"]


@pytest.mark.proves(architecture="name", policy="policy")
@pytest.mark.parametrize(("name", "policy"), cases(UNDOES_ROPE, undo_rope=True))
def test_rope_is_undone(name, policy):
    """The same with a policy that scores queries before RoPE."""
    run = check_policy(name, policy)
    assert run["tokens"] != found(name)["stock"]["tokens"], "nothing was dropped"
    assert run["tokens"]["preempted"] == run["tokens"]["chunks"]


@pytest.mark.proves(architecture="name", policy="policy")
@pytest.mark.parametrize(("name", "policy"), cases("icecache"))
def test_tokens_are_fetched(name, policy):
    """Tokens in host memory: blocks are freed as planned, none leaks; a prefix hit
    changes no token.
    """
    check_policy(name, policy)


@pytest.mark.proves(architecture="name", policy="policy", refused="KVP031")
@pytest.mark.parametrize(("name", "policy"), cases(UNDOES_ROPE, undo_rope=False))
def test_models_whose_rope_cannot_be_undone_are_refused(name, policy):
    """Refused at start-up, with the reason."""
    kind, message = found(name)[policy]["error"]
    assert kind == "KVPolicyError"
    assert "[KVP031]" in message


@pytest.mark.slow
@pytest.mark.parametrize(("name", "policy"), cases("snapkv", "icecache"))
def test_random_traffic_leaks_nothing_and_changes_no_token(name, policy, tmp_path):
    print("seed", SEED)
    # Codes round keys, so the last bits of a key, which depend on the batch where the
    # CPU has AVX-512, may change what they find. The tree reads the keys themselves.
    exact = {"index": "dci"} if policy == "icecache" else {}
    counts = run_scenario(
        "scenarios_fuzz:fuzz",
        {
            "model": str(write(name, tmp_path / "model", SEED)),
            "policy": configure(policy, SETTINGS) | exact,
            "seed": SEED,
            "rounds": 200,
            "blocks": 40,
            # A preempted request reads its own answer with full attention, so a
            # retriever may go on with other tokens (docs/policies/exact-topk.md).
            "compares_preempted": policy != "icecache",
        },
        timeout=550,
    )
    print(counts)
    for event in ("requests", "hits", "compared", "compactions"):
        assert counts[event] > 0, counts
    assert counts["differed"] == 0
