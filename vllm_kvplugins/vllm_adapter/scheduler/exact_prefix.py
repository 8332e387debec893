"""What another KV connector sees of a request under a policy: its exact prefix.

A compaction rewrites the retained region, and what the model computes afterwards
depends on it. A connector stores blocks under the tokens of the text, so it must never
see these blocks::

    tokens   [0 ...... exact) [exact ........ cut) [cut ...
             never rewritten  rewritten at cut     computed from rewritten tokens
    saves    shown            hidden               hidden
    loads    shown            shown, until the     hidden
                              request has started
    once the compaction has run, the blocks of [0, exact) are free, and hidden too,
    but for those of a shared prefix

``cut`` is where the first compaction runs, ``exact`` the end of the blocks that no
compaction rewrites (``ResidencyPlan.exact_prefix_blocks``). A request that continues a
session is hidden altogether, but for its shared prefix. Without compactions everything
is shown.

Tokens that the scheduler does not know yet are hidden as well: drafts, which the model
may reject, and the token of a step in flight. They are shown with the next step::

    step       scheduled by vLLM             accepted       shown
    n          token t, drafts t+1 t+2 t+3   t+1, t+2       [t, t+1)
    n + 1      token t+3, drafts t+4 ...     ...            [t+1, t+4)
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA

from vllm_kvplugins.vllm_adapter.scheduler.block_manager import ResidencyBlockManager
from vllm_kvplugins.vllm_adapter.scheduler.scheduler import residency_manager

_UNLIMITED = sys.maxsize


class VisibleRequest:
    """A request of which only the first tokens exist.

    Args:
        visible_tokens: how many, asked at each access.
    """

    __slots__ = ("__weakref__", "_block_size", "_request", "_visible_tokens")

    def __init__(
        self, request: Any, block_size: int, visible_tokens: Callable[[Any], int]
    ) -> None:
        self._request = request
        self._block_size = block_size
        self._visible_tokens = visible_tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

    @property
    def num_tokens(self) -> int:
        return int(min(self._request.num_tokens, self._visible_tokens(self._request)))

    @property
    def num_tokens_with_spec(self) -> int:
        return self.num_tokens

    @property
    def spec_token_ids(self) -> list[int]:
        return []

    @property
    def num_prompt_tokens(self) -> int:
        return int(min(self._request.num_prompt_tokens, self.num_tokens))

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_computed_tokens(self) -> int:
        return int(min(self._request.num_computed_tokens, self.num_tokens))

    @property
    def prompt_token_ids(self) -> list[int] | None:
        ids = self._request.prompt_token_ids
        return None if ids is None else list(ids[: self.num_tokens])

    @property
    def all_token_ids(self) -> list[int]:
        return list(self._request.all_token_ids[: self.num_tokens])

    _all_token_ids = all_token_ids

    @property
    def output_token_ids(self) -> list[int]:
        return self.all_token_ids[self.num_prompt_tokens :]

    @property
    def block_hashes(self) -> list[Any]:
        return list(self._request.block_hashes[: self.num_tokens // self._block_size])


@dataclass(slots=True)
class _Shown:
    """What a connector knows of one request.

    Attributes:
        limit: end of the tokens that it sees, because it may load them; None: those
            that no compaction rewrites.
        local_tokens: tokens of the prefix cache when it was asked.
        loaded_tokens: end of the tokens that it loads; 0: none.
        num_blocks: blocks that the request has got, shown or not.
        end_tokens: end of the tokens of its last step, as shown; None: the next step
            is its first since it got its blocks.
    """

    limit: int | None = None
    local_tokens: int = 0
    loaded_tokens: int = 0
    num_blocks: int = 0
    end_tokens: int | None = None


class ExactPrefix:
    """Decides what one connector sees, and cuts vLLM's objects accordingly.

    Args:
        manager: the engine's block manager.
        make_blocks: vLLM's ``KVCacheManager.create_kv_cache_blocks``.
    """

    def __init__(
        self, manager: ResidencyBlockManager, make_blocks: Callable[[Any], Any]
    ) -> None:
        self._manager = manager
        self._make_blocks = make_blocks
        self._shown: dict[str, _Shown] = {}
        self._requests: WeakValueDictionary[str, VisibleRequest] = WeakValueDictionary()

    def __len__(self) -> int:
        """Number of requests that the connector knows."""
        return len(self._shown)

    # -- limits -------------------------------------------------------------------

    def exact_tokens(self, request: Any) -> int:
        """End of the tokens in blocks that no compaction rewrites."""
        return self._manager.num_exact_tokens(request, _UNLIMITED)

    def _visible_tokens(self, request: Any) -> int:
        shown = self._shown.get(request.request_id)
        if shown is not None and shown.limit is not None:
            return shown.limit
        return self.exact_tokens(request)

    # -- requests -------------------------------------------------------------------

    def request(self, request: Any) -> VisibleRequest:
        """The visible part of a request: the same object as long as it is in use."""
        visible = self._requests.get(request.request_id)
        if visible is None or visible._request is not request:
            visible = VisibleRequest(
                request, self._manager.block_size, self._visible_tokens
            )
            self._requests[request.request_id] = visible
        return visible

    def lookups(self, request: Any, local_tokens: int) -> Iterator[VisibleRequest]:
        """The request as it may be looked up, longest first.

        A connector that stores whole prompts has one of these: the whole prompt if a
        server without a policy stored it, the exact prefix if one with this policy did.
        """
        # Without the session that the request may continue instead.
        plan = self._manager.plans.continuing(request, None)
        cut, blocks = plan.next_cut(0), plan.exact_prefix_blocks
        limits = [_UNLIMITED if cut is None else cut]
        if blocks is not None:
            limits.append(blocks * self._manager.block_size)
        shown = _Shown(local_tokens=local_tokens)
        self._shown[request.request_id] = shown
        for limit in limits:
            if limit > local_tokens:
                shown.limit = limit
                yield self.request(request)
        shown.limit = None

    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> Any:
        """The request got its blocks. Returns those that are shown.

        Args:
            external_tokens: tokens that the connector loads.
        """
        shown = self._shown.setdefault(request.request_id, _Shown())
        if external_tokens:
            shown.loaded_tokens = shown.local_tokens + external_tokens
        elif not shown.loaded_tokens:
            shown.limit = None
        (ids,) = blocks.blocks
        return self._make_blocks((list(ids[: self._num_shown(request, shown)]),))

    def finished(self, request: Any, block_ids: Sequence[int]) -> list[int]:
        """Blocks of an ended request that are shown. Forgets the request."""
        self._shown.pop(request.request_id, None)
        if self._manager.starts.of(request).awaits_load(request):
            return []
        return self._resolve(request, block_ids)

    # -- steps ----------------------------------------------------------------------

    def step(self, output: Any) -> Any:
        """The visible part of vLLM's SchedulerOutput."""
        scheduled: dict[str, int] = {}
        new = [
            visible
            for each in output.scheduled_new_reqs
            if (visible := self._new(each, output, scheduled)) is not None
        ]
        cached = self._cached(output.scheduled_cached_reqs, output, scheduled)
        return replace(
            output,
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=scheduled,
            scheduled_spec_decode_tokens={},
            total_num_scheduled_tokens=sum(scheduled.values()),
            kv_connector_block_state=self._block_state(output),
        )

    def _new(self, new: Any, output: Any, scheduled: dict[str, int]) -> Any | None:
        request = self._manager.plans.request(new.req_id)
        shown = self._shown.setdefault(new.req_id, _Shown())
        (ids,) = new.block_ids
        shown.num_blocks, shown.end_tokens = len(ids), None
        count = self._num_shown(request, shown)
        if not count:
            return None
        visible = self._visible_tokens(request)
        start, tokens = self._interval(
            request,
            shown,
            new.num_computed_tokens,
            output.num_scheduled_tokens[new.req_id],
        )
        scheduled[new.req_id] = tokens
        return replace(
            new,
            prompt_token_ids=_first(new.prompt_token_ids, visible),
            prefill_token_ids=_first(new.prefill_token_ids, visible),
            block_ids=(ids[:count],),
            num_computed_tokens=start,
        )

    def _cached(self, cached: Any, output: Any, scheduled: dict[str, int]) -> Any:
        """Requests that go on, without those that have nothing new to show."""
        kept, new_block_ids, computed = [], [], []
        for index, request_id in enumerate(cached.req_ids):
            request = self._manager.plans.request(request_id)
            shown = self._shown.setdefault(request_id, _Shown())
            resumed = request_id in cached.resumed_req_ids
            got = cached.new_block_ids[index]
            ids = list(got[0]) if got is not None else []
            before = 0 if resumed else shown.num_blocks
            if resumed:
                shown.end_tokens = None
            shown.num_blocks = before + len(ids)
            count = self._num_shown(request, shown)
            visible_ids = ids[: max(count - before, 0)]
            start, tokens = self._interval(
                request,
                shown,
                cached.num_computed_tokens[index],
                output.num_scheduled_tokens[request_id],
            )
            if not (tokens or visible_ids):
                continue
            kept.append(index)
            # vLLM: None if a request got no block.
            new_block_ids.append((visible_ids,) if visible_ids else None)
            computed.append(start)
            scheduled[request_id] = tokens
        ids_kept = [cached.req_ids[index] for index in kept]
        return replace(
            cached,
            req_ids=ids_kept,
            resumed_req_ids=cached.resumed_req_ids & set(ids_kept),
            new_token_ids=[],  # of pipeline parallelism
            all_token_ids={
                request_id: self._first_tokens(request_id, tokens)
                for request_id, tokens in cached.all_token_ids.items()
                if request_id in scheduled
            },
            new_block_ids=new_block_ids,
            num_computed_tokens=computed,
            num_output_tokens=[cached.num_output_tokens[index] for index in kept],
        )

    def _first_tokens(self, request_id: str, tokens: list[int]) -> list[int]:
        request = self._manager.plans.request(request_id)
        return list(tokens[: self._visible_tokens(request)])

    def _interval(
        self, request: Any, shown: _Shown, computed: int, scheduled: int
    ) -> tuple[int, int]:
        """Computed and scheduled tokens of a step, without those that are hidden.

        A connector loads up to the end of a block, also where the policy computes the
        last loaded tokens again, because it needs their queries. A step ends with the
        last known token, and begins where the last one ended: in between, accepted
        drafts have become tokens.
        """
        exact = self.exact_tokens(request)
        start = min(max(computed, shown.loaded_tokens), max(exact, shown.loaded_tokens))
        if shown.end_tokens is not None:
            start = min(start, shown.end_tokens)
        end = min(computed + scheduled, request.num_tokens, exact)
        tokens = max(end - start, 0)
        shown.end_tokens = start + tokens
        return start, tokens

    def _num_shown(self, request: Any, shown: _Shown) -> int:
        """Number of first blocks that may be shown."""
        tokens = max(self.exact_tokens(request), shown.loaded_tokens)
        return int(-(-tokens // self._manager.block_size))

    def _block_state(self, output: Any) -> Any:
        state = output.kv_connector_block_state
        if state is None:
            return None
        resolve = state.resolve_block_ids

        def resolve_block_ids(request_id: str) -> tuple[list[int], ...]:
            request = self._manager.plans.request(request_id)
            (ids,) = resolve(request_id)
            return (self._resolve(request, ids),)

        return replace(state, resolve_block_ids=resolve_block_ids)

    def _resolve(self, request: Any, block_ids: Sequence[int]) -> list[int]:
        """Blocks of the exact prefix that the request still holds."""
        count = self.exact_tokens(request) // self._manager.block_size
        null = self._manager.block_pool.null_block.block_id
        first = list(block_ids[:count])
        return first[: first.index(null)] if null in first else first


def _first(tokens: list[int] | None, count: int) -> list[int] | None:
    return None if tokens is None else list(tokens[:count])


class ExactPrefixConnector(SupportsHMA):
    """Mixin before the user's connector class: shows it exact prefixes only.

    The connector gets no KV cache manager, which would show it all blocks.
    """

    _finishes_all_groups: ClassVar[bool]
    exact_prefix: ExactPrefix

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return False

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self.exact_prefix = ExactPrefix(
            residency_manager(kv_cache_manager), kv_cache_manager.create_kv_cache_blocks
        )

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(self.exact_prefix.request(request))

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        for visible in self.exact_prefix.lookups(request, num_computed_tokens):
            tokens, is_async = super().get_num_new_matched_tokens(
                visible, num_computed_tokens
            )
            if tokens is None or tokens > 0:
                return tokens, is_async
        return 0, False

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        shown = self.exact_prefix.allocated(request, blocks, num_external_tokens)
        super().update_state_after_alloc(
            self.exact_prefix.request(request), shown, num_external_tokens
        )

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> Any:
        return super().get_external_cache_hit_sources(
            self.exact_prefix.request(request), num_external_tokens
        )

    def get_loaded_kv_cache_group_ids(self, request: Any) -> Any:
        return super().get_loaded_kv_cache_group_ids(self.exact_prefix.request(request))

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        visible = self.exact_prefix.step(scheduler_output)
        return super().build_connector_meta(visible)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        (ids,) = block_ids
        return self.request_finished(request, ids)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        result: tuple[bool, dict[str, Any] | None]
        if isinstance(request, VisibleRequest):
            # A connector's own request_finished_all_groups may call this method, with
            # what it was shown.
            result = super().request_finished(request, block_ids)
            return result
        visible = self.exact_prefix.request(request)
        ids = self.exact_prefix.finished(request, block_ids)
        if self._finishes_all_groups:
            result = super().request_finished_all_groups(visible, (ids,))
        else:
            result = super().request_finished(visible, ids)
        return result

    def register_finished_partial_tail(self, *args: Any, **kwargs: Any) -> bool:
        return False


@functools.cache
def exact_prefix_class(connector: type) -> type:
    """The user's connector class behind ``ExactPrefixConnector``.

    It has the name of the user's class, under which vLLM files its statistics.
    """
    return type(
        connector.__name__,
        (ExactPrefixConnector, connector),
        {"_finishes_all_groups": issubclass(connector, SupportsHMA)},
    )
