"""A stand-in for FlashInfer's wrappers.

Checks the arguments as the real wrappers require, copies what they copy, and attends in
torch. Names and order of the parameters in use are those of flashinfer-python 0.7.2.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from simulated_graph import capturing, launch

INT32 = torch.int32


class _Wrapper:
    def _check(self, workspace: torch.Tensor, layout: str) -> None:
        assert layout == "NHD"
        assert workspace.dtype == torch.uint8
        assert workspace.data_ptr() % 16 == 0
        assert not workspace.any(), "must begin with zeros"
        self.plans = 0
        self.device = workspace.device
        self.buffers: list[torch.Tensor] | None = None

    def _take(
        self,
        start: torch.Tensor,
        listed: torch.Tensor,
        last: torch.Tensor,
        size: int,
        heads: tuple[int, int],
        types: tuple[torch.dtype, torch.dtype],
    ) -> None:
        assert heads[1] == 1
        assert types[0] == types[1]
        for host in (start, last):
            assert host.device.type == "cpu", "planning would wait for the device"
        assert start.dtype == listed.dtype == last.dtype == INT32
        assert len(listed) == int(start[-1])
        assert len(last) == len(start) - 1
        assert ((last == 0) == (start.diff() == 0)).all(), "full pages are not empty"
        assert ((last >= 0) & (last <= size)).all()
        parts = [start, listed, last]
        if self.buffers is None:
            self.held = [part.clone() for part in parts]
        else:
            assert len(start) == len(self.buffers[0]), "the batch size is captured"
            for buffer, part in zip(self.buffers, parts, strict=True):
                buffer[: len(part)].copy_(part)
            self.held = self.buffers
        self.size, self.heads, self.type = size, heads, types[0]
        self.plans += 1

    def _run(
        self, q: torch.Tensor, cache: Any, out: torch.Tensor, asks: torch.Tensor
    ) -> None:
        assert self.plans, "not planned"
        assert q.dtype == out.dtype == self.type
        assert q.shape == out.shape
        assert q.shape[1] == self.heads[0]
        assert q.is_contiguous()
        assert out.is_contiguous()
        assert isinstance(cache, tuple), "else one tensor is split along dimension 1"
        keys, values = cache
        assert keys.stride() == values.stride()
        assert keys.stride(-1) == 1
        assert keys.shape[1:3] == (self.size, 1)
        start, listed, last = self.held
        for i, full in enumerate(last.tolist()):
            pages = listed[int(start[i]) : int(start[i + 1])].long()
            length = max(len(pages) - 1, 0) * self.size + full
            own_queries = slice(int(asks[i]), int(asks[i + 1]))
            count = own_queries.stop - own_queries.start
            k, v = (t[pages].flatten(0, 1)[:length, 0].float() for t in cache)
            later = torch.arange(length) > length - count + torch.arange(count)[:, None]
            scores = q[own_queries].float().transpose(0, 1) @ k.T * self.scale
            weights = scores.masked_fill(later, -torch.inf).softmax(-1).nan_to_num(0)
            out[own_queries] = (weights @ v).transpose(0, 1).to(out.dtype)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """Decode: one query per sequence."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
    ) -> None:
        self._check(float_workspace_buffer, kv_layout)
        assert use_tensor_cores
        if use_cuda_graph:
            assert paged_kv_indptr_buffer is not None
            assert paged_kv_indices_buffer is not None
            assert paged_kv_last_page_len_buffer is not None
            self.buffers = [
                paged_kv_indptr_buffer,
                paged_kv_indices_buffer,
                paged_kv_last_page_len_buffer,
            ]

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        sm_scale: float,
    ) -> None:
        heads, types = (num_qo_heads, num_kv_heads), (q_data_type, kv_data_type)
        self._take(indptr, indices, last_page_len, page_size, heads, types)
        self.scale = sm_scale

    def run(
        self, q: torch.Tensor, paged_kv_cache: Any, *, out: torch.Tensor
    ) -> torch.Tensor:
        has_buffers = self.buffers is not None
        assert has_buffers or not capturing(), (
            "what is planned next would lie elsewhere"
        )
        launch(self._run)(q, paged_kv_cache, out, torch.arange(len(q) + 1))
        return out


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """Prefill: any number of queries per sequence, at its end."""

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD"
    ) -> None:
        self._check(float_workspace_buffer, kv_layout)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert causal
        assert qo_indptr.device.type == "cpu"
        assert qo_indptr.dtype == INT32
        assert len(qo_indptr) == len(paged_kv_indptr)
        self._take(
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            page_size,
            (num_qo_heads, num_kv_heads),
            (q_data_type, kv_data_type),
        )
        self.scale, self.asks = sm_scale, qo_indptr.clone()

    def run(
        self, q: torch.Tensor, paged_kv_cache: Any, *, out: torch.Tensor
    ) -> torch.Tensor:
        self._run(q, paged_kv_cache, out, self.asks)
        return out


def install(patch: pytest.MonkeyPatch) -> None:
    """Make ``import flashinfer`` import these stand-ins."""
    import sys
    from types import ModuleType

    module = ModuleType("flashinfer")
    for kind in (
        BatchDecodeWithPagedKVCacheWrapper,
        BatchPrefillWithPagedKVCacheWrapper,
    ):
        setattr(module, kind.__name__, kind)
    patch.setitem(sys.modules, "flashinfer", module)
    patch.setenv("VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE", "1024")
