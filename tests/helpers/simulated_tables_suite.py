"""Page tables of decode steps on a simulated GPU: the host never waits.

``tests/unit/test_suites.py`` runs it in its own process, because torch cannot undo the
simulation of a GPU.
"""

from __future__ import annotations

import pytest
import torch
from simulated_cuda import CUDA, GpuTensor, SimulatedGPU

from vllm_kvplugins.engine.page_table import (
    FixedTable,
    PageTables,
    TableShape,
    page_indices,
    page_runs,
)

SEED = 20261122
LAYERS, HEADS, BLOCK, BLOCKS, WIDTH = 3, 2, 4, 60, 20
LENS = (51, 17, 0)  # rows: a compacted request, an ordinary one, padding


def here(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor if device.type == "cpu" else GpuTensor.of(tensor.clone())


def step(device: torch.device, uniform: bool, fixed: bool) -> list[torch.Tensor]:
    """The page table of a step, and its pages in one list."""
    print("seed", SEED)
    random = torch.Generator().manual_seed(SEED)
    tables = PageTables(LAYERS, HEADS, BLOCKS, BLOCK, uniform, device)
    counts = torch.tensor([3] * 6 if uniform else [3, 1, 7, 0, 4, 3])
    pages = torch.randint(0, 99, (LAYERS * HEADS, 7), generator=random)
    slot_index = tables.assign(here(pages, device), here(counts, device), tail_block=9)
    shape = TableShape(tables.scopes, 4, HEADS, WIDTH)
    into = FixedTable(shape, device) if fixed else None
    lens = here(torch.tensor(LENS).int(), device)
    blocks = torch.randint(0, BLOCKS, (3, WIDTH), generator=random).int()
    blocks = here(blocks, device)
    gpu = SimulatedGPU.active
    before = len(gpu.waits) if gpu else 0
    flat = tables.build([slot_index, 0, 0], lens, blocks, LENS, into)
    known = tables.lengths_on_host(flat)
    built = [flat.lengths, known]
    for listed, lengths in zip(flat.pages, known, strict=True):
        start, last = page_runs(lengths, BLOCK)
        built += [
            start,
            last,
            page_indices(listed, here(start, device), int(start[-1])),
        ]
    assert gpu is None or len(gpu.waits) == before, gpu.waits[before:]
    plain = [t.numbers if isinstance(t, GpuTensor) else t for t in built]
    assert torch.equal(*plain[:2]), "the host knows the result"
    return plain


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("uniform", [False, True])
def test_decoding_steps_wait_for_nothing(uniform: bool, fixed: bool):
    expected = step(torch.device("cpu"), uniform, fixed=False)
    with SimulatedGPU():
        built = step(CUDA, uniform, fixed)
    for right, other in zip(expected, built, strict=True):
        assert torch.equal(right, other)
