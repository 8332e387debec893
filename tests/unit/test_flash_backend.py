"""What FlashAttention is asked over the page heap, and what becomes of its answer.

A stand-in checks what the real function wants of its arguments, and attends in torch.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="install a vLLM (see scripts/)")

import kernel_suite
from fake_flash import flash_attn_varlen_func
from kernel_suite import Case, make_case

from vllm_kvplugins.vllm_adapter.attention import flash, flat
from vllm_kvplugins.vllm_adapter.attention.flat import Scope


def attend(case: Case, scopes: int = 1, layer: int = 0) -> torch.Tensor:
    """Through the layer, as the builder would ask."""
    heads = len(case.lengths) // len(case.asking)
    start, order = flat.flat_queries(case.query_start, heads)
    metadata = flash.FlashPolicyMetadata(
        len(case.queries),
        start,
        order,
        max(case.asking),
        [Scope(case.page_table, case.lengths)] * scopes,
    )
    tokens, q_heads, head_dim = case.queries.shape
    impl: Any = SimpleNamespace(
        num_heads=q_heads,
        num_kv_heads=heads,
        num_queries_per_kv=q_heads // heads,
        head_size=head_dim,
        scale=case.scale,
        layer_index=layer,
        vllm_flash_attn_version=3,
        runtime=SimpleNamespace(heap=SimpleNamespace(pages=case.heap)),
    )
    impl.scope = functools.partial(flash.FlashPolicyImpl.scope, impl)
    # a cache of pages of one KV head, so that ids count pages of the layer
    cache = case.heap.view(len(case.heap), 1, case.layout.block_size, 2 * head_dim)
    output = torch.full((tokens + 2, q_heads, head_dim), 7.0, dtype=case.queries.dtype)
    padded = torch.cat([case.queries, case.queries[:1].expand(2, -1, -1)])
    flash.FlashPolicyImpl.attend(impl, padded, cache, metadata, output)
    assert (output[tokens:] == 7).all(), "padding was written"
    return output[:tokens]


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
    """Decoding rows lie in the order of sequences; others are put into it and back."""
    case = make_case(torch.bfloat16, asking, [100, 45, 41, 50])
    exact, _ = case.right(torch.float64)
    plain, _ = case.right(torch.bfloat16)
    found = attend(case, scopes, layer=scopes - 1).double()
    allowed = 2 * (plain - exact).abs().max()
    assert (found - exact).abs().max() <= allowed


def test_decoding_rows_are_not_copied():
    case = make_case(torch.bfloat16, [1, 1, 1], [33] * 6)
    start, order = flat.flat_queries(case.query_start, 2)
    assert order is None
    assert start.tolist() == list(range(7))
    out = torch.empty(6, 3, 64, dtype=torch.bfloat16)
    queries, target = flat.in_flat_order(case.queries, out, None)
    assert target is out
    assert queries.data_ptr() == case.queries.data_ptr()
