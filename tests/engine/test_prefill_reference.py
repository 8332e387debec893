"""Block-wise prefill keeps the same tokens as plain torch, in the same blocks.

The reference is the tiny Llama over the whole sequence with a mask per query that hides
what earlier compactions dropped. Scores come from its queries and keys with the
formulas of ``score_oracles``, or from the attention of a probe after them. They share
no code with the package.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_scenario
from test_masked_reference import CLOSE, visible_positions
from tiny_model import KV_HEADS, masked_logits
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "oracles"))

import score_oracles

pytestmark = pytest.mark.engine

BLOCK, BUDGET, EVERY, WINDOW = 32, 128, 128, 64
# The second prompt ends 40 tokens after a cut, which therefore happens a block earlier.
CUTS = {
    900: [256, 384, 512, 640, 768, 900],
    808: [256, 384, 512, 640, 736, 808],
}
TOKENS = 40
BASE: dict[str, Any] = {"budget": BUDGET, "prefill_block": EVERY}
POLICIES: dict[str, dict[str, Any]] = {
    "snapkv": {"name": "snapkv", "window": WINDOW, **BASE},
    "keydiff": {"name": "keydiff", **BASE},
    "streaming-llm": {"name": "streaming-llm", **BASE},
    "infinipot": {"name": "infinipot", **BASE},
    # a ranking over all heads belongs to the allocator
    "kvzip": {"name": "kvzip", "allocator": "uniform", **BASE},
}
SUMMARIZE = "Summarize the previous context highlighting the most important parts."
REPEAT_ALL = "\n\nRepeat the previous context exactly."
REPEAT_PART = "\n\nRepeat the part of the previous context exactly, starting with"
SCALE = 32**-0.5


@pytest.fixture(scope="module")
def runs(tiny_model: str) -> dict[str, Any]:
    report: dict[str, Any] = run_scenario(
        "scenarios_blocks:recorded_each",
        {
            "model": tiny_model,
            "policies": POLICIES,
            "lengths": list(CUTS),
            "max_tokens": TOKENS,
        },
    )
    return report


def probe_tokens(model: str, name: str, prompt: list[int], since: int) -> list[int]:
    """The probe of a policy after this prefix; [] for policies without one."""
    tokenizer = Tokenizer.from_file(str(Path(model, "tokenizer.json")))

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text).ids
        return ids

    if name == "infinipot":
        return encode(SUMMARIZE)
    if name == "kvzip":
        lead = [*encode(REPEAT_PART), *prompt[since - 8 : since]]
        lead = lead if since else encode(REPEAT_ALL)
        return [*lead, *encode("\n"), *prompt[since:]]
    return []


def behind(visible: torch.Tensor, probe: int) -> torch.Tensor:
    """Masks of the prefix and of the probe behind it."""
    count = visible.shape[-1]
    out = torch.ones(count + probe, count + probe, dtype=torch.bool).tril()
    out = out.repeat(*visible.shape[:2], 1, 1)
    out[..., :count, :count] = visible
    out[..., count:, :count] = visible[..., -1:, :]
    return out


def score(
    name: str, queries: torch.Tensor, keys: torch.Tensor, held: torch.Tensor, at: int
) -> torch.Tensor:
    """Reference scores of one KV head's slots.

    Args:
        queries: [group, tokens, head_dim]; of the newest tokens before ``at``, or
            of the probe behind it.
        keys: [tokens, head_dim].
        held: positions of the slots, ascending.
    """
    if name == "keydiff":
        return score_oracles.keydiff(keys[None, held])[0]
    if name == "snapkv":
        return score_oracles.snapkv(queries, keys[None, held], SCALE, 5)[0]
    if name == "streaming-llm":
        return held.double().masked_fill(held < 4, torch.inf)
    own = keys[at:]
    logits = torch.cat([queries @ keys[held].T, queries @ own.T], -1) * SCALE
    future = torch.ones(len(own), len(own), dtype=torch.bool).triu(1)
    logits[..., len(held) :].masked_fill_(future, -torch.inf)
    paid = logits.softmax(-1)[..., : len(held)].amax((0, 1)).double()
    return paid.masked_fill((held < 4) | (held >= at - 32), torch.inf)


@pytest.mark.each_value
@pytest.mark.parametrize("length", CUTS)
@pytest.mark.parametrize("name", POLICIES)
def test_each_block_keeps_what_torch_keeps(tiny_model, runs, name, length):
    run = runs[name][str(length)]
    prompt, visible = run["prompt"], visible_positions(run)
    cuts = [c["at_tokens"] for c in run["compactions"]]
    if name in ("snapkv", "kvzip"):  # these require this many new tokens
        assert cuts == CUTS[length]
    assert len(cuts) == 6
    since, dropped = 0, 0
    for compaction in run["compactions"]:
        at = compaction["at_tokens"]
        probe = probe_tokens(tiny_model, name, prompt[:at], since)
        layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        masks = behind(visible[..., :at, :at], len(probe))
        masked_logits(Path(tiny_model), prompt[:at] + probe, masks, layers)
        tail = at % BLOCK
        for layer, (queries, keys) in enumerate(layers):
            asking = queries[:, at:] if probe else queries[:, at - WINDOW : at]
            for head in range(KV_HEADS):
                held = visible[layer, head, at - 1, :at].nonzero()[:, 0]
                group = asking.unflatten(0, (KV_HEADS, -1))[head]
                worth = score(name, group, keys[head], held, at)
                kept = torch.tensor(compaction["kept"][layer][head])
                check(worth[: len(worth) - tail], held, kept, tail)
                dropped += len(held) - len(kept)
        since = at
    assert dropped > 1000


def check(
    worth: torch.Tensor, held: torch.Tensor, kept: torch.Tensor, tail: int
) -> None:
    """The best slots and the tail are kept; near ties may go either way."""
    stays = torch.isin(held, kept)
    assert len(kept) == int(stays.sum()), "kept a token that was not resident"
    assert stays[len(worth) :].all(), "the tail stays"
    stays = stays[: len(worth)]
    last = worth.topk(len(kept) - tail).values[-1]
    near = 1e-4 * last.abs()
    assert stays[worth > last + near].all()
    assert not stays[worth < last - near].any()


def check_answer(model: str, run: dict[str, Any]) -> None:
    """The answer equals that of a model that sees only the kept tokens; near ties
    may differ.
    """
    sequence = run["prompt"] + run["tokens"]
    logits = masked_logits(Path(model), sequence, visible_positions(run))
    logits = logits[len(run["prompt"]) - 1 : -1]
    best = logits.topk(2).values
    clear = best[:, 0] - best[:, 1] > CLOSE
    assert clear.sum() > 0.9 * len(run["tokens"])
    actual = torch.tensor(run["tokens"])
    assert torch.equal(logits.argmax(-1)[clear], actual[clear])


@pytest.mark.parametrize("name", POLICIES)
def test_the_answer_is_that_of_a_model_with_a_mask(tiny_model, runs, name):
    for run in runs[name].values():
        check_answer(tiny_model, run)
