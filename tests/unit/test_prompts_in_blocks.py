"""Retrieval with ``prefill_block``: prompts move to the host while they are read.

The fake engine compares what prompt tokens attend to with dense attention to all
earlier tokens, and all memory that is not resident is NaN.
"""

from __future__ import annotations

import random

import pytest
import torch
from fake_engine import GROUP, HEAD_DIM, KV_HEADS, LAYERS
from retrieving_engine import BLOCK, RETRIEVERS, SINKS, SKIP, WINDOW, engine

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.ops.tiled_attention import TiledAttention
from vllm_kvplugins.plan.geometry import Geometry, Lengths
from vllm_kvplugins.scoring.logits import LogitRules

SEED = 11
KEEP = -(-(SINKS + 9 + WINDOW) // BLOCK)


@pytest.fixture(autouse=True)
def _as_in_an_engine():
    with torch.inference_mode():
        yield


@pytest.mark.each_value
@pytest.mark.parametrize("name", RETRIEVERS)
@pytest.mark.parametrize("host_dtype", ["auto", "int8"])
@pytest.mark.parametrize("prefill_block", [4, 11, 24])
def test_prompt_tokens_attend_to_all_earlier_tokens(name, host_dtype, prefill_block):
    fake = engine(name, host_dtype=host_dtype, prefill_block=prefill_block)
    request = fake.add("r", 147, 20)
    while not request.done:
        fake.step({"r": 13})
    first = fake.plan("r").compaction(0).at_tokens
    assert first <= KEEP * BLOCK + max(prefill_block, 2 * BLOCK)
    assert fake.prompt_tokens_checked == 147 - first
    fake.remove("r")
    fake.check_idle()
    assert fake.retrieval.tier.num_free == len(fake.retrieval.tier.pages)


@pytest.mark.parametrize("skip_layers", [0, 1])
def test_a_prompt_holds_no_more_than_planned(skip_layers):
    settings = {"budget": 9, "sinks": SINKS, "window": WINDOW, "prefill_block": 8}
    policy = parse_policy({"name": "icecache", **settings, "skip_layers": skip_layers})
    geometry = Geometry(BLOCK, LAYERS, KV_HEADS, 2 * LAYERS * KV_HEADS * HEAD_DIM * 4)
    for tokens in range(1, 400):
        plan = policy.plan(Lengths(tokens), geometry)
        bound = policy.max_prompt_blocks(tokens, geometry)
        whole = skip_layers * -(-tokens // BLOCK) / LAYERS
        assert plan.peak_blocks(tokens) == bound <= KEEP + 2 + 1 + whole
        assert len(plan.compactions) >= (tokens - KEEP * BLOCK) // 8 - 2


def test_a_policy_says_that_blocks_make_it_worse():
    assert not parse_policy({"name": "pqcache"}).remarks
    (remark,) = parse_policy({"name": "pqcache", "prefill_block": 512}).remarks
    assert "first 512 tokens" in remark
    assert not parse_policy({"name": "icecache", "prefill_block": 512}).remarks


@pytest.mark.each_value
@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))]
)
@pytest.mark.parametrize("name", RETRIEVERS)
def test_random_traffic(name, seed):
    """Chunks of any length, several requests at once, preemptions and aborts."""
    rng = random.Random(seed)
    fake = engine(
        name,
        prefill_block=rng.choice([4, 9, 16]),
        age_blocks=rng.choice([1, 3]),
        # the oracle of exact-topk selects in every layer
        reuse_every=1 if name == "exact-topk" else rng.choice([1, 2]),
        host_dtype=rng.choice(["auto", "int4"]),
    )
    names = iter(range(1000))
    for _ in range(60):
        if len(fake.requests) < 3:
            fake.add(f"{seed}.{next(names)}", rng.randint(3, 110), rng.randint(1, 12))
        alive = [n for n, request in fake.requests.items() if not request.done]
        fake.step(
            {n: rng.randint(1, 40) for n in alive if rng.random() < 0.8}
            or {alive[0]: 1}
        )
        for n in [n for n, request in fake.requests.items() if request.done]:
            fake.remove(n)
        if fake.requests and rng.random() < 0.1:
            victim = rng.choice(list(fake.requests))
            (fake.preempt if rng.random() < 0.7 else fake.remove)(victim)
    for n in list(fake.requests):
        fake.remove(n)
    fake.check_idle()
    assert fake.prompt_tokens_checked > 300


def test_the_index_is_complete_before_it_selects():
    """Prompt blocks are indexed while later blocks are read."""
    fake = engine("icecache", prefill_block=8)
    request = fake.add("r", 90, 10)
    while not request.done:
        fake.step({"r": 40})
    state = fake.retrieval._requests["r"]
    assert state.tokens > 60
    for layer in range(SKIP, LAYERS):
        assert state.layers[layer].tokens == state.tokens
        index = fake.retrieval._indexer._ready(state.layers[layer])
        index.check_integrity(fake.retrieval.tier.keys(state.table(layer)[None]))
    fake.remove("r")
    fake.check_idle()


@pytest.fixture(params=["flash", "plain"])
def kernel(request, monkeypatch):
    """torch's flash kernel, and matrix products as on devices without it."""
    if request.param == "plain":
        module = "vllm_kvplugins.ops.tiled_attention"
        monkeypatch.setattr(f"{module}._has_flash", lambda device: False)
        monkeypatch.setattr(f"{module}._MAX_SCORES", 100)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sinks", [False, True])
def test_tiles_add_up_to_dense_attention(dtype, sinks):
    """At most twice the error of torch's attention in the same dtype, against fp32."""
    rng = torch.Generator().manual_seed(SEED)
    heads, dim, before, new = 2, 16, 70, 9
    queries = torch.randn(new, heads * GROUP, dim, generator=rng).to(dtype)
    keys, values = (
        torch.randn(heads, before + new, dim, generator=rng).to(dtype) for _ in range(2)
    )
    sink = torch.randn(heads * GROUP, generator=rng) if sinks else None
    attention = TiledAttention(queries, heads, 0.3, sink)
    for first, stop in ((0, 33), (33, 33), (33, before)):
        attention.add(keys[:, first:stop], values[:, first:stop])
    attention.add(keys[:, before:], values[:, before:], causal=True)

    def dense(q, k, v):
        k, v = (each.repeat_interleave(GROUP, 0) for each in (k, v))
        logits = (q.transpose(0, 1) @ k.transpose(1, 2) * 0.3).float()
        later = torch.ones(new, before + new, dtype=torch.bool).triu_(before + 1)
        logits = logits.masked_fill(later, -torch.inf)
        weights = LogitRules(sink).softmax(logits)
        return (weights.to(v.dtype) @ v).transpose(0, 1)

    exact = dense(queries.float(), keys.float(), values.float())
    error = (attention.result().float() - exact).abs().max()
    torch_error = (dense(queries, keys, values).float() - exact).abs().max()
    assert error <= max(2 * torch_error, 1e-6)
