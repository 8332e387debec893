"""What cannot run with a policy, each with what to do about it.

Everything is checked at start-up and reported together. What only the loaded
model shows (attention sinks, ALiBi, shared caches) is checked by the attention
backend, still before the first request.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from vllm_kvplugins.episodes.encoder import missing
from vllm_kvplugins.policies.base import Retention

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    from vllm_kvplugins.policies.base import KVCachePolicy
    from vllm_kvplugins.scoring.rotary import Rotary

_PLAIN_KV_DTYPES = ("auto", "bfloat16", "float16", "float32")
_STOCK_WORKERS = (
    "auto",
    "vllm.v1.worker.cpu_worker.CPUWorker",
    "vllm.v1.worker.gpu_worker.Worker",
)


def episode_problems(policy: KVCachePolicy) -> list[str]:
    """What a policy that cuts conversations into episodes lacks."""
    settings = policy.episode_settings
    problem = missing(settings.encoder) if settings is not None else None
    return [] if problem is None else [problem]


def argument_problems(args: EngineArgs) -> list[str]:
    """Engine arguments that contradict a policy."""
    from vllm.platforms import current_platform

    found = []
    if not (current_platform.is_cpu() or current_platform.is_cuda()):
        found.append(
            f"platform {current_platform.device_name!r}: there are attention backends "
            "for CPUs and for CUDA; run with one of these builds of vLLM"
        )
    if args.speculative_config:
        found.append(
            "speculative decoding is not supported; remove --speculative-config"
        )
    if args.kv_transfer_config is not None:
        found.append(
            f"KV connector {args.kv_transfer_config.kv_connector!r}: other stores "
            "would save compressed blocks as if they were exact; remove "
            "--kv-transfer-config"
        )
    if getattr(args, "kv_offloading_size", None):
        found.append(
            f"KV offloading ({args.kv_offloading_size} GiB) would save compressed "
            "blocks as if they were exact; remove --kv-offloading-size"
        )
    if args.scheduler_cls is not None:
        found.append(
            f"scheduler {args.scheduler_cls!r}: a policy brings its own; remove "
            "--scheduler-cls"
        )
    if args.worker_cls not in _STOCK_WORKERS:
        found.append(
            f"worker {args.worker_cls!r}: a policy brings its own; remove --worker-cls"
        )
    return found


def platform_in_use() -> tuple[str, list[str]]:
    """The platform that vLLM chose, and why a policy cannot run there, if so."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    name = current_platform.device_type or "none"
    # Any folder will do as a model: offline, vLLM looks its default one up.
    return name, argument_problems(EngineArgs(model=os.curdir))


def config_problems(vllm_config: VllmConfig) -> list[str]:
    """What the resolved configuration and the model rule out."""
    return [
        *model_problems(vllm_config.model_config),
        *cache_problems(vllm_config.cache_config, _page_tokens()),
        *_parallel_problems(vllm_config.parallel_config),
    ]


def model_problems(model: Any) -> list[str]:
    """Models that policies cannot run with.

    Args:
        model: vLLM's ModelConfig, or what is known of it without vLLM.
    """
    found = []
    if model.runner_type != "generate":
        found.append(
            f"runner {model.runner_type!r} does not generate text; policies are "
            "for text generation"
        )
    if model.use_mla:
        found.append(
            f"{model.model} uses multi-head latent attention (MLA), which has no "
            "KV heads to evict from; serve it without a policy"
        )
    if _has_sliding_window(model):
        found.append(
            f"{model.model} has sliding-window layers, which already drop tokens; "
            "not supported yet, serve it without a policy"
        )
    if model.is_hybrid or model.is_attention_free:
        found.append(
            f"{model.model} has layers without a KV cache (Mamba or linear "
            "attention); not supported yet, serve it without a policy"
        )
    if model.is_encoder_decoder:
        found.append(
            f"{model.model} is an encoder-decoder model; policies are for decoders"
        )
    if getattr(model.hf_text_config, "attn_logit_softcapping", None):
        found.append(
            f"{model.model} caps attention logits, which the policies' scores do "
            "not model; serve it without a policy"
        )
    return found


def _has_sliding_window(model: Any) -> bool:
    text = model.hf_text_config
    kinds = getattr(text, "layer_types", None) or ()
    if kinds:
        return any(kind != "full_attention" for kind in kinds)
    return (
        model.get_sliding_window() is not None
        or getattr(text, "attention_chunk_size", None) is not None
    )


def cache_problems(cache: Any, page_tokens: int = 32) -> list[str]:
    """Caches that policies cannot run with.

    Args:
        cache: vLLM's CacheConfig, or anything with its dtype and block size.
        page_tokens: kernels read pages of multiples of so many; of vLLM's CPU kernel
            unless it is said.
    """
    found = []
    if cache.cache_dtype not in _PLAIN_KV_DTYPES:
        found.append(
            f"KV cache dtype {cache.cache_dtype!r} is quantized; use one of "
            f"{', '.join(_PLAIN_KV_DTYPES)}"
        )
    if cache.block_size % page_tokens:
        found.append(
            f"block size {cache.block_size}: kernels here read pages of a "
            f"multiple of {page_tokens} tokens; use --block-size 32"
        )
    if getattr(cache, "kv_sharing_fast_prefill", False):
        found.append(
            "--kv-sharing-fast-prefill skips the layers that policies score; remove it"
        )
    return found


def _page_tokens() -> int:
    """Pages of vLLM's CPU kernel are multiples of 32 tokens, on GPUs of 16."""
    from vllm.platforms import current_platform

    return 16 if current_platform.is_cuda() else 32


def _parallel_problems(parallel: Any) -> list[str]:
    limits = {
        "pipeline_parallel_size": "--pipeline-parallel-size",
        "decode_context_parallel_size": "--decode-context-parallel-size",
        "prefill_context_parallel_size": "--prefill-context-parallel-size",
    }
    found = [
        f"{flag} {value}: not supported; leave it at 1"
        for name, flag in limits.items()
        if (value := getattr(parallel, name, 1)) > 1
    ]
    if getattr(parallel, "use_ubatching", False):
        found.append(
            "--enable-dbo and --ubatch-size run a step in parts, whose requests a "
            "policy would take for each other's; remove them"
        )
    return found


def layer_problems(name: str, impl: Any) -> list[str]:
    """What a built attention layer shows that no configuration does."""
    found = []
    if impl.alibi_slopes is not None:
        found.append(f"layer {name} uses ALiBi; serve this model without a policy")
    if impl.sinks is not None:
        found.append(
            f"layer {name} has learned attention sinks; serve this model without a "
            "policy"
        )
    if impl.sliding_window not in (-1, (-1, -1)):
        found.append(
            f"layer {name} has a sliding window; serve this model without a policy"
        )
    if impl.kv_sharing_target_layer_name is not None:
        found.append(
            f"layer {name} shares the cache of {impl.kv_sharing_target_layer_name}; "
            "serve this model without a policy"
        )
    if impl.logits_soft_cap:
        found.append(
            f"layer {name} caps its logits at {impl.logits_soft_cap}; serve this "
            "model without a policy"
        )
    return found


def dtype_problems(policy: KVCachePolicy, model: Any) -> list[str]:
    """Why a policy cannot run with the model's dtype."""
    if policy.retention is Retention.DROP or str(model.dtype) != "torch.float16":
        return []
    return [
        f"{policy.name} indexes keys in bfloat16 or float32, and this model runs in "
        "float16; use --dtype bfloat16"
    ]


def rotary_problems(policy: KVCachePolicy, rotary: Rotary | None) -> list[str]:
    """A policy that undoes RoPE needs one that it can undo."""
    if not policy.needs_rotary or rotary is not None:
        return []
    return [
        f"{policy.name} works on queries before RoPE, and this model has none, "
        "several, or one over more than one position index; use another policy"
    ]
