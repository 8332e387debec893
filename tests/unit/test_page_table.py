"""Tables of many rows and scopes: built in slices, in little memory."""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vllm_kvplugins.engine import page_table
from vllm_kvplugins.engine.page_table import (
    FixedTable,
    FlatTable,
    PageTables,
    TableShape,
)

SEED = 20261203
CPU = torch.device("cpu")
LAYERS, HEADS, BLOCK, BLOCKS = 6, 3, 4, 90
ZONES = (5, 0, 9, 0, 2)  # pages of the longest of each row; 0 = not compacted
TAIL_BLOCK = 11
LENS = (61, 44, 50, 0, 47)


class Live(TorchDispatchMode):
    """Bytes of tensors that operations have made and somebody has, at most.

    Views and what was there before count nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: set[int] = set()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for tensor in tree_leaves((args, kwargs or {})):
            if isinstance(tensor, torch.Tensor):
                cdata = StorageWeakRef(tensor.untyped_storage()).cdata
                if cdata not in self._made:
                    self._known.add(cdata)
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                ref = StorageWeakRef(storage)
                if ref.cdata not in self._known:
                    self._made[ref.cdata] = ref, storage.nbytes()
        self._made = {k: v for k, v in self._made.items() if not v[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._made.values()))
        return found


def build(uniform: bool, into: FixedTable | None = None) -> FlatTable:
    """A step of compacted requests, of others, and of padding."""
    random = torch.Generator().manual_seed(SEED)
    tables = PageTables(LAYERS, HEADS, BLOCKS, BLOCK, uniform, CPU)
    slot_indices = []
    for most in ZONES:
        counts = torch.randint(0, most + 1, (LAYERS * HEADS,), generator=random)
        counts[:] = most if uniform else counts
        pages = torch.randint(0, 999, (LAYERS * HEADS, most), generator=random)
        slot_indices.append(tables.assign(pages, counts, TAIL_BLOCK) if most else 0)
    blocks = torch.randint(0, BLOCKS, (len(LENS), 18), generator=random).int()
    return tables.build(slot_indices, torch.tensor(LENS), blocks, LENS, into)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("uniform", [False, True])
def test_slices_make_the_same_table(monkeypatch, uniform: bool, fixed: bool):
    print("seed", SEED)
    whole = build(uniform)
    most = whole.pages.shape[-1]
    a_row = page_table._BYTES_PER_PAGE * HEADS * most
    # a row of a scope at a time, two rows of it, all rows of a scope, of two scopes
    for limit in (1, 2 * a_row, len(LENS) * a_row, 2 * len(LENS) * a_row):
        monkeypatch.setattr(page_table, "SLICE_BYTES", limit)
        shape = TableShape(1 if uniform else LAYERS, 8, HEADS, most + 3)
        into = FixedTable(shape, CPU) if fixed else None
        sliced = build(uniform, into)
        assert sliced.pages[..., :most].equal(whole.pages)
        assert sliced.lengths.equal(whole.lengths)
        assert not sliced.pages[..., most:].any(), "written behind the longest row"


@pytest.mark.parametrize("scopes", [1, 32])
def test_building_takes_little_memory_besides_the_table(monkeypatch, scopes: int):
    """However many rows there are, one of which is long."""
    limit = 1 << 20
    monkeypatch.setattr(page_table, "SLICE_BYTES", limit)
    heads, rows, long = 4, 40, 600
    tables = PageTables(scopes, heads, 99, BLOCK, scopes == 1, CPU)
    retained = torch.zeros(scopes * heads, long, dtype=torch.int64)
    slot_index = tables.assign(
        retained, torch.full((scopes * heads,), long), TAIL_BLOCK
    )
    slot_indices, known = (
        [slot_index] + [0] * (rows - 1),
        [TAIL_BLOCK * BLOCK + 9] + [50] * rows,
    )
    blocks = torch.zeros(rows, 700, dtype=torch.int32)
    into = FixedTable(TableShape(scopes, rows, heads, 700), CPU)
    with Live() as live:
        tables.build(
            slot_indices, torch.tensor(known[:rows]), blocks, known[:rows], into
        )
    small = 8 * scopes * rows * heads * 8  # lengths, counts and the like
    assert limit // 8 < live.most <= limit + small


@pytest.mark.parametrize("uniform", [False, True])
def test_room_for_zones_is_that_of_those_who_are_there(uniform: bool):
    """A long one takes room while it is there; nobody loses a page for that."""
    random = torch.Generator().manual_seed(SEED)
    tables = PageTables(LAYERS, HEADS, BLOCKS, BLOCK, uniform, CPU)
    zones: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def sit(most: int) -> int:
        heap = LAYERS * BLOCKS * HEADS
        pages = torch.randint(0, heap, (LAYERS * HEADS, most), generator=random)
        if uniform:  # as the same blocks are, in every layer
            layer = torch.arange(LAYERS).repeat_interleave(HEADS)[:, None]
            pages = pages[:HEADS].repeat(LAYERS, 1) % 50 + layer * BLOCKS * HEADS
        counts = torch.full((LAYERS * HEADS,), most)
        slot_index = tables.assign(pages, counts, TAIL_BLOCK)
        zones[slot_index] = pages, counts
        return slot_index

    def leave(slot_index: int) -> None:
        tables.release(slot_index)
        del zones[slot_index]

    def room() -> int:
        for slot_index, (pages, counts) in zones.items():
            found = tables.retained(slot_index)
            assert found[0].equal(pages)
            assert found[1].equal(counts)
        return int(tables._retained_pages.shape[-1])

    some = [sit(most) for most in (3, 8, 5)]
    assert room() == 9
    long = sit(800)
    assert room() == 900
    leave(some.pop())
    some.append(sit(9))
    assert room() == 900, "the long one is there"
    leave(long)
    some += [sit(20) for _ in range(9)]  # more seats than there were
    assert room() == 22
    for slot_index in some:
        leave(slot_index)
    assert sit(0)
    assert room() == 0
    assert tables.num_slot_indices == 1


def test_who_finds_no_room_takes_no_seat(monkeypatch):
    """Without memory for it; the next one sits where it would have."""
    tables = PageTables(LAYERS, HEADS, BLOCKS, BLOCK, False, CPU)
    counts = torch.full((LAYERS * HEADS,), 2)
    pages = torch.zeros(LAYERS * HEADS, 2, dtype=torch.int64)
    extend, calls = page_table._extend, []

    def no_memory(tensor: torch.Tensor, dim: int, more: int) -> torch.Tensor:
        calls.append(dim)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return extend(tensor, dim, more)

    monkeypatch.setattr(page_table, "_extend", no_memory)
    with pytest.raises(RuntimeError):
        tables.assign(pages, counts, TAIL_BLOCK)
    assert tables.num_slot_indices == 0
    short = pages[:5]  # fails when the seat is written
    with pytest.raises(RuntimeError):
        tables.assign(short, counts, TAIL_BLOCK)
    assert tables.num_slot_indices == 0
    slot_indices = [tables.assign(pages, counts, TAIL_BLOCK) for _ in range(2)]
    assert slot_indices == [1, 2]


def test_ids_that_do_not_fit_are_refused():
    with pytest.raises(AssertionError, match="int32"):
        PageTables(2**5, 2**3, 2**23, BLOCK, False, CPU)
