"""An fp8 KV cache: moves copy elements bit by bit, scores read dequantized keys.

vLLM's CPU kernel attends to fp8 with AVX-512 only. Other machines skip the tests that
compare with it, and run the others with that kernel in torch (``fp8_kernels``).
"""

from __future__ import annotations

from typing import Any

import pytest
import runners
from fp8_kernels import HAS_KERNEL, needs_kernel
from harness import run_scenario
from policy_settings import SMALL_BUDGETS, configure, drop, policies_that, retrieve

pytestmark = pytest.mark.engine

SEED = 5
LENGTHS = [40, 300, 700]
SCALES = [[0.03125, 0.0625], [0.05, 0.07]]
QUICK = ("snapkv", "kvzip")


RETRIEVAL = {"budget": 96, "skip_layers": 1, "sinks": 8, "window": 24}
QUICK_RETRIEVERS = ("icecache",)
ON_TRITON = runners.environment("V2", asynchronous=False) | {
    "KVP_TEST_KERNEL": "triton",
    "KVP_TEST_INTERPRETER": "torch",
}


def traffic(model: str, policy: dict[str, Any] | None, **arguments: Any) -> Any:
    arguments = {"lengths": LENGTHS, "cache": "fp8"} | arguments
    environment = {} if policy else {"VLLM_PLUGINS": ""}
    return run_scenario(
        "scenarios_fp8:traffic",
        {"model": model, "policy": policy, **arguments},
        environment,
        timeout=580,
    )


@needs_kernel
@pytest.mark.parametrize(
    ("cache", "scales"),
    [
        pytest.param("fp8_e4m3", [[0.03125, 0.0625]], id="e4m3-scales"),
        pytest.param("fp8_e5m2", [[1.0, 1.0]], id="e5m2", marks=pytest.mark.slow),
    ],
)
def test_keeping_everything_is_stock(tiny_model, cache, scales):
    stock = traffic(tiny_model, None, cache=cache, scales=scales)
    run = traffic(tiny_model, {"name": "full"}, cache=cache, scales=scales)
    assert run.pop("kernel") != stock.pop("kernel")
    assert run == stock
    assert min(run["cached"][1:]) > 0


@needs_kernel
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow)
        for n in policies_that(drop)
    ],
)
def test_every_policy_that_drops_tokens_runs(tiny_model, name):
    """Tokens do not depend on other requests or on cached prefixes."""
    policy = configure(name, SMALL_BUDGETS | {"sessions": False}) | {"sessions": False}
    run = traffic(tiny_model, policy, scales=SCALES)
    assert run["together"] == run["alone"] == run["hits"]
    assert run["held"] == 0
    assert name == "full" or run["compactions"] >= len(LENGTHS)


@pytest.mark.slow
def test_our_triton_kernel_reads_what_the_cpu_kernel_reads(tiny_model):
    """The kernel of GPUs on torch, under model runner V2, which GPUs use."""
    for name in ("full", "snapkv"):
        policy = configure(name, SMALL_BUDGETS | {"sessions": False})
        cpu, gpu = (
            run_scenario(
                "scenarios_fp8:traffic",
                {
                    "model": tiny_model,
                    "policy": policy | {"kernel": kernel},
                    "lengths": [40, 300],
                    "cache": "fp8",
                    "scales": [[0.03125, 0.0625]],
                    "emulate": True,
                },
                environment,
                timeout=580,
            )
            for kernel, environment in (
                ("auto", runners.environment("V1", asynchronous=False)),
                ("triton", ON_TRITON),
            )
        )
        assert (cpu.pop("kernel"), gpu.pop("kernel")) == (
            "PagedPolicyImpl",
            "TritonPolicyImpl",
        )
        assert gpu == cpu
        assert (gpu["compactions"] > 0) == (name != "full")


@needs_kernel
@pytest.mark.parametrize(
    "name",
    [
        "snapkv",
        pytest.param("keydiff", marks=pytest.mark.slow),
        pytest.param("knorm", marks=pytest.mark.slow),
    ],
)
def test_kept_positions_are_nearly_those_of_a_plain_cache(model_path, name):
    """The elements have three bits of mantissa, so close scores change places.

    docs/compatibility.md has what was measured.
    """
    print("seed", SEED)
    tokens = 1500
    plain, quantized = (
        run_scenario(
            "scenarios_fp8:kept",
            {
                "model": model_path,
                "policy": {"name": name, "budget": 256},
                "cache": cache,
                "tokens": tokens,
                "seed": SEED,
                "dtype": "float32",
            },
            timeout=580,
        )
        for cache in ("auto", "fp8")
    )
    differ = total = 0
    for heads, others in zip(plain, quantized, strict=True):
        for positions, other in zip(heads, others, strict=True):
            differ += len({*positions} ^ {*other})
            total += tokens
    print(f"agreement {1 - differ / total:.4f}")
    assert differ <= 0.05 * total


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[] if n in QUICK_RETRIEVERS else pytest.mark.slow)
        for n in policies_that(retrieve)
    ],
)
def test_every_retrieval_policy_runs(tiny_model, name):
    """Tokens do not depend on other requests or on cached prefixes, and host memory
    holds one byte per element."""
    policy = configure(name, RETRIEVAL)
    run = traffic(tiny_model, policy, scales=SCALES, emulate=not HAS_KERNEL)
    assert run["together"] == run["alone"] == run["hits"]
    assert run["held"] == 0
    assert run["compactions"] >= len(LENGTHS) - 1
    # 700 tokens without sinks and window, in pages of 16, in one of two layers
    pages = -(-(700 - 8 - 24) // 16)
    assert run["host_bytes"] == pages * 16 * 2 * 2 * 32


@pytest.mark.slow
@pytest.mark.parametrize(
    "cache", ["fp8_e4m3", pytest.param("fp8_e5m2", marks=pytest.mark.slow)]
)
def test_prompts_attend_to_elements_in_host_memory(tiny_model, cache):
    """In blocks, with most tokens on the host: the first token is that of `full`."""
    shared = {"cache": cache, "scales": [[0.05, 0.07]], "emulate": not HAS_KERNEL}
    policy = RETRIEVAL | {"name": "exact-topk", "prefill_block": 128}
    found = traffic(tiny_model, policy, **shared)
    whole = traffic(tiny_model, {"name": "full"}, **shared)
    assert found["compactions"] >= 2 * len(LENGTHS)
    for kind in ("together", "alone", "hits"):
        first, right = (
            {name: tokens[0] for name, tokens in run[kind].items()}
            for run in (found, whole)
        )
        assert first == right
