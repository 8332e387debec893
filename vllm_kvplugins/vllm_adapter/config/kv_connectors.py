"""Other KV connectors next to a policy: which run, and what is refused.

The user's connector runs behind ours (``scheduler.composed_connector``). It is shown
the exact prefix of each request only (``scheduler.exact_prefix``), so it must learn
about blocks from the scheduler and in no other way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vllm_kvplugins.errors import coded
from vllm_kvplugins.model_config import FULL

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    from vllm_kvplugins.policies.base import KVCachePolicy

_MULTI = "MultiConnector"
_CONNECTORS = "connectors"  # key of MultiConnector's settings
_SCHEDULER = "vllm_kvplugins.vllm_adapter.scheduler"
# Connectors of vLLM that run next to a policy.
_RUN = ("ExampleConnector",)
_READS_LATER = (
    "reads the blocks of a request some steps after they are computed and counts on "
    "the request holding them, and a policy frees blocks of running requests"
)
_HANDS_OVER = (
    "hands over all blocks of a prompt after its last token is computed, and a policy "
    "has freed some of them by then"
)
_REFUSED = {
    "OffloadingConnector": _READS_LATER,
    "SimpleCPUOffloadConnector": _READS_LATER,
    "NixlConnector": _HANDS_OVER,
    "NixlPullConnector": _HANDS_OVER,
    "NixlPushConnector": _HANDS_OVER,
    "MoRIIOConnector": _HANDS_OVER,
    "MooncakeConnector": _HANDS_OVER,
    "HiSparseConnector": "keeps tokens of its own choice on the device",
}
_NOT_RUN = "has not been run next to a policy"


def is_configured(transfer: KVTransferConfig | None) -> bool:
    """Whether the user has configured a KV connector."""
    return transfer is not None and transfer.kv_connector is not None


def composed(transfer: KVTransferConfig | None) -> KVTransferConfig:
    """The configuration of our connector, with the user's behind it if there is one."""
    from vllm.config import KVTransferConfig

    if transfer is None or not is_configured(transfer):
        return KVTransferConfig(
            kv_connector="KVPolicyConnector",
            kv_connector_module_path=f"{_SCHEDULER}.connector",
            kv_role="kv_both",
        )
    theirs = {
        field.name: getattr(transfer, field.name)
        for field in dataclasses.fields(transfer)
        if field.name != "engine_id"  # vLLM passes on the engine's
    }
    return dataclasses.replace(
        transfer,
        kv_connector="ComposedConnector",
        kv_connector_module_path=f"{_SCHEDULER}.composed_connector",
        kv_role="kv_both",
        kv_connector_extra_config={_CONNECTORS: [theirs]},
    )


def is_composed(vllm_config: VllmConfig) -> bool:
    """Whether the user's connector runs behind ours."""
    return _theirs(vllm_config.kv_transfer_config) is not None


def observes_prompt(policy: KVCachePolicy) -> bool:
    """Whether a policy observes every query of a prompt, which loaded tokens lack."""
    # `kvplugins recommend` runs without torch, which policies import.
    from vllm_kvplugins.policies.capabilities import Trigger

    observation = policy.observation
    return policy.spans is not None or (
        observation is not None and Trigger.PREFILL_CHUNK in observation.triggers
    )


# -- refusals ----------------------------------------------------------------------


def argument_problems(args: EngineArgs) -> list[str]:
    """Configured connectors that cannot run next to a policy."""
    reasons = []
    transfer = args.kv_transfer_config
    if transfer is not None and is_configured(transfer):
        for config in _leaves(transfer):
            reasons += [
                coded("KVP005", f"KV connector {config.kv_connector!r} {reason}")
                for reason in _connector_problems(config)
            ]
    if size := getattr(args, "kv_offloading_size", None):
        from vllm.platforms import current_platform

        reason = "vLLM's offloading runs on GPUs only"
        if not current_platform.is_cpu():
            reason = f"it {_READS_LATER}"
        reasons.append(
            coded(
                "KVP006",
                f"KV offloading ({size} GiB): {reason}; remove --kv-offloading-size, "
                "and use a policy with a host tier, such as icecache",
            )
        )
    return reasons


def problems(
    vllm_config: VllmConfig, policy: KVCachePolicy, types: Sequence[str]
) -> list[str]:
    """Why the policy or the model cannot run with the configured connector.

    Args:
        types: attention type of each layer.
    """
    transfer = vllm_config.kv_transfer_config
    theirs = _theirs(transfer)
    if theirs is None:
        return []
    reasons = []
    if observes_prompt(policy):
        reasons.append(
            f"{policy.name} observes every token of a prompt while it is computed, so "
            "no token can be loaded; use another policy, such as snapkv"
        )
    if any(kind != FULL for kind in types):
        reasons.append(
            f"{vllm_config.model_config.model} has layers with a window, chunks or a "
            "recurrent state, whose blocks the policy does not manage; use a model "
            "with full attention"
        )
    for config in _leaves(theirs):
        layout = _required_layout(config, vllm_config)
        if layout is not None:
            reasons.append(
                f"{config.kv_connector!r} needs the cache layout {layout}, and a "
                "policy needs its own; use a connector without a required layout"
            )
    return [
        coded("KVP049", f"{reason}, or remove --kv-transfer-config")
        for reason in reasons
    ]


def _theirs(transfer: KVTransferConfig | None) -> KVTransferConfig | None:
    """The user's connector behind ours; None if there is none."""
    from vllm.config import KVTransferConfig

    if transfer is None or transfer.kv_connector != "ComposedConnector":
        return None
    (theirs,) = transfer.kv_connector_extra_config[_CONNECTORS]
    return KVTransferConfig(**theirs, engine_id=transfer.engine_id)


def _leaves(transfer: KVTransferConfig) -> Iterator[KVTransferConfig]:
    """All connectors of a configuration, those of a MultiConnector one by one."""
    from vllm.config import KVTransferConfig

    if transfer.kv_connector != _MULTI:
        yield transfer
        return
    for each in transfer.kv_connector_extra_config.get(_CONNECTORS, ()):
        yield from _leaves(
            KVTransferConfig(**({"engine_id": transfer.engine_id} | each))
        )


def _connector_problems(config: KVTransferConfig) -> list[str]:
    """What follows "KV connector NAME" in a refusal."""
    remedy = (
        f"; use {', '.join(_RUN)} or a connector of your own "
        "(kv_connector_module_path), or remove --kv-transfer-config"
    )
    name = config.kv_connector or ""
    if config.kv_connector_module_path is None and name not in _RUN:
        return [_REFUSED.get(name, _NOT_RUN) + remedy]
    try:
        connector = _class_of(config)
    except (ImportError, AttributeError, ValueError) as error:
        return [f"cannot be loaded ({error}); correct --kv-transfer-config"]
    if _reads_pool(connector):
        return [f"reads vLLM's block pool itself, past the policy{remedy}"]
    return []


def _class_of(config: KVTransferConfig) -> Any:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    return KVConnectorFactory.get_connector_class(config)


def _reads_pool(connector: Any) -> bool:
    """Whether a connector class looks at blocks that the scheduler does not name."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    return any(
        getattr(connector, name) is not getattr(KVConnectorBase_V1, name)
        for name in ("bind_kv_cache_manager", "bind_gpu_block_pool")
    )


def _required_layout(config: KVTransferConfig, vllm_config: VllmConfig) -> str | None:
    import copy

    own = copy.copy(vllm_config)
    own.kv_transfer_config = config
    layout: str | None = _class_of(config).get_required_kvcache_layout(own)
    return layout
