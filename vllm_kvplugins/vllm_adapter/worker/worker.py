"""vLLM's worker under a policy."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group

from vllm_kvplugins.engine.recorded_run import Fetch
from vllm_kvplugins.engine.requests import Record
from vllm_kvplugins.engine.runtime import PolicyRuntime
from vllm_kvplugins.errors import refuse
from vllm_kvplugins.vllm_adapter.config import compat, host_memory
from vllm_kvplugins.vllm_adapter.config.request_params import (
    requested_loop_ends,
    requested_patched_prompt,
    requested_turn_ends,
    shared_blocks,
)
from vllm_kvplugins.vllm_adapter.scheduler.composed_connector import our_metadata
from vllm_kvplugins.vllm_adapter.scheduler.spec import is_managed, with_policy
from vllm_kvplugins.vllm_adapter.worker import draft_layers
from vllm_kvplugins.vllm_adapter.worker.context import WorkerContext
from vllm_kvplugins.vllm_adapter.worker.other_layers import (
    geometry_problems,
    use_stock_backend,
)


class PolicyWorker:
    """Mixin of workers under a policy.

    The worker creates the context, hands it to the attention layers and the connector,
    and tells the runtime which requests start and end. The attention backend and the
    connector call the runtime in each step.

    Attributes:
        kv_policy: runtime, session store and model runner of this worker.
    """

    vllm_config: Any
    model_runner: Any

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        # Before the model is built: its layers look the attention backend up.
        self.kv_policy = WorkerContext.create(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]
        self.kv_policy.open_sessions(vllm_config)  # the rank is known now

    @property
    def kv_policy_runtime(self) -> PolicyRuntime:
        """The runtime of this worker."""
        return self.kv_policy.runtime

    def init_device(self) -> None:
        super().init_device()  # type: ignore[misc]
        policy = self.kv_policy_runtime.policy
        refuse(
            f"KV policy {policy.name!r} cannot run on this machine",
            host_memory.pinning_problems(policy, self.model_runner.device),
        )
        self.kv_policy.runner = compat.runner_adapter(self.model_runner)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        layers = self.vllm_config.compilation_config.static_forward_context
        self.kv_policy.bind_layers(layers.values())

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """vLLM's specs; those of full attention carry the policy to the scheduler.

        The other layers, such as those with a sliding window or a recurrent state, stay
        vLLM's: their block managers and metadata builders are the stock ones, and so
        are their specs, but for one that would crash vLLM on a CPU.
        """
        runtime = self.kv_policy.runtime
        layers = self.vllm_config.compilation_config.static_forward_context
        specs: dict[str, Any] = super().get_kv_cache_spec()  # type: ignore[misc]
        drafts = draft_layers.names(self.model_runner.model, layers, specs)
        self.kv_policy.draft_layers = drafts
        managed = [
            spec
            for name, spec in specs.items()
            if is_managed(spec) and name not in drafts
        ]
        refuse(
            f"KV policy {runtime.policy.name!r} cannot run with this model",
            [
                *geometry_problems(managed, self.vllm_config, runtime.geometry),
                *draft_layers.problems(drafts, specs, layers),
            ],
        )
        for name, spec in specs.items():
            if name in drafts:
                draft_layers.use_draft_backend(layers[name], runtime)
            elif not is_managed(spec):
                use_stock_backend(layers[name])
        ranks = self.vllm_config.parallel_config.tensor_parallel_size
        draft_geometry = draft_layers.geometry(drafts, specs, ranks)
        return {
            name: with_policy(spec, runtime.policy, runtime.geometry, draft_geometry)
            if is_managed(spec)
            else self._stock_spec(spec)
            for name, spec in specs.items()
        }

    def _stock_spec(self, spec: Any) -> Any:
        """The spec of a layer without a policy."""
        on_cpu = self.model_runner.device.type == "cpu"
        return compat.without_checkpoints(spec) if on_cpu else spec

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_from_config(*args, **kwargs)  # type: ignore[misc]
        context = self.kv_policy
        retrieval = context.runtime.policy.retrieval
        if retrieval is not None and retrieval.device_selection is not None:
            # Memory on the device is allocated now, not when a request needs it.
            context.ensure_heap()
        get_kv_transfer_group().bind_worker(context.runtime, context.session_store)

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        runtime, store = self.kv_policy.runtime, self.kv_policy.session_store
        meta = our_metadata(scheduler_output.kv_connector_metadata)
        if store is not None and meta is not None:
            if meta.commands.copy_pages:
                self.kv_policy.ensure_heap()
            store.save(meta.commands)
        runtime.finish(scheduler_output.finished_req_ids)
        runtime.forget(getattr(scheduler_output, "preempted_req_ids", None) or ())
        if runtime.policy.spans is not None:
            # Before this step writes: other requests may own these blocks now.
            with torch.inference_mode():
                runtime.end_step()
        self._clear_new_blocks(scheduler_output)
        for new in scheduler_output.scheduled_new_reqs:
            turns = requested_turn_ends(new.sampling_params)
            loops = requested_loop_ends(new.sampling_params)
            patched = requested_patched_prompt(new.sampling_params)
            shared = shared_blocks(
                runtime.policy,
                new.sampling_params,
                _prompt_tokens(new),
                runtime.geometry.block_size,
            )
            prompt = new.prompt_token_ids or ()
            runtime.add_request(new.req_id, prompt, turns, patched, shared, loops)
        if store is not None and meta is not None:
            store.execute(meta.commands)
            if not scheduler_output.total_num_scheduled_tokens:
                store.wait_for_copies()
        drafts = scheduler_output.scheduled_spec_decode_tokens
        self.kv_policy.runner.draft_tokens = {
            request_id: len(tokens) for request_id, tokens in drafts.items()
        }
        run = super().execute_model  # type: ignore[misc]
        return run(scheduler_output, *args, **kwargs)

    def _clear_new_blocks(self, scheduler_output: Any) -> None:
        """Zero newly allocated blocks, where the scheduler asks for it.

        vLLM's runner would do it after sessions are restored. Their earlier owners have
        been saved or compacted above.
        """
        fresh = scheduler_output.new_block_ids_to_zero
        scheduler_output.new_block_ids_to_zero = None
        if fresh:
            self.kv_policy_runtime.clear_blocks(torch.tensor(fresh))

    # -- called through LLM.collective_rpc ----------------------------------------

    def kv_policy_record(self, enabled: bool) -> None:
        """Start or stop recording the positions that each compaction keeps."""
        self.kv_policy_runtime.records = [] if enabled else None

    def kv_policy_take_records(self) -> list[Record]:
        """Records since the last call; empty unless recording is on."""
        taken = self.kv_policy_runtime.records or []
        if self.kv_policy_runtime.records is not None:
            self.kv_policy_runtime.records = []
        return taken

    def kv_policy_log_retrieval(self) -> None:
        """Start to log fetches. Needs a retriever, and a step that has run."""
        logs = [each.start_log() for each in self.kv_policy_runtime.extensions]
        assert any(logs), "no retriever, or no step has run yet"

    def kv_policy_take_fetches(self) -> list[Fetch]:
        """Fetches since the last call; empty unless logging is on."""
        extensions = self.kv_policy_runtime.extensions
        return [fetch for each in extensions for fetch in each.take_log()]

    def kv_policy_check_integrity(self) -> int:
        """Raise AssertionError if the residency state contradicts itself.

        Returns:
            Requests for which this worker holds state.
        """
        self.kv_policy_runtime.check_integrity()
        return self.kv_policy_runtime.num_requests

    def kv_policy_held_sessions(self) -> list[int]:
        """Number of sessions in memory, and bytes of their pages and queries."""
        store = self.kv_policy.session_store
        return [store.num_held, store.held_bytes] if store is not None else [0, 0]


def _prompt_tokens(new: Any) -> int:
    """Length of the prompt of a new request, which is token ids or embeddings."""
    ids = new.prompt_token_ids
    return len(ids if ids is not None else new.prompt_embeds)
