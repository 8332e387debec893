"""Every policy attends with our Triton kernel as with vLLM's CPU kernel.

The Triton kernel runs in the interpreter, under model runner V2, which is what GPUs
have; the reference is vLLM's CPU kernel under runner V1.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers" / "cpu_v2"))

import runners
from harness import run_scenario
from policy_settings import configure

from vllm_kvplugins.policies.registry import available_policies

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SETTINGS = {
    "budget": 96,
    "window": 16,
    "local_window": 32,
    "decode_budget": 64,
    "fold_blocks": 1,
    "chunk_size": 16,
    "skip_layers": 0,
}
CHANGES_NOTHING = "full"


@cache
def found(model: str, kernel: str) -> dict[str, Any]:
    """What happened under each policy with a kernel."""
    names = available_policies()
    policies = [configure(name, SETTINGS) | {"kernel": kernel} for name in names]
    changes = runners.environment("V1" if kernel == "auto" else "V2", False)
    results = run_scenario(
        "scenarios_kernels:under_policies",
        {"model": model, "policies": policies},
        changes,
        timeout=580,
    )
    return dict(zip(names, results, strict=True))


@pytest.mark.parametrize("name", available_policies())
def test_same_tokens_with_triton(tiny_model: str, name: str):
    here, stock = found(tiny_model, "triton")[name], found(tiny_model, "auto")[name]
    assert here["backend"] == "TritonPolicyImpl"
    assert stock["backend"] == "PagedPolicyImpl"
    assert here["runner"] == "vllm.v1.worker.cpu.model_runner"
    assert here["tokens"] == stock["tokens"]
    assert here["compactions"] == stock["compactions"]
    assert here["left"] == stock["left"] == 0


def test_policies_show_in_the_tokens(tiny_model: str):
    """Else equal tokens would prove little."""
    full = found(tiny_model, "auto")[CHANGES_NOTHING]["tokens"]
    others = [f["tokens"] for f in found(tiny_model, "auto").values()]
    assert sum(tokens != full for tokens in others) > len(others) / 2
