"""After a compaction the engine computes the same as a model with an attention mask.

The reference is a plain torch Llama over the whole sequence, in which each query of
each (layer, KV head) sees only the positions that the engine reports as kept. Equal
tokens therefore need correct page tables, moved tokens, per-layer tables and positions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_scenario
from tiny_model import masked_logits

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LENGTHS = (300, 555, 1100)
TOKENS = 70
CLOSE = 1e-3  # logit leads below this are not compared
BASE = {"name": "snapkv", "budget": 128, "window": 32}
POLICIES: dict[str, dict[str, Any]] = {
    "uniform": BASE,
    "cross-layer": BASE | {"allocator": "cross-layer"},
    "pyramid": {"name": "streaming-llm", "budget": 128, "allocator": "pyramid"},
    "folding": BASE
    | {"allocator": "head-adaptive", "decode_budget": 96, "fold_blocks": 1},
}


def visible_positions(run: dict[str, Any]) -> torch.Tensor:
    """bool [layers, kv_heads, query, key] of a request's whole life."""
    count = len(run["prompt"]) + len(run["tokens"])
    causal = torch.ones(count, count, dtype=torch.bool).tril()
    kept_at_first = run["compactions"][0]["kept"]
    visible = causal.repeat(len(kept_at_first), len(kept_at_first[0]), 1, 1)
    for compaction in run["compactions"]:
        at = compaction["at_tokens"]
        for layer, heads in enumerate(compaction["kept"]):
            for head, kept in enumerate(heads):
                dropped = torch.ones(at, dtype=torch.bool)
                dropped[kept] = False
                visible[layer, head, at:, :at] &= ~dropped
    return visible


@pytest.mark.parametrize("name", POLICIES)
def test_tokens_are_those_of_a_model_with_a_mask(tiny_model, name):
    arguments = {
        "model": tiny_model,
        "policy": POLICIES[name],
        "lengths": LENGTHS,
        "max_tokens": TOKENS,
    }
    compared, unmasked_differs = 0, 0
    for run in run_scenario("scenarios_tiny:recorded", arguments).values():
        assert run["compactions"]
        assert name != "folding" or len(run["compactions"]) > 2
        sequence = run["prompt"] + run["tokens"]
        visible = visible_positions(run)
        logits = masked_logits(Path(tiny_model), sequence, visible)
        # the logits at a position choose the token after it
        logits = logits[len(run["prompt"]) - 1 : -1]
        best = logits.topk(2).values
        clear = best[:, 0] - best[:, 1] > CLOSE
        expected, actual = logits.argmax(-1), torch.tensor(run["tokens"])
        assert torch.equal(expected[clear], actual[clear])
        compared += int(clear.sum())
        everything = torch.ones_like(visible[0, 0]).tril().expand_as(visible)
        plain = masked_logits(Path(tiny_model), sequence, everything)
        plain = plain[len(run["prompt"]) - 1 : -1]
        unmasked_differs += int((plain.argmax(-1) != actual).sum())
    assert compared > 0.98 * TOKENS * len(LENGTHS)
    assert unmasked_differs > 20, "what was dropped did not matter"
