"""The quality benchmark measures the same memory per request as vLLM's gauges."""

from __future__ import annotations

import pytest
from harness import run_scenario
from tiny_model import KV_HEADS, LAYERS

HEAD_DIM, BLOCK = 32, 32
TOKEN_BYTES = 2 * 4 * HEAD_DIM * LAYERS * KV_HEADS  # K and V in float32


@pytest.mark.engine
@pytest.mark.slow
def test_resident_bytes_are_what_the_gauges_say(tiny_model):
    words = ["Repeat", "the", "context", "Summarize", "the"]
    prompts = [" ".join(words[(i + k) % 5] for i in range(500)) for k in range(3)]
    report = run_scenario(
        "scenarios_quality:answer_samples",
        {
            "model": tiny_model,
            "policy": {"name": "snapkv", "budget": 128, "window": 16},
            "prompts": prompts,
        },
    )
    rows = report["rows"]
    assert [row["sample"] for row in rows] == ["0", "1", "2"]
    assert [row["prompt_tokens"] for row in rows] == [500] * 3
    # at the end of the answer: pages of the budget, and the block being written
    gauges = [gauge for gauge in report["gauges"] if gauge][:-1]
    held = [gauge["vllm:kv_policy_resident_tokens"] for gauge in gauges]
    used = [gauge["vllm:kv_cache_usage_perc"] for gauge in gauges]
    outside = report["outside"][-1]  # page lists and positions
    assert 0 < outside < 0.05 * held[-1] * TOKEN_BYTES
    assert rows[0]["resident_bytes"] == held[-1] * TOKEN_BYTES + outside
    assert used[-1] * (report["blocks"] - 1) * BLOCK == pytest.approx(held[-1])
    assert 128 <= held[-1] < 128 + 2 * BLOCK
    assert rows[0]["peak_bytes"] == -(-500 // BLOCK) * BLOCK * TOKEN_BYTES
