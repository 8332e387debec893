"""Every policy gives the same tokens with our Triton kernel and vLLM's CPU kernel.

The Triton kernel runs in the interpreter, under model runner V2, which GPUs use. The
reference is vLLM's CPU kernel under runner V1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import runners
from harness import run_scenario
from policy_settings import configure
from tiny_hybrids import write_tiny_hybrid

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
SEED = 7


@pytest.fixture(scope="module")
def found(tiny_model: str) -> dict[str, dict[str, Any]]:
    """Kernel -> policy -> result."""
    return {kernel: run(tiny_model, kernel) for kernel in ("auto", "triton")}


def run(model: str, kernel: str) -> dict[str, Any]:
    """Results of all policies with one kernel."""
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


@pytest.mark.proves(policy="name", runner="V2")
@pytest.mark.parametrize("name", available_policies())
def test_same_tokens_with_triton(found: dict[str, Any], name: str):
    triton, auto = found["triton"][name], found["auto"][name]
    assert triton["backend"] == "TritonPolicyImpl"
    assert auto["backend"] == "PagedPolicyImpl"
    assert triton["runner"] == "vllm.v1.worker.cpu.model_runner"
    assert triton["tokens"] == auto["tokens"]
    assert triton["compactions"] == auto["compactions"]
    assert (triton["compactions"] > 0) == (name != CHANGES_NOTHING)
    assert triton["left"] == auto["left"] == 0


@pytest.mark.parametrize("model", ["gpt_oss", "gemma2"])
def test_learned_sinks_and_capped_logits_with_triton(model: str, tmp_path: Path):
    """Both models also have windowed layers, which stay vLLM's."""
    folder = str(write_tiny_hybrid(tmp_path / model, model, SEED))
    policies = [{"name": "full"}, {"name": "snapkv", "budget": 96}]
    tokens = {}
    for kernel, runner in (("auto", "V1"), ("triton", "V2")):
        runs = run_scenario(
            "scenarios_kernels:under_policies",
            {
                "model": folder,
                "policies": [policy | {"kernel": kernel} for policy in policies],
                "num_gpu_blocks_override": 200,
            },
            runners.environment(runner, False),
            timeout=580,
        )
        tokens[kernel] = [run["tokens"] for run in runs]
        assert runs[1]["compactions"] > 0
    assert tokens["triton"] == tokens["auto"]
    assert tokens["auto"][0] != tokens["auto"][1]


def test_policies_show_in_the_tokens(found: dict[str, Any]):
    """Policies change tokens; otherwise equal tokens would prove little."""
    full = found["auto"][CHANGES_NOTHING]["tokens"]
    others = [one["tokens"] for one in found["auto"].values()]
    assert sum(tokens != full for tokens in others) > len(others) / 2
