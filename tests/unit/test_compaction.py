"""Compaction moves every kept token once and overwrites none that it needs."""

from __future__ import annotations

import pytest
import torch

from vllm_kvplugins.budgets import parse_allocator
from vllm_kvplugins.residency.compaction import compact
from vllm_kvplugins.selection import keep_top

SEED = 7


def run(rows: int, candidates: int, block_size: int, counts: torch.Tensor, seed: int):
    """Compact a heap whose slot (page, s) holds the number page * bs + s."""
    generator = torch.Generator().manual_seed(seed)
    slots = candidates * block_size
    zone = int(counts.sum()) // rows
    ids = torch.randperm(rows * candidates + 5, generator=generator)
    pages = ids[: rows * candidates].view(rows, candidates)
    heap = torch.arange(ids.numel() * block_size).view(-1, block_size).clone()
    scores = torch.rand(rows, slots, generator=generator)
    keep = keep_top(scores, counts * block_size)
    positions = torch.arange(slots, dtype=torch.int32).expand(rows, -1)
    before = heap[pages].view(rows, slots)
    after = compact(keep, counts, pages, positions, zone)
    for moves in after.phases:
        targets = set(
            zip(moves.target_page.tolist(), moves.target_slot.tolist(), strict=True)
        )
        sources = set(
            zip(moves.source_page.tolist(), moves.source_slot.tolist(), strict=True)
        )
        assert len(targets) == len(moves), "a target is written twice"
        assert not targets & sources, "a phase must be free of hazards"
        heap[moves.target_page, moves.target_slot] = heap[
            moves.source_page, moves.source_slot
        ]
    return keep, before, pages, heap, after, zone


@pytest.mark.parametrize("name", ["uniform", "head-adaptive", "cross-layer", "pyramid"])
@pytest.mark.parametrize(("candidates", "zone"), [(2, 1), (9, 4), (9, 8), (30, 3)])
def test_kept_tokens_survive_and_positions_tell_them(name, candidates, zone):
    for seed in range(SEED, SEED + 20):
        print("seed", seed)
        generator = torch.Generator().manual_seed(seed)
        block_size, layers, heads = 16, 3, 2
        scores = torch.rand(layers, heads, candidates * block_size, generator=generator)
        counts = parse_allocator(name).allocate(scores**6, zone, block_size).view(-1)
        keep, before, pages, heap, after, _ = run(
            layers * heads, candidates, block_size, counts, seed
        )
        zone_pages = set(pages[:, candidates - zone :].reshape(-1).tolist())
        owned: list[int] = []
        for row, count in enumerate(counts.tolist()):
            mine = after.pages[row, :count]
            owned += mine.tolist()
            held = heap[mine].view(-1)
            assert sorted(held.tolist()) == sorted(before[row][keep[row]].tolist())
            told = after.positions[row, : count * block_size].long()
            assert torch.equal(before[row][told], held), "positions name the tokens"
            assert (after.positions[row, count * block_size :] == -1).all()
        assert sorted(owned) == sorted(zone_pages), "the landing zone is used exactly"


def test_tokens_already_home_do_not_move():
    keep = torch.zeros(1, 4 * 16, dtype=torch.bool)
    keep[:, 32:] = True  # exactly the landing zone
    positions = torch.arange(64, dtype=torch.int32).expand(1, -1)
    after = compact(keep, torch.tensor([2]), torch.arange(4)[None], positions, 2)
    assert after.phases == ()
    assert after.pages.tolist() == [[2, 3]]
