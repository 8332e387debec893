"""Attention of a patched prompt to the history, against plain torch.

The reference is the tiny Llama over history and patched prompt, with a mask per query
that hides what earlier compressions dropped. It shares no code with the package.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_scenario
from test_masked_reference import visible_positions
from test_prefill_reference import behind, check, check_answer, score
from tiny_model import KV_HEADS, masked_logits

pytestmark = pytest.mark.engine

POLICY: dict[str, Any] = {
    "name": "epicache",
    "budget": 128,
    "prefill_block": 128,
    "allocator": "uniform",
}
QUERY, TOKENS = 30, 40
PATCHED = {"700": [7, 300, 21, 90, 4], "533": [411, 2, 77]}
CUTS = {"700": [256, 384, 512, 640], "533": [256, 384, 512]}


@pytest.fixture(scope="module")
def runs(tiny_model: str) -> dict[str, Any]:
    report: dict[str, Any] = run_scenario(
        "scenarios_epicache:scored",
        {
            "model": tiny_model,
            "policy": POLICY,
            "patched": PATCHED,
            "query": QUERY,
            "max_tokens": TOKENS,
        },
    )
    return report


@pytest.mark.parametrize("length", PATCHED)
def test_scores_are_those_of_torch_with_and_without_eviction(tiny_model, runs, length):
    run, patched = runs[length], PATCHED[length]
    assert [c["at_tokens"] for c in run["compactions"]] == CUTS[length]
    visible = visible_positions(run)
    for number, compaction in enumerate(run["compactions"]):
        at = compaction["at_tokens"]
        layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        masks = behind(visible[..., :at, :at], len(patched))
        masked_logits(Path(tiny_model), run["prompt"][:at] + patched, masks, layers)
        for layer, (queries, keys) in enumerate(layers):
            for head in range(KV_HEADS):
                held = visible[layer, head, at - 1, :at].nonzero()[:, 0]
                assert (len(held) < at) == (number > 0)
                group = queries[:, at:].unflatten(0, (KV_HEADS, -1))[head]
                worth = score("infinipot", group, keys[head], held, at)
                kept = torch.tensor(compaction["kept"][layer][head])
                check(worth, held, kept, tail=0)
                free = worth.isfinite()
                actual = torch.tensor(compaction["worth"][layer][head])[held]
                assert (actual - worth)[free].abs().max() < 1e-4
                assert overlap(actual[free], worth[free].float()) >= 0.999


def overlap(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Share of the best quarter that both rankings have in common."""
    best = [set(s.topk(len(s) // 4).indices.tolist()) for s in (actual, expected)]
    return len(best[0] & best[1]) / len(best[0])


def test_the_answer_is_that_of_a_model_with_a_mask(tiny_model, runs):
    for run in runs.values():
        assert len(run["tokens"]) == TOKENS
        check_answer(tiny_model, run)
