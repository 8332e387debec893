"""Block-wise prefill: prompts that are compacted block by block."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from fake_engine import KV_HEADS, FakeEngine, Kept
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_settings import EACH_KIND, configure
from tiers import tiered

from vllm_kvplugins.budgets import ALLOCATORS
from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.errors import KVPolicyError
from vllm_kvplugins.plan.geometry import Geometry, Lengths
from vllm_kvplugins.plan.residency_plan import BlockSpan, Compaction, ResidencyPlan
from vllm_kvplugins.policies import available_policies, get_policy_class
from vllm_kvplugins.policies.capabilities import ProbeOccasion
from vllm_kvplugins.policies.compressor import Compressor

SEED = 20261124
COMPRESSORS = [
    name
    for name in available_policies()
    if issubclass(get_policy_class(name), Compressor)
]
BLOCK_SIZES = st.sampled_from([16, 32, 64, 128])


def geometry(block_size: int) -> Geometry:
    return Geometry(block_size, num_layers=4, num_kv_heads=2, kv_bytes_per_token=1024)


# -- plans ----------------------------------------------------------------------


@st.composite
def blockwise(draw: st.DrawFn) -> tuple[Lengths, Compressor, Geometry]:
    """A prompt, SnapKV with a random window, a block size; sometimes restored."""
    shape = geometry(draw(BLOCK_SIZES))
    size = shape.block_size
    block = draw(st.integers(1, 1500))
    window = draw(st.integers(1, min(block, 200)))
    budget = draw(st.integers(window + 1, 1000) | st.floats(0.05, 0.9))
    policy = parse_policy(
        {
            "name": "snapkv",
            "window": window,
            "budget": budget,
            "prefill_block": block,
            "decode_budget": draw(st.none() | st.just(window + 300)),
        }
    )
    prompt, restored = draw(st.integers(1, 6000)), None
    if draw(st.booleans()):
        stop = draw(st.integers(1, 40))
        at = stop * size + draw(st.integers(0, 3 * size))
        retained = BlockSpan(draw(st.integers(0, stop - 1)), stop)
        restored = Compaction(at, BlockSpan(0, stop), retained)
        prompt += at
    return Lengths(prompt, (), restored), policy, shape


def bound_tokens(policy: Compressor, prompt: int) -> int:
    """Budget and block in tokens; a block is at least one block of the cache."""
    budget = policy.budget.resolve(prompt, 1024)
    return max(budget, policy.minimum_budget_tokens) + policy.prefill_block


@settings(deadline=None)
@given(blockwise())
def test_no_count_of_the_prompt_holds_more_than_budget_and_block(case):
    lengths, policy, shape = case
    plan, size = policy.plan(lengths, shape), shape.block_size
    prompt = lengths.prompt_tokens
    limit = (bound_tokens(policy, prompt) + size - 1) // size + 1  # the partial one
    if policy.prefill_block < size:
        limit += 1  # cuts are at least one block of the cache apart
    start, own = 0, plan.compactions
    if lengths.restored:
        start, own = lengths.restored.at_tokens, plan.compactions[1:]
        # the restored tokens, and the queries that score them
        limit = max(limit, plan.resident_blocks(start) + -(-policy.window // size) + 1)
    held = max(map(plan.resident_blocks, (*range(start, prompt, 97), prompt)))
    for cut in own:  # all candidates are still resident, and a partial block
        before = -(-cut.at_tokens // size) - cut.candidates.start
        held = max(held, before, plan.resident_blocks(cut.at_tokens))
    assert held <= limit, (held, limit)
    if lengths.restored is None:
        assert plan.peak_blocks(prompt) <= policy.max_prompt_blocks(prompt, shape)
        assert held == plan.peak_blocks(prompt)


@settings(deadline=None)
@given(blockwise())
def test_each_cut_is_scored_by_a_window_and_leaves_the_budget(case):
    lengths, policy, shape = case
    plan, size = policy.plan(lengths, shape), shape.block_size
    prompt, restored = lengths.prompt_tokens, lengths.restored
    own = plan.compactions[1:] if restored else plan.compactions
    once = policy.model_copy(update={"prefill_block": None}).plan(lengths, shape)
    assert plan.resident_blocks(prompt) <= once.resident_blocks(prompt)
    at = begin = restored.at_tokens if restored else 0
    for index, compaction in enumerate(own):
        assert at < compaction.at_tokens <= prompt
        before_end = compaction.at_tokens < prompt
        if before_end:
            assert compaction.at_tokens % size == 0, "whole blocks"
            kept = len(compaction.retained) * size
            budget = bound_tokens(policy, prompt) - policy.prefill_block
            assert budget <= kept < budget + size
        # the last cut before the end may be early, so that enough queries follow
        if not before_end or index < len(own) - 2:
            minimum = min(policy.window, max(policy.prefill_block // size, 1) * size)
            enough = compaction.at_tokens - at >= minimum
            assert enough or at == begin, "a short prompt is all there is"
        at = compaction.at_tokens


@settings(deadline=None)
@given(blockwise(), st.integers(1, 700))
def test_chunks_of_any_size_meet_every_cut(case, chunk):
    lengths, policy, shape = case
    plan = policy.plan(lengths, shape)
    computed = lengths.restored.at_tokens if lengths.restored else 0
    met = [lengths.restored] if lengths.restored else []
    while computed < lengths.prompt_tokens:
        new_tokens = min(chunk, lengths.prompt_tokens - computed)
        step = plan.clip_chunk(computed, new_tokens)
        assert step > 0
        due = plan.due(computed, computed + step)
        met += [due] if due else []
        computed += step
    assert tuple(met) == plan.compactions


@settings(deadline=None)
@given(blockwise())
def test_only_the_first_blocks_may_come_from_the_prefix_cache(case):
    lengths, policy, shape = case
    plan = policy.plan(lengths, shape)
    exact = plan.exact_prefix_blocks
    assert exact == (plan.compaction(0).retained.start if not plan.is_static else None)


def test_the_bound_does_not_grow_with_the_prompt():
    policy = parse_policy({"name": "snapkv", "budget": 512, "prefill_block": 512})
    shape = geometry(32)
    peaks = {
        policy.plan(Lengths(n), shape).peak_blocks(n) for n in range(2000, 90000, 777)
    }
    assert peaks <= {32, 33}
    assert policy.max_prompt_blocks(90000, shape) == 33
    assert policy.max_prompt_blocks(320, shape) == 10
    assert parse_policy({"name": "snapkv"}).max_prompt_blocks(90000, shape) is None


def test_plans_that_skip_what_is_held_are_refused():
    """Each compaction includes all resident tokens; sizes count from the last one."""
    first = Compaction(96, BlockSpan(0, 3), BlockSpan(2, 3))
    with pytest.raises(ValueError, match="first block that is still held"):
        ResidencyPlan(32, (first, Compaction(192, BlockSpan(3, 6), BlockSpan(5, 6))))


# -- settings ----------------------------------------------------------------------


@pytest.mark.parametrize("name", COMPRESSORS)
def test_every_compressor_has_it_and_refuses_less_than_it_scores_by(name):
    policy = parse_policy({"name": name, "prefill_block": 2048})
    assert len(policy.plan(Lengths(9000), geometry(32)).compactions) > 3
    minimum = policy.min_new_tokens
    parse_policy({"name": name, "prefill_block": minimum})
    if minimum > 1:
        with pytest.raises(
            KVPolicyError, match=f"prefill_block {minimum - 1} is below"
        ):
            parse_policy({"name": name, "prefill_block": minimum - 1})


# -- the runtime, against a dense copy of each request ---------------------------------

BLOCK, BLOCKS = 4, 200
SMALL = {"window": 3, "sinks": 2, "recent": 1, "chunk_size": 4, "hash_bits": 1}
REQUESTS = {"tail": (211, 6), "exact": (160, 6), "short": (9, 6)}
POLICIES = [
    *tiered([(name, None) for name in COMPRESSORS], [(n, None) for n in EACH_KIND]),
    *(("snapkv", a) for a in sorted(ALLOCATORS) if a not in ("uniform", "file")),
    ("kvzip", "uniform"),
]


def engine_for(name: str, allocator: str | None) -> FakeEngine:
    block = 64 if name == "kvzip" else 24
    settings = {**SMALL, "budget": 16, "prefill_block": block, "future": 16}
    if allocator:
        settings["allocator"] = allocator
    return FakeEngine(configure(name, settings), BLOCK, BLOCKS)


def alone(name: str, allocator: str | None, request: str) -> list[Kept]:
    """Tokens that a request keeps with the largest possible chunks."""
    engine = engine_for(name, allocator)
    added = engine.add(request, *REQUESTS[request])
    while not added.done:
        engine.step({request: 1 << 20})
        held, block = len(added.held), engine.runtime.policy.prefill_block
        if added.computed < added.prompt:
            assert held <= (16 + block) // BLOCK + 1
    return added.kept


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_blocks_are_compacted_alike_in_any_chunks_and_company(policy):
    """The fake engine checks pages, attention and what was written at each step."""
    print("seed", SEED)
    rng, expected = random.Random(SEED), {n: alone(*policy, n) for n in REQUESTS}
    assert len(expected["tail"]) > 2, "compacted again and again"
    engine = engine_for(*policy)
    requests = {name: engine.add(name, *sizes) for name, sizes in REQUESTS.items()}
    preempt_at, kept = {"tail": 100, "exact": 155}, {}
    while engine.requests:
        for name, at in list(preempt_at.items()):
            if requests[name].computed >= at:
                engine.preempt(name)
                del preempt_at[name]
        engine.step({name: rng.randint(1, 40) for name in engine.requests})
        for name in [n for n, r in engine.requests.items() if r.done]:
            kept[name] = engine.remove(name).kept
    engine.check_idle()
    assert kept == expected
    assert not preempt_at
    assert all(len(heads) == KV_HEADS for heads in kept["tail"][0])


# -- probes ------------------------------------------------------------------


def test_kvzip_repeats_the_block_just_read():
    policy = parse_policy({"name": "kvzip", "chunk": 100, "prefill_block": 150})
    prompt = list(range(10_000, 10_400))
    occasion = ProbeOccasion(prompt, 150, 300, 4000, lambda text: [1] * 5)
    first, second = policy.probing.probes(occasion)
    assert (first.about, second.about) == (range(150, 250), range(250, 300))
    assert list(first.token_ids)[-100:] == prompt[150:250]
    assert list(first.token_ids)[5:13] == prompt[142:150], "announced by what leads"
    assert list(second.token_ids)[-50:] == prompt[250:300]
    assert first.survivors == second.survivors == range(150), (
        "survivors compete in each"
    )
    whole = ProbeOccasion(prompt, 0, 400, 4000, lambda text: [1] * 5)
    assert [p.about.start for p in policy.probing.probes(whole)] == [0, 100, 200, 300]


# -- what never fits ---------------------------------------------------------


def too_large(
    answer: int, pool: int, runs_ahead: bool = False, slots: tuple = (), **changes
):
    pytest.importorskip("vllm")
    from vllm_kvplugins.vllm_adapter.config import pool as adapter

    policy = parse_policy(
        {"name": "snapkv", "budget": 512, "prefill_block": 512, **changes}
    )
    plan = policy.plan(Lengths(6144), geometry(32))
    return adapter.pool_problem(policy, plan, 6144, answer, pool, runs_ahead, 0, *slots)


def test_a_request_that_outgrows_the_pool_is_told_what_to_do():
    # 32 blocks during prefill; afterwards 16 and the answer's
    assert too_large(513, 32) is None
    assert too_large(513, 32, runs_ahead=True)
    reason = too_large(514, 32)
    assert reason
    for words in ("6144 tokens", "514", "33 blocks", "has 32", "max_tokens"):
        assert words in reason
    assert "decode_budget" in reason
    assert "larger KV cache" in reason
    assert too_large(100_000, 40, decode_budget=512) is None


def test_a_drafter_needs_slots_beyond_the_answer():
    assert too_large(510, 32) is None
    assert too_large(510, 32, slots=(3,)) is not None  # 32 blocks during prefill
    assert too_large(510, 33, slots=(3,)) is None
    assert too_large(510 + 32, 33, slots=(3,)) is None
    assert too_large(511 + 32, 33, slots=(3,)) is not None
    assert too_large(511 + 32, 33, slots=(3, 6144 + 542)) is None


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(2, 500))
def test_the_pool_of_one_engine_is_known_from_the_sum(engines, blocks):
    pytest.importorskip("vllm")
    from vllm_kvplugins.vllm_adapter.config.pool import blocks_per_engine

    def found(total: int | None, **changes: object) -> int | None:
        parallel = {
            "data_parallel_size": engines,
            "data_parallel_size_local": 1,
            "data_parallel_rank_local": None,
            "local_engines_only": False,
        }
        return blocks_per_engine(
            SimpleNamespace(
                cache_config=SimpleNamespace(num_gpu_blocks=total),
                parallel_config=SimpleNamespace(**parallel | changes),
            )
        )

    assert found(engines * blocks) == blocks - 1
    assert found(blocks, data_parallel_rank_local=0) == blocks - 1
    assert found(blocks, local_engines_only=True) == blocks - 1
    assert found(None) is None
