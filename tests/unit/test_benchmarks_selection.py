"""The benchmarks' shortcuts compute the same as the engine."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.engine.heap import Heap
from vllm_kvplugins.engine.probing import ProbeModel
from vllm_kvplugins.engine.requests import Row
from vllm_kvplugins.engine.runtime import PolicyRuntime
from vllm_kvplugins.ops.layout import PageLayout
from vllm_kvplugins.scoring.rotary import Rotary

pytest.importorskip("transformers")
from _masked_model import Branches, Prompt, attend
from _selection import Probing, Selector, dropping_policies

SEED = 20261121
LAYERS, KV_HEADS, GROUP, DIM, SIZE, TOKENS = 3, 2, 2, 8, 16, 200
SCALE = DIM**-0.5
POSITIONS = 4 * TOKENS
PROMPT = [i % 97 for i in range(TOKENS)]


def made_up_prompt() -> Prompt:
    print("seed", SEED)
    rng = torch.Generator().manual_seed(SEED)

    def layers(heads: int) -> list[torch.Tensor]:
        return [torch.randn(heads, TOKENS, DIM, generator=rng) for _ in range(LAYERS)]

    queries, keys, values = layers(KV_HEADS * GROUP), layers(KV_HEADS), layers(KV_HEADS)
    for layer in keys:  # one flat head, one peaked head
        layer *= torch.tensor([0.3, 4.0]).view(2, 1, 1)
    return Prompt(queries, keys, values, [SCALE] * LAYERS)


def made_up_rotary() -> Rotary:
    angle = torch.arange(POSITIONS)[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])
    return Rotary(angle.cos(), angle.sin(), is_neox=True)


class LookUpModel:
    """Queries, keys and values are rows of random tables."""

    max_positions = POSITIONS

    def __init__(self) -> None:
        rng = torch.Generator().manual_seed(SEED + 2)
        heads = (KV_HEADS * GROUP, KV_HEADS, KV_HEADS)
        self.tables = [torch.randn(97, LAYERS, n, DIM, generator=rng) for n in heads]

    def rows(self, token_ids: torch.Tensor, layer: int) -> list[torch.Tensor]:
        """Queries, keys and values, each [tokens, heads, DIM]."""
        return [table[token_ids, layer] for table in self.tables]

    def extend(self, branches: Branches, tokens: torch.Tensor, logits: int = 0) -> None:
        for layer in range(LAYERS):
            parts = [part.transpose(0, 1)[None] for part in self.rows(tokens[0], layer)]
            branches.queries[layer], branches.keys[layer] = parts[0], parts[1]
            branches.values[layer] = parts[2]


def encode(text: str) -> list[int]:
    return [ord(letter) % 97 for letter in text]


def made_up_output_weights(layer: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(SEED + layer)
    return torch.randn(KV_HEADS * GROUP, DIM, 20, generator=rng)


def attach(runtime: PolicyRuntime, heap: Heap, rotary: Rotary) -> None:
    """A runtime whose prober sees the layers of a model."""
    tables = LookUpModel()

    def forward(token_ids: torch.Tensor, positions: torch.Tensor) -> None:
        for layer in range(LAYERS):
            runtime.prober.attend(layer, *tables.rows(token_ids, layer))

    model = ProbeModel(forward, encode, POSITIONS, POSITIONS)
    weights = [partial(made_up_output_weights, layer) for layer in range(LAYERS)]
    runtime.bind_heap(heap, [SCALE] * LAYERS, rotary, model, output_weights=weights)


def runtime_keeps(policy: Any, prompt: Prompt, selector: Selector) -> torch.Tensor:
    """The tokens that the worker's runtime keeps after a prompt in two steps."""
    blocks = -(-TOKENS // SIZE)

    def paged(parts: list[torch.Tensor]) -> torch.Tensor:
        padded = torch.zeros(LAYERS, KV_HEADS, blocks * SIZE, DIM)
        padded[:, :, :TOKENS] = torch.stack(parts)
        return padded.view(LAYERS, KV_HEADS, blocks, SIZE, DIM).transpose(1, 2)

    pages = torch.cat([paged(p).flatten(3) for p in (prompt.keys, prompt.values)], -1)
    layout = PageLayout.natural(SIZE, DIM)
    heap = Heap(pages.flatten(0, 2).clone(), layout, LAYERS, blocks, KV_HEADS)
    runtime = PolicyRuntime(policy, selector.geometry)
    attach(runtime, heap, selector.rotary)
    runtime.add_request("r", PROMPT)
    runtime.records = []
    table = torch.arange(blocks, dtype=torch.int32)[None]
    for start, stop in ((0, 120), (120, TOKENS)):
        row = Row("r", TOKENS, start, stop - start, 0)
        runtime.begin_step([row], torch.tensor([stop]), table)
        for layer, queries in enumerate(prompt.queries):
            runtime.after_layer(layer, queries[:, start:stop].transpose(0, 1))
        runtime.end_step()
    keep = torch.ones(LAYERS, KV_HEADS, TOKENS, dtype=torch.bool)
    for record in runtime.records:
        keep[:] = False
        for layer, heads in enumerate(record.kept_positions):
            for head, kept in enumerate(heads):
                keep[layer, head, kept] = True
    return keep


@pytest.mark.parametrize("allocator", [None, "head-adaptive", "cross-layer"])
@pytest.mark.parametrize("name", ["full", *dropping_policies()])
def test_the_selector_keeps_what_the_runtime_keeps(name, allocator):
    fields = type(parse_policy(name)).model_fields
    options: dict[str, Any] = {"name": name}
    small = {"window": 8, "recent": 8, "chunk": 64}
    options |= {key: value for key, value in small.items() if key in fields}
    options |= {"budget": 0.3} if "budget" in fields else {}
    options |= {"allocator": allocator} if allocator and "allocator" in fields else {}
    policy = parse_policy(options)
    prompt = made_up_prompt()
    probing = Probing(LookUpModel(), PROMPT, encode)
    rotary = made_up_rotary()
    selector = Selector(prompt, rotary, SIZE, probing, made_up_output_weights)
    kept = selector.kept(policy)
    assert torch.equal(kept, runtime_keeps(policy, prompt, selector))
    assert name == "full" or kept.double().mean() < 0.4
    # budgets share observations; a second question observes the same
    assert torch.equal(selector.kept(policy), kept)


def test_attention_over_a_mask_is_attention_without_the_hidden_tokens():
    prompt = made_up_prompt()
    rng = torch.Generator().manual_seed(SEED + 1)
    new, branches = 5, 3
    q = torch.randn(branches, KV_HEADS * GROUP, 2, DIM, generator=rng)
    k, v = torch.randn(2, branches, KV_HEADS, new, DIM, generator=rng)
    visible = torch.rand(branches, KV_HEADS, TOKENS, generator=rng) < 0.2
    actual = attend(q, prompt.keys[0], prompt.values[0], k, v, visible, SCALE)
    for branch in range(branches):
        for head in range(KV_HEADS * GROUP):
            kv = head // GROUP
            at = visible[branch, kv]
            for i in range(2):
                own = slice(0, new - 1 + i)  # the newest two tokens are the queries
                keys = torch.cat([prompt.keys[0][kv, at], k[branch, kv, own]])
                values = torch.cat([prompt.values[0][kv, at], v[branch, kv, own]])
                shares = (keys @ q[branch, head, i] * SCALE).softmax(0)
                torch.testing.assert_close(actual[branch, head, i], shares @ values)
