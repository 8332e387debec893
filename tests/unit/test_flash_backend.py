"""The calls of FlashAttention over the page heap, and the use of its results.

A stand-in checks the arguments as the real function requires, and attends in torch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="install a vLLM (see scripts/)")

import kernel_suite
from backend_kernels import through_flash
from fake_flash import flash_attn_varlen_func
from kernel_suite import make_case

from vllm_kvplugins.vllm_adapter.attention import flash, flat


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(kernel_suite, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(
        flash.fa_utils,
        "flash_attn_varlen_func",
        flash_attn_varlen_func,
        raising=False,
    )


@pytest.mark.parametrize("scopes", [1, 2])
@pytest.mark.parametrize("asking", [[1, 1], [1, 40], [7, 1]])
def test_rows_of_all_kinds(asking, scopes):
    """Decode rows are in the order of sequences; other rows are reordered and
    restored.
    """
    case = make_case(torch.bfloat16, asking, [100, 45, 41, 50])
    exact, _ = case.right(torch.float64)
    plain, _ = case.right(torch.bfloat16)
    actual = through_flash(case, scopes, layer=scopes - 1).double()
    allowed = 2 * (plain - exact).abs().max()
    assert (actual - exact).abs().max() <= allowed


def test_what_is_multiplied_by_nothing_is_finite():
    """FlashAttention multiplies unused slots by 0; one slot too many still shows."""
    of_flash = partial(kernel_suite.of_backend, "flash")
    case = make_case(torch.bfloat16, [1, 9], [100, 45, 41, 50], block=128)
    assert case.heap.isnan().any()
    calls = []

    def listening(k, v, **arguments):
        calls.extend((k, v))
        return flash_attn_varlen_func(k=k, v=v, **arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash.fa_utils, "flash_attn_varlen_func", listening)
        kernel_suite.assert_right(case, of_flash)
    assert all(pages.isfinite().all() for pages in calls)
    actual, _ = replace(case, lengths=case.lengths + 1).run(of_flash)
    expected, _ = case.run(of_flash)
    assert (actual - expected).abs().max() > 100


@pytest.mark.parametrize(
    ("tokens", "most_queries", "splits"),
    [
        (1, 1, 32),
        (512, 1, 32),
        (1024, 1, 16),
        (9000, 1, 1),
        (700, 40, 23),
        # of vLLM's call, 8 KV heads with 14 tiles of 128 queries occupy a GPU
        (448, 448, 1),
        (416, 416, 32),
    ],
)
def test_parts_are_bounded(tokens, most_queries, splits):
    """Limits: 32 splits, their memory, and the splits of vLLM's own call."""
    layer = SimpleNamespace(
        num_heads=32, num_kv_heads=8, num_queries_per_kv=4, head_size=128
    )
    layer.vllm_flash_attn_version = 3
    assert flash.max_splits(layer, tokens, most_queries) == splits
    assert splits == 1 or splits * tokens * 32 * 128 * 4 <= 256 << 20
    layer.vllm_flash_attn_version = 2
    assert flash.max_splits(layer, tokens, most_queries) == 0


def test_decoding_rows_are_not_copied():
    case = make_case(torch.bfloat16, [1, 1, 1], [33] * 6)
    start, order = flat.flat_queries(case.query_start, 2)
    assert order is None
    assert start.tolist() == list(range(7))
    out = torch.empty(6, 3, 64, dtype=torch.bfloat16)
    queries, target = flat.in_flat_order(case.queries, out, None)
    assert target is out
    assert queries.data_ptr() == case.queries.data_ptr()
