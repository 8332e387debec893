"""Device-resident sessions in vLLM's block pool: free blocks that are reused last."""

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
    pool: BlockPool, sessions: DeviceSessions, session: str, blocks: Sequence[Any]
) -> None:
    """A request with these blocks ends, and the next step begins."""
    sessions.add(session, blocks)
    pool.free_blocks(reversed(blocks))
    sessions.keep_freed_blocks()
    sessions.check_integrity()


def ids(blocks: Sequence[Any]) -> list[int]:
    return [block.block_id for block in blocks]


def test_a_continued_session_gets_its_blocks_back(pool):
    sessions = DeviceSessions(pool)
    blocks = pool.get_new_blocks(4)
    ends(pool, sessions, "s", blocks)
    assert pool.get_num_free_blocks() == BLOCKS, "kept blocks are free"
    assert sessions.num_blocks == 4
    taken = sessions.take("s", 4)
    assert ids(taken) == ids(blocks)
    assert [block.ref_cnt for block in taken] == [1] * 4
    assert pool.get_num_free_blocks() == BLOCKS - 4
    assert sessions.take("s", 4) == [], "assigned twice"
    # their new owner can lose them like any other blocks
    pool.free_blocks(taken)
    assert pool.get_num_free_blocks() == BLOCKS
    assert len(pool.get_new_blocks(BLOCKS)) == BLOCKS
    assert sessions.num_blocks == 0


def test_blocks_of_the_oldest_session_are_reused_first(pool):
    """The pool takes them after all other free blocks."""
    sessions = DeviceSessions(pool)
    several = {name: pool.get_new_blocks(3) for name in ("old", "new")}
    others = pool.get_new_blocks(6)
    for name, blocks in several.items():
        ends(pool, sessions, name, blocks)
    pool.free_blocks(others)
    assert set(ids(pool.get_new_blocks(6))) == set(ids(others))
    assert sessions.num_blocks == 6
    (first,) = pool.get_new_blocks(1)
    assert first.block_id in ids(several["old"])
    assert sessions.take("old", 3) == [], "one of its blocks is another's"
    sessions.check_integrity()
    assert set(ids(pool.get_new_blocks(2))) < set(ids(several["old"]))
    assert ids(sessions.take("new", 3)) == ids(several["new"])


def test_taking_the_first_blocks_frees_the_others(pool):
    sessions = DeviceSessions(pool)
    blocks = pool.get_new_blocks(5)
    ends(pool, sessions, "s", blocks)
    ends(pool, sessions, "t", pool.get_new_blocks(2))
    assert ids(sessions.take("s", 3)) == ids(blocks[:3])
    assert pool.get_num_free_blocks() == BLOCKS - 3
    assert sessions.num_blocks == 2
    # empty blocks are taken before blocks that hold sessions
    assert set(ids(pool.get_new_blocks(2))) == set(ids(blocks[3:]))


def test_blocks_of_a_dropped_session_are_reused_first(pool):
    sessions = DeviceSessions(pool)
    freed, stays = pool.get_new_blocks(3), pool.get_new_blocks(3)
    ends(pool, sessions, "stays", stays)
    ends(pool, sessions, "gone", freed)
    sessions.drop("gone")
    sessions.drop("never there")
    assert sessions.take("gone", 3) == []
    assert pool.get_num_free_blocks() == BLOCKS
    assert set(ids(pool.get_new_blocks(3))) == set(ids(freed))
    assert ids(sessions.take("stays", 3)) == ids(stays)


def test_blocks_are_kept_once_no_step_in_flight_reads_them(pool):
    """vLLM frees blocks late if steps are in flight."""
    sessions = DeviceSessions(pool)
    blocks = pool.get_new_blocks(3)
    sessions.add("s", blocks)
    sessions.add("t", other := pool.get_new_blocks(2))
    sessions.keep_freed_blocks()
    assert sessions.take("s", 3) == []
    assert sessions.num_blocks == 0
    sessions.drop("t")
    pool.free_blocks(blocks)
    pool.free_blocks(other)
    sessions.keep_freed_blocks()
    assert ids(sessions.take("s", 3)) == ids(blocks)
    assert sessions.take("t", 2) == []


def test_blocks_in_the_prefix_cache_are_not_kept(pool):
    sessions = DeviceSessions(pool)
    blocks = pool.get_new_blocks(3)
    blocks[0].set_block_hash(b"hash")
    ends(pool, sessions, "s", blocks)
    shared = pool.get_new_blocks(2)
    pool.touch(shared[:1])
    ends(pool, sessions, "t", shared)
    assert sessions.num_blocks == 0


def test_a_prefix_cache_reset_forgets_all_sessions(pool):
    sessions = DeviceSessions(pool)
    ends(pool, sessions, "s", pool.get_new_blocks(3))
    assert pool.reset_prefix_cache()
    assert sessions.num_blocks == 0
    assert sessions.take("s", 3) == []


@pytest.mark.parametrize("seed", range(50))
def test_no_order_of_operations_returns_an_overwritten_block(pool, seed):
    print("seed", seed)
    rng, sessions = random.Random(seed), DeviceSessions(pool)
    running: dict[str, list[Any]] = {}
    held: dict[str, list[int]] = {}  # the blocks from which each session was saved
    wrote: dict[int, str] = {}  # the last writer of each block
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
            sessions.add(name, blocks)
            held[name] = ids(blocks)
            if do == "late":
                sessions.keep_freed_blocks()
            pool.free_blocks(reversed(blocks))
            sessions.keep_freed_blocks()
        elif do == "take" and held:
            of = rng.choice(sorted(held))
            count = rng.randint(1, len(held[of]))
            taken = sessions.take(of, count)
            if taken:
                assert ids(taken) == held.pop(of)[:count]
                assert {wrote[block.block_id] for block in taken} == {of}
                running[name] = taken
                wrote.update((b.block_id, name) for b in taken)
        elif do == "drop" and held:
            of = rng.choice(sorted(held))
            sessions.drop(of)
            del held[of]
        elif do == "reset" and not running and rng.random() < 0.2:
            pool.reset_prefix_cache()
        sessions.check_integrity()
        used = sum(map(len, running.values()))
        assert pool.get_num_free_blocks() + used == BLOCKS
    for name in held:
        sessions.drop(name)
    assert sessions.num_blocks == 0
