"""Quantized rows and a host tier of them: compiled against torch, and their errors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from real_keys import capture
from texts import english

from vllm_kvplugins import ops
from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.engine.retrieval.host_tier import HostTier
from vllm_kvplugins.errors import KVPolicyError, codes_in
from vllm_kvplugins.index import (
    BruteForceIndex,
    DCIIndex,
    Keys,
    compiled,
    scan_in_torch,
)
from vllm_kvplugins.ops import QuantizedRows
from vllm_kvplugins.plan.geometry import Geometry

SEED = 20261121
DIMS = [2, 3, 31, 33, 54, 64, 65, 80, 128]
BITS = [8, 4]
needs_extension = pytest.mark.skipif(
    bool(compiled.extension_problem()), reason="the extension is not built"
)


@pytest.fixture
def random():
    print("seed", SEED)
    return torch.Generator().manual_seed(SEED)


@pytest.fixture(params=["compiled", "torch"])
def backend(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setenv("KVP_OPS", "torch")
    elif compiled.extension_problem():
        pytest.skip("the extension is not built")
    return request.param


def rows_of(random, n: int, dim: int) -> torch.Tensor:
    """Rows of several magnitudes; some all zero, all equal or far from zero."""
    scale = torch.exp(3 * torch.randn(n, 1, generator=random))
    rows = scale * torch.randn(n, dim, generator=random)
    rows[0] = 0
    rows[1] = 5.3
    rows[2] = rows[2].abs() + 1000
    rows[3] = -1e-38
    return rows


@needs_extension
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_rows_are_those_of_torch(random, monkeypatch, bits, dim, dtype):
    rows, values = QuantizedRows(dim, bits), rows_of(random, 200, dim).to(dtype)
    values[5, 0], values[6, -1], values[7, 0] = torch.inf, torch.nan, -3e37
    actual = rows.quantize(values), rows.dequantize(rows.quantize(values), dtype)
    monkeypatch.setenv("KVP_OPS", "torch")
    right = rows.quantize(values), rows.dequantize(rows.quantize(values), dtype)
    assert actual[0].equal(right[0])
    assert torch.equal(actual[1].nan_to_num(nan=7.0), right[1].nan_to_num(nan=7.0))
    assert right[1][:5].isfinite().all()
    assert right[1][5, 0].isnan()
    assert right[1][6, -1].isnan()
    assert right[1][7, 0].isnan()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", DIMS)
def test_no_element_is_off_by_more_than_half_a_step(random, backend, bits, dim):
    rows, values = QuantizedRows(dim, bits), rows_of(random, 300, dim)
    actual = rows.dequantize(rows.quantize(values))
    for first in range(0, dim, 64 if bits == 8 else 32):
        part = slice(first, first + (64 if bits == 8 else 32))
        exact = values[:, part].double()
        size = exact.abs().amax(1, keepdim=True)
        span = exact.amax(1, keepdim=True) - exact.amin(1, keepdim=True)
        step = torch.maximum(span / (2**bits - 1), size / 32767) * (1 + 1 / 128)
        error = (actual[:, part].double() - exact).abs()
        assert (error <= step / 2 + 1e-6 * size + 1e-34).all()
    assert actual[0].eq(0).all()
    torch.testing.assert_close(actual[1], values[1], rtol=2e-5, atol=0)


def test_shapes_and_single_rows(random, backend):
    rows = QuantizedRows(10, 4)
    values = torch.randn(2, 3, 10, generator=random)
    quantized = rows.quantize(values)
    assert quantized.shape == (2, 3, rows.row_bytes)
    assert quantized.dtype == torch.uint8
    assert rows.dequantize(quantized).shape == (2, 3, 10)
    one = rows.quantize(values[0, 0])
    assert one.equal(quantized[0, 0]), "rows do not depend on each other"
    assert rows.quantize(values[:, :0]).shape == (2, 0, rows.row_bytes)
    out = torch.empty(3, 10, dtype=torch.bfloat16)
    flat = quantized.view(-1, rows.row_bytes)
    rows.dequantize_into(out, flat, torch.tensor([5, 0, 5]))
    right = rows.dequantize(quantized).view(-1, 10)[[5, 0, 5]]
    assert out.equal(right.to(torch.bfloat16))
    assert QuantizedRows(64, 8).row_bytes == 68
    assert QuantizedRows(64, 4).row_bytes == 40
    for bad in ((64, 5), (1, 8)):
        with pytest.raises(ValueError, match="8 or 4 bits and at least 2"):
            QuantizedRows(*bad)


@needs_extension
def test_bad_rows_are_refused(random):
    rows = QuantizedRows(64, 8)
    quantized, out = rows.quantize(torch.zeros(3, 64)), torch.empty(2, 64)
    for change, message in (
        ({"ids": torch.tensor([0, 3])}, "row 3"),
        ({"ids": torch.tensor([0])}, "2 entries"),
        ({"ids": None}, "2 rows"),
        ({"rows": quantized[:, :67].contiguous()}, "quantized rows of 64"),
        ({"out": out.half()}, "float32 or bfloat16"),
        ({"rows": quantized.to(torch.int8)}, "uint8"),
    ):
        arguments = {
            "out": out,
            "rows": quantized,
            "ids": torch.tensor([0, 1]),
        } | change
        with pytest.raises(ValueError, match=message):
            rows.dequantize_into(**arguments)
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        rows.quantize(torch.zeros(3, 64, dtype=torch.float16))


# -- a host tier of quantized rows ----------------------------------------------------

HEADS, TOKENS, DIM, PAGE = 2, 90, 40, 8


def tier_of(random, bits: int, dtype: torch.dtype) -> tuple[HostTier, torch.Tensor]:
    """A tier, and a table of pages for two requests."""
    rows, pages = QuantizedRows(DIM, bits), -(-TOKENS // PAGE)
    total = 2 * HEADS * pages
    size = 2 * PAGE * rows.row_bytes
    tier = HostTier(total * size, PAGE, DIM, dtype, quantized=rows)
    assert tier.page_bytes == size
    assert len(tier.pages) == total
    order = torch.randperm(total, generator=random)
    return tier, tier.take(total)[order].view(2, HEADS, pages)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tier_keeps_what_rows_keep(random, backend, bits, dtype):
    """Written in pieces, also of one token; one scan finds the same keys in both."""
    tier, table = tier_of(random, bits, dtype)
    rows, scale = tier.quantized, 0.2
    assert rows is not None
    keys = torch.randn(2, HEADS, TOKENS, DIM, generator=random).to(dtype)
    right = rows.dequantize(rows.quantize(keys))
    for request in range(2):
        for first, stop in ((0, 1), (1, 21), (21, TOKENS)):
            part = keys[request, :, first:stop]
            tier.write(table[request], first, part, -part)
        actual = tier.read_keys(table[request], range(3, TOKENS))
        assert actual.equal(right[request, :, 3:])
    queries = torch.randn(2, HEADS, 3, DIM, generator=random)
    on_host, lengths = tier.keys(table), [TOKENS, TOKENS]
    assert on_host.gather()[:, :, :TOKENS].equal(right)
    assert on_host.of(1).gather()[:, :, :TOKENS].equal(right[1:])
    found = scan_in_torch(lengths, queries, on_host, scale, 20)
    assert found.equal(scan_in_torch(lengths, queries, Keys.dense(right), scale, 20))


@needs_extension
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", [BruteForceIndex, DCIIndex])
def test_indices_read_quantized_keys(random, bits, kind):
    tier, table = tier_of(random, bits, torch.float32)
    rows, settings = tier.quantized, () if kind is BruteForceIndex else (16,)
    assert rows is not None
    keys = torch.randn(2, HEADS, TOKENS, DIM, generator=random)
    right = rows.dequantize(rows.quantize(keys))
    indices = []
    for request in range(2):
        tier.write(table[request], 0, keys[request], keys[request])
        indices.append(kind(HEADS, DIM, *settings))
        indices[-1].append(tier.read_keys(table[request], range(TOKENS)), 0)
        indices[-1].check_integrity(tier.keys(table[request : request + 1]))
    queries = torch.randn(2, HEADS, 3, DIM, generator=random)
    select = compiled.select_compiled
    actual = select(indices, queries, tier.keys(table), 0.2, 20)
    assert actual.equal(select(indices, queries, Keys.dense(right), 0.2, 20))
    best = compiled.query_topk(indices, queries, tier.keys(table), 5)
    exact = compiled.query_topk(indices, queries, Keys.dense(right), 5)
    assert best.slots.equal(exact.slots)
    assert best.scores.equal(exact.scores)
    wrong = Keys.paged(tier.pages[:, 0, :, 1:], table)
    with pytest.raises(ValueError, match="quantized rows of 40 elements"):
        select(indices, queries, wrong, 0.2, 20)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hot_slots_hold_dequantized_tokens(random, backend, bits, dtype):
    tier, table = tier_of(random, bits, dtype)
    rows, layout = tier.quantized, ops.PageLayout.transposed_keys(4, DIM)
    assert rows is not None
    keys = torch.randn(2, HEADS, TOKENS, DIM, generator=random).to(dtype)
    for request in range(2):
        tier.write(table[request], 0, keys[request], -keys[request])
    heap = torch.full((20, 2 * 4 * DIM), torch.nan, dtype=dtype)
    kv = ops.PagedKV(heap, layout)
    spots = torch.randperm(80, generator=random)[: 2 * HEADS * 9].view(2, HEADS, 9)
    hot = ops.HotSet(
        torch.arange(9).expand(2, HEADS, 9).contiguous(),
        spots // 4,
        spots % 4,
        torch.tensor([9, 9]),
    )
    wanted = torch.stack([torch.arange(30, 39), torch.arange(81, 90)])
    wanted = wanted[:, None].expand(2, HEADS, 9).contiguous()
    copied = ops.fill_hot(kv, tier.host_pages(table), wanted, torch.tensor([0, 1]), hot)
    assert copied.tolist() == [HEADS * 9] * 2
    for request in range(2):
        for head in range(HEADS):
            own = request, head
            actual = ops.gather_tokens(kv, hot.page[own], hot.slot[own])
            part = keys[request, head, wanted[own]]
            for cached, exact in zip(actual, (part, -part), strict=True):
                assert cached.equal(rows.dequantize(rows.quantize(exact), dtype))


@needs_extension
@pytest.mark.slow
def test_icecache_covers_as_much_attention_with_int8(model_path):
    """Real keys and queries: 64 tokens of 1500, in four layers."""
    shares: dict[str, list[float]] = {"auto": [], "int8": []}
    layers = capture(model_path, english(SEED, 200), 1500, 16)
    for queries, keys in layers[2::9]:
        heads, _, dim = keys.shape
        scale = dim**-0.5
        for host_dtype, found in shares.items():
            policy = parse_policy({"name": "icecache", "host_dtype": host_dtype})
            rows = policy.quantized_rows(dim)
            on_host = Keys.dense(keys)
            if rows is not None:
                on_host = replace(Keys.dense(rows.quantize(keys)), quantized=rows)
            index = policy.new_index(heads, dim)
            index.append(on_host.gather()[0], 0)
            for number in range(queries.shape[2]):
                group = queries[:, :, number]
                weights = (group @ keys.transpose(1, 2) * scale).softmax(-1).sum(1)
                chosen = index.select(group, on_host, scale, 64)
                held, best = weights.gather(1, chosen), weights.topk(64).values
                found += (held.sum(1) / best.sum(1)).tolist()
    exact, int8 = (sum(found) / len(found) for found in shares.values())
    print(f"exact {exact:.4f}, int8 {int8:.4f}")
    assert exact > 0.9
    assert int8 == pytest.approx(exact, abs=0.005)


# -- the setting ----------------------------------------------------------------------


def test_a_gpu_cannot_dequantize():
    for host_dtype in ("int8", "int4"):
        with pytest.raises(KVPolicyError) as caught:
            parse_policy(
                {"name": "exact-topk", "host_dtype": host_dtype, "host_fetch": "direct"}
            )
        assert codes_in(str(caught.value)) == ("KVP141",)
    with pytest.raises(KVPolicyError) as caught:
        parse_policy({"name": "exact-topk", "host_dtype": "fp8"})
    assert codes_in(str(caught.value)) == ("KVP037",)


@pytest.mark.parametrize(
    "name", ["exact-topk", "icecache", "quest", "arkvale", "pqcache", "clusterkv"]
)
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_reservations_count_codes_scales_and_the_index(name, element_bytes):
    """68 of 128 or 256 bytes per row of 64 elements, and 40; the index is as large."""
    per_token = 2 * 30 * 3 * 64 * element_bytes
    shape = Geometry(32, 30, 3, per_token, 64, element_bytes)
    need = {
        host_dtype: parse_policy({"name": name, "host_dtype": host_dtype}).host_bytes(
            4096, shape
        )
        for host_dtype in ("auto", "int8", "int4")
    }
    rows = 2 * 28 * 3 * (4096 - 16 - 64)
    index = need["auto"] - rows * 64 * element_bytes
    assert (index == 0) == (name == "exact-topk")
    assert need["int8"] - index == rows * 68
    assert need["int4"] - index == rows * 40
