"""vLLM's worker with a policy switched on before the model is built."""

from __future__ import annotations

from typing import Any

import torch

from vllm_kvplugins.engine.recorded_run import Fetch
from vllm_kvplugins.engine.requests import Record
from vllm_kvplugins.engine.retrieval.log import RetrievalLog
from vllm_kvplugins.errors import refuse
from vllm_kvplugins.vllm_adapter.config import compat, host_memory
from vllm_kvplugins.vllm_adapter.config.request_params import (
    requested_patched_prompt,
    requested_turn_ends,
)
from vllm_kvplugins.vllm_adapter.startup import activation


class PolicyWorker:
    """Mixin of workers under a policy.

    The runtime does its work in the attention backend and in the connector;
    here it is created, given the model runner, and told which requests left.
    """

    model_runner: Any

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        self.kv_policy_runtime = activation.activate(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]

    def init_device(self) -> None:
        super().init_device()  # type: ignore[misc]
        policy = self.kv_policy_runtime.policy
        refuse(
            f"KV policy {policy.name!r} cannot run on this machine",
            host_memory.pinning_problems(policy, self.model_runner.device),
        )
        activation.set_runner(compat.runner_adapter(self.model_runner))

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        runtime, store = self.kv_policy_runtime, activation.vault()
        meta = scheduler_output.kv_connector_metadata
        if store is not None and meta is not None:
            if meta.commands.saves or meta.commands.loads or meta.commands.stage:
                activation.attach()
            store.save(meta.commands)
        runtime.finish(scheduler_output.finished_req_ids)
        runtime.forget(getattr(scheduler_output, "preempted_req_ids", None) or ())
        if runtime.policy.spans is not None:
            # before this step writes: blocks that are read may be another's by now
            with torch.inference_mode():
                runtime.end_step()
        self._clear_new_blocks(scheduler_output)
        for new in scheduler_output.scheduled_new_reqs:
            turns = requested_turn_ends(new.sampling_params)
            patched = requested_patched_prompt(new.sampling_params)
            runtime.learn(new.req_id, new.prompt_token_ids or (), turns, patched)
        if store is not None and meta is not None:
            store.execute(meta.commands)
            if not scheduler_output.total_num_scheduled_tokens:
                store.wait_for_reads()
        run = super().execute_model  # type: ignore[misc]
        return run(scheduler_output, *args, **kwargs)

    def _clear_new_blocks(self, scheduler_output: Any) -> None:
        """Zero blocks that requests were given, where the scheduler asks for that.

        Not by vLLM's runner, which would do it after sessions are restored. Whoever
        had the blocks is done with them: saved, or compacted, above.
        """
        heap = self.kv_policy_runtime.heap
        fresh = scheduler_output.new_block_ids_to_zero
        scheduler_output.new_block_ids_to_zero = None
        if heap is not None and fresh:  # without a heap nobody has written yet
            heap.clear(torch.tensor(fresh, device=heap.pages.device))

    # -- called through LLM.collective_rpc ----------------------------------------

    def kv_policy_record(self, enabled: bool) -> None:
        """Start or stop keeping which positions each compaction kept."""
        self.kv_policy_runtime.records = [] if enabled else None

    def kv_policy_take_records(self) -> list[Record]:
        """Records since the last call; empty unless recording is on."""
        taken = self.kv_policy_runtime.records or []
        if self.kv_policy_runtime.records is not None:
            self.kv_policy_runtime.records = []
        return taken

    def kv_policy_log_retrieval(self) -> None:
        """Start to log what is fetched; a step must have run, under a retriever."""
        retrieval = self.kv_policy_runtime.retrieval
        assert retrieval is not None, "no retriever, or no step has run yet"
        retrieval.log = RetrievalLog()

    def kv_policy_take_fetches(self) -> list[Fetch]:
        """What was fetched since the last call; empty unless a log is kept."""
        retrieval = self.kv_policy_runtime.retrieval
        log = retrieval.log if retrieval is not None else None
        return log.take() if log is not None else []

    def kv_policy_check_integrity(self) -> int:
        """Raise if the residency state contradicts itself.

        Returns:
            Requests that this worker holds any state of.
        """
        self.kv_policy_runtime.check_integrity()
        return self.kv_policy_runtime.num_tracked

    def kv_policy_held_sessions(self) -> list[int]:
        """What this worker keeps for requests to come.

        Returns:
            Number of sessions in memory, and bytes of their pages and queries.
        """
        store = activation.vault()
        return [store.num_held, store.held_bytes] if store is not None else [0, 0]
