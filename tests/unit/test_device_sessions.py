"""Blocks that hold sessions, in vLLM's own pool: free, and last to be handed out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("vllm", reason="install a vLLM (see scripts/)")

from vllm.v1.core.block_pool import BlockPool

from vllm_kvplugins.vllm_adapter.scheduler.device_sessions import DeviceSessions

BLOCKS = 12  # and the null block


@pytest.fixture(params=[True, False], ids=["prefix cache", "none"])
def pool(request: pytest.FixtureRequest) -> BlockPool:
    return BlockPool(BLOCKS + 1, enable_caching=request.param, hash_block_size=16)


def ends(
    pool: BlockPool, parked: DeviceSessions, session: str, blocks: Sequence[Any]
) -> None:
    """A request with these blocks ends, and the next step begins."""
    parked.add(session, blocks)
    pool.free_blocks(reversed(blocks))
    parked.keep_freed_blocks()
    parked.check_integrity()


def ids(blocks: Sequence[Any]) -> list[int]:
    return [block.block_id for block in blocks]


def test_who_comes_back_gets_its_blocks(pool):
    parked = DeviceSessions(pool)
    blocks = pool.get_new_blocks(4)
    ends(pool, parked, "s", blocks)
    assert pool.get_num_free_blocks() == BLOCKS, "parked blocks are free"
    assert parked.num_blocks == 4
    taken = parked.take("s", 4)
    assert ids(taken) == ids(blocks)
    assert [block.ref_cnt for block in taken] == [1] * 4
    assert pool.get_num_free_blocks() == BLOCKS - 4
    assert parked.take("s", 4) == [], "taken twice"
    # whoever has them can lose them like any others
    pool.free_blocks(taken)
    assert pool.get_num_free_blocks() == BLOCKS
    assert len(pool.get_new_blocks(BLOCKS)) == BLOCKS
    assert parked.num_blocks == 0


def test_the_room_of_who_ended_first_goes_first(pool):
    """But only when there is nothing else."""
    parked = DeviceSessions(pool)
    several = {name: pool.get_new_blocks(3) for name in ("old", "new")}
    others = pool.get_new_blocks(6)
    for name, blocks in several.items():
        ends(pool, parked, name, blocks)
    pool.free_blocks(others)
    assert set(ids(pool.get_new_blocks(6))) == set(ids(others))
    assert parked.num_blocks == 6
    (first,) = pool.get_new_blocks(1)
    assert first.block_id in ids(several["old"])
    assert parked.take("old", 3) == [], "one of its blocks is another's"
    parked.check_integrity()
    assert set(ids(pool.get_new_blocks(2))) < set(ids(several["old"]))
    assert ids(parked.take("new", 3)) == ids(several["new"])


def test_who_takes_the_first_blocks_gives_up_the_others(pool):
    parked = DeviceSessions(pool)
    blocks = pool.get_new_blocks(5)
    ends(pool, parked, "s", blocks)
    ends(pool, parked, "t", pool.get_new_blocks(2))
    assert ids(parked.take("s", 3)) == ids(blocks[:3])
    assert pool.get_num_free_blocks() == BLOCKS - 3
    assert parked.num_blocks == 2
    # they hold nothing any more, and go before what does
    assert set(ids(pool.get_new_blocks(2))) == set(ids(blocks[3:]))


def test_blocks_of_a_session_that_is_gone_are_handed_out_first(pool):
    parked = DeviceSessions(pool)
    gone, stays = pool.get_new_blocks(3), pool.get_new_blocks(3)
    ends(pool, parked, "stays", stays)
    ends(pool, parked, "gone", gone)
    parked.drop("gone")
    parked.drop("never there")
    assert parked.take("gone", 3) == []
    assert pool.get_num_free_blocks() == BLOCKS
    assert set(ids(pool.get_new_blocks(3))) == set(ids(gone))
    assert ids(parked.take("stays", 3)) == ids(stays)


def test_blocks_are_parked_when_the_last_step_has_left_them(pool):
    """vLLM takes blocks back late if steps are in flight."""
    parked = DeviceSessions(pool)
    blocks = pool.get_new_blocks(3)
    parked.add("s", blocks)
    parked.add("t", other := pool.get_new_blocks(2))
    parked.keep_freed_blocks()
    assert parked.take("s", 3) == []
    assert parked.num_blocks == 0
    parked.drop("t")
    pool.free_blocks(blocks)
    pool.free_blocks(other)
    parked.keep_freed_blocks()
    assert ids(parked.take("s", 3)) == ids(blocks)
    assert parked.take("t", 2) == []


def test_what_the_prefix_cache_knows_is_left_to_it(pool):
    parked = DeviceSessions(pool)
    blocks = pool.get_new_blocks(3)
    blocks[0].set_block_hash(b"hash")
    ends(pool, parked, "s", blocks)
    shared = pool.get_new_blocks(2)
    pool.touch(shared[:1])
    ends(pool, parked, "t", shared)
    assert parked.num_blocks == 0


def test_a_reset_forgets_them(pool):
    parked = DeviceSessions(pool)
    ends(pool, parked, "s", pool.get_new_blocks(3))
    assert pool.reset_prefix_cache()
    assert parked.num_blocks == 0
    assert parked.take("s", 3) == []


@pytest.mark.parametrize("seed", range(50))
def test_any_order_gives_nobody_a_block_that_another_wrote(pool, seed):
    print("seed", seed)
    rng, parked = random.Random(seed), DeviceSessions(pool)
    running: dict[str, list[Any]] = {}
    held: dict[str, list[int]] = {}  # what each session was saved from
    wrote: dict[int, str] = {}  # who wrote to a block last
    for number in range(300):
        name = f"s{number}"
        do = rng.choice(["start", "end", "end", "take", "drop", "late", "reset"])
        if do == "start":
            want = rng.randint(1, 5)
            if want <= pool.get_num_free_blocks():
                running[name] = pool.get_new_blocks(want)
                wrote.update((b.block_id, name) for b in running[name])
        elif do in ("end", "late") and running:
            name = rng.choice(sorted(running))
            blocks = running.pop(name)
            parked.add(name, blocks)
            held[name] = ids(blocks)
            if do == "late":
                parked.keep_freed_blocks()
            pool.free_blocks(reversed(blocks))
            parked.keep_freed_blocks()
        elif do == "take" and held:
            of = rng.choice(sorted(held))
            count = rng.randint(1, len(held[of]))
            taken = parked.take(of, count)
            if taken:
                assert ids(taken) == held.pop(of)[:count]
                assert {wrote[block.block_id] for block in taken} == {of}
                running[name] = taken
                wrote.update((b.block_id, name) for b in taken)
        elif do == "drop" and held:
            of = rng.choice(sorted(held))
            parked.drop(of)
            del held[of]
        elif do == "reset" and not running and rng.random() < 0.2:
            pool.reset_prefix_cache()
        parked.check_integrity()
        used = sum(map(len, running.values()))
        assert pool.get_num_free_blocks() + used == BLOCKS
    for name in held:
        parked.drop(name)
    assert parked.num_blocks == 0
