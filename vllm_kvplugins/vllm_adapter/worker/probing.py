"""Probes through vLLM's model: an extra forward pass that writes no cache."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vllm_kvplugins.engine.probe_attention import LocalLayer
from vllm_kvplugins.engine.probing import ProbeModel
from vllm_kvplugins.errors import coded
from vllm_kvplugins.policies.capabilities import Encode, Probing
from vllm_kvplugins.vllm_adapter.config import compat
from vllm_kvplugins.vllm_adapter.config.engine_config import has_other_layers

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_kvplugins.policies.base import KVCachePolicy


logger = logging.getLogger("vllm.kv_policy")


@dataclass(frozen=True, slots=True)
class ProbeMetadata:
    """Attention metadata that tells a layer that a probe is running.

    Attributes:
        local: the layer's cache, if the policy does not manage it.
    """

    local: LocalLayer | None = None


def probe_model(
    vllm_config: VllmConfig,
    model: torch.nn.Module,
    layer_names: Sequence[str],
    local_layers: Mapping[str, LocalLayer],
) -> ProbeModel:
    """The loaded model as the runtime's probes use it.

    Args:
        layer_names: of the layers that the policy manages.
        local_layers: the other attention layers, by name.
    """
    from vllm.forward_context import set_forward_context

    metadata = dict.fromkeys(layer_names, ProbeMetadata())
    metadata |= {name: ProbeMetadata(layer) for name, layer in local_layers.items()}

    @torch.inference_mode()
    def forward(token_ids: torch.Tensor, positions: torch.Tensor) -> None:
        # Without slot mappings no layer writes its cache. Compiled graphs are
        # left out: they are made for the shapes of ordinary steps.
        with set_forward_context(
            metadata,
            vllm_config,
            num_tokens=token_ids.numel(),
            slot_mapping={},
            skip_compiled=True,
        ):
            model(
                input_ids=token_ids.to(torch.int32),
                positions=positions,
                intermediate_tensors=None,
                inputs_embeds=None,
            )

    return ProbeModel(
        forward=forward,
        encode=encoder(vllm_config),
        max_positions=compat.max_positions(vllm_config),
        max_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
    )


def encoder(vllm_config: VllmConfig) -> Encode:
    """The model's tokenizer as a function; loaded when first used."""

    def encode(text: str) -> list[int]:
        from vllm.tokenizers import cached_tokenizer_from_config

        tokenizer = cached_tokenizer_from_config(vllm_config.model_config)
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    return encode


def leave_positions(vllm_config: VllmConfig, policy: KVCachePolicy) -> None:
    """Lower max_model_len so that probes fit behind the longest sequence.

    Only where the user set no ``--max-model-len``; ``problems`` refuses a larger value
    that the user did set. Logs the change.
    """
    model, probing = vllm_config.model_config, policy.probing
    if probing is None or not compat.left_open_max_model_len(model):
        return
    if probing.needs_tokenizer and model.skip_tokenizer_init:
        return  # refused by ``problems``
    room = _room(vllm_config, policy, probing)
    longest = compat.max_positions(vllm_config) - room
    if 0 < longest < model.max_model_len:
        logger.info(
            "KV policy %s: max_model_len is %d instead of %d, because %d positions "
            "after the longest sequence stay free for probes",
            policy.name,
            longest,
            model.max_model_len,
            room,
        )
        compat.lower_max_model_len(vllm_config, longest)


def problems(vllm_config: VllmConfig, policy: KVCachePolicy) -> list[str]:
    """Reasons why a policy cannot run its probes with these engine settings."""
    probing = policy.probing
    if probing is None:
        return []
    from vllm.platforms import current_platform

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    probes = f"{policy.name} runs tokens of its own through the model"
    problems = []
    if model.is_multimodal_model or model.uses_mrope:
        problems.append(
            f"{probes}, which needs plain text positions; {model.model} has others, so "
            "use another policy"
        )
    if has_other_layers(vllm_config) and not current_platform.is_cpu():
        problems.append(
            f"{probes}, which needs the layout of windowed layers that vLLM's CPU "
            "kernel has; use another policy"
        )
    if vllm_config.lora_config is not None:
        problems.append(
            f"{probes}, which does not work with LoRA; remove --enable-lora"
        )
    if getattr(model, "enable_prompt_embeds", False):
        problems.append(
            f"{probes} and needs the prompt's token IDs; remove --enable-prompt-embeds"
        )
    if parallel.data_parallel_size > 1 and parallel.is_moe_model is not False:
        problems.append(
            f"{probes}, which the other ranks of --data-parallel-size "
            f"{parallel.data_parallel_size} do not join; set it to 1"
        )
    if probing.needs_tokenizer and model.skip_tokenizer_init:
        problems.append(f"{policy.name} encodes text; remove --skip-tokenizer-init")
    else:
        problems += _room_problems(vllm_config, policy, probing)
    return [coded("KVP040", problem) for problem in problems]


def _room_problems(
    vllm_config: VllmConfig, policy: KVCachePolicy, probing: Probing
) -> list[str]:
    """Reasons why a probe does not fit behind the longest sequence, or into a batch."""
    room = _room(vllm_config, policy, probing)
    longest = vllm_config.model_config.max_model_len
    positions = compat.max_positions(vllm_config)
    batch = vllm_config.scheduler_config.max_num_batched_tokens
    problems = []
    if longest + room > positions:
        problems.append(
            f"{policy.name} runs {room} tokens or more after a sequence, and the model "
            f"has {positions} positions; use --max-model-len {positions - room} or less"
        )
    if room > batch:
        problems.append(
            f"{policy.name} runs {room} tokens or more in one step; raise "
            f"--max-num-batched-tokens {batch}"
        )
    return problems


def _room(vllm_config: VllmConfig, policy: KVCachePolicy, probing: Probing) -> int:
    """Minimum number of tokens of a probe."""
    return max(probing.room(encoder(vllm_config)), policy.max_patched_prompt_tokens)
