"""An fp8 KV cache: moves copy elements bit by bit, scores read dequantized keys.

vLLM's CPU kernel attends to fp8 with AVX-512 only; other machines skip these tests.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import run_scenario
from policy_settings import SMALL_BUDGETS, configure, drop, policies_that

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        not torch.cpu._is_avx512_supported(), reason="needs AVX-512 (vLLM's kernel)"
    ),
]

SEED = 5
LENGTHS = [40, 300, 700]
QUICK = ("snapkv", "kvzip")


def traffic(model: str, policy: dict[str, Any] | None, **arguments: Any) -> Any:
    arguments = {"lengths": LENGTHS, "cache": "fp8"} | arguments
    environment = {} if policy else {"VLLM_PLUGINS": ""}
    return run_scenario(
        "scenarios_fp8:traffic",
        {"model": model, "policy": policy, **arguments},
        environment,
        timeout=580,
    )


@pytest.mark.parametrize(
    ("cache", "scales"),
    [
        pytest.param("fp8_e4m3", [0.03125, 0.0625], id="e4m3-scales"),
        pytest.param("fp8_e5m2", [1.0, 1.0], id="e5m2", marks=pytest.mark.slow),
    ],
)
def test_keeping_everything_is_stock(tiny_model, cache, scales):
    stock = traffic(tiny_model, None, cache=cache, scales=scales)
    run = traffic(tiny_model, {"name": "full"}, cache=cache, scales=scales)
    assert run == stock
    assert min(run["cached"][1:]) > 0


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
    run = traffic(tiny_model, policy, scales=[0.03125, 0.0625])
    assert run["together"] == run["alone"] == run["hits"]
    assert run["held"] == 0
    assert name == "full" or run["compactions"] >= len(LENGTHS)


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
