"""What another KV connector is shown of requests under a policy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="install a vLLM (see scripts/)")

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    SupportsHMA,
)
from vllm.v1.core.sched.output import (
    CachedRequestData,
    KVConnectorBlockState,
    NewRequestData,
    SchedulerOutput,
)

from vllm_kvplugins.plan.residency_plan import BlockSpan, Compaction, ResidencyPlan
from vllm_kvplugins.vllm_adapter.scheduler.admission import Admission
from vllm_kvplugins.vllm_adapter.scheduler.exact_prefix import (
    ExactPrefix,
    exact_prefix_class,
)

SIZE = 4
NULL = 0
# A prompt of 42 tokens: blocks 0 to 7 are freed, 8 and 9 rewritten.
COMPACTION = Compaction(42, BlockSpan(0, 10), BlockSpan(8, 10))
PLAN = ResidencyPlan(SIZE, (COMPACTION,))
EXACT = 8 * SIZE


class Request(SimpleNamespace):
    """The part of vLLM's Request that is shown."""

    __hash__ = object.__hash__

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


def request(name: str = "r", prompt: int = 42, answer: int = 0) -> Request:
    tokens = list(range(prompt + answer))
    return Request(
        request_id=name,
        all_token_ids=tokens,
        prompt_token_ids=tokens[:prompt],
        num_prompt_tokens=prompt,
        num_computed_tokens=0,
        num_in_flight_tokens=0,
        block_hashes=[f"hash{i}" for i in range(len(tokens) // SIZE)],
        status="waiting",
    )


class Manager:
    """Requests with one plan each, as our block manager answers for them."""

    block_size = SIZE
    block_pool = SimpleNamespace(null_block=SimpleNamespace(block_id=NULL))

    def __init__(self, *requests: Request, plan: ResidencyPlan = PLAN) -> None:
        self._requests = {each.request_id: each for each in requests}
        self._plan = plan
        self.continues_session = False
        self.plans = SimpleNamespace(
            of=lambda request: plan,
            continuing=lambda request, compaction: plan,
            request=self._requests.get,
        )
        self.admission = Admission()
        self.starts = SimpleNamespace(of=lambda request: self.admission)

    def num_exact_tokens(self, request: Any, tokens: int) -> int:
        if self.continues_session:
            return 0
        blocks = self._plan.exact_prefix_blocks
        return tokens if blocks is None else min(tokens, blocks * SIZE)


def shows(manager: Manager) -> ExactPrefix:
    return ExactPrefix(manager, lambda groups: groups)  # type: ignore[arg-type]


def step(
    new: dict[str, tuple[list[int], int, int]] | None = None,
    cached: dict[str, tuple[list[int], int, int]] | None = None,
    resumed: set[str] | None = None,
    drafts: dict[str, list[int]] | None = None,
) -> Any:
    """A SchedulerOutput: per request its new blocks, computed and scheduled tokens."""
    new, cached = new or {}, cached or {}
    tables = {name: ids for name, (ids, _, _) in (new | cached).items()}
    return SchedulerOutput(
        scheduled_new_reqs=[
            NewRequestData(
                name, list(range(42)), [], None, None, (ids,), computed, None
            )
            for name, (ids, computed, _) in new.items()
        ],
        scheduled_cached_reqs=CachedRequestData(
            req_ids=list(cached),
            resumed_req_ids=resumed or set(),
            new_token_ids=[],
            all_token_ids={name: list(range(60)) for name in cached},
            new_block_ids=[(ids,) if ids else None for ids, _, _ in cached.values()],
            num_computed_tokens=[computed for _, computed, _ in cached.values()],
            num_output_tokens=[0] * len(cached),
        ),
        num_scheduled_tokens={name: n for name, (_, _, n) in (new | cached).items()},
        total_num_scheduled_tokens=sum(n for _, _, n in (new | cached).values()),
        scheduled_spec_decode_tokens=drafts or {},
        scheduled_encoder_inputs={},
        finished_req_ids={"gone"},
        free_encoder_mm_hashes=[],
        kv_connector_block_state=KVConnectorBlockState(
            set(tables), lambda name: (tables[name],), {}
        ),
    )


def test_a_prompt_in_chunks_is_shown_up_to_the_retained_region():
    shown = shows(Manager(request()))
    first = shown.step(step(new={"r": ([1, 2, 3, 4, 5], 0, 20)}))
    assert first.scheduled_new_reqs[0].block_ids == ([1, 2, 3, 4, 5],)
    assert first.scheduled_new_reqs[0].prompt_token_ids == list(range(EXACT))
    assert first.num_scheduled_tokens == {"r": 20}
    assert first.finished_req_ids == {"gone"}
    # Tokens 20 to 41: those from 32 on, in blocks 8 and 9, are rewritten.
    second = shown.step(step(cached={"r": ([6, 7, 8, 9, 10, 11], 20, 22)}))
    assert second.scheduled_cached_reqs.new_block_ids == [([6, 7, 8],)]
    assert second.scheduled_cached_reqs.num_computed_tokens == [20]
    assert second.scheduled_cached_reqs.all_token_ids == {"r": list(range(EXACT))}
    assert second.num_scheduled_tokens == {"r": EXACT - 20}
    assert second.total_num_scheduled_tokens == EXACT - 20
    # Generated tokens depend on the compaction.
    third = shown.step(step(cached={"r": ([12], 42, 1)}))
    assert third.scheduled_cached_reqs.req_ids == []
    assert third.num_scheduled_tokens == {}


def test_the_original_is_not_changed():
    shown, output = shows(Manager(request())), step(new={"r": ([1] * 11, 0, 42)})
    shown.step(output)
    assert output.num_scheduled_tokens == {"r": 42}
    assert output.scheduled_new_reqs[0].block_ids == ([1] * 11,)


def test_without_compactions_everything_is_shown():
    whole = request(answer=3)
    shown = shows(Manager(whole, plan=ResidencyPlan(SIZE)))
    output = shown.step(step(cached={"r": ([9], 44, 1)}))
    assert output.num_scheduled_tokens == {"r": 1}
    assert output.scheduled_cached_reqs.new_block_ids == [([9],)]
    assert shown.request(whole).num_tokens == 45
    assert shown.finished(whole, [1, 2, 3]) == [1, 2, 3]


def test_accepted_drafts_are_shown_with_the_next_step():
    whole = request(answer=1)
    shown = shows(Manager(whole, plan=ResidencyPlan(SIZE)))

    def interval(known: int, output: Any) -> tuple[int, int]:
        """Start and end of what is shown where so many tokens are known."""
        whole.all_token_ids = list(range(known))
        visible = shown.step(output)
        assert visible.scheduled_spec_decode_tokens == {}
        count = visible.num_scheduled_tokens["r"]
        assert visible.total_num_scheduled_tokens == count
        start = visible.scheduled_cached_reqs.num_computed_tokens[0]
        return start, start + count

    shown.step(step(new={"r": (list(range(1, 12)), 0, 42)}))
    drafts = {"r": [7, 7, 7]}
    first = step(cached={"r": ([12], 42, 4)}, drafts=drafts)
    assert interval(43, first) == (42, 43)
    # Two drafts were accepted, 43 and 44.
    second = step(cached={"r": ([], 45, 4)}, drafts=drafts)
    assert interval(46, second) == (43, 46)
    # None was accepted.
    assert interval(47, step(cached={"r": ([], 46, 1)})) == (46, 47)
    # A preempted request is computed again.
    again = step(cached={"r": (list(range(21, 32)), 0, 42)}, resumed={"r"})
    assert interval(47, again) == (0, 42)


def test_the_token_of_a_step_in_flight_is_shown_with_the_next_step():
    whole = request(answer=1)
    shown = shows(Manager(whole, plan=ResidencyPlan(SIZE)))
    shown.step(step(new={"r": (list(range(1, 12)), 0, 42)}))
    shown.step(step(cached={"r": ([], 42, 1)}))
    unknown = shown.step(step(cached={"r": ([], 43, 1)}))
    assert unknown.num_scheduled_tokens == {}
    whole.all_token_ids = list(range(44))
    known = shown.step(step(cached={"r": ([], 44, 1)}))
    assert known.scheduled_cached_reqs.num_computed_tokens == [43]
    assert known.num_scheduled_tokens == {"r": 1}


def test_drafts_of_a_request_are_hidden():
    whole = request(answer=3)
    whole.spec_token_ids = [7, 7]
    whole.num_computed_tokens = 47  # of a step whose drafts are not verified
    visible = shows(Manager(whole, plan=ResidencyPlan(SIZE))).request(whole)
    assert visible.spec_token_ids == []
    assert visible.num_tokens_with_spec == visible.num_computed_tokens == 45


def test_the_visible_request_ends_with_the_exact_prefix():
    whole = request(answer=5)
    visible = shows(Manager(whole)).request(whole)
    assert visible.num_tokens == visible.num_prompt_tokens == EXACT
    assert visible.all_token_ids == visible.prompt_token_ids == list(range(EXACT))
    assert visible.output_token_ids == []
    assert visible.block_hashes == [f"hash{i}" for i in range(8)]
    whole.num_computed_tokens = 44
    assert visible.num_computed_tokens == EXACT
    assert visible.status == "waiting"


def test_a_prompt_is_looked_up_whole_and_then_without_what_is_rewritten():
    whole = request(answer=5)
    shown = shows(Manager(whole))
    assert [each.num_tokens for each in shown.lookups(whole, 0)] == [42, EXACT]
    assert [each.num_tokens for each in shown.lookups(whole, EXACT)] == [42]
    assert shown.request(whole).num_tokens == EXACT


def test_loads_reach_to_the_compaction_and_are_hidden_afterwards():
    whole = request()
    shown = shows(Manager(whole))
    next(shown.lookups(whole, 4))
    blocks = SimpleNamespace(blocks=(list(range(1, 12)),))
    assert shown.allocated(whole, blocks, 36) == (list(range(1, 11)),)
    # The policy computes tokens 32 to 39 again, for their queries.
    first = shown.step(step(new={"r": (list(range(1, 12)), 32, 10)}))
    (new,) = first.scheduled_new_reqs
    assert new.prompt_token_ids == list(range(42))
    assert new.block_ids == (list(range(1, 11)),)
    assert new.num_computed_tokens == 40
    assert first.num_scheduled_tokens == {"r": 0}, "would be saved again"
    later = shown.step(step(cached={"r": ([12], 42, 1)}))
    assert later.scheduled_cached_reqs.req_ids == []
    assert shown.finished(whole, [NULL] * 8 + [9, 10, 11, 12]) == []
    assert len(shown) == 0


def test_a_short_load_is_followed_by_saves():
    whole = request()
    shown = shows(Manager(whole))
    next(shown.lookups(whole, 0))
    shown.allocated(whole, SimpleNamespace(blocks=(list(range(1, 12)),)), 8)
    first = shown.step(step(new={"r": (list(range(1, 12)), 8, 34)}))
    assert first.scheduled_new_reqs[0].block_ids == (list(range(1, 9)),)
    assert first.num_scheduled_tokens == {"r": EXACT - 8}


def test_a_resumed_request_has_a_new_table():
    whole = request()
    shown = shows(Manager(whole))
    shown.step(step(new={"r": (list(range(1, 12)), 0, 42)}))
    again = shown.step(
        step(cached={"r": (list(range(21, 26)), 0, 20)}, resumed={"r"})
    ).scheduled_cached_reqs
    assert again.new_block_ids == [(list(range(21, 26)),)]
    assert again.resumed_req_ids == {"r"}


def test_requests_that_continue_a_session_are_hidden():
    whole = request()
    manager = Manager(whole)
    shown = shows(manager)
    manager.continues_session = True
    blocks = SimpleNamespace(blocks=([NULL] * 8 + [9, 10],))
    assert shown.allocated(whole, blocks, 0) == ([],)
    output = shown.step(step(new={"r": ([NULL] * 8 + [9, 10], 40, 2)}))
    assert output.scheduled_new_reqs == []
    assert output.num_scheduled_tokens == {}
    assert shown.finished(whole, [NULL] * 8 + [9, 10]) == []


def test_blocks_that_are_being_loaded_are_hidden():
    whole = request()
    manager = Manager(whole)
    manager.admission = Admission(loaded_tokens=20, offered_tokens=24)
    shown = shows(manager)
    whole.num_computed_tokens = 20  # an asynchronous load
    assert shown.finished(whole, [1, 2, 3, 4, 5]) == []
    whole.num_computed_tokens = 23
    whole.num_in_flight_tokens = 3  # a step whose output is not known
    assert shown.finished(whole, [1, 2, 3, 4, 5]) == []
    whole.num_in_flight_tokens = 0
    assert shown.finished(whole, [1, 2, 3, 4, 5]) == [1, 2, 3, 4, 5]


def test_freed_blocks_are_hidden_from_tables():
    whole = request()
    shown = shows(Manager(whole))
    held = step(cached={"r": (list(range(1, 12)), 20, 1)})
    assert shown.step(held).kv_connector_block_state.get_block_ids("r") == (
        list(range(1, 9)),
    )
    freed = step(cached={"r": ([NULL] * 8 + [9, 10, 11], 42, 1)})
    assert shown.step(freed).kv_connector_block_state.get_block_ids("r") == ([],)
    partly = step(cached={"r": ([1, 2, NULL, 4], 20, 1)})
    assert shown.step(partly).kv_connector_block_state.get_block_ids("r") == ([1, 2],)


class _Plain(KVConnectorBase_V1):
    pass


class _Grouped(KVConnectorBase_V1, SupportsHMA):
    pass


@pytest.mark.parametrize("connector", [_Plain, _Grouped])
def test_the_class_keeps_its_name_and_gets_no_block_pool(connector):
    shown = exact_prefix_class(connector)
    assert shown is exact_prefix_class(connector)
    assert shown.__name__ == connector.__name__
    assert issubclass(shown, connector)
    assert issubclass(shown, SupportsHMA)
    assert shown._finishes_all_groups == issubclass(connector, SupportsHMA)
    assert shown.bind_kv_cache_manager is not KVConnectorBase_V1.bind_kv_cache_manager


class _Delegating(SupportsHMA):
    """Handles a single group as vLLM's MultiConnector does."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return self.request_finished(request, block_ids[0])

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        self.seen.append((request.num_tokens, block_ids))
        return True, None


@pytest.mark.parametrize("groups", [False, True])
def test_a_connector_may_finish_requests_by_its_other_method(groups):
    whole = request(answer=10)
    connector = exact_prefix_class(_Delegating)()
    connector.exact_prefix = shows(Manager(whole))
    ids = list(range(1, 12))
    if groups:
        result = connector.request_finished_all_groups(whole, (ids,))
    else:
        result = connector.request_finished(whole, ids)
    assert result == (True, None)
    assert connector.seen == [(EXACT, ids[: EXACT // SIZE])]
