"""vLLM's schedulers under a policy."""

from __future__ import annotations

import time
from typing import Any

from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import MambaSpec

from vllm_kvplugins.config import describe
from vllm_kvplugins.errors import coded, refuse
from vllm_kvplugins.sessions.commands import Load
from vllm_kvplugins.vllm_adapter.config import compat, validation
from vllm_kvplugins.vllm_adapter.scheduler import calibration
from vllm_kvplugins.vllm_adapter.scheduler.block_manager import ResidencyBlockManager
from vllm_kvplugins.vllm_adapter.scheduler.request_report import REPORT_KEY
from vllm_kvplugins.vllm_adapter.scheduler.spec import ResidencySpec

# vLLM configures only the loggers below its own name.
logger = init_logger("vllm.kv_policy")


class ResidencyScheduling:
    """Mixin for vLLM's schedulers. It changes three decisions:

    - where a chunk of prefill ends (``_reserve_prefill_lookahead``),
    - what a waiting request starts from (``_get_local_prefix_cache_hit``; see
      ``admission`` for the whole sequence),
    - which requests are preempted because their session, or the load of another KV
      connector, failed (``update_from_output``).

    On CPUs, it also makes workers zero new blocks. A reset of the prefix cache drops
    sessions that are being saved. Requests that ask for a report get one with their
    last output (``_connector_finished``). At start-up, it may start the measurement of
    a model without a sensitivity profile (``calibration``).
    """

    vllm_config: Any
    kv_cache_manager: Any
    connector: Any
    block_size: int
    running: list[Any]
    requests: dict[str, Any]
    recompute_kv_load_failures: bool
    num_spec_tokens: int
    dynamic_sd_lookup: list[int] | None
    max_num_running_reqs: int
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
        self._caches_states = caches_states(self.kv_cache_manager)
        self._drops_last_block = compat.drops_last_block(self.vllm_config)
        if self.num_spec_tokens and self.dynamic_sd_lookup is None:
            # With one number of drafts for all batch sizes, vLLM fills up the last
            # token of a waiting request with drafts that do not exist, beyond a
            # compaction that is due after it.
            sizes = self.max_num_running_reqs + 1
            self.dynamic_sd_lookup = [self.num_spec_tokens] * sizes
        if current_platform.is_cpu():
            # The CPU kernel multiplies the slots after a request's last token by 0. A
            # NaN of an earlier request in these slots would spread to this request.
            self.needs_kv_cache_zeroing = True
        pool_blocks = self.kv_cache_manager.block_pool.num_gpu_blocks
        pool_tokens = pool_blocks * spec.geometry.block_size
        pool_bytes = pool_tokens * spec.geometry.kv_bytes_per_token
        self._calibration = calibration.start(self.vllm_config, pool_bytes)

    def shutdown(self) -> None:
        """End the measurement of the model, if one runs."""
        if self._calibration is not None:
            self._calibration.stop()
        super().shutdown()  # type: ignore[misc]

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Reset the prefix cache, which needs all blocks to be free.

        Sessions of ended requests that are being saved are dropped.
        """
        if self.connector.sessions is not None:
            self.connector.sessions.drop_unsaved()
        return bool(super().reset_prefix_cache(*args, **kwargs))  # type: ignore[misc]

    def _reserve_prefill_lookahead(
        self, request: Any, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """End a chunk at the next compaction of the plan, or drafts before it.

        A compaction runs after a step without drafts, so that it includes accepted
        tokens only.

        With steps in flight, the next chunk of a prompt waits until earlier compactions
        have freed their blocks. Otherwise the request would hold old and new blocks.
        vLLM skips a running request that gets 0 tokens. Generation does not wait.
        """
        num_new_tokens = super()._reserve_prefill_lookahead(  # type: ignore[misc]
            request, num_computed_tokens, num_new_tokens
        )
        plan = self._residency_manager.plans.of(request)
        processed = max(num_computed_tokens - request.num_in_flight_tokens, 0)
        is_freed = plan.num_done(processed) == plan.num_done(num_computed_tokens)
        prefill_end = max(request.num_prompt_tokens, request.num_tokens - 1)
        if num_computed_tokens < prefill_end and not is_freed:
            return 0
        num_new_tokens = plan.clip_chunk(
            num_computed_tokens,
            num_new_tokens,
            known_tokens=request.num_tokens
            + request.num_output_placeholders
            - num_computed_tokens,
        )
        return self._residency_manager.starts.clip_first_chunk(
            request, num_computed_tokens, num_new_tokens
        )

    def _get_local_prefix_cache_hit(
        self, request: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, ...]:
        """Decide what the request starts from, and shorten the hit accordingly."""
        hit: tuple[Any, ...] = super()._get_local_prefix_cache_hit(  # type: ignore[misc]
            request, *args, **kwargs
        )
        blocks, hit_tokens, *rest = hit
        if self._drops_last_block:
            blocks, hit_tokens = self._with_shared_prefix(request, blocks, hit_tokens)
        admit = self.connector.admission.admit
        usable = admit(request, hit_tokens).cached_tokens
        while usable < hit_tokens:
            # A slice of each group's hit would be wrong: a group with a sliding window
            # holds only the blocks before the end of the hit, and one with a recurrent
            # state only the state at its end.
            blocks, hit_tokens, *rest[:1] = compat.prefix_hit(
                self.kv_cache_manager, request, usable
            )
            usable = admit(request, hit_tokens).cached_tokens
        if self._caches_states:
            rest[0] = rest[0] or self._end_of_exact_prefix(request)
        return (blocks, hit_tokens, *rest)

    def _with_shared_prefix(
        self, request: Any, blocks: Any, hit_tokens: int
    ) -> tuple[Any, int]:
        """A hit with the whole shared prefix, whose last block vLLM may have dropped.

        A session that stores no prefix needs all of it. The drafter then begins behind
        it. Its keys of the prefix's last token belong to the next token of the request
        that computed them: a draft may be wrong, and the model verifies it.
        """
        plans = self._residency_manager.plans
        shared = min(
            plans.continuing(request, None).shared_tokens, request.num_tokens - 1
        )
        reads = self.kv_cache_manager.enable_caching
        if hit_tokens >= shared or not reads or request.skip_reading_prefix_cache:
            return blocks, hit_tokens
        return compat.whole_prefix_hit(self.kv_cache_manager, request, shared)

    def _end_of_exact_prefix(self, request: Any) -> int:
        """Where the prefix cache needs the state of recurrent layers.

        vLLM stores few states: at the last block of the prompt, and where a request
        reports the end of a prefix that others share. Under a policy, an equal prompt
        can use no more tokens than these.

        Returns:
            0 if such a prompt can use all tokens, or none.
        """
        shared: int = self._residency_manager.plans.of(request).shared_tokens
        if shared:
            return shared  # for all prompts with this prefix
        tokens = request.num_prompt_tokens
        usable: int = self.connector.admission.usable_hit(request, tokens)
        return usable if usable < tokens else 0

    def _connector_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """Finish a request; add its report to what the connector returns for it."""
        delays, params = super()._connector_finished(request)  # type: ignore[misc]
        report = self.connector.admission.take_report(request.request_id)
        if report is not None:
            params = (params or {}) | {REPORT_KEY: report}
        return delays, params

    def update_from_output(self, scheduler_output: Any, model_output: Any) -> Any:
        """Preempt requests whose KV failed to load before processing their output."""
        output = model_output.kv_connector_output
        if output is not None:
            loads = self.connector.failed_loads(output.kv_connector_worker_meta)
            if loads:
                self._recompute(loads)
            if self.recompute_kv_load_failures:
                self._recompute_loads_of_others(output)
        return super().update_from_output(scheduler_output, model_output)  # type: ignore[misc]

    def _recompute(self, loads: list[Load]) -> None:
        """Preempt requests with invalid KV.

        These are the requests whose session failed to load, and requests that share
        their blocks through the prefix cache. Outputs in flight are dropped, as when
        vLLM resets its prefix cache. Some blocks may belong to other requests by now;
        preempting these only takes time.
        """
        manager = self._residency_manager
        invalid = {block for load in loads for block in load.blocks}
        for load in loads:
            # The blocks of a shared prefix are valid: nothing was loaded there.
            invalid |= manager.block_ids(load.request_id) - set(load.prefix)
        self._preempt_holders(invalid)

    def _recompute_loads_of_others(self, output: Any) -> None:
        """Let requests compute what another KV connector failed to load.

        vLLM would let a running request continue at the first invalid block. A
        compaction may have run in the same step, so it starts from an empty cache.
        Requests that still wait for their load are vLLM's.
        """
        invalid = set(output.invalid_block_ids or ())
        failed = set(output.failed_recving or ())
        if not (invalid or failed):
            return
        manager = self._residency_manager
        failed |= {
            request_id
            for request_id in manager.req_to_blocks
            if manager.block_ids(request_id) & invalid
        }
        self.connector.loads_failed(
            self.requests[request_id]
            for request_id in failed
            if request_id in self.requests
        )
        self._preempt_holders(invalid)

    def _preempt_holders(self, invalid: set[int]) -> None:
        """Preempt running requests with some of these blocks."""
        manager = self._residency_manager
        for request in reversed(self.running.copy()):
            blocks = manager.block_ids(request.request_id)
            if blocks & invalid:
                self.kv_cache_manager.evict_blocks(blocks)
                self.running.remove(request)
                self._preempt_request(request, time.monotonic(), drop_stale_output=True)  # type: ignore[attr-defined]
                # The next step may already resume it.
                self.prev_step_scheduled_req_ids.discard(request.request_id)
        self.kv_cache_manager.evict_blocks(invalid)


class KVPolicyScheduler(ResidencyScheduling, Scheduler):
    """vLLM's scheduler under a policy."""


class KVPolicyAsyncScheduler(ResidencyScheduling, AsyncScheduler):
    """vLLM's asynchronous scheduler under a policy."""


def residency_manager(kv_cache_manager: Any) -> ResidencyBlockManager:
    """Our block manager inside vLLM's KV cache manager.

    A hybrid model also has groups of layers that vLLM manages.

    Raises:
        KVPolicyError: vLLM grouped the layers in a way that a policy cannot manage.
    """
    refuse(
        "a KV policy cannot run with this model",
        group_problems(kv_cache_manager.kv_cache_config),
    )
    managers = kv_cache_manager.coordinator.single_type_managers
    (manager,) = (m for m in managers if isinstance(m, ResidencyBlockManager))
    return manager


def caches_states(kv_cache_manager: Any) -> bool:
    """Whether the prefix cache contains states of recurrent layers."""
    groups = kv_cache_manager.kv_cache_config.kv_cache_groups
    recurrent = any(isinstance(group.kv_cache_spec, MambaSpec) for group in groups)
    return recurrent and bool(kv_cache_manager.enable_caching)


def group_problems(kv_cache_config: Any) -> list[str]:
    """Whether vLLM grouped the layers in a way that a policy cannot manage."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    managed = [spec for spec in specs if isinstance(spec, ResidencySpec)]
    if len(managed) != 1:
        return [validation.split_problem(len(managed))]
    (spec,) = managed
    planned = spec.geometry.block_size
    if spec.block_size == planned and spec.page_size_padded is None:
        return []
    return [
        coded(
            "KVP204",
            f"vLLM stores full attention in blocks of {spec.block_size} tokens "
            f"({spec.page_size_bytes} bytes) instead of {planned}, so that all layers "
            "have equal pages; a policy needs the configured size. Serve this model "
            "without a policy",
        )
    ]
