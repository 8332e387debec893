"""vLLM's CPU kernels for an fp8 cache, in torch, for CPUs without AVX-512.

``install`` replaces the functions through which vLLM and this package call them. What
is computed is what the kernels compute; pages have the natural order.
"""

from __future__ import annotations

import functools
from itertools import product
from typing import Any

import pytest
import torch

HAS_KERNEL = torch.cpu._is_avx512_supported()
needs_kernel = pytest.mark.skipif(
    not HAS_KERNEL, reason="needs AVX-512 (vLLM's kernel)"
)
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


def compute_tokens_alone() -> None:
    """Let linear layers compute each token of a step by itself.

    Then no bit of a token depends on how many others its step has. In an fp8 cache the
    last bit of a key may decide to which of two elements it is rounded.
    """
    from vllm.model_executor.layers import utils

    dispatch = utils.dispatch_cpu_unquantized_gemm

    def dispatched(layer: Any, *args: Any, **kwargs: Any) -> None:
        dispatch(layer, *args, **kwargs)
        linear = layer.cpu_linear

        def by_token(x: torch.Tensor, weight: Any, bias: Any) -> torch.Tensor:
            if len(x) == 1 or not len(x):
                return linear(x, weight, bias)
            return torch.cat([linear(row, weight, bias) for row in x.split(1)])

        layer.cpu_linear = by_token

    utils.dispatch_cpu_unquantized_gemm = dispatched


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
        # [new tokens, KV heads, group, head_dim]
        attended = output[own].view(queries.shape)
        first = length - len(queries) + 1
        # One by one, so that no bit depends on the other new tokens of a step.
        for token, head in product(range(len(queries)), range(len(keys))):
            seen = slice(0, first + token)
            logits = queries[token, head] @ keys[head, seen].T * scale
            attended[token, head] = logits.softmax(-1) @ values[head, seen]
