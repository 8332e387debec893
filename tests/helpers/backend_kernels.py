"""The attention kernels of vLLM's own backends, called as our layers call them.

The real kernels on a GPU; stand-ins elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from vllm_kvplugins.engine.page_table import FlatTable, PageTables
from vllm_kvplugins.vllm_adapter.attention import flash, flashinfer, flat

if TYPE_CHECKING:
    from kernel_suite import Case


def through_flash(case: Case, scopes: int = 1, layer: int = 0) -> torch.Tensor:
    """Attention through one layer, as the builder would ask for it."""
    impl, cache = _layer(flash.FlashPolicyImpl, case, layer)
    start, order = flat.flat_queries(case.query_start.cpu(), impl.num_kv_heads)
    device = case.heap.device
    impl.vllm_flash_attn_version = 3
    if device.type == "cuda":
        impl.vllm_flash_attn_version = flash.fa_utils.get_flash_attn_version()
    metadata = flash.FlashPolicyMetadata(
        len(case.queries),
        start.to(device),
        None if order is None else order.to(device),
        max(case.asking),
        [flat.Scope(case.page_table, case.lengths)] * scopes,
        flash.max_splits(impl, len(case.queries), max(case.asking)),
    )
    return _attended(flash.FlashPolicyImpl, impl, case, cache, metadata)


def through_flashinfer(case: Case, scopes: int = 1, layer: int = 0) -> torch.Tensor:
    """Attention through the metadata builder and one layer."""
    impl, cache = _layer(flashinfer.FlashInferPolicyImpl, case, layer)
    heads, rows, device = impl.num_kv_heads, len(case.asking), case.heap.device
    size = case.layout.block_size
    tables = PageTables(scopes, heads, len(case.heap), size, scopes == 1, device)
    builder = object.__new__(flashinfer.FlashInferPolicyBuilder)
    vars(builder).update(
        runtime=SimpleNamespace(tables=tables),
        layers=[SimpleNamespace(impl=impl, kv_cache=cache)],
        device=device,
        vllm_config=SimpleNamespace(
            model_config=SimpleNamespace(dtype=case.queries.dtype),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
        ),
        table=None,
        _scale=case.scale,
        _workspace=None,
        _wrappers={},
        _captured_rows=set(),
        _graph_lists=[],
    )
    table = FlatTable(
        case.page_table.expand(scopes, -1, -1),
        case.lengths.expand(scopes, -1),
        [0] * rows,
        None,
    )
    common = SimpleNamespace(
        num_actual_tokens=len(case.queries),
        num_reqs=rows,
        query_start_loc_cpu=case.query_start.cpu(),
    )
    metadata = builder.metadata(common, table, one_each=False)
    assert len({id(scope.schedule) for scope in metadata.scopes}) == scopes
    return _attended(flashinfer.FlashInferPolicyImpl, impl, case, cache, metadata)


KERNELS: dict[str, Callable[[Case], torch.Tensor]] = {
    "flash": through_flash,
    "flashinfer": through_flashinfer,
}


def _layer(kind: type[Any], case: Case, layer: int) -> tuple[Any, torch.Tensor]:
    heads, q_heads = len(case.lengths) // len(case.asking), case.queries.shape[1]
    impl: Any = SimpleNamespace(
        num_heads=q_heads,
        num_kv_heads=heads,
        num_queries_per_kv=q_heads // heads,
        head_size=case.layout.head_dim,
        scale=case.scale,
        layer_index=layer,
        runtime=SimpleNamespace(heap=SimpleNamespace(pages=case.heap)),
    )
    impl.heap = impl.runtime.heap
    impl.scope = functools.partial(kind.scope, impl)
    # a cache with pages of one KV head, so that ids count pages of the layer
    shape = len(case.heap), 1, case.layout.block_size, 2 * case.layout.head_dim
    return impl, case.heap.view(shape)


def _attended(
    kind: type[Any], impl: Any, case: Case, cache: torch.Tensor, metadata: Any
) -> torch.Tensor:
    """Attention of the queries; checks that padding after them is not written."""
    tokens = len(case.queries)
    padded = torch.cat([case.queries, case.queries[:1].expand(2, -1, -1)])
    output = torch.full_like(padded, 7.0)
    kind.attend(impl, padded, cache, metadata, output)
    assert (output[tokens:] == 7).all(), "padding was written"
    return output[:tokens]
