"""Models and engine settings that cannot run with a policy, each with a remedy.

Start-up checks everything and reports all reasons in one message. The attention backend
checks what only the loaded model shows (attention sinks, ALiBi, shared caches), before
the first request.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vllm_kvplugins.episodes.encoder import missing
from vllm_kvplugins.errors import coded
from vllm_kvplugins.model_config import (
    ATTENTION_TYPES,
    FULL,
    STATE,
    groups_of,
    layer_types,
)
from vllm_kvplugins.vllm_adapter.config import kv_connectors, speculation

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    from vllm_kvplugins.model_config import ConfigOnlyModel
    from vllm_kvplugins.policies.base import KVCachePolicy
    from vllm_kvplugins.policies.retrieval import Retriever
    from vllm_kvplugins.scoring.rotary import Rotary

_PLAIN_KV_DTYPES = ("auto", "bfloat16", "float16", "float32")
# vLLM's names of fp8 caches with one scale per layer.
_FP8_KV_DTYPES = ("fp8", "fp8_e4m3", "fp8_e5m2")
_STOCK_WORKERS = (
    "auto",
    "vllm.v1.worker.cpu_worker.CPUWorker",
    "vllm.v1.worker.gpu_worker.Worker",
)


def prefix_problems(vllm_config: VllmConfig, request: dict[str, Any]) -> list[str]:
    """Why a shared prefix that the user has set cannot be shared.

    Args:
        request: the policy's settings, as the user wrote them.
    """
    wanted = request.get("shared_prefix", "none")
    if wanted == "none" or vllm_config.cache_config.enable_prefix_caching:
        return []
    return [
        coded(
            "KVP050",
            f"shared_prefix {wanted!r} needs vLLM's prefix cache, which is off; remove "
            "--no-enable-prefix-caching, or shared_prefix",
        )
    ]


def episode_problems(policy: KVCachePolicy) -> list[str]:
    """Packages that a policy with episodes needs and that are not installed."""
    routing = policy.episode_routing
    problem = missing(routing.settings.encoder) if routing is not None else None
    return [] if problem is None else [problem]


def argument_problems(args: EngineArgs) -> list[str]:
    """Engine arguments that contradict a policy."""
    from vllm.platforms import current_platform

    reasons = []
    if not (current_platform.is_cpu() or current_platform.is_cuda()):
        reasons.append(
            coded(
                "KVP003",
                f"platform {current_platform.device_name!r} is not supported; use a "
                "build of vLLM for CPUs or for CUDA",
            )
        )
    reasons += speculation.argument_problems(args)
    reasons += kv_connectors.argument_problems(args)
    if args.scheduler_cls is not None:
        reasons.append(
            coded(
                "KVP007",
                f"scheduler {args.scheduler_cls!r} conflicts with the scheduler of the "
                "KV policy; remove --scheduler-cls",
            )
        )
    if args.worker_cls not in _STOCK_WORKERS:
        reasons.append(
            coded(
                "KVP008",
                f"worker {args.worker_cls!r} conflicts with the worker of the KV "
                "policy; remove --worker-cls",
            )
        )
    return reasons


def platform_in_use() -> tuple[str, list[str]]:
    """The platform that vLLM selected, and reasons why no policy can run on it."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    name = current_platform.device_type or "none"
    # A folder as the model: vLLM would look up its default model on the network.
    return name, argument_problems(EngineArgs(model=os.curdir))


def config_problems(vllm_config: VllmConfig) -> list[str]:
    """Reasons in the resolved configuration and the model."""
    return [
        *model_problems(vllm_config.model_config),
        *cache_problems(vllm_config.cache_config, _page_tokens()),
        *_parallel_problems(vllm_config.parallel_config),
    ]


def model_problems(model: Any) -> list[str]:
    """Models that policies cannot run with.

    Args:
        model: vLLM's ModelConfig, or an equivalent read from ``config.json``.
    """
    reasons = []
    if model.runner_type != "generate":
        reasons.append(
            coded(
                "KVP010",
                f"runner {model.runner_type!r} does not generate text; serve it "
                "without a policy",
            )
        )
    if model.use_mla:
        reasons.append(
            coded(
                "KVP011",
                f"{model.model} uses multi-head latent attention (MLA), which has no "
                "KV heads; serve it without a policy",
            )
        )
    kinds = set(layer_types(model.hf_text_config, _num_layers(model)))
    if FULL not in kinds and kinds <= set(ATTENTION_TYPES):
        reasons.append(
            coded(
                "KVP012",
                f"{model.model} has no layer with full attention, so a policy has "
                "nothing to manage: each layer keeps a fixed window of tokens; serve "
                "it without a policy",
            )
        )
    if unmanageable := _unmanageable_layers(model, kinds):
        reasons.append(
            coded(
                "KVP013",
                f"{model.model} {unmanageable}; serve it without a policy",
            )
        )
    if model.is_encoder_decoder:
        reasons.append(
            coded(
                "KVP014",
                f"{model.model} is an encoder-decoder model; serve it without a policy",
            )
        )
    if getattr(model, "is_mm_prefix_lm", False):
        reasons.append(
            coded(
                "KVP045",
                f"{model.model} attends to the tokens of an image in both directions, "
                "which the kernels of a policy do not; serve it without a policy, or "
                """without images: --limit-mm-per-prompt '{"image": 0}'""",
            )
        )
    return reasons


def _unmanageable_layers(model: Any, kinds: set[str]) -> str:
    """Why a policy has no full attention to manage, or cannot tell where it is."""
    if model.is_attention_free or kinds == {STATE}:
        return "has no attention layers, so a policy has nothing to manage"
    if unknown := sorted(kinds - {*ATTENTION_TYPES, STATE}):
        return f"has layers of type {', '.join(unknown)}, which policies do not know"
    if model.is_hybrid and STATE not in kinds:
        return (
            "has layers with a recurrent state, and its configuration does not say "
            "which ones"
        )
    return ""


def training_problems(model: Any) -> list[str]:
    """Models that policies run with, and that cannot be measured or trained on.

    Args:
        model: vLLM's ModelConfig, or an equivalent read from ``config.json``.
    """
    if STATE not in layer_types(model.hf_text_config, _num_layers(model)):
        return []
    return [
        coded(
            "KVP013",
            f"{model.model} has layers with a recurrent state (Mamba, linear "
            "attention), which is supported in the engine only; use a model without "
            "such layers",
        )
    ]


def calibration_problems(model: ConfigOnlyModel) -> list[str]:
    """Why `kvplugins research calibrate` refuses a model before it loads weights."""
    return [
        *model_problems(model),
        *training_problems(model),
        *model.layer_problems(),
    ]


def softcap_problems(policy: KVCachePolicy, model: Any) -> list[str]:
    """Why a policy cannot run with a model that caps attention logits."""
    cap = getattr(model.hf_text_config, "attn_logit_softcapping", None)
    if not cap or (_caps_logits(policy) and policy.applies_softcap):
        return []
    return [
        coded(
            "KVP015",
            f"{model.model} caps attention logits at {cap}, which {policy.name} does "
            "not model; use another policy, such as snapkv",
        )
    ]


def _caps_logits(policy: KVCachePolicy) -> bool:
    """Whether all attention of this policy's requests caps its logits."""
    return policy.spans is None


def _num_layers(model: Any) -> int:
    """Number of layers; 0 where a file only lists them, 1 where it does not."""
    text = model.hf_text_config
    given = getattr(text, "num_hidden_layers", None)
    return given or int(not layer_types(text, 0))


def split_problem(num_groups: int) -> str:
    """Why full-attention layers in several KV cache groups have no policy."""
    return coded(
        "KVP043",
        f"vLLM puts the full-attention layers into {num_groups} KV cache groups, "
        "because the model has fewer layers of another kind, and a policy manages one "
        "group; serve this model without a policy",
    )


def hybrid_problems(
    types: Sequence[str], policy: KVCachePolicy, model: Any
) -> list[str]:
    """What does not work with layers that a policy leaves to vLLM.

    Args:
        types: attention type of each layer.
        model: vLLM's ModelConfig, or an equivalent read from ``config.json``.
    """
    if all(kind == FULL for kind in types):
        return []
    reasons = []
    num_groups = groups_of(types).get(FULL, 0)
    if num_groups > 1:
        reasons.append(split_problem(num_groups))
    if policy.probing is not None and STATE in types:
        reasons.append(
            coded(
                "KVP040",
                f"{policy.name} runs tokens of its own through the model, which would "
                f"advance the recurrent state of {model.model}; use another policy",
            )
        )
    return reasons


def hybrid_manager_problems(vllm_config: VllmConfig) -> list[str]:
    """Whether vLLM would keep other layers in the blocks that a policy frees.

    Args:
        vllm_config: of a model with layers that a policy leaves to vLLM.
    """
    if not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        return []
    return [
        coded(
            "KVP042",
            f"{vllm_config.model_config.model} has layers without full attention, and "
            "without the hybrid KV cache manager they would share the blocks that a "
            "policy frees; remove --disable-hybrid-kv-cache-manager",
        )
    ]


def prefix_unit_problems(cache: Any) -> list[str]:
    """Whether hits in the prefix cache of a recurrent model end inside of a block.

    Args:
        cache: vLLM's CacheConfig, with the final block size.
    """
    unit = cache.prefix_match_unit
    if unit in (None, cache.block_size):
        return []
    return [
        coded(
            "KVP047",
            f"--prefix-match-unit {unit} lets a prefix hit end inside of a block of "
            f"{cache.block_size} tokens, and a policy keeps or drops whole blocks; "
            "remove --prefix-match-unit",
        )
    ]


def cache_problems(cache: Any, page_tokens: int = 32) -> list[str]:
    """Caches that policies cannot run with.

    Args:
        cache: vLLM's CacheConfig, or an object with its dtype and block size.
        page_tokens: the kernels read pages of a multiple of this many tokens; the
            default is that of vLLM's CPU kernel.
    """
    reasons = []
    known = (*_PLAIN_KV_DTYPES, *_FP8_KV_DTYPES)
    if cache.cache_dtype not in known:
        reasons.append(
            coded(
                "KVP019",
                f"KV cache dtype {cache.cache_dtype!r} has scales inside of the pages, "
                f"or is unknown; set --kv-cache-dtype to one of {', '.join(known)}",
            )
        )
    if cache.block_size % page_tokens:
        reasons.append(
            coded(
                "KVP020",
                f"block size {cache.block_size} is not a multiple of {page_tokens}, "
                "which the attention kernels need; use --block-size 32",
            )
        )
    if getattr(cache, "kv_sharing_fast_prefill", False):
        reasons.append(
            coded(
                "KVP021",
                "--kv-sharing-fast-prefill skips layers that policies score; remove it",
            )
        )
    return reasons


def fp8_problems(vllm_config: VllmConfig, policy: KVCachePolicy) -> list[str]:
    """Why a policy cannot run with an fp8 cache."""
    from vllm.platforms import current_platform

    cache = vllm_config.cache_config
    if cache.cache_dtype not in _FP8_KV_DTYPES:
        return []
    on_cpu = current_platform.is_cpu()
    reasons = [*(_fp8_cpu_problems if on_cpu else _fp8_gpu_problems)(vllm_config)]
    if policy.spans is not None:
        reasons.append(
            f"{policy.name} keeps keys in host memory, in the dtype of the cache, and "
            "its kernels read plain elements"
        )
    if policy.retrieval is not None:
        reasons += _fp8_retrieval_problems(policy.retrieval)
    if cache.kv_cache_dtype_skip_layers:
        reasons.append(
            "--kv-cache-dtype-skip-layers gives layers pages of different sizes"
        )
    return [
        coded(
            "KVP019",
            f"KV cache dtype {cache.cache_dtype!r}: {reason}; use --kv-cache-dtype "
            "auto",
        )
        for reason in reasons
    ]


def _fp8_cpu_problems(vllm_config: VllmConfig) -> Iterator[str]:
    """What vLLM's CPU kernel needs for an fp8 cache."""
    if not (_cpu_has("_is_avx512_supported") or _cpu_has("_is_amx_tile_supported")):
        yield "vLLM's CPU kernel needs AVX-512 for it"
    drafter = speculation.drafter_with_cache(vllm_config)
    models = [("", vllm_config.model_config)]
    models += [] if drafter is None else [(" in the drafter", drafter[1])]
    for where, model in models:
        if (size := model.get_head_size()) % 32:
            yield (
                "vLLM's CPU kernel needs heads of a multiple of 32 elements, not "
                f"{size}{where}"
            )


def _fp8_gpu_problems(vllm_config: VllmConfig) -> Iterator[str]:
    """What vLLM's Triton kernel, which writes the cache, needs for fp8."""
    from vllm.platforms import current_platform

    if vllm_config.cache_config.cache_dtype == "fp8_e5m2":
        yield "the kernel that writes it on GPUs supports fp8_e4m3 only"
    if not current_platform.has_device_capability(89):
        yield "the kernel that writes it needs a GPU of compute capability 8.9 or more"


def _fp8_retrieval_problems(retriever: Retriever) -> Iterator[str]:
    """What a retrieval policy cannot do with an fp8 cache."""
    if retriever.host_dtype != "auto":
        yield (
            f"host_dtype {retriever.host_dtype!r} would quantize elements that are "
            "quantized already (host_dtype 'auto' keeps them as they are)"
        )
    if retriever.host_fetch == "direct":
        yield "host_fetch 'direct' has not been tried with it (host_fetch 'staged' has)"
    if (selection := retriever.device_selection) is not None:
        yield (
            f"{selection.setting} has not been tried with it ({selection.instead} has)"
        )


def _cpu_has(check: str) -> bool:
    import torch

    return bool(getattr(torch.cpu, check)())


def _page_tokens() -> int:
    """Page granularity in tokens: 32 for vLLM's CPU kernel, 16 for GPU kernels."""
    from vllm.platforms import current_platform

    return 16 if current_platform.is_cuda() else 32


def _parallel_problems(parallel: Any) -> list[str]:
    limits = {
        "pipeline_parallel_size": "--pipeline-parallel-size",
        "decode_context_parallel_size": "--decode-context-parallel-size",
        "prefill_context_parallel_size": "--prefill-context-parallel-size",
    }
    reasons = [
        coded("KVP022", f"{flag} {value} is not supported; use 1")
        for name, flag in limits.items()
        if (value := getattr(parallel, name, 1)) > 1
    ]
    if getattr(parallel, "use_ubatching", False):
        reasons.append(
            coded(
                "KVP023",
                "microbatching is not supported with a KV policy; remove --enable-dbo "
                "and --ubatch-size",
            )
        )
    return reasons


def layer_problems(name: str, layer: Any, policy: KVCachePolicy) -> list[str]:
    """Reasons that only a built attention layer shows.

    Args:
        layer: its ``impl.attends_with_sinks`` and ``impl.attends_with_softcap`` tell
            what our backend implements.
    """
    reasons = []
    impl = layer.impl
    value_size = getattr(layer, "head_size_v", None)
    if value_size is not None and value_size != impl.head_size:
        reasons.append(
            coded(
                "KVP046",
                f"layer {name} has keys of {impl.head_size} and values of {value_size} "
                "elements, and pages hold equal halves; serve this model without a "
                "policy",
            )
        )
    if impl.alibi_slopes is not None:
        reasons.append(
            coded(
                "KVP016",
                f"layer {name} uses ALiBi; serve this model without a policy",
            )
        )
    if impl.sinks is not None:
        sinks = f"layer {name} has learned attention sinks, which"
        if not impl.attends_with_sinks:
            reasons.append(
                coded(
                    "KVP017",
                    f"{sinks} this attention kernel does not support; use "
                    '"kernel": "triton"',
                )
            )
    if impl.kv_sharing_target_layer_name is not None:
        reasons.append(
            coded(
                "KVP018",
                f"layer {name} shares the KV cache of "
                f"{impl.kv_sharing_target_layer_name}; serve this model without a "
                "policy",
            )
        )
    if impl.logits_soft_cap:
        capped = f"layer {name} caps its logits at {impl.logits_soft_cap}, which"
        if not impl.attends_with_softcap:
            reasons.append(
                coded(
                    "KVP015",
                    f"{capped} this attention kernel does not support; use "
                    '"kernel": "triton"',
                )
            )
        if not (_caps_logits(policy) and policy.applies_softcap):
            reasons.append(
                coded(
                    "KVP015",
                    f"{capped} {policy.name} does not model; use another policy, such "
                    "as snapkv",
                )
            )
    return reasons


def dtype_problems(
    policy: KVCachePolicy, model: Any, cache_dtype: str = "auto"
) -> list[str]:
    """Why a policy cannot run with the dtype of the model, or of its KV cache.

    Args:
        model: vLLM's ModelConfig, or an object with its dtype.
        cache_dtype: vLLM's ``--kv-cache-dtype``.
    """
    if policy.host_storage is None:
        return []
    if cache_dtype == "float16":
        stored, remedy = "KV cache stores", "--kv-cache-dtype auto"
    elif cache_dtype == "auto" and str(model.dtype) == "torch.float16":
        stored, remedy = "model runs in", "--dtype bfloat16"
    else:
        return []
    return [
        coded(
            "KVP030",
            f"{policy.name} needs keys in bfloat16 or float32, and this {stored} "
            f"float16; use {remedy}",
        )
    ]


def rotary_problems(policy: KVCachePolicy, rotary: Rotary | None) -> list[str]:
    """Whether the policy needs to undo RoPE and cannot with this model."""
    if not policy.needs_rotary or rotary is not None:
        return []
    return [
        coded(
            "KVP031",
            f"{policy.name} needs queries before RoPE, and this model has no RoPE, "
            "several, layers without it, one that depends on the length (LongRoPE), "
            "one in the code of transformers, or multi-dimensional positions (M-RoPE); "
            "use another policy",
        )
    ]
