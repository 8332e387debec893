"""vLLM's CPU kernels for an fp8 cache, in torch, for CPUs without AVX-512.

``install`` replaces the functions through which vLLM and this package call them. What
is computed is what the kernels compute; pages have the natural order.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

TYPES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def install() -> None:
    """Let this process run an fp8 cache. Other caches keep their kernels."""
    from vllm import _custom_ops as ops

    torch.cpu._is_avx512_supported = lambda: True
    for name, function in (
        ("cpu_attn_get_scheduler_metadata", _plan),
        ("cpu_attn_reshape_and_cache", _write),
        ("cpu_attention_with_kv_cache", _attend),
    ):
        setattr(ops, name, _unless_plain(getattr(ops, name), function))


def _unless_plain(stock: Any, function: Any) -> Any:
    @functools.wraps(stock)  # the signature is a seam that start-up checks
    def either(*args: Any, **kwargs: Any) -> Any:
        fp8 = kwargs.get("kv_cache_dtype") in TYPES
        return (function if fp8 else stock)(*args, **kwargs)

    return either


def _plan(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.zeros(1)


def _write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    isa: str,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    kv_cache_dtype: str = "auto",
) -> None:
    size, dtype = key_cache.shape[2], TYPES[kv_cache_dtype]
    used = slot_mapping >= 0
    block, slot = slot_mapping[used] // size, slot_mapping[used] % size
    count = len(slot_mapping)
    for cache, rows, scale in (
        (key_cache, key, k_scale),
        (value_cache, value, v_scale),
    ):
        elements = (rows[:count][used].float() / scale).to(dtype)
        cache.view(torch.uint8)[block, :, slot] = elements.view(torch.uint8)


def _attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    output: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    block_table: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    kv_cache_dtype: str = "auto",
    **_: Any,
) -> None:
    dtype, size = TYPES[kv_cache_dtype], key_cache.shape[2]
    starts = query_start_loc.tolist()
    for row, length in enumerate(seq_lens.tolist()):
        own = slice(starts[row], starts[row + 1])
        pages = block_table[row, : -(-length // size)].long()
        keys, values = (
            cache.view(torch.uint8)[pages].transpose(0, 1).flatten(1, 2)[:, :length]
            for cache in (key_cache, value_cache)
        )
        keys = keys.contiguous().view(dtype).float() * k_scale
        values = values.contiguous().view(dtype).float() * v_scale
        queries = query[own].float().unflatten(1, (len(keys), -1))
        logits = torch.einsum("nhgd,htd->hgnt", queries, keys) * scale
        new = own.stop - own.start
        order = torch.arange(length)
        seen = order <= order[length - new :, None]
        weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
        attended = torch.einsum("hgnt,htd->nhgd", weights, values)
        output[own] = attended.flatten(1, 2).view(output[own].shape)
