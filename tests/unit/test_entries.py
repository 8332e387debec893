"""Runs of entries: allocated, moved with their contents, and freed."""

from __future__ import annotations

import random

import pytest
import torch

from vllm_kvplugins.engine.spans.zoom_arena import ZoomArena

SEED = 20261122
LAYERS, DIM = 2, 4


def fill(arena: ZoomArena, start: int, count: int, number: float) -> None:
    run = slice(start, start + count)
    for layer, entries in enumerate(arena.layers):
        entries.keys[run] = number + layer
        entries.values[run] = -number - layer
        entries.bias[run] = number
        entries.owner[run] = int(number)


def holds(arena: ZoomArena, start: int, count: int, number: float) -> bool:
    run = slice(start, start + count)
    return all(
        bool((entries.keys[run] == number + layer).all())
        and bool((entries.values[run] == -number - layer).all())
        and bool((entries.bias[run] == number).all())
        and bool((entries.owner[run] == int(number)).all())
        for layer, entries in enumerate(arena.layers)
    )


def test_runs_keep_what_they_hold_while_others_come_and_go():
    print("seed", SEED)
    rng = random.Random(SEED)
    arena = ZoomArena(LAYERS, DIM, torch.bfloat16)
    allocated: dict[int, tuple[int, int]] = {}
    peak = largest = 0
    for number in range(1, 200):
        if allocated and rng.random() < 0.48:
            released = rng.choice(sorted(allocated))
            arena.release(*allocated.pop(released))
        else:
            count = rng.choice([1, 7, 30, 200])
            start = arena.take(count)
            for entries in arena.layers:
                run = slice(start, start + count)
                assert bool((entries.bias[run] == -torch.inf).all())
                assert bool((entries.owner[run] == -1).all())
            allocated[number] = start, count
            fill(arena, start, count, number)
        arena.check_integrity(list(allocated.values()))
        assert all(holds(arena, *run, number) for number, run in allocated.items())
        used = sum(count for _, count in allocated.values())
        assert arena.capacity - arena.free == used
        peak, largest = max(peak, used), max(largest, arena.capacity)
    assert peak > 800
    assert largest < 4 * peak, "gaps are not reused"
    for run in allocated.values():
        arena.release(*run)
    assert arena.capacity == 0


def test_runs_are_taken_in_steps_and_given_back_between_them():
    arena = ZoomArena(LAYERS, DIM, torch.float32)
    with torch.inference_mode():
        first, second = arena.take(10), arena.take(50)
        fill(arena, second, 50, 3)
    arena.release(first, 10)
    with torch.inference_mode():
        assert holds(arena, second, 50, 3)


def test_gaps_side_by_side_are_one():
    arena = ZoomArena(LAYERS, DIM, torch.float32)
    starts = [arena.take(10) for _ in range(4)]
    before = arena.capacity
    for start in (starts[1], starts[3], starts[2]):
        arena.release(start, 10)
    assert arena.take(30) == starts[1]
    assert arena.capacity == before


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda arena: arena._gaps.append((4, 6)), "shared"),
        (lambda arena: arena._gaps.clear(), "lost"),
        (lambda arena: arena.layers[1].bias[19].fill_(0.0), "has a bias"),
        (lambda arena: arena.layers[1].owner[19].fill_(0), "but owned"),
    ],
)
def test_what_is_lost_or_shared_is_seen(break_it, message):
    arena = ZoomArena(LAYERS, DIM, torch.float32)
    first, second = arena.take(10), arena.take(5)
    arena.release(first, 10)
    arena.check_integrity([(second, 5)])
    assert arena.capacity == 20
    break_it(arena)
    with pytest.raises(AssertionError, match=message):
        arena.check_integrity([(second, 5)])
