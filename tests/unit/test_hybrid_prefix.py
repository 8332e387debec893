"""Prefix hits of a hybrid model: a shorter hit is another hit, not a slice of it.

The group of full attention caches all blocks of a prefix. A group with a sliding window
has the null block everywhere but in the window before the end of the hit, and one with
a recurrent state everywhere but in the last block of the hit.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="install a vLLM (see scripts/)")

import torch
from scheduled_blocks import Scheduling
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    make_block_hash_with_group_id,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.plan.geometry import Geometry
from vllm_kvplugins.vllm_adapter.config.host_memory import HostReservations
from vllm_kvplugins.vllm_adapter.scheduler.admission_controller import (
    AdmissionController,
)
from vllm_kvplugins.vllm_adapter.scheduler.scheduler import residency_manager
from vllm_kvplugins.vllm_adapter.scheduler.spec import with_policy

SIZE, WINDOW, CHUNK = 4, 8, 12  # tokens
WINDOW_BLOCKS = 2  # that a hit needs before its end
WINDOWED = (0, 2)  # groups
GEOMETRY = Geometry(SIZE, num_layers=1, num_kv_heads=2, kv_bytes_per_token=128)


class Hybrid:
    """vLLM's KV cache manager with one group of full and two of other layers."""

    def __init__(self, blocks: int = 100, other: Any = None) -> None:
        policy = parse_policy({"name": "streaming-llm", "budget": 16, "sinks": 2})
        shape: dict[str, Any] = {
            "block_size": SIZE,
            "num_kv_heads": 2,
            "head_size": 8,
            "dtype": torch.float32,
        }
        other = other or SlidingWindowSpec(**shape, sliding_window=WINDOW)
        full = with_policy(FullAttentionSpec(**shape), policy, GEOMETRY)
        groups = [
            KVCacheGroupSpec([f"layer{i}"], spec)
            for i, spec in enumerate((other, full, other))
        ]
        self.vllm = KVCacheManager(KVCacheConfig(blocks, [], groups), 400, SIZE, SIZE)
        self.manager = residency_manager(self.vllm)
        self.admission = AdmissionController(
            self.manager, HostReservations(policy, GEOMETRY)
        )
        self.scheduler = Scheduling(self.vllm)
        self.scheduler.connector = SimpleNamespace(admission=self.admission)
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(SIZE, sha256)

    def request(self, name: str, prompt: list[int]) -> Request:
        params = SamplingParams(max_tokens=1)
        return Request(
            name, prompt, params, None, arrival_time=0.0, block_hasher=self.hasher
        )

    def run(self, request: Request) -> None:
        """Process a prompt in chunks, without cached tokens, and end."""
        hit = self.scheduler._get_local_prefix_cache_hit(request)
        request.shared_prefix_boundary = hit[2]
        while request.num_computed_tokens < request.num_prompt_tokens:
            done = request.num_computed_tokens
            new = min(CHUNK, request.num_prompt_tokens - done)
            assert self.vllm.allocate_slots(request, new) is not None
            request.num_computed_tokens += new
        self.vllm.free(request)


def tokens(seed: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1000, (count,), generator=generator).tolist()


def test_a_hit_before_a_retained_region_has_the_window_before_its_end():
    hybrid = Hybrid()
    shared = tokens(1, 60)
    hybrid.run(hybrid.request("long", shared + tokens(2, 60)))
    # All 15 blocks of the shared prefix are cached, but the plan of this request
    # rewrites its last 4 full blocks, so a hit may have 11.
    request = hybrid.request("short", [*shared, 1, 2])
    exact = hybrid.manager.plans.of(request).exact_prefix_blocks
    whole, hit, _ = hybrid.vllm.get_computed_blocks(request)
    assert (hit // SIZE, exact) == (15, 11)

    blocks, cached, *_ = hybrid.scheduler._get_local_prefix_cache_hit(request)
    assert cached == exact * SIZE
    for group, group_blocks in enumerate(blocks.blocks):
        assert len(group_blocks) == exact
        first = exact - WINDOW_BLOCKS if group in WINDOWED else 0
        for place, block in enumerate(group_blocks):
            if place < first:
                assert block.is_null
            else:
                of_tokens = make_block_hash_with_group_id(
                    request.block_hashes[place], group
                )
                assert block.block_hash == of_tokens, f"group {group}, block {place}"
    # A slice of the whole hit would be null blocks only.
    assert all(block.is_null for block in whole.blocks[WINDOWED[0]][:exact])


def test_a_hit_without_its_window_is_shorter_and_so_is_the_admission():
    hybrid = Hybrid()
    shared = tokens(3, 60)
    hybrid.run(hybrid.request("long", shared + tokens(4, 60)))
    request = hybrid.request("short", [*shared, 1, 2])
    # The pool has reused a block of the window before the eleventh block.
    pool = hybrid.vllm.block_pool
    lost = pool.get_cached_block(request.block_hashes[10], [WINDOWED[0]])
    assert lost is not None
    hybrid.vllm.evict_blocks({block.block_id for block in lost})

    blocks, cached, *_ = hybrid.scheduler._get_local_prefix_cache_hit(request)
    assert cached == 10 * SIZE
    assert [len(group) for group in blocks.blocks] == [10, 10, 10]
    admission = hybrid.manager.starts.of(request)
    assert admission.cached_tokens == cached
    assert admission.first_query == cached, "queries begin after the cached tokens"


def test_windowed_groups_cache_as_without_a_policy():
    """What a compaction rewrites is hashed in no group of full attention only."""
    hybrid = Hybrid()
    request = hybrid.request("one", tokens(5, 60))
    hybrid.run(request)
    pool = hybrid.vllm.block_pool
    cached = [
        [
            pool.get_cached_block(block_hash, [group]) is not None
            for block_hash in request.block_hashes
        ]
        for group in range(3)
    ]
    exact = hybrid.manager.plans.of(request).exact_prefix_blocks
    assert cached[0] == cached[2] == [True] * 15
    assert cached[1] == [True] * exact + [False] * (15 - exact)


# -- recurrent states --------------------------------------------------------------

STATE = MambaSpec(
    shapes=((8, 16),),
    dtypes=(torch.float32,),
    block_size=SIZE,
    mamba_cache_mode="align",
)


def test_vllm_is_asked_for_the_state_that_a_hit_can_use():
    """A hit ends before the blocks that a compaction rewrites: a state belongs there.

    Without one, equal prompts would never hit.
    """
    hybrid = Hybrid(other=STATE)
    request = hybrid.request("one", tokens(6, 62))
    exact = hybrid.manager.plans.of(request).exact_prefix_blocks
    assert exact == 11
    _, cached, boundary, _ = hybrid.scheduler._get_local_prefix_cache_hit(request)
    assert (cached, boundary) == (0, exact * SIZE)


def test_a_hit_has_the_state_at_its_own_end():
    hybrid = Hybrid(other=STATE)
    shared = tokens(7, 60)
    hybrid.run(hybrid.request("long", shared + tokens(10, 60)))
    # Chunks of 12 tokens leave states at 36, 48 and 60. The plan of this request
    # rewrites what follows after 44 tokens.
    request = hybrid.request("short", [*shared, 1, 2])
    whole, hit, _ = hybrid.vllm.get_computed_blocks(request)
    assert hit == 60
    blocks, cached, *_ = hybrid.scheduler._get_local_prefix_cache_hit(request)
    assert cached == 36
    for group, group_blocks in enumerate(blocks.blocks):
        assert len(group_blocks) == cached // SIZE
        first = len(group_blocks) - 1 if group in WINDOWED else 0
        for place, block in enumerate(group_blocks):
            if place < first:
                assert block.is_null
            else:
                of_tokens = make_block_hash_with_group_id(
                    request.block_hashes[place], group
                )
                assert block.block_hash == of_tokens, f"group {group}, block {place}"
    # A slice of the whole hit would have no state.
    assert all(block.is_null for block in whole.blocks[WINDOWED[0]][: cached // SIZE])


def test_states_beyond_the_exact_prefix_are_of_no_use():
    hybrid = Hybrid(other=STATE)
    prompt = tokens(8, 62)
    hybrid.run(hybrid.request("one", prompt))
    request = hybrid.request("two", prompt)
    pool = hybrid.vllm.block_pool
    for place in range(9):  # the pool has reused all states up to 36 tokens
        if lost := pool.get_cached_block(request.block_hashes[place], [WINDOWED[0]]):
            hybrid.vllm.evict_blocks({block.block_id for block in lost})
    _, cached, boundary, _ = hybrid.scheduler._get_local_prefix_cache_hit(request)
    assert cached == 0
    assert boundary == 44
    assert hybrid.manager.starts.of(request).cached_tokens == 0


def test_policies_that_rewrite_nothing_ask_for_no_state():
    hybrid = Hybrid(other=STATE)
    request = hybrid.request("short", tokens(9, 14))
    assert hybrid.manager.plans.of(request).exact_prefix_blocks is None
    *_, boundary, _ = hybrid.scheduler._get_local_prefix_cache_hit(request)
    assert boundary == 0
