"""Blocks that workers still read or fill, in vLLM's block pool."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="install a vLLM (see scripts/)")

from vllm.v1.core.block_pool import BlockPool

from vllm_kvplugins.vllm_adapter.scheduler.device_sessions import DeviceSessions
from vllm_kvplugins.vllm_adapter.scheduler.placed_sessions import PlacedSessions
from vllm_kvplugins.vllm_adapter.scheduler.saving_blocks import SavingBlocks

BLOCKS = 8  # and the null block


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(BLOCKS + 1, enable_caching=True, hash_block_size=16)


def test_blocks_of_an_ended_request_stay_until_all_workers_have_copied_them(pool):
    saving, blocks = SavingBlocks(pool, ranks=2), pool.get_new_blocks(3)
    saving.hold("s", blocks)
    pool.free_blocks(reversed(blocks))  # the request ends
    assert pool.get_num_free_blocks() == BLOCKS - 3
    saving.acknowledge("s")
    assert (len(saving), pool.get_num_free_blocks()) == (1, BLOCKS - 3)
    saving.acknowledge("s")
    assert (len(saving), pool.get_num_free_blocks()) == (0, BLOCKS)


def test_a_save_that_is_withdrawn_frees_its_blocks(pool):
    saving, blocks = SavingBlocks(pool, ranks=2), pool.get_new_blocks(3)
    saving.hold("s", blocks)
    saving.release("s")
    pool.free_blocks(reversed(blocks))
    assert pool.get_num_free_blocks() == BLOCKS
    saving.acknowledge("s")  # a worker that had the command
    assert list(saving) == []


def test_a_session_stays_on_the_device_after_it_is_copied(pool):
    saving, sessions = SavingBlocks(pool, ranks=1), DeviceSessions(pool)
    blocks = pool.get_new_blocks(3)
    sessions.add("s", blocks)
    saving.hold("s", blocks)
    pool.free_blocks(reversed(blocks))
    sessions.keep_freed_blocks()
    assert sessions.num_blocks == 0, "the copy still reads them"
    saving.acknowledge("s")
    sessions.keep_freed_blocks()
    assert sessions.num_blocks == 3
    assert sessions.take("s", 3) == blocks


def test_a_request_takes_the_blocks_that_all_workers_have_filled(pool):
    sessions = DeviceSessions(pool)
    placed = PlacedSessions(pool, 2, sessions)
    ids = placed.begin("s", "r", 4)
    assert "s" in placed
    assert placed.was_tried("r")
    assert pool.get_num_free_blocks() == BLOCKS - 4
    placed.acknowledge("s", failed=False, is_in_memory=True)
    assert sessions.num_blocks == 0
    placed.acknowledge("s", failed=False, is_in_memory=True)
    sessions.check_integrity()
    assert pool.get_num_free_blocks() == BLOCKS, "others may take them"
    assert [block.block_id for block in sessions.take("s", 4)] == ids


@pytest.mark.parametrize("reason", ["failed", "gone"])
def test_blocks_that_no_request_can_use_are_free(pool, reason):
    """One worker is enough; the blocks stay until the other one has ended, too."""
    sessions = DeviceSessions(pool)
    placed = PlacedSessions(pool, 2, sessions)
    placed.begin("s", "r", 4)
    placed.acknowledge("s", failed=reason == "failed", is_in_memory=True)
    assert pool.get_num_free_blocks() == BLOCKS - 4
    placed.acknowledge("s", failed=False, is_in_memory=reason != "gone")
    assert pool.get_num_free_blocks() == BLOCKS
    assert (len(placed), sessions.num_blocks) == (0, 0)
    placed.forget("r")
    assert not placed.was_tried("r")
