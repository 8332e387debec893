"""FlashInfer's plans over the page heap, and the use of its results.

A stand-in checks the arguments as the real wrappers require, and attends in torch.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="install a vLLM (see scripts/)")

import fake_flashinfer
import kernel_suite
from backend_kernels import through_flashinfer
from kernel_suite import make_case

from vllm_kvplugins.engine.page_table import PageTables, page_indices, page_runs
from vllm_kvplugins.vllm_adapter.attention import flashinfer

SEED = 20261122
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(kernel_suite, "DEVICE", CPU)
    fake_flashinfer.install(monkeypatch)


@pytest.mark.parametrize("scopes", [1, 2])
@pytest.mark.parametrize("asking", [[1, 1], [1, 40], [7, 1]])
def test_rows_of_all_kinds(asking, scopes):
    case = make_case(torch.bfloat16, asking, [100, 45, 41, 64])
    exact, _ = case.right(torch.float64)
    plain, _ = case.right(torch.bfloat16)
    actual = through_flashinfer(case, scopes, layer=scopes - 1).double()
    allowed = 2 * (plain - exact).abs().max()
    assert (actual - exact).abs().max() <= allowed


def test_decoding_steps_have_a_wrapper_of_their_own(monkeypatch):
    used = []
    for kind in ("Decode", "Prefill"):
        wrapper = getattr(fake_flashinfer, f"Batch{kind}WithPagedKVCacheWrapper")
        monkeypatch.setattr(
            wrapper, "run", lambda *_, kind=kind, out: used.append(kind)
        )
    through_flashinfer(make_case(torch.bfloat16, [1, 1], [33] * 4))
    through_flashinfer(make_case(torch.bfloat16, [1, 2], [33] * 4))
    assert used == ["Decode", "Prefill"]


def test_pages_of_all_sequences_behind_each_other():
    print("seed", SEED)
    random = torch.Generator().manual_seed(SEED)
    for _ in range(20):
        lengths = torch.randint(0, 70, (9,), generator=random).int()
        lengths[torch.randint(0, 9, (2,), generator=random)] = 32
        pages = torch.randint(0, 999, (9, 6), generator=random).int()
        start, last = page_runs(lengths, 16)
        listed = page_indices(pages, start, int(start[-1]))
        expected = [row[: -(-n // 16)] for row, n in zip(pages, lengths, strict=True)]
        assert listed.dtype == start.dtype == last.dtype == torch.int32
        assert torch.equal(listed, torch.cat(expected))
        sizes = start.diff()
        assert torch.equal((sizes - 1).clamp(min=0) * 16 + last, lengths)


def test_lengths_are_known_on_the_host():
    """Plans use the page counts of the compaction, without reading from the device."""
    tables = PageTables(2, 3, 50, 16, False, CPU)
    counts = torch.tensor([2, 0, 5, 1, 1, 4])
    pages = torch.arange(6 * 5).view(6, 5)
    slot_index = tables.assign(pages, counts, tail_block=7)
    table = torch.zeros(3, 20, dtype=torch.int32)
    lens = [7 * 16 + 3, 40, 0]
    flat = tables.build([slot_index, 0, 0], torch.tensor(lens), table, lens)
    assert torch.equal(tables.lengths_on_host(flat), flat.lengths)
    unknown = tables.build([slot_index, 0, 0], torch.tensor(lens), table)
    assert torch.equal(tables.lengths_on_host(unknown), flat.lengths)


def test_layers_that_scale_differently_are_refused(monkeypatch):
    """One plan serves all layers with equal tables."""
    from vllm_kvplugins.errors import KVPolicyError
    from vllm_kvplugins.vllm_adapter.attention.flat import PolicyBuilder

    def begin(self, *args, **kwargs):
        impls = [SimpleNamespace(scale=scale) for scale in (0.1, 0.2)]
        self.layers = [SimpleNamespace(impl=impl) for impl in impls]

    monkeypatch.setattr(PolicyBuilder, "__init__", begin)
    with pytest.raises(KVPolicyError, match="KVP025"):
        flashinfer.FlashInferPolicyBuilder()
