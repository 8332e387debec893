"""Policies under torch.compile give the same tokens as eager engines.

On a CPU vLLM compiles models with inductor, which has unrelated errors there.
AOTAutograd alone traces and functionalizes the same calls.
"""

from __future__ import annotations

import pytest
from harness import run_scenario

pytestmark = [pytest.mark.engine, pytest.mark.slow]

POLICIES = [
    {"name": "snapkv", "budget": 96, "window": 16, "allocator": "head-adaptive"},
]
COMPILATION = {"mode": 2, "backend": "aot_eager"}  # mode: traced once


def test_compiled_models_answer_as_eager_ones(tiny_model: str):
    report = run_scenario(
        "scenarios_kernels:eager_and_compiled",
        {"model": tiny_model, "policies": POLICIES, "compilation": COMPILATION},
    )
    for eager, compiled in zip(*report, strict=True):
        assert eager["graphs"] == 0
        assert compiled["graphs"] > 0
        assert compiled["tokens"] == eager["tokens"]
        assert compiled["compactions"] == eager["compactions"] > 0
        assert compiled["left"] == 0
