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
ZONES = (5, 0, 9, 0, 2)  # pages of the longest list of each row; 0 = not compacted
TAIL_BLOCK = 11
LENS = (61, 44, 50, 0, 47)


class Live(TorchDispatchMode):
    """Maximum of the bytes of live tensors that operations have created.

    Views do not count.

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
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                ref = StorageWeakRef(storage)
                if ref.cdata not in self._known:
                    self._made[ref.cdata] = ref, storage.nbytes()
        self._made = {k: v for k, v in self._made.items() if not v[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._made.values()))
        return result


def build(uniform: bool, into: FixedTable | None = None) -> FlatTable:
    """A step of compacted requests, ordinary requests, and padding."""
    random = torch.Generator().manual_seed(SEED)
    tables = PageTables(LAYERS, HEADS, BLOCKS, BLOCK, uniform, CPU)
    slot_indices = []
    for max_blocks in ZONES:
        counts = torch.randint(0, max_blocks + 1, (LAYERS * HEADS,), generator=random)
        counts[:] = max_blocks if uniform else counts
        pages = torch.randint(0, 999, (LAYERS * HEADS, max_blocks), generator=random)
        slot_indices.append(
            tables.assign(pages, counts, TAIL_BLOCK) if max_blocks else 0
        )
    blocks = torch.randint(0, BLOCKS, (len(LENS), 18), generator=random).int()
    return tables.build(slot_indices, torch.tensor(LENS), blocks, LENS, into)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("uniform", [False, True])
def test_slices_make_the_same_table(monkeypatch, uniform: bool, fixed: bool):
    print("seed", SEED)
    whole = build(uniform)
    max_blocks = whole.pages.shape[-1]
    a_row = page_table._BYTES_PER_PAGE * HEADS * max_blocks
    # one row of a scope at a time, two rows, all rows of a scope, two scopes
    for limit in (1, 2 * a_row, len(LENS) * a_row, 2 * len(LENS) * a_row):
        monkeypatch.setattr(page_table, "SLICE_BYTES", limit)
        shape = TableShape(1 if uniform else LAYERS, 8, HEADS, max_blocks + 3)
        into = FixedTable(shape, CPU) if fixed else None
        sliced = build(uniform, into)
        assert sliced.pages[..., :max_blocks].equal(whole.pages)
        assert sliced.lengths.equal(whole.lengths)
        assert not sliced.pages[..., max_blocks:].any(), (
            "written behind the longest row"
        )


@pytest.mark.parametrize("scopes", [1, 32])
def test_building_takes_little_memory_besides_the_table(monkeypatch, scopes: int):
    """One long row does not make the memory grow with the number of rows."""
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
    """A long request takes room while it runs; no other request loses a page."""
    random = torch.Generator().manual_seed(SEED)
    tables = PageTables(LAYERS, HEADS, BLOCKS, BLOCK, uniform, CPU)
    zones: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def sit(max_blocks: int) -> int:
        heap = LAYERS * BLOCKS * HEADS
        pages = torch.randint(0, heap, (LAYERS * HEADS, max_blocks), generator=random)
        if uniform:  # equal to the blocks, in every layer
            layer = torch.arange(LAYERS).repeat_interleave(HEADS)[:, None]
            pages = pages[:HEADS].repeat(LAYERS, 1) % 50 + layer * BLOCKS * HEADS
        counts = torch.full((LAYERS * HEADS,), max_blocks)
        slot_index = tables.assign(pages, counts, TAIL_BLOCK)
        zones[slot_index] = pages, counts
        return slot_index

    def leave(slot_index: int) -> None:
        tables.release(slot_index)
        del zones[slot_index]

    def room() -> int:
        for slot_index, (pages, counts) in zones.items():
            result = tables.retained(slot_index)
            assert result[0].equal(pages)
            assert result[1].equal(counts)
        return int(tables._retained_pages.shape[-1])

    some = [sit(max_blocks) for max_blocks in (3, 8, 5)]
    assert room() == 9
    long = sit(800)
    assert room() == 900
    leave(some.pop())
    some.append(sit(9))
    assert room() == 900, "the long one is there"
    leave(long)
    some += [sit(20) for _ in range(9)]  # more requests than there were
    assert room() == 22
    for slot_index in some:
        leave(slot_index)
    assert sit(0)
    assert room() == 0
    assert tables.num_slot_indices == 1


def test_who_finds_no_room_takes_no_seat(monkeypatch):
    """An allocation fails; the next request gets the same index."""
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
    short = pages[:5]  # the write of the row fails
    with pytest.raises(RuntimeError):
        tables.assign(short, counts, TAIL_BLOCK)
    assert tables.num_slot_indices == 0
    slot_indices = [tables.assign(pages, counts, TAIL_BLOCK) for _ in range(2)]
    assert slot_indices == [1, 2]


def test_ids_that_do_not_fit_are_refused():
    with pytest.raises(AssertionError, match="int32"):
        PageTables(2**5, 2**3, 2**23, BLOCK, False, CPU)
