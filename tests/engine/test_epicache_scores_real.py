"""Attention of a patched prompt in a real model, against transformers.

The reference is the model with eager attention over history and patched prompt; each
layer's mask hides what earlier compressions dropped from each KV head.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import run_scenario
from test_epicache_scores import overlap
from test_masked_reference import visible_positions
from test_prefill_reference import behind
from texts import english_tokens

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SEED = 29
LENGTH, QUERY = 430, 20
CUTS = [192, 288, 384]
SINKS, RECENT = 4, 32
POLICY: dict[str, Any] = {
    "name": "epicache",
    "budget": 96,
    "prefill_block": 96,
    "allocator": "uniform",
}


@torch.no_grad()
def paid(model: Any, tokens: list[int], visible: torch.Tensor, at: int) -> torch.Tensor:
    """Largest attention from tokens behind ``at`` to each token before it.

    Args:
        model: of transformers, with eager attention.
        seen: bool [layers, kv_heads, query, key].

    Returns:
        float32 [layers, kv_heads, at].
    """
    rows: list[torch.Tensor] = []
    group = model.config.num_attention_heads // visible.shape[1]

    def masked(layer: Any, _: Any, options: dict[str, Any]) -> Any:
        hidden = ~visible[layer.layer_idx].repeat_interleave(group, 0)
        mask = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)
        return (), options | {"attention_mask": mask[None]}

    def look(layer: Any, _: Any, done: Any) -> None:
        rows.append(done[1][0, :, at:, :at].unflatten(0, (-1, group)).amax((1, 2)))

    hooks = []
    for layer in model.model.layers:
        hooks.append(
            layer.self_attn.register_forward_pre_hook(masked, with_kwargs=True)
        )
        hooks.append(layer.self_attn.register_forward_hook(look))
    model(torch.tensor([tokens]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(rows)


def test_scores_are_those_of_eager_attention(model_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print("seed", SEED)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    prompt = english_tokens(tokenizer, SEED, LENGTH + QUERY)
    patched = english_tokens(tokenizer, SEED + 1, 24)
    runs = run_scenario(
        "scenarios_epicache:scored",
        {
            "model": model_path,
            "policy": POLICY,
            "patched": {str(LENGTH): patched},
            "prompts": {str(LENGTH): prompt},
            "query": QUERY,
            "max_tokens": 2,
        },
    )
    run = runs[str(LENGTH)]
    assert [c["at_tokens"] for c in run["compactions"]] == CUTS
    model = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    visible = visible_positions(run)
    for number, compaction in enumerate(run["compactions"]):
        at, actual = compaction["at_tokens"], torch.tensor(compaction["worth"])
        masks = behind(visible[..., :at, :at], len(patched))
        expected = paid(model, prompt[:at] + patched, masks, at)
        held = visible[:, :, at - 1, :at]
        assert bool(held.all()) == (number == 0), "nothing was dropped before"
        assert (actual - expected)[held].abs().max() < 1e-3
        free = held.clone()
        free[..., :SINKS] = free[..., at - RECENT :] = False
        shares = [
            overlap(g[f], w[f])
            for g, w, f in zip(
                actual.flatten(0, 1),
                expected.flatten(0, 1),
                free.flatten(0, 1),
                strict=True,
            )
        ]
        assert len(shares) == expected[..., 0].numel()
        assert sum(shares) / len(shares) >= 0.999
        print(at, "least overlap", min(shares))
