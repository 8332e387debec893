"""Chunked prefill does not change which tokens a policy keeps.

SnapKV scores with the prompt's last 64 queries. Chunks of 40 tokens spread them over
two steps; the tokens must equal those of a run with one chunk.
"""

from __future__ import annotations

import pytest
from harness import run_scenario

pytestmark = pytest.mark.engine

POLICY = {"name": "snapkv", "budget": 128, "decode_budget": 96, "fold_blocks": 1}
LENGTHS = (129, 300, 333, 640)


def test_chunks_shorter_than_the_window(tiny_model):
    runs = [
        run_scenario(
            "scenarios_tiny:answers",
            {
                "model": tiny_model,
                "policy": policy,
                "lengths": LENGTHS,
                "max_tokens": 120,
                "max_num_batched_tokens": chunk,
                "max_num_seqs": 4,
            },
        )
        for policy, chunk in ((POLICY, 1024), (POLICY, 40), (None, 1024))
    ]
    whole, cut, stock = runs
    assert cut["tokens"] == whole["tokens"] != stock["tokens"]
    # one at the end of each prompt, and folds during 120 generated tokens
    assert cut["compactions"] == whole["compactions"] >= 4 * 3
    assert cut["steps"] > whole["steps"] + sum(LENGTHS) // 40 - 10
