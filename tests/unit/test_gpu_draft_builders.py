"""The kernels of GPUs attend in a drafter's layers to the tokens that these keep.

A drafter's layers have another number of KV heads than the model's, and page tables of
their own. Stand-ins replace FlashAttention and FlashInfer. The Triton kernel runs in
tests/engine/test_drafters.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="install a vLLM (see scripts/)")

import fake_flashinfer
from fake_flash import flash_attn_varlen_func
from graphed_engine import bare_impl

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.engine.draft_layers import DraftLayers
from vllm_kvplugins.engine.heap import Heap
from vllm_kvplugins.engine.requests import DueCompaction, PageList, Row
from vllm_kvplugins.engine.runtime import PolicyRuntime
from vllm_kvplugins.ops.layout import PageLayout
from vllm_kvplugins.plan.geometry import Geometry
from vllm_kvplugins.plan.residency_plan import BlockSpan, Compaction
from vllm_kvplugins.vllm_adapter.attention import flash, flashinfer, flat
from vllm_kvplugins.vllm_adapter.worker.context import WorkerContext

SEED = 20261127
BLOCK, BLOCKS = 16, 40
MODEL_HEADS, HEADS, GROUP, DIM = 2, 4, 2, 32
PROMPT = 150
# One token more than whole pages, so that a limit that is short of one loses a page.
LENGTHS = {"compacted": 161, "whole": 49}
NAME = "draft.0"
KERNELS = {
    "flash": (flash.FlashDraftBackend, flash.FlashPolicyBackend),
    "flashinfer": (
        flashinfer.FlashInferDraftBackend,
        flashinfer.FlashInferPolicyBackend,
    ),
}


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    fake_flashinfer.install(monkeypatch)
    monkeypatch.setattr(
        flash.fa_utils, "flash_attn_varlen_func", flash_attn_varlen_func, raising=False
    )


class Bench:
    """One draft layer of a worker with two requests, one of them compacted."""

    def __init__(self, monkeypatch: Any, kernel: str) -> None:
        print("seed", SEED)
        self.rng = torch.Generator().manual_seed(SEED)
        model = self._heap(MODEL_HEADS)
        draft_backend, backend = KERNELS[kernel]
        assert backend.draft_backend is draft_backend
        geometry = Geometry(BLOCK, 1, MODEL_HEADS, 2 * MODEL_HEADS * DIM * 4)
        self.runtime = PolicyRuntime(parse_policy("snapkv"), geometry)
        self.heap = self._heap(HEADS)
        self.runtime.heap = model
        self.drafts = self.runtime.draft_layers = DraftLayers(self.heap, model)
        self.impl = bare_impl(draft_backend.get_impl_cls(), HEADS, GROUP, DIM)
        cache = self.heap.pages.view(BLOCKS, HEADS, BLOCK, 2 * DIM)
        layer = SimpleNamespace(impl=self.impl, kv_cache=cache)
        self.impl.bind(self.runtime, None, layer)
        context = WorkerContext(self.runtime)
        context.runner = SimpleNamespace(draft_request_ids=lambda _: list(LENGTHS))
        context.bind_layers([layer])
        self.builder = self._builder(monkeypatch, draft_backend, layer)
        blocks = (torch.randperm(BLOCKS - 1, generator=self.rng) + 1).int()
        self.table = torch.stack([blocks[:12], blocks[12:24]])
        self._compact()

    def _heap(self, heads: int) -> Heap:
        layout = PageLayout.interleaved(BLOCK, DIM)
        pages = torch.randn(BLOCKS * heads, layout.page_elems, generator=self.rng)
        return Heap(pages, layout, 1, BLOCKS, heads)

    def _builder(self, monkeypatch: Any, backend: Any, layer: Any) -> Any:
        config = SimpleNamespace(
            model_config=SimpleNamespace(dtype=torch.float32),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
            num_speculative_tokens=1,
        )
        with monkeypatch.context() as patch:
            patch.setattr(flat, "get_layers_from_vllm_config", lambda *_: {NAME: layer})
            cpu = torch.device("cpu")
            return backend.get_builder_cls()(None, [NAME], config, cpu)

    def _compact(self) -> None:
        blocks = self.table[0].long()
        scores = torch.rand(1, MODEL_HEADS, 9 * BLOCK, generator=self.rng)
        owned = PageList.of_blocks(self.runtime.heap, blocks[:10], 0)
        compaction = Compaction(PROMPT, BlockSpan(0, 9), BlockSpan(6, 9))
        row = Row("compacted", PROMPT, PROMPT - 1, 1, 0)
        due = DueCompaction(row, compaction, PROMPT, blocks)
        self.drafts.compact(due, scores, owned.positions)

    def attended(self, new_tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """What the kernel computes, and what torch computes over the page lists."""
        tokens = sum(new_tokens)
        queries = torch.randn(tokens, HEADS * GROUP, DIM, generator=self.rng)
        start = torch.tensor([0, *new_tokens]).cumsum(0).int()
        common = SimpleNamespace(
            num_reqs=len(new_tokens),
            num_actual_tokens=tokens,
            max_query_len=max(new_tokens),
            query_start_loc_cpu=start,
            seq_lens=torch.tensor(list(LENGTHS.values())).int(),
            # Of draft models, vLLM's limit is short of one token.
            seq_lens_cpu_upper_bound=torch.tensor(list(LENGTHS.values())) - 1,
            block_table_tensor=self.table,
        )
        # As a drafter calls it.
        metadata = self.builder.build_for_drafting(common, draft_index=1)
        output = torch.zeros(tokens, HEADS * GROUP * DIM)
        cache = self.heap.pages.view(BLOCKS, HEADS, BLOCK, 2 * DIM)
        flat_output = output.view(tokens, HEADS * GROUP, DIM)
        self.impl.forward(None, queries, None, None, cache, metadata, flat_output)
        return flat_output, self._expected(queries, new_tokens)

    def _expected(self, queries: torch.Tensor, new_tokens: list[int]) -> torch.Tensor:
        lengths = torch.tensor(list(LENGTHS.values())).int()
        table = self.drafts.build(list(LENGTHS), lengths, self.table)
        expected, at = torch.zeros_like(queries), 0
        for row, new in enumerate(new_tokens):
            for head in range(HEADS):
                sequence = row * HEADS + head
                pages = table.pages[0, sequence].long()
                length = int(table.lengths[0, sequence])
                slots = self.heap.pages[pages].view(-1, 2 * DIM)[:length]
                keys, values = slots.split(DIM, -1)
                for i in range(new):
                    seen = length - new + i + 1
                    mine = queries[at + i, head * GROUP : (head + 1) * GROUP]
                    weights = (mine @ keys[:seen].T * DIM**-0.5).softmax(-1)
                    expected[at + i, head * GROUP : (head + 1) * GROUP] = (
                        weights @ values[:seen]
                    )
            at += new
        return expected


@pytest.mark.parametrize("new_tokens", [[1, 1], [4, 1]])
@pytest.mark.parametrize("kernel", KERNELS)
def test_attention_in_draft_layers(monkeypatch, kernel, new_tokens):
    """After a compaction and without one; one token of each request, and several."""
    bench = Bench(monkeypatch, kernel)
    actual, expected = bench.attended(new_tokens)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    lengths = bench.builder.tables.build([0], torch.tensor([7]), bench.table[:1])
    assert lengths.lengths.shape[1] == HEADS, "the tables of the draft layers"
