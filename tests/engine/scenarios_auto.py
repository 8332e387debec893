"""Engines with ``--kv-policy auto``."""

from __future__ import annotations

import logging
from typing import Any


def choices(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What ``auto`` makes of each case's engine arguments, without loading weights.

    Returns:
        Per case ``policy``: what it wrote into the configuration, None for stock;
        ``log``: its messages; ``hash`` of the configuration; ``scheduler``; or
        ``error``.
    """
    return {name: _choice(dict(arguments)) for name, arguments in cases.items()}


def _choice(arguments: dict[str, Any]) -> dict[str, Any]:
    from vllm.engine.arg_utils import EngineArgs

    messages = _capture()
    base = {"skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True}
    policy = arguments.pop("kv_policy")
    if policy is not None:
        arguments["additional_config"] = {"kv_policy": policy, "mine": 1}
    args = EngineArgs(**base | arguments)
    try:
        config = args.create_engine_config()
    except Exception as error:
        return {"error": str(error), "after": args.additional_config}
    return {
        "policy": config.additional_config.get("kv_policy"),
        "mine": config.additional_config.get("mine"),
        "hash": config.compute_hash(),
        "scheduler": str(config.scheduler_config.scheduler_cls),
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "log": messages,
    }


def _capture() -> list[str]:
    """Messages of ``auto`` from now on. vLLM removes the handlers of its loggers."""
    from vllm_kvplugins.vllm_adapter.startup import auto

    messages: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(f"{record.levelname} {record.getMessage()}")

    auto.logger = logging.Logger("test", logging.INFO)
    auto.logger.addHandler(Kept())
    return messages


def later_processes(
    model: str, flags: list[str], host_bytes: list[int]
) -> list[dict[str, Any]]:
    """The front end, then API servers that get its arguments, as with spawn.

    Args:
        host_bytes: free host memory that each process finds, halved.
    """
    import pickle

    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_kvplugins.vllm_adapter.config import memory_estimate

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    arguments = parser.parse_args(["--model", model, *flags])
    found = []
    for num_bytes in host_bytes:
        memory_estimate.default_limit_bytes = lambda num_bytes=num_bytes: num_bytes
        messages = _capture()
        config = AsyncEngineArgs.from_cli_args(arguments).create_engine_config()
        policy = config.additional_config.get("kv_policy")
        found.append({"policy": policy, "log": messages})
        arguments = pickle.loads(pickle.dumps(arguments))
    return found


def answers(
    model: str,
    policy: dict[str, Any] | None,
    prompts: list[list[int]],
    tokens: int,
    **settings: Any,
) -> dict[str, Any]:
    """Tokens that an engine generates, its policy, and blocks that it freed."""
    from driver import Driver, make_llm

    llm = make_llm(model, policy, **settings)
    driver = Driver(llm)
    named = {str(index): prompt for index, prompt in enumerate(prompts)}
    generated = driver.generate(named, tokens)
    config = driver.engine.vllm_config
    return {
        "tokens": generated,
        "policy": config.additional_config.get("kv_policy"),
        "compactions": getattr(driver.manager, "compactions", None),
        "scheduler": str(config.scheduler_config.scheduler_cls),
    }
