"""KV heads of sessions are cut and joined for another tensor-parallel size.

The oracle is a dense cache of all heads: what each rank of each size must have is
copied out of it, row by row.
"""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch

from vllm_kvplugins.plan.residency_plan import BlockSpan, Compaction
from vllm_kvplugins.sessions.head_shards import Heads, Shard, gather
from vllm_kvplugins.sessions.snapshot import CacheSnapshot, HeapPart

LAYERS, GROUP, ELEMS, TOKENS, BLOCK = 3, 2, 6, 18, 4
SIZES = [(m, n) for m in (1, 2, 4) for n in (1, 2, 4)]
COMPACTION = Compaction(12, BlockSpan(0, 4), BlockSpan(2, 4))
TAIL_BLOCKS = 2


class Dense:
    """A cache of all heads, and the parts of it that ranks have.

    Attributes:
        heads: KV heads of the model, and of a drafter if there is one.
    """

    def __init__(
        self,
        heads: tuple[int, ...],
        seed: int = 0,
        compacted: bool = True,
        queries: bool = True,
        pages_dtype: torch.dtype = torch.float32,
    ) -> None:
        print("seed", seed)
        rng = torch.Generator().manual_seed(seed)
        self.heads, self.compaction = heads, COMPACTION if compacted else None
        blocks = len(COMPACTION.retained) if compacted else 0

        def random(*shape: int) -> torch.Tensor:
            return torch.randint(0, 200, shape, generator=rng)

        # [layers, heads, ...]
        self.positions = [random(LAYERS, n, blocks * BLOCK).int() for n in heads]
        self.retained = [
            random(LAYERS, n, blocks, ELEMS + i).to(pages_dtype)
            for i, n in enumerate(heads)
        ]
        self.tail = [
            random(LAYERS, n, TAIL_BLOCKS, ELEMS + i).to(pages_dtype)
            for i, n in enumerate(heads)
        ]
        self.queries = (
            random(LAYERS, 5, heads[0] * GROUP, 4).half() if queries else None
        )
        self.sums = random(LAYERS, heads[0], 7).double() if queries else None
        self.moments = random(LAYERS, heads[0] * GROUP, 2, 2) if queries else None

    def part(self, rank: int, ranks: int) -> CacheSnapshot:
        """What a rank saves: its heads, one row after the other."""
        parts = []
        for i, total in enumerate(self.heads):
            own = held_by(rank, ranks, total)
            rows = [(layer, head) for layer in range(LAYERS) for head in own]
            parts.append(
                HeapPart(
                    counts=torch.full((len(rows),), self.retained[i].shape[2]),
                    positions=torch.stack([self.positions[i][row] for row in rows]),
                    retained=torch.cat([self.retained[i][row] for row in rows]),
                    tail=torch.cat([self.tail[i][row] for row in rows]),
                    layout=f"l{i}",
                )
            )
        saved = CacheSnapshot(TOKENS, self.compaction, tuple(parts))
        if self.queries is not None:
            own = held_by(rank, ranks, self.heads[0])
            group = [head * GROUP + i for head in own for i in range(GROUP)]
            saved.queries_dtype = torch.float16
            saved.queries = self.queries[:, :, group].clone()
            for layer in range(LAYERS):
                saved.observed[layer] = {
                    "count": torch.tensor(9 + layer),
                    "sums": self.sums[layer, own].clone(),
                    "moments": self.moments[layer, group].clone(),
                }
        return saved


def held_by(rank: int, ranks: int, total: int) -> list[int]:
    """vLLM's rule: whole heads if there are enough, else copies of one."""
    if ranks <= total:
        each = total // ranks
        return [rank * each + i for i in range(each)]
    return [rank // (ranks // total)]


def check_equal(found: CacheSnapshot, expected: CacheSnapshot) -> None:
    assert (found.tokens, found.compaction) == (expected.tokens, expected.compaction)
    assert found.dtype == expected.dtype
    assert found.queries_dtype == expected.queries_dtype
    assert len(found.parts) == len(expected.parts)
    for part, other in zip(found.parts, expected.parts, strict=True):
        assert part.layout == other.layout
        for name in ("counts", "positions", "retained", "tail"):
            same(getattr(part, name), getattr(other, name), name)
    assert (found.queries is None) == (expected.queries is None)
    if found.queries is not None and expected.queries is not None:
        same(found.queries, expected.queries, "queries")
    assert found.observed.keys() == expected.observed.keys()
    for layer, packed in expected.observed.items():
        assert found.observed[layer].keys() == packed.keys()
        for name, tensor in packed.items():
            same(found.observed[layer][name], tensor, name)


def same(found: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    assert found.dtype == expected.dtype, name
    assert found.shape == expected.shape, name
    assert torch.equal(found, expected), name
    assert found.is_contiguous(), name


@pytest.mark.parametrize("compacted", [True, False], ids=["compacted", "whole"])
@pytest.mark.parametrize("totals", [(4,), (8, 4)], ids=["alone", "with a drafter"])
@pytest.mark.parametrize(("written_by", "ranks"), SIZES)
def test_each_rank_gets_what_it_would_have_saved(
    totals: tuple[int, ...], written_by: int, ranks: int, compacted: bool
):
    """Bit for bit, with queries and observed state, also in one byte per element."""
    heads = Heads(totals)
    for pages_dtype in (torch.float32, torch.uint8):
        dense = Dense(totals, 7 * ranks, compacted, pages_dtype=pages_dtype)
        for rank in range(ranks):
            found = gather(
                heads,
                Shard(rank, ranks),
                written_by,
                lambda source, dense=dense: dense.part(source, written_by),
            )
            check_equal(found, dense.part(rank, ranks))


@pytest.mark.parametrize("totals", [(1,), (2,), (2, 4)])
@pytest.mark.parametrize(("written_by", "ranks"), SIZES)
def test_more_ranks_than_heads(totals: tuple[int, ...], written_by: int, ranks: int):
    """Each head is on several ranks, which keep the same tokens of it."""
    heads = Heads(totals, replicas_are_equal=True)
    dense = Dense(totals, ranks, queries=False)
    for rank in range(ranks):
        found = gather(
            heads,
            Shard(rank, ranks),
            written_by,
            lambda source: dense.part(source, written_by),
        )
        check_equal(found, dense.part(rank, ranks))


@pytest.mark.parametrize(("written_by", "ranks"), [(4, 1), (4, 2), (1, 4)])
def test_replicas_have_different_queries(written_by: int, ranks: int):
    """Each has a part of the head's group, and observes that part."""
    dense = Dense((2,))
    whole = [dense.part(rank, written_by) for rank in range(written_by)]
    heads = Heads((2,), replicas_are_equal=True)
    for saved in (whole, [replace(each, queries=None) for each in whole]):
        with pytest.raises(ValueError, match="different queries"):
            gather(heads, Shard(0, ranks), written_by, saved.__getitem__)


def test_sizes_that_fit():
    def fit(heads: Heads) -> list[int]:
        return [ranks for ranks in range(-1, 17) if heads.fit(ranks)]

    assert fit(Heads((8,))) == [1, 2, 4, 8]
    assert fit(Heads((6,))) == [1, 2, 3, 6]
    assert fit(Heads((2,))) == [1, 2]
    assert fit(Heads((2,), replicas_are_equal=True)) == [1, *range(2, 17, 2)]
    assert fit(Heads((8, 2), replicas_are_equal=True)) == [1, 2], "replicas of drafts"
    assert fit(Heads((2, 8), replicas_are_equal=True)) == [1, 2, 4, 8]


def test_a_rank_reads_only_the_files_that_it_needs():
    heads = Heads((8,))
    assert heads.sources(Shard(1, 2), 4) == [2, 3]
    assert heads.sources(Shard(3, 4), 2) == [1]
    assert heads.sources(Shard(0, 1), 4) == [0, 1, 2, 3]
    replicated = Heads((2,), replicas_are_equal=True)
    assert replicated.sources(Shard(0, 1), 8) == [0, 4]
    assert replicated.sources(Shard(5, 8), 2) == [1]


def test_one_part_at_a_time_is_in_memory():
    """The result does not refer to the parts either."""
    dense, alive = Dense((4,)), list[weakref.ref]()

    def lent(tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in memory that lives as long as any tensor refers to it."""
        memory = tensor.numpy().copy()
        alive.append(weakref.ref(memory))
        return torch.from_numpy(memory)

    def read(rank: int) -> CacheSnapshot:
        assert all(each() is None for each in alive), "an earlier part is still there"
        saved = dense.part(rank, 4)
        part = saved.parts[0]
        part = replace(part, tail=lent(part.tail), retained=lent(part.retained))
        observed = {
            layer: {name: lent(tensor) for name, tensor in packed.items()}
            for layer, packed in saved.observed.items()
        }
        queries = lent(saved.queries)
        return replace(saved, parts=(part,), queries=queries, observed=observed)

    found = gather(Heads((4,)), Shard(0, 1), 4, read)
    assert len(alive) == 4 * (3 + 3 * LAYERS)
    assert all(each() is None for each in alive)
    check_equal(found, dense.part(0, 1))


def ragged(saved: CacheSnapshot) -> CacheSnapshot:
    """The same number of pages, which its rows share in another way."""
    part = saved.parts[0]
    counts = part.counts.clone()
    counts[0] += 1
    counts[1] -= 1
    return replace(saved, parts=(replace(part, counts=counts),))


def without_a_page(saved: CacheSnapshot) -> CacheSnapshot:
    part = saved.parts[0]
    return replace(saved, parts=(replace(part, tail=part.tail[1:]),))


def of_an_observation(saved: CacheSnapshot, **changes: torch.Tensor) -> CacheSnapshot:
    observed = {layer: packed | changes for layer, packed in saved.observed.items()}
    return replace(saved, observed=observed)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (ragged, "different numbers of pages"),
        (without_a_page, "rows of pages"),
        (lambda s: replace(s, tokens=17), "not of one session"),
        (lambda s: replace(s, compaction=None), "different numbers of pages"),
        (lambda s: replace(s, dtype="int8"), "not of one session"),
        (lambda s: replace(s, queries_dtype=torch.float32), "not of one session"),
        (lambda s: replace(s, parts=s.parts * 2), "2 heaps"),
        (lambda s: replace(s, queries=None), "different tensors"),
        (lambda s: replace(s, queries=s.queries[:, :, 1:]), "3 query heads"),
        (lambda s: replace(s, queries=s.queries.float()), "other shapes"),
        (lambda s: replace(s, observed={}), "not of one session"),
        (lambda s: of_an_observation(s, count=torch.tensor(1)), "not of one session"),
        (lambda s: of_an_observation(s, sums=torch.zeros(2, 9)), "other shapes"),
        (
            lambda s: replace(s, parts=(replace(s.parts[0], layout="other"),)),
            "not of one session",
        ),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(change, why):
    dense = Dense((4,))
    saved = [dense.part(0, 2), change(dense.part(1, 2))]
    with pytest.raises(ValueError, match=why):
        gather(Heads((4,)), Shard(0, 1), 2, saved.__getitem__)


def test_pages_that_heads_share_unevenly_are_refused_when_they_are_cut():
    saved = ragged(Dense((4,)).part(0, 1))
    with pytest.raises(ValueError, match="different numbers of pages"):
        gather(Heads((4,)), Shard(1, 2), 1, lambda rank: saved)
