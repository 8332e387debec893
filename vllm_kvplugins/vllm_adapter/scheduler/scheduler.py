"""The scheduler's side of a plan: where prefill is cut, what a hit may reuse, who
begins anew."""

from __future__ import annotations

import time
from typing import Any

from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_kvplugins.config import describe
from vllm_kvplugins.sessions.commands import Load
from vllm_kvplugins.vllm_adapter.scheduler.block_manager import ResidencyBlockManager

# vLLM configures only the loggers below its own name.
logger = init_logger("vllm.kv_policy")


class ResidencyScheduling:
    """Mixin over vLLM's schedulers; changes two decisions, has requests begin anew
    whose session could not be loaded, and on CPUs has blocks zeroed before anybody
    gets them."""

    kv_cache_manager: Any
    connector: Any
    block_size: int
    running: list[Any]
    prev_step_scheduled_req_ids: set[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        manager = residency_manager(self.kv_cache_manager)
        spec = manager.kv_cache_spec
        logger.info(
            "ACTIVE kv-policy=%s (block_size=%d, layers=%d, kv_heads=%d, pool=%d "
            "blocks)",
            describe(spec.policy),
            spec.geometry.block_size,
            spec.geometry.num_layers,
            spec.geometry.num_kv_heads,
            self.kv_cache_manager.block_pool.num_gpu_blocks,
        )
        self._residency_manager = manager
        if current_platform.is_cpu():
            # its kernel multiplies what lies behind a request's last token by 0: NaN
            # of somebody who had the block before would be NaN of this request's
            self.needs_kv_cache_zeroing = True

    def _reserve_prefill_lookahead(
        self, request: Any, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """End a chunk at the plan's next cut, and never inside the window.

        With steps in flight the next chunk waits (0 tokens: a running request is
        passed over) until a compaction before it has freed its blocks; else the
        request would hold both. What is generated does not wait for that.
        """
        num_new_tokens = super()._reserve_prefill_lookahead(  # type: ignore[misc]
            request, num_computed_tokens, num_new_tokens
        )
        plan = self._residency_manager.plan(request)
        processed = max(num_computed_tokens - request.num_in_flight_tokens, 0)
        freed = plan.num_done(processed) == plan.num_done(num_computed_tokens)
        prefill_end = max(request.num_prompt_tokens, request.num_tokens - 1)
        if num_computed_tokens < prefill_end and not freed:
            return 0
        num_new_tokens = plan.clip_chunk(num_computed_tokens, num_new_tokens)
        return self._residency_manager.clip_start(
            request, num_computed_tokens, num_new_tokens
        )

    def _get_local_prefix_cache_hit(
        self, request: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, ...]:
        """Take from the prefix cache only what the plan leaves untouched.

        A longer hit would skip the queries that score the prompt, and would
        make the retained region lie in blocks that others share. A policy that
        observes the whole prompt gets no hit: cached tokens have no queries.
        A session that saves more is taken in its place.
        """
        blocks, hit_tokens, *rest = super()._get_local_prefix_cache_hit(  # type: ignore[misc]
            request, *args, **kwargs
        )
        manager = self._residency_manager
        manager.start_from(request, None)
        usable = manager.plan(request).exact_prefix_blocks
        sessions = self.connector.sessions
        if manager.observes_prompt and (usable is not None or sessions is not None):
            usable = 0  # also if only a later request will be compacted
        if usable is not None and hit_tokens > usable * self.block_size:
            hit_tokens = usable * self.block_size
            kept = tuple(group[:usable] for group in blocks.blocks)
            blocks = self.kv_cache_manager.create_kv_cache_blocks(kept)
        match = sessions and sessions.match(request, at_least=hit_tokens)
        if match is not None:
            manager.start_from(request, match)
            blocks, hit_tokens = self.kv_cache_manager.empty_kv_cache_blocks, 0
        if sessions is not None:
            sessions.begin(request, hit_tokens, match)
        return (blocks, hit_tokens, *rest)

    def update_from_output(self, scheduler_output: Any, model_output: Any) -> Any:
        """Before anybody is told what requests computed whose session could not be
        loaded, they begin anew."""
        loads = self.connector.failed_loads(model_output.kv_connector_output)
        if loads:
            self._begin_anew(loads)
        return super().update_from_output(scheduler_output, model_output)  # type: ignore[misc]

    def _begin_anew(self, loads: list[Load]) -> None:
        """Preempt requests whose session could not be loaded, and those who found
        their blocks in the prefix cache since, as vLLM does when its cache is reset.

        What steps in flight compute for them is not looked at. Some of the blocks may
        be somebody else's by now; who is preempted wrongly loses time.
        """
        manager = self._residency_manager
        spoilt = {block for load in loads for block in load.blocks}
        for load in loads:
            spoilt |= manager.block_ids(load.request_id)
        for request in reversed(self.running.copy()):
            blocks = manager.block_ids(request.request_id)
            if blocks & spoilt:
                self.kv_cache_manager.evict_blocks(blocks)
                self.running.remove(request)
                self._preempt_request(request, time.monotonic(), drop_stale_output=True)  # type: ignore[attr-defined]
                # it may be resumed in the very next step
                self.prev_step_scheduled_req_ids.discard(request.request_id)
        self.kv_cache_manager.evict_blocks(spoilt)


class KVPolicyScheduler(ResidencyScheduling, Scheduler):
    """vLLM's scheduler under a policy."""


class KVPolicyAsyncScheduler(ResidencyScheduling, AsyncScheduler):
    """vLLM's asynchronous scheduler under a policy."""


def residency_manager(kv_cache_manager: Any) -> ResidencyBlockManager:
    """Our block manager inside vLLM's KV cache manager."""
    managers = kv_cache_manager.coordinator.single_type_managers
    ours = [m for m in managers if isinstance(m, ResidencyBlockManager)]
    assert len(ours) == len(managers) == 1, f"expected one group, got {managers}"
    return ours[0]
