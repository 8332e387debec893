"""Routers, their training examples and losses, against SeKV's equations."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import fake_engine
import pytest
import torch
from routers import Shape, random_router, write_random_router
from safetensors.torch import load_file, save_file
from zooming_engine import ZoomingEngine, run

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.errors import KVPolicyError, codes_in
from vllm_kvplugins.model_config import ModelFingerprint
from vllm_kvplugins.ops.svd import truncated_svd
from vllm_kvplugins.plan.geometry import Geometry, Lengths
from vllm_kvplugins.policies.sekv import SeKV
from vllm_kvplugins.routers.files import read_router
from vllm_kvplugins.routers.router import spectra
from vllm_kvplugins.spans.coarse import CoarseSpans

SEED = 20261123
SHAPE = Shape()
MODEL = ModelFingerprint(
    architecture="LlamaForCausalLM",
    num_layers=SHAPE.layers,
    num_heads=SHAPE.heads,
    num_kv_heads=SHAPE.kv_heads,
    head_dim=SHAPE.head_dim,
    hidden_size=32,
    vocab_size=100,
    rope=None,
)


@pytest.fixture
def random():
    print("seed", SEED)
    return torch.Generator().manual_seed(SEED)


# -- gates ---------------------------------------------------------------------------


def test_logits_are_those_of_the_equations(random):
    router = random_router(SHAPE, random)
    keys = torch.randn(SHAPE.kv_heads, 5, SHAPE.head_dim, generator=random)
    queries = torch.randn(SHAPE.heads, 3, SHAPE.head_dim, generator=random)
    sizes = torch.tensor([1, 2, 30, 4, 9])
    summary = router.summarize(keys, 1)
    actual = router.logits(queries, summary, sizes.log(), 1)
    for head, ask, span in itertools.product(range(SHAPE.heads), range(3), range(5)):
        weight = router.projection[1, head].double()
        projected = weight @ keys[head // SHAPE.group, span].double()
        projected_query = weight @ queries[head, ask].double()
        expected = (
            projected_query @ projected / projected.norm() / SHAPE.routing_dim**0.5
        )
        expected += math.log(sizes[span])
        assert float(actual[head, ask, span]) == pytest.approx(
            float(expected), abs=1e-4
        )
    every = router.summarize(keys.expand(SHAPE.layers, *keys.shape), slice(None))
    assert torch.allclose(every[1], summary)
    # and the same for mean keys, as served
    lengths = router.per_length(keys, 1)
    for ask in range(3):
        grouped = queries[:, ask].unflatten(0, (SHAPE.kv_heads, -1))
        served = router.logits_of_means(grouped, keys, lengths, sizes.log(), 1)
        assert torch.allclose(served.flatten(0, 1), actual[:, ask], atol=1e-4)


def test_a_span_whose_keys_cancel_out_is_no_nan(random):
    router = random_router(SHAPE, random)
    keys = torch.zeros(SHAPE.kv_heads, 1, SHAPE.head_dim)
    assert router.summarize(keys, 0).isfinite().all()
    assert (router.per_length(keys, 0)[..., None] * keys[0, 0]).isfinite().all()


def test_rank_gates_are_laid_out_like_the_factors(random):
    router = random_router(SHAPE, random)
    keys = torch.randn(SHAPE.kv_heads, 3, SHAPE.head_dim, generator=random)
    summary = router.summarize(keys, 0)
    rows = torch.randn(2 * SHAPE.kv_heads, 20, SHAPE.head_dim, generator=random)
    rows[1, 8:10] = 0.0  # a matrix of rank 0
    starts, sizes = torch.tensor([0, 8, 10]), torch.tensor([8, 2, 10])
    factors = truncated_svd(rows, starts, sizes, SHAPE.max_rank, dtype=torch.bfloat16)
    gates = router.component_gates(factors, summary)
    assert gates.numel() == int(factors.ranks.sum())
    parts = gates.split(factors.ranks.tolist())
    for matrix, part in enumerate(parts):
        plane, span = divmod(matrix, 3)
        head = plane % SHAPE.kv_heads
        spectrum = torch.zeros(SHAPE.max_rank)
        spectrum[: part.numel()] = factors.singular_values(matrix)
        group = slice(head * SHAPE.group, (head + 1) * SHAPE.group)
        logits = router.rank_logits(
            spectrum,
            summary[group, span].mean(0),
            torch.tensor([float(plane >= SHAPE.kv_heads)]),
        )
        assert torch.allclose(part, logits.sigmoid()[: part.numel()], atol=1e-6)
    assert parts[4].numel() == 0


def test_more_components_than_a_router_knows_are_an_error(random):
    router = random_router(replace(SHAPE, max_rank=2), random)
    summary = router.summarize(torch.ones(SHAPE.kv_heads, 1, SHAPE.head_dim), 0)
    rows = torch.randn(2 * SHAPE.kv_heads, 5, SHAPE.head_dim, generator=random)
    factors = truncated_svd(rows, torch.tensor([0]), torch.tensor([5]), 3)
    with pytest.raises(ValueError, match="rank 3, but the router knows 2"):
        router.component_gates(factors, summary)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_spectra_of_packed_factors(random, dtype):
    rows = torch.randn(3, 30, 8, generator=random)
    rows[0, :3] = 0.0
    starts, sizes = torch.tensor([0, 3, 4]), torch.tensor([3, 1, 26])
    factors = truncated_svd(rows, starts, sizes, 7, dtype=dtype)
    actual = spectra(factors, 9)
    for matrix in range(len(factors)):
        values = factors.singular_values(matrix)
        assert actual[matrix, : len(values)].equal(values)
        assert not actual[matrix, len(values) :].any()


# -- files and the policy ------------------------------------------------------------


def test_a_router_comes_back_from_its_file(random, tmp_path):
    path = tmp_path / "router.safetensors"
    written = write_random_router(path, MODEL, random)
    actual, facts = read_router(path)
    assert facts.fingerprint == MODEL
    for name, tensor in written.tensors.items():
        near = 0.01 if name == "projection" else 0.0
        assert torch.allclose(actual.tensors[name], tensor, rtol=near, atol=near)


def damage(path, how):
    tensors = load_file(path)
    if how == "cut":
        path.write_bytes(path.read_bytes()[:-100])
        return
    if how == "bytes":
        path.write_bytes(b"no router at all")
        return
    metadata = {"facts": json.dumps({"format": "other"})}
    if how == "shape":
        tensors["threshold"] = torch.zeros(3, 3)
    if how == "nan":
        tensors["projection"][0, 0, 0, 0] = torch.nan
    if how == "missing":
        del tensors["rank_out"]
    if how != "facts":
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            metadata = file.metadata()
    save_file(tensors, path, metadata)


@pytest.mark.parametrize(
    ("how", "value"),
    [
        ("cut", ""),
        ("bytes", ""),
        ("facts", ""),
        ("missing", ""),
        ("shape", "(3, 3)"),
        ("nan", "projection"),
    ],
)
def test_a_damaged_router_file_is_refused_at_start(random, tmp_path, how, value):
    path = tmp_path / "router.safetensors"
    write_random_router(path, MODEL, random)
    damage(path, how)
    with pytest.raises(KVPolicyError) as caught:
        parse_policy({"name": "sekv", "router": str(path)})
    assert "KVP646" in caught.value.codes
    assert value in str(caught.value)
    assert path.name in str(caught.value)


def test_a_router_of_another_model_is_refused(random, tmp_path):
    path = tmp_path / "router.safetensors"
    write_random_router(path, MODEL, random)
    policy = parse_policy({"name": "sekv", "router": str(path)})
    assert policy.model_problems(lambda: MODEL) == []
    other = MODEL.model_copy(update={"vocab_size": 101})
    (problem,) = policy.model_problems(lambda: other)
    assert codes_in(problem) == ("KVP116",)
    assert "vocab_size 100" in problem
    assert "101" in problem
    with pytest.raises(KVPolicyError, match=r"none\.safetensors"):
        parse_policy({"name": "sekv", "router": "none.safetensors"})


def test_a_rank_beyond_the_routers_is_refused(random, tmp_path):
    path = tmp_path / "router.safetensors"
    write_random_router(path, MODEL, random)
    with pytest.raises(KVPolicyError, match=r"rank 80.* 64 "):
        parse_policy({"name": "sekv", "router": str(path), "rank": 80})


def test_the_policy_zooms_where_any_head_of_a_group_wants_to(random, tmp_path):
    path = tmp_path / "router.safetensors"
    high = 8 + torch.randn(SHAPE.layers, SHAPE.heads, generator=random)
    write_random_router(path, MODEL, random, threshold=high)
    router = read_router(path)[0]
    policy = parse_policy({"name": "sekv", "router": str(path)})
    assert isinstance(policy, SeKV)
    assert policy.remarks == []
    assert "mean keys" in parse_policy({"name": "sekv"}).remarks[0]
    keys = torch.randn(SHAPE.kv_heads, 7, SHAPE.head_dim, generator=random)
    sizes = torch.tensor([3, 4, 50, 6, 7, 8, 9])
    log_sizes, summary = sizes.float().log(), policy.summarize(1, keys)
    spans = CoarseSpans(keys, log_sizes, sizes, summary)
    queries = 3 * torch.randn(
        SHAPE.kv_heads, SHAPE.group, SHAPE.head_dim, generator=random
    )
    gates = policy.gates(1, queries, spans, 1.0)
    summary = router.summarize(keys, 1)
    alone = router.logits(queries.flatten(0, 1)[:, None], summary, spans.log_sizes, 1)
    counted = 0
    for head, span in itertools.product(range(SHAPE.kv_heads), range(7)):
        group = range(head * SHAPE.group, (head + 1) * SHAPE.group)
        above = any(torch.sigmoid(alone[h, 0, span]) > router.tau[1, h] for h in group)
        counted += above
        shares = sum(float(alone[h, 0].softmax(0)[span]) for h in group)
        # and the attention that means get
        scores = queries[head].double() @ keys[head].double().T + sizes.log()
        shares += float(scores.softmax(-1)[:, span].sum())
        expected = shares if above else -math.inf
        assert float(gates[head, span]) == pytest.approx(expected, abs=1e-5)
    assert 0 < counted < 14, "both outcomes must occur"


def test_the_engine_zooms_as_the_router_says(random, tmp_path):
    """By the spans of each request."""
    path = tmp_path / "router.safetensors"
    model = MODEL.model_copy(
        update={
            "num_layers": fake_engine.LAYERS,
            "num_heads": fake_engine.KV_HEADS * fake_engine.GROUP,
            "num_kv_heads": fake_engine.KV_HEADS,
            "head_dim": fake_engine.HEAD_DIM,
        }
    )
    shape = (model.num_layers, model.num_heads)
    write_random_router(
        path,
        model,
        random,
        threshold=3 + 3 * torch.randn(shape, generator=random),
        rank_out=torch.zeros(32, 64),
        rank_out_bias=torch.full((64,), 50.0),  # components count as they are
    )
    router = read_router(path)[0]

    def predicted_mass(layer, head, query, keys, scores, variance):
        actual = torch.zeros(len(keys), dtype=torch.float64)
        above = torch.zeros(len(keys), dtype=torch.bool)
        log_sizes = scores[0] - query[0] @ keys.T * fake_engine.SCALE
        for member in range(fake_engine.GROUP):
            weight = router.projection[layer, head * fake_engine.GROUP + member]
            summary = torch.nn.functional.normalize(keys @ weight.double().T, dim=1)
            logits = summary @ (weight.double() @ query[member])
            logits = logits / weight.shape[0] ** 0.5 + log_sizes
            tau = router.threshold[layer, head * fake_engine.GROUP + member]
            actual += logits.softmax(0) + scores[member].softmax(0)
            above |= logits > tau
        return actual.where(above, -math.inf)

    policy = {
        "name": "sekv",
        "budget": 80,
        "sinks": 2,
        "least_span": 3,
        "span_tokens": 8,
        "rank": fake_engine.HEAD_DIM,
        "sensitivity": 0.5,
        "router": str(path),
    }
    engine = ZoomingEngine(policy, predicted_mass)
    run(engine, {"a": 150, "b": 97, "short": 30}, 12, 9, SEED)
    assert len(engine.seen) == 22
    zoomed = torch.cat([marks.flatten() for marks in engine.seen.values()]).float()
    assert 0.02 < zoomed.mean() < 0.8


def test_what_a_router_keeps_of_spans_takes_its_place_in_the_budget(random, tmp_path):
    path = tmp_path / "router.safetensors"
    router = write_random_router(path, MODEL, random)
    # 4 bytes for each of 2 layers and 4 query heads
    assert router.threshold.shape == (2, 4)
    geometry = Geometry(4, 2, 2, 2 * 2 * 128)
    plain = parse_policy({"name": "sekv", "budget": 200})
    routed = parse_policy({"name": "sekv", "budget": 200, "router": str(path)})
    surprisal = torch.rand(3000, generator=random)
    summary = torch.zeros(2 * 2 * 2)  # a number per layer and query head
    actual = {}
    for name, policy in {"plain": plain, "routed": routed}.items():
        plan = policy.plan(Lengths(3000), geometry)
        resident = len(plan.compactions[0].retained) * 4
        spans = policy.segment(surprisal, resident, geometry).num_spans
        zoom = policy.zoom_tokens(3000, geometry)
        # positions, and biases and owners; all of a row of 128 bytes
        used = 132 * resident + 140 * (zoom + spans) + spans  # a log of its size
        if name == "routed":
            used += spans * summary.nbytes / 4
        assert 198 * 128 <= used <= 200 * 128
        actual[name] = spans
    assert actual["routed"] < actual["plain"]
