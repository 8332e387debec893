"""Lists the names of vLLM that this package uses below its documented interfaces.

``compat.problems`` checks them at start-up.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True, slots=True)
class Seam:
    """Names of one vLLM class or module that this package uses.

    Attributes:
        where: ``module`` or ``module:Class``.
        uses: names separated by spaces. ``f(a b)`` is a function that we override or
            call, with the parameters that we use. Other names are attributes, fields,
            or names that a constructor assigns.
    """

    where: str
    uses: str

    def names(self) -> Iterator[tuple[str, list[str] | None]]:
        """Each name, and the parameters of a function; None if it is no function."""
        for name, call, parameters in re.findall(r"(\w+)(\(([^)]*)\))?", self.uses):
            yield name, parameters.split() if call else None

    def problems(self) -> Iterator[str]:
        """Names and parameters that this vLLM lacks."""
        module, _, class_name = self.where.partition(":")
        try:
            owner: Any = import_module(module)
        except ImportError as error:
            yield f"{module} cannot be imported ({error})"
            return
        if class_name:
            owner = getattr(owner, class_name, None)
            if owner is None:
                yield f"{module} no longer has {class_name}"
                return
        short = class_name or module
        assigned = _assigned(owner)
        for name, parameters in self.names():
            member = getattr(owner, name, None)
            is_function = parameters is not None
            if member is None and (
                is_function or name not in assigned | set(dir(owner))
            ):
                yield f"{short} no longer has {name}"
            elif parameters and (missing := _missing_parameters(member, parameters)):
                yield f"{short}.{name} no longer takes {missing}"


def _missing_parameters(function: Any, names: list[str]) -> str:
    parameters = inspect.signature(function).parameters
    return ", ".join(name for name in names if name not in parameters)


def _assigned(owner: Any) -> set[str]:
    """Fields of a class, and the names that its constructors use."""
    if not isinstance(owner, type):
        return set()
    names: set[str] = set()
    for cls in owner.__mro__:
        names.update(inspect.get_annotations(cls))
        for constructor in ("__init__", "__post_init__"):
            function = vars(cls).get(constructor)
            if inspect.isfunction(function):
                names.update(inspect.unwrap(function).__code__.co_names)
    return names


_CORE = "vllm.v1.core"
_TRANSFER = "vllm.distributed.kv_transfer"
_CONNECTOR = f"{_TRANSFER}.kv_connector.v1"

_EVERYWHERE = {
    # Configuration with --kv-policy; validation of requests.
    "vllm.engine.arg_utils:EngineArgs": "add_cli_args(parser) from_cli_args(args) "
    "create_engine_config() additional_config block_size kv_transfer_config "
    "scheduler_cls speculative_config worker_cls async_scheduling data_parallel_size "
    "data_parallel_size_local nnodes",
    "vllm.v1.engine.input_processor:InputProcessor": "process_inputs(prompt resumable)",
    "vllm.v1.engine.async_llm:AsyncLLM": "add_request(request_id prompt params) "
    "renderer "
    "generate(prompt sampling_params request_id)",
    "vllm.renderers.base:BaseRenderer": "config default_chat_tok_params "
    "get_tokenizer() "
    "render_chat(conversations chat_params tok_params) render_chat_async("
    "conversations chat_params tok_params) render_messages(messages params) "
    "render_messages_async(messages params) tokenize_prompts(prompts params) "
    "tokenize_prompts_async(prompts params)",
    "vllm.renderers:ChatParams": "chat_template_kwargs",
    # What a chat chose about sessions, while it is rendered.
    "vllm.renderers.online_renderer:OnlineRenderer": "preprocess_chat(request)",
    "vllm.entrypoints.common.offline:OfflineInferenceMixin": ""
    "_add_chat_requests(params)",
    "vllm.renderers.params:TokenizeParams": "add_special_tokens return_token_offsets "
    "max_total_tokens max_output_tokens pad_prompt_tokens truncate_prompt_tokens",
    "vllm:SamplingParams": "extra_args",
    # Reports of the policy in streamed chats.
    "vllm.outputs:RequestOutput": "kv_transfer_params",
    "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat": ""
    "chat_completion_stream_generator(request result_generator request_id model_name)",
    "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest": ""
    "vllm_xargs",
    "vllm.config:VllmConfig": "additional_config cache_config "
    "compilation_config kv_transfer_config lora_config model_config parallel_config "
    "scheduler_config speculative_config num_lookahead_tokens "
    "num_prefill_lookahead_tokens num_speculative_tokens",
    "vllm.config:SpeculativeConfig": "method draft_model_config parallel_drafting "
    "kv_cache_dtype use_eagle_block_drop()",
    "vllm.config:SchedulerConfig": "async_scheduling scheduler_cls "
    "disable_hybrid_kv_cache_manager "
    "max_num_batched_tokens max_num_seqs long_prefill_token_threshold",
    "vllm.config:ParallelConfig": "worker_cls data_parallel_size is_moe_model "
    "data_parallel_rank_local data_parallel_size_local local_engines_only rank "
    "world_size local_world_size",
    "vllm.config:CacheConfig": "block_size cache_dtype num_gpu_blocks sliding_window "
    "enable_prefix_caching mamba_cache_mode prefix_match_unit num_gpu_blocks_override "
    "kv_cache_memory_bytes gpu_memory_utilization",
    "vllm.platforms.interface:Platform": "_align_hybrid_block_size(vllm_config "
    "backend_cls) get_device_total_memory()",
    "vllm.config:KVTransferConfig": "kv_connector kv_connector_module_path kv_role "
    "kv_connector_extra_config engine_id",
    "vllm.config:ModelConfig": "get_num_layers(parallel_config) get_head_size() "
    "get_num_kv_heads(parallel_config) get_total_num_kv_heads() "
    "get_sliding_window() hf_text_config runner_type use_mla is_hybrid "
    "is_attention_free is_encoder_decoder is_multimodal_model uses_mrope "
    "skip_tokenizer_init max_model_len original_max_model_len dtype hf_config model "
    "quantization revision",
    "vllm.utils.torch_utils": "STR_DTYPE_TO_TORCH_DTYPE",
    "vllm.envs": "VLLM_USE_BREAKABLE_CUDAGRAPH",
    # The scheduler: ends of prefill chunks, length of prefix-cache hits.
    f"{_CORE}.sched.scheduler:Scheduler": "_reserve_prefill_lookahead(request "
    "num_computed_tokens num_new_tokens) _get_local_prefix_cache_hit(request) "
    "update_from_output(scheduler_output model_runner_output) "
    "_connector_finished(request) _preempt_request("
    "request timestamp drop_stale_output) prev_step_scheduled_req_ids running "
    "connector kv_cache_manager block_size needs_kv_cache_zeroing requests vllm_config "
    "recompute_kv_load_failures num_spec_tokens dynamic_sd_lookup "
    "max_num_running_reqs shutdown() reset_prefix_cache()",
    f"{_CORE}.sched.async_scheduler:AsyncScheduler": "_reserve_prefill_lookahead("
    "request num_computed_tokens num_new_tokens) "
    "_get_local_prefix_cache_hit(request)",
    f"{_CORE}.sched.output:SchedulerOutput": "finished_req_ids preempted_req_ids "
    "scheduled_new_reqs kv_connector_metadata total_num_scheduled_tokens "
    "new_block_ids_to_zero scheduled_spec_decode_tokens scheduled_cached_reqs "
    "num_scheduled_tokens kv_connector_block_state",
    f"{_CORE}.sched.output:NewRequestData": "req_id prompt_token_ids sampling_params "
    "prefill_token_ids prompt_embeds block_ids num_computed_tokens",
    f"{_CORE}.sched.output:CachedRequestData": "req_ids resumed_req_ids new_token_ids "
    "all_token_ids new_block_ids num_computed_tokens num_output_tokens",
    f"{_CORE}.sched.output:KVConnectorBlockState": "resolve_block_ids",
    "vllm.v1.request:Request": "num_prompt_tokens prompt_token_ids sampling_params "
    "request_id all_token_ids cache_salt lora_request mm_features num_computed_tokens "
    "num_in_flight_tokens num_output_placeholders num_preemptions num_tokens "
    "prompt_embeds "
    "skip_reading_prefix_cache status block_hashes",
    "vllm.v1.request:RequestStatus": "FINISHED_STOPPED FINISHED_LENGTH_CAPPED "
    "FINISHED_ABORTED",
    "vllm.v1.engine:EngineCoreRequest": "prompt_token_ids prompt_embeds "
    "sampling_params",
    # The block pool: freeing blocks of running requests.
    f"{_CORE}.kv_cache_manager:KVCacheManager": "create_kv_cache_blocks(blocks) "
    "block_pool coordinator enable_caching evict_blocks(block_ids) kv_cache_config",
    f"{_CORE}.kv_cache_coordinator:KVCacheCoordinator": "remove_skipped_blocks("
    "num_prompt_tokens) single_type_managers find_longest_cache_hit(block_hashes "
    "max_cache_hit_length)",
    f"{_CORE}.single_type_kv_cache_manager:FullAttentionManager": "__init__("
    "kv_cache_spec needs_kv_cache_zeroing) remove_skipped_blocks("
    "request_id processed_computed_tokens num_prompt_tokens) "
    "cache_blocks(request num_tokens) "
    "get_num_blocks_to_allocate(request_id num_tokens apply_admission_cap) "
    "allocate_new_blocks(request_id num_tokens) "
    "pop_blocks_for_free(request_id) _remove_blocks_in_range(request_id "
    "first_block last_block) "
    "allocate_external_computed_blocks(request_id) new_step_starts() _null_block "
    "find_longest_cache_hit(block_hashes max_length kv_cache_group_ids block_pool "
    "kv_cache_spec drop_eagle_block alignment_tokens) "
    "block_pool block_size kv_cache_spec num_cached_block req_to_blocks",
    f"{_CORE}.block_pool:BlockPool": "get_num_free_blocks() num_gpu_blocks "
    "get_new_blocks(num_blocks) "
    "touch(blocks) unpin_blocks(blocks on_reuse) free_blocks(ordered_blocks) "
    "null_block",
    f"{_CORE}.kv_cache_utils:KVCacheBlock": "is_null block_hash block_id ref_cnt",
    "vllm.v1.kv_cache_interface:FullAttentionSpec": "merge(specs) "
    "max_memory_usage_bytes(vllm_config) page_size_bytes page_size_padded "
    "sliding_window attention_chunk_size num_kv_heads head_size dtype",
    "vllm.v1.kv_cache_interface:KVCacheConfig": "kv_cache_groups",
    "vllm.v1.kv_cache_interface:MambaSpec": "mamba_cache_mode "
    "num_prefill_checkpoint_blocks prefill_checkpoint_alignment",
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec": "kv_cache_spec",
    "vllm.model_executor.layers.attention.chunked_local_attention": ""
    "create_chunked_local_attention_backend()",
    "vllm.v1.kv_cache_interface": "replace_as()",
    "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry": "_ensure_registered() "
    "register(kvcache_spec_cls manager_class uniform_type_base_spec)",
    # The attention backend.
    "vllm.v1.attention.backends.registry": "register_backend(backend class_path)",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum": "clear_override() "
    "get_path() is_overridden() CPU_ATTN CUSTOM",
    "vllm.v1.attention.selector": "_cached_get_attn_backend()",
    "vllm.v1.attention.backend:CommonAttentionMetadata": "num_reqs query_start_loc "
    "query_start_loc_cpu seq_lens seq_lens_cpu_upper_bound block_table_tensor req_idx "
    "num_actual_tokens max_query_len",
    "vllm.config": "get_layers_from_vllm_config()",
    "vllm.config:CompilationConfig": "static_forward_context",
    # Probes: our own forward passes.
    "vllm.forward_context": "set_forward_context(attn_metadata vllm_config "
    "num_tokens slot_mapping skip_compiled)",
    "vllm.tokenizers": "cached_tokenizer_from_config(model_config)",
    "vllm.model_executor.layers.attention:Attention": "impl kv_cache attn_backend "
    "layer_name",
    # The worker, and the rows of a step in its model runner.
    "vllm.v1.worker.gpu_input_batch:InputBatch": "req_ids num_prompt_tokens "
    "num_computed_tokens_cpu",
    "vllm.v1.worker.gpu.states:RequestState": "index_to_req_id prompt_len "
    "num_computed_tokens_np",
    "vllm.v1.worker.gpu.buffer_utils:UvaBackedTensor": "np",
    "vllm.v1.worker.gpu.kv_connector:ActiveKVConnector": "_disabled",
    # The connector: the end of each step, and metrics.
    f"{_CONNECTOR}.base:KVConnectorBase_V1": "bind_kv_cache_manager("
    "kv_cache_manager) build_connector_meta(scheduler_output) "
    "build_kv_connector_stats(data) build_prom_metrics() get_kv_connector_stats() "
    "get_num_new_matched_tokens(request num_computed_tokens) "
    "save_kv_layer(layer_name kv_layer attn_metadata) start_load_kv("
    "forward_context) update_state_after_alloc(request blocks "
    "num_external_tokens) wait_for_layer_load(layer_name) wait_for_save() "
    "build_connector_worker_meta() update_connector_output(connector_output) "
    "reset_cache() shutdown() requires_kv_delivery has_pending_push_work() "
    "on_new_request(request) "
    "request_finished(request block_ids) get_external_cache_hit_sources(request "
    "num_external_tokens) get_loaded_kv_cache_group_ids(request) "
    "get_required_kvcache_layout(vllm_config) bind_gpu_block_pool(gpu_block_pool) "
    "register_finished_partial_tail() supports_divergent_local_hybrid_hits",
    f"{_CONNECTOR}.multi_connector:MultiConnector": "_connectors "
    "_requests_to_connector _get_connector_classes_and_configs(vllm_config) "
    "get_num_new_matched_tokens(request num_computed_tokens) "
    "update_state_after_alloc(request blocks num_external_tokens) "
    "request_finished(request blocks) "
    "request_finished_all_groups(request block_ids) build_kv_connector_stats(data) "
    "build_prom_metrics() wait_for_save() has_connector_metadata()",
    f"{_CONNECTOR}.multi_connector:MultiKVConnectorPromMetrics": "_prom_metrics",
    f"{_CONNECTOR}.multi_connector:MultiKVConnectorMetadata": "metadata",
    f"{_CONNECTOR}.multi_connector:MultiKVConnectorStats": "data",
    f"{_TRANSFER}.kv_connector.factory:KVConnectorFactory": "get_connector_class("
    "kv_transfer_config)",
    # An idle engine drops expired sessions.
    "vllm.v1.engine.core:EngineCoreProc": "_process_input_queue() has_work() "
    "input_queue scheduler",
    "vllm.v1.engine:EngineCoreRequestType": "WAKEUP",
    f"{_CONNECTOR}.base:KVConnectorWorkerMetadata": "aggregate(other)",
    "vllm.v1.outputs:KVConnectorOutput": "kv_connector_worker_meta invalid_block_ids "
    "failed_recving",
    f"{_CONNECTOR}.base:SupportsHMA": "request_finished_all_groups(request block_ids)",
    f"{_CONNECTOR}.metrics:KVConnectorPromMetrics": "observe(transfer_stats_data "
    "engine_idx) _gauge_cls _counter_cls _histogram_cls _labelnames "
    "per_engine_labelvalues",
    f"{_CONNECTOR}.metrics:KVConnectorStats": "aggregate(other) reduce() reset() "
    "is_empty() data",
    f"{_TRANSFER}.kv_transfer_state": "ensure_kv_transfer_shutdown() "
    "get_kv_transfer_group()",
    # The RoPE that policies undo.
    "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding": "is_neox_style "
    "forward_native(positions query key)",
    # The output projection that policies read.
    "vllm.model_executor.layers.linear:RowParallelLinear": "input_size_per_partition "
    "params_dtype quant_method",
    "vllm.model_executor.layers.linear:LinearMethodBase": "apply(layer x bias)",
}

_BACKENDS = "vllm.v1.attention.backends"
_CPU = f"{_BACKENDS}.cpu_attn"

_ON_CPUS = {
    f"{_CPU}:CPUAttentionBackend": "get_impl_cls() get_builder_cls()",
    f"{_CPU}:CPUAttentionMetadataBuilder": "build(common_prefix_len "
    "common_attn_metadata) vllm_config layer_names num_heads num_kv_heads head_dim "
    "dtype isa kv_cache_dtype reorder_batch_threshold",
    f"{_CPU}:CPUAttentionMetadata": "num_actual_tokens query_start_loc block_table",
    f"{_CPU}:CPUAttentionBackendImpl": "forward(layer query key value kv_cache "
    "attn_metadata output) num_kv_heads num_queries_per_kv head_size scale "
    "kv_cache_dtype alibi_slopes sinks sliding_window kv_sharing_target_layer_name "
    "logits_soft_cap",
    "vllm._custom_ops": "cpu_attention_with_kv_cache(query key_cache value_cache "
    "output query_start_loc seq_lens scale causal alibi_slopes sliding_window "
    "block_table softcap scheduler_metadata s_aux kv_cache_dtype) "
    "cpu_attn_get_scheduler_metadata(num_reqs num_heads num_kv_heads head_dim "
    "seq_lens dtype query_start_loc causal sliding_window_size isa enable_kv_split "
    "kv_cache_dtype) cpu_attn_reshape_and_cache()",
    "vllm.envs": "VLLM_CPU_ATTN_SPLIT_KV",
    # Random generators of requests with a seed.
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": "input_batch requests",
    "vllm.v1.worker.gpu_input_batch:InputBatch": "generators req_ids",
    "vllm.v1.worker.cpu_worker:CPUWorker": "__init__(vllm_config) init_device() "
    "load_model() get_kv_cache_spec() initialize_from_config(kv_cache_config) "
    "execute_model(scheduler_output) vllm_config",
}

_IMPL = (
    "do_kv_cache_update(layer key value kv_cache slot_mapping) forward(layer query key "
    "value kv_cache attn_metadata output) fused_output_quant_supported(quant_key) "
    "num_heads num_kv_heads num_queries_per_kv head_size scale alibi_slopes sinks "
    "sliding_window kv_sharing_target_layer_name logits_soft_cap"
)

_ON_GPUS = {
    f"{_BACKENDS}.triton_attn:TritonAttentionBackend": "get_impl_cls() "
    "get_builder_cls() supported_kv_cache_layouts()",
    f"{_BACKENDS}.triton_attn:TritonAttentionImpl": _IMPL,
    f"{_BACKENDS}.flash_attn:FlashAttentionBackend": "get_impl_cls() "
    "get_builder_cls() supported_kv_cache_layouts() "
    "supports_head_size(head_size) supports_dtype(dtype)",
    f"{_BACKENDS}.flash_attn:FlashAttentionImpl": f"{_IMPL} vllm_flash_attn_version",
    f"{_BACKENDS}.fa_utils": "flash_attn_varlen_func(q k v out cu_seqlens_q "
    "max_seqlen_q seqused_k max_seqlen_k softmax_scale causal block_table num_splits "
    "fa_version) get_flash_attn_version(head_size)",
    "vllm.utils.flashinfer": "has_flashinfer()",
    "vllm.envs": "VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE",
    "vllm.config:AttentionConfig": "backend flash_attn_max_num_splits_for_cuda_graph",
    # CUDA graphs: capture, and replay of steps.
    "vllm.config:CompilationConfig": "cudagraph_mode max_cudagraph_capture_size",
    "vllm.config:CUDAGraphMode": "NONE FULL has_full_cudagraphs()",
    "vllm.v1.attention.backend:AttentionCGSupport": "NEVER UNIFORM_SINGLE_TOKEN_DECODE",
    "vllm.v1.attention.backend:AttentionMetadataBuilder": "get_cudagraph_support("
    "vllm_config kv_cache_spec) build_for_cudagraph_capture(common_attn_metadata)",
    "vllm.v1.cudagraph_dispatcher:CudagraphDispatcher": "dispatch(num_tokens "
    "uniform_decode invalid_modes)",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": "cudagraph_dispatcher",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner": "gather_batch_req_state("
    "scheduler_output dummy_run)",
    "vllm.v1.worker.gpu.model_runner:BatchReqState": "req_ids idx_mapping_np",
    "vllm.v1.worker.gpu_worker:Worker": "__init__(vllm_config) init_device() "
    "load_model() get_kv_cache_spec() initialize_from_config(kv_cache_config) "
    "execute_model(scheduler_output) determine_available_memory() vllm_config "
    "cache_config",
    "vllm.config:CacheConfig": "kv_cache_memory_bytes",
    "vllm.utils.torch_utils": "startup_omp_num_threads(num_local_procs)",
}


def all_seams(on_cpu: bool) -> list[Seam]:
    """All seams on CPUs or on GPUs."""
    seams = dict(_EVERYWHERE)
    for where, uses in (_ON_CPUS if on_cpu else _ON_GPUS).items():
        seams[where] = f"{seams[where]} {uses}" if where in seams else uses
    return [Seam(where, uses) for where, uses in seams.items()]
