"""A compaction moves every kept token once and overwrites none that it still needs."""

from __future__ import annotations

import pytest
import torch

from vllm_kvplugins.budgets import parse_allocator
from vllm_kvplugins.engine.compaction import CompactedPages, Moves, plan_moves
from vllm_kvplugins.scoring.selection import keep_top

SEED = 7
BLOCK = 16
LAYERS, HEADS = 3, 2
ROWS = LAYERS * HEADS


def pairs(pages: torch.Tensor, slots: torch.Tensor) -> set[tuple[int, int]]:
    return set(zip(pages.tolist(), slots.tolist(), strict=True))


def apply(heap: torch.Tensor, after: CompactedPages) -> None:
    """Run the moves, and check the two passes for hazards."""
    direct, staged = after.direct, after.staged
    targets = pairs(direct.target_page, direct.target_slot)
    sources = pairs(direct.source_page, direct.source_slot)
    assert len(targets) == len(direct), "a target is written twice"
    assert not targets & sources, "direct moves must be free of hazards"
    later = pairs(staged.source_page, staged.source_slot)
    assert not targets & later, "a direct move overwrites a staged source"
    assert len(pairs(staged.target_page, staged.target_slot)) == len(staged)
    for moves in (direct, staged):
        buffer = heap[moves.source_page, moves.source_slot]
        heap[moves.target_page, moves.target_slot] = buffer


def check(heap, after, tokens, keep, counts, pool):
    """Every row holds exactly its kept tokens, in exactly the pages of the pool."""
    owned: list[int] = []
    for row, count in enumerate(counts.tolist()):
        own_pages = after.pages[row, :count]
        owned += own_pages.tolist()
        contents = heap[own_pages].view(-1)
        assert sorted(contents.tolist()) == sorted(tokens[row][keep[row]].tolist())
        # the heap's numbers are position * ROWS + row
        expected_rows = after.positions[row, : count * BLOCK].long() * ROWS + row
        assert torch.equal(expected_rows, contents), "positions name the tokens"
        assert (after.positions[row, count * BLOCK :] == -1).all()
    assert sorted(owned) == sorted(pool.tolist()), "the pool is used exactly"


def first_compaction(seed: int, name: str, candidates: int, retained: int):
    """Compact a prompt of ``candidates`` blocks with known numbers in its slots."""
    generator = torch.Generator().manual_seed(seed)
    slots = candidates * BLOCK
    pages = torch.randperm(ROWS * (candidates + 9), generator=generator)
    pages, spare = pages[: ROWS * candidates].view(ROWS, -1), pages[ROWS * candidates :]
    heap = torch.full((ROWS * (candidates + 9), BLOCK), -1)
    positions = torch.arange(slots, dtype=torch.int32).expand(ROWS, -1)
    tokens = positions.long() * ROWS + torch.arange(ROWS)[:, None]
    heap[pages] = tokens.view(ROWS, candidates, BLOCK)
    scores = torch.rand(LAYERS, HEADS, slots, generator=generator) ** 6
    everything = torch.full((LAYERS, HEADS), candidates)
    counts = (
        parse_allocator(name).allocate(scores, retained, BLOCK, everything).view(-1)
    )
    keep = keep_top(scores.view(ROWS, -1), counts * BLOCK)
    pool = pages[:, candidates - retained :].reshape(-1)
    owned = torch.full((ROWS,), candidates)
    after = plan_moves(keep, counts, pages, owned, positions, pool)
    apply(heap, after)
    check(heap, after, tokens, keep, counts, pool)
    return generator, heap, after, counts, spare


ALLOCATORS = ["uniform", "head-adaptive", "cross-layer", "pyramid"]


@pytest.mark.parametrize("name", ALLOCATORS)
@pytest.mark.parametrize(("candidates", "retained"), [(2, 1), (9, 4), (9, 8), (30, 3)])
def test_kept_tokens_survive_and_positions_tell_them(name, candidates, retained):
    for seed in range(SEED, SEED + 20):
        print("seed", seed)
        first_compaction(seed, name, candidates, retained)


@pytest.mark.parametrize("name", ALLOCATORS)
@pytest.mark.parametrize("fresh", [1, 3, 6])
def test_a_second_compaction_survives_any_ownership(name, fresh):
    """The zone slides: new blocks join, old blocks leave, pages are swapped."""
    candidates, retained = 12, 4
    for seed in range(SEED, SEED + 20):
        print("seed", seed)
        generator, heap, before, counts, spare = first_compaction(
            seed, name, candidates, retained
        )
        tail = spare[: ROWS * fresh].view(ROWS, fresh)
        old_zone = torch.cat([p[:c] for p, c in zip(before.pages, counts, strict=True)])
        # the oldest blocks leave first: drop as many pages of the zone as joined
        dropped = min(fresh, retained) * ROWS
        pool = torch.cat(
            [old_zone.sort().values[dropped:], tail[:, -retained:].reshape(-1)]
        )

        longest = int(counts.max()) + fresh
        pages = torch.zeros(ROWS, longest, dtype=torch.int64)
        positions = torch.full((ROWS, longest * BLOCK), -1, dtype=torch.int32)
        tokens = torch.full((ROWS, longest * BLOCK), -1)
        new = torch.arange(
            candidates * BLOCK, (candidates + fresh) * BLOCK, dtype=torch.int32
        )
        for row, count in enumerate(counts.tolist()):
            pages[row, : count + fresh] = torch.cat(
                [before.pages[row, :count], tail[row]]
            )
            expected_rows = torch.cat([before.positions[row, : count * BLOCK], new])
            positions[row, : expected_rows.numel()] = expected_rows
            tokens[row, : expected_rows.numel()] = expected_rows.long() * ROWS + row
            heap[tail[row]] = (new.long() * ROWS + row).view(fresh, BLOCK)
        owned = counts + fresh

        scores = torch.rand(ROWS, longest * BLOCK, generator=generator)
        valid = torch.arange(longest * BLOCK) < owned[:, None] * BLOCK
        scores = scores.masked_fill(~valid, -torch.inf)
        again = counts[torch.randperm(ROWS, generator=generator)].minimum(owned)
        again[0] += counts.sum() - again.sum()
        if int(again[0]) > int(owned[0]):
            again = counts
        keep = keep_top(scores, again * BLOCK)
        after = plan_moves(keep, again, pages, owned, positions, pool)
        apply(heap, after)
        check(heap, after, tokens, keep, again, pool)


def test_tokens_already_home_do_not_move():
    keep = torch.zeros(1, 4 * 16, dtype=torch.bool)
    keep[:, 32:] = True  # exactly the pages that stay
    positions = torch.arange(64, dtype=torch.int32).expand(1, -1)
    after = plan_moves(
        keep,
        torch.tensor([2]),
        torch.arange(4)[None],
        torch.tensor([4]),
        positions,
        torch.tensor([2, 3]),
    )
    assert len(after.direct) == len(after.staged) == 0
    assert isinstance(after.direct, Moves)
    assert after.pages.tolist() == [[2, 3]]
