"""The residency plan: properties that hold for every length and budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.plan.geometry import Geometry, Lengths
from vllm_kvplugins.plan.residency_plan import (
    BlockSpan,
    Compaction,
    DecodeCompaction,
    ResidencyPlan,
)

BLOCK_SIZES = st.sampled_from([16, 32, 64, 128])


def geometry(block_size: int) -> Geometry:
    return Geometry(block_size, num_layers=4, num_kv_heads=2, kv_bytes_per_token=1024)


@st.composite
def plans(draw: st.DrawFn) -> tuple[int, int, ResidencyPlan]:
    """A prompt's length, a budget, and SnapKV's plan; its window is half the budget."""
    block_size = draw(BLOCK_SIZES)
    prompt = draw(st.integers(1, 4000))
    budget = draw(st.integers(2, 2000))
    window = max(budget // 2, 1)
    policy = parse_policy({"name": "snapkv", "budget": budget, "window": window})
    return prompt, budget, policy.plan(Lengths(prompt), geometry(block_size))


@given(plans())
def test_budget_is_kept_to_within_one_block(case):
    prompt, budget, plan = case
    kept = plan.resident_blocks(prompt) * plan.block_size
    tail = prompt % plan.block_size
    kept_tokens = kept - (plan.block_size - tail if tail else 0)
    # at least one page stays, also when the tail alone exceeds the budget
    assert min(budget, prompt) <= kept_tokens < max(budget, tail + 1) + plan.block_size
    if not plan.compactions:
        assert kept_tokens == prompt


@given(plans(), st.integers(1, 512))
def test_chunks_end_at_the_cut(case, token_budget):
    prompt, _, plan = case
    computed, last = 0, 0
    while computed < prompt:
        last = plan.clip_chunk(computed, min(token_budget, prompt - computed))
        assert last > 0, "every step makes progress"
        computed += last
    if plan.compactions:
        assert plan.due(computed - last, computed) == plan.compactions[0]


@given(plans(), st.integers(0, 3000))
def test_blocks_balance_and_never_exceed_the_peak(case, extra):
    prompt, _, plan = case
    total = prompt + extra
    assert 0 < plan.resident_blocks(total) <= plan.peak_blocks(total)
    # decoding adds exactly the blocks of the request's own tokens
    blocks_of = -(-total // plan.block_size) - -(-prompt // plan.block_size)
    assert plan.resident_blocks(total) - plan.resident_blocks(prompt) == blocks_of


@given(plans())
def test_hits_leave_the_window_to_compute(case):
    prompt, budget, plan = case
    exact = plan.exact_prefix_blocks
    if exact is None:
        assert not plan.compactions
        return
    remaining = prompt - exact * plan.block_size
    assert remaining >= budget // 2, "the window's queries would not be computed"
    assert exact == plan.compactions[0].retained.start


def test_many_compactions_release_in_order():
    steps = tuple(
        Compaction(32 * b, BlockSpan(b - 3, b), BlockSpan(b - 2, b)) for b in (3, 4, 5)
    )
    plan = ResidencyPlan(32, steps)
    held = [plan.resident_blocks(n) for n in (95, 96, 127, 128, 160, 161)]
    assert held == [3, 2, 3, 2, 2, 3]
    assert plan.peak_blocks(1000) == plan.resident_blocks(1000)
    assert plan.peak_blocks(128) == 3
    assert plan.next_cut(96) == 128
    assert plan.next_cut(160) is None


@st.composite
def decoding_plans(draw: st.DrawFn) -> ResidencyPlan:
    prompt_blocks = draw(st.integers(1, 60))
    retained = draw(st.integers(1, 60))
    prefill = ()
    held = prompt_blocks
    if retained < prompt_blocks:
        blocks = BlockSpan(0, prompt_blocks)
        kept = BlockSpan(prompt_blocks - retained, prompt_blocks)
        tokens = prompt_blocks * 32 + draw(st.integers(0, 31))
        prefill = (Compaction(tokens, blocks, kept),)
        held = retained
    keep, every = draw(st.integers(1, 20)), draw(st.integers(1, 8))
    first = prompt_blocks + max(keep + every - held, 1)
    if first <= keep:
        first = keep + 1
    return ResidencyPlan(
        32, prefill, decode_compaction=DecodeCompaction(first, every, keep)
    )


@given(decoding_plans())
def test_decode_compactions_bound_memory(plan):
    """After the first compaction, the number of held blocks is bounded for any
    answer.
    """
    decoding = plan.decode_compaction
    start = decoding.first_at_block * 32
    bound = decoding.keep_blocks + decoding.interval_blocks
    for tokens in range(start, start + 40 * 32, 7):
        assert plan.resident_blocks(tokens) <= bound
    assert plan.resident_blocks(start) == decoding.keep_blocks


@given(decoding_plans())
def test_decode_compactions_free_every_block_once(plan):
    horizon = plan.decode_compaction.first_at_block * 32 + 2000
    freed: list[int] = []
    for index in range(plan.num_done(horizon)):
        compaction = plan.compaction(index)
        assert plan.num_done(compaction.at_tokens) == index + 1
        assert plan.num_done(compaction.at_tokens - 1) == index
        freed += range(compaction.freed.start, compaction.freed.stop)
        held = -(-compaction.at_tokens // 32) - len(freed)
        assert plan.resident_blocks(compaction.at_tokens) == held
    assert freed == list(range(len(freed))), "oldest first, none twice, none skipped"


@given(decoding_plans(), st.integers(1, 300))
def test_decode_compactions_cut_any_chunking(plan, chunk):
    """A resumed request, which prefills its own output, also stops at each of them."""
    computed, count = 0, 0
    horizon = plan.decode_compaction.first_at_block * 32 + 500
    while computed < horizon:
        step = plan.clip_chunk(computed, chunk)
        assert step > 0
        if plan.due(computed, computed + step) is not None:
            count += 1
        computed += step
    assert count == plan.num_done(computed)


@given(decoding_plans(), st.integers(0, 4), st.randoms(use_true_random=False))
def test_drafts_end_before_the_cut(plan, num_drafts, random):
    """Whatever is accepted, each compaction runs after a step without drafts."""
    prompt = plan.compactions[0].at_tokens if plan.compactions else 1
    horizon = plan.decode_compaction.first_at_block * 32 + 500
    computed, known, compacted = 0, prompt, []
    while computed < horizon:
        step = plan.clip_chunk(
            computed, min(known - computed + num_drafts, 64), known - computed
        )
        assert step > 0, "every step makes progress"
        num_verified = max(computed + step - known, 0)
        due = plan.due(computed, computed + step)
        if due is not None:
            assert not num_verified
            compacted.append(due)
        computed += step - num_verified + random.randint(0, num_verified)
        if computed >= known:
            known = computed + 1
    assert compacted == [plan.compaction(i) for i in range(plan.num_done(computed))]


@pytest.mark.parametrize(
    "make",
    [
        lambda: BlockSpan(3, 2),
        lambda: Compaction(64, BlockSpan(1, 2), BlockSpan(0, 2)),
        lambda: Compaction(64, BlockSpan(0, 2), BlockSpan(1, 1)),
        lambda: ResidencyPlan(32, (Compaction(63, BlockSpan(0, 2), BlockSpan(1, 2)),)),
        lambda: ResidencyPlan(
            32, (Compaction(64, BlockSpan(0, 2), BlockSpan(1, 2)),) * 2
        ),
        lambda: DecodeCompaction(4, 0, 2),
        lambda: DecodeCompaction(2, 1, 2),
        lambda: DecodeCompaction(4, 1, 2, whole_layers=3, num_layers=3),
        lambda: ResidencyPlan(
            32,
            (Compaction(99, BlockSpan(0, 3), BlockSpan(1, 3)),),
            decode_compaction=DecodeCompaction(3, 1, 1),
        ),
    ],
)
def test_impossible_plans_are_refused(make):
    with pytest.raises(ValueError):
        make()
