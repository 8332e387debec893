"""Configurations: refused ones, and an engine without a policy."""

from __future__ import annotations

from typing import Any


def try_configs(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Resolve each case's EngineArgs without loading anything.

    Returns:
        Per case ``[name of the error's class, message]``, or None if it passed.
    """
    return {name: _refusal(arguments) for name, arguments in cases.items()}


def _refusal(arguments: dict[str, Any]) -> list[str] | None:
    from vllm.engine.arg_utils import EngineArgs

    try:
        EngineArgs(**_with_objects(arguments)).create_engine_config()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


def lengths(cases: dict[str, dict[str, Any]]) -> dict[str, list[Any]]:
    """Per case:

    max_model_len and the log messages about it, or the error and its message.
    """
    import io
    import logging

    from vllm.engine.arg_utils import EngineArgs

    from vllm_kvplugins.vllm_adapter.worker import probing

    messages: dict[str, list[Any]] = {}
    for name, arguments in cases.items():
        captured = io.StringIO()
        # vLLM removes the handlers of its own loggers while it configures them.
        probing.logger = logging.Logger("test", logging.INFO)
        probing.logger.addHandler(logging.StreamHandler(captured))
        try:
            config = EngineArgs(**_with_objects(arguments)).create_engine_config()
            messages[name] = [config.model_config.max_model_len, captured.getvalue()]
        except Exception as error:
            messages[name] = [type(error).__name__, str(error)]
    return messages


def _with_objects(arguments: dict[str, Any]) -> dict[str, Any]:
    from vllm.config import KVTransferConfig

    base = {"skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True}
    transfer = arguments.get("kv_transfer_config")
    if transfer is not None:
        base["kv_transfer_config"] = KVTransferConfig(**transfer)
        arguments = {**arguments, "kv_transfer_config": None}
    return base | {k: v for k, v in arguments.items() if v is not None}


def stock_run(model: str, prompts: list[list[int]]) -> dict[str, Any]:
    """Tokens and resolved classes of an engine without a policy."""
    from driver import Driver, make_llm

    llm = make_llm(model, block_size=None)
    driver = Driver(llm)
    named = {str(index): prompt for index, prompt in enumerate(prompts)}
    return {"tokens": driver.generate(named, 16), **_resolved(driver)}


def policy_then_stock(
    model: str, policy: dict[str, Any], prompts: list[list[int]]
) -> dict[str, Any]:
    """Three engines in one process: with a policy, without, and with it again.

    An engine is only let go of, as a user would, not shut down.
    """
    import gc

    from driver import Driver, make_llm

    named = {str(index): prompt for index, prompt in enumerate(prompts)}
    configs: dict[str, Any] = {}
    for name, settings in (("policy", policy), ("stock", None), ("again", policy)):
        llm = make_llm(model, settings, block_size=None)
        driver = Driver(llm)
        configs[name] = {"tokens": driver.generate(named, 16), **_resolved(driver)}
        configs[name]["compactions"] = getattr(driver.manager, "compactions", None)
        del llm, driver
        gc.collect()
    return configs


def _resolved(driver: Any) -> dict[str, Any]:
    """Everything that a policy replaces, by name."""
    config = driver.engine.vllm_config
    layers = config.compilation_config.static_forward_context
    attention = [layer for layer in layers.values() if hasattr(layer, "attn_backend")]
    return {
        "scheduler_cls": str(config.scheduler_config.scheduler_cls),
        "worker_cls": str(config.parallel_config.worker_cls),
        "kv_transfer_config": str(config.kv_transfer_config),
        "block_size": config.cache_config.block_size,
        "additional_config": str(config.additional_config),
        "scheduler": _name(driver.scheduler),
        "manager": _name(driver.manager),
        "worker": _name(driver.core.model_executor.driver_worker.worker),
        "connector": str(driver.scheduler.connector),
        "backends": sorted({_class(layer.attn_backend) for layer in attention}),
        "impls": sorted({_name(layer.impl) for layer in attention}),
        "config_hash": config.compute_hash(),
    }


def _name(thing: Any) -> str:
    return _class(type(thing))


def _class(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
