"""An engine, and the measurement that it starts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from driver import make_llm, worker_of

PATIENCE_S = 300.0


def measured(
    model: str, policy: dict[str, Any] | None, wait: bool = False, stop: bool = False
) -> dict[str, Any]:
    """Start an engine.

    Args:
        wait: until its measurement has ended.
        stop: shut the scheduler down while it measures.

    Returns:
        Whether a measurement was started, the files in the cache, the sensitivity that
        the worker has, and the layers' shares by it; with ``stop``, whether it ended.
    """
    from vllm_kvplugins.budgets.profile_cache import cache_folder

    llm = make_llm(model, policy, skip_tokenizer_init=False, max_model_len=4096)
    core = llm.llm_engine.engine_core.engine_core
    running = getattr(core.scheduler, "_calibration", None)
    result: dict[str, Any] = {"running": running is not None, "profile": None}
    if wait:
        _until(lambda: list(cache_folder().glob("*.json")))
    if stop:
        process = Path(f"/proc/{running.pid}")
        assert process.exists()
        core.scheduler.shutdown()
        result["ended"] = not process.exists()
    if policy is not None:
        allocator = worker_of(llm).kv_policy.runtime.policy.page_allocator()
        profile = getattr(allocator, "measured", None)
        if profile is not None:
            result["profile"] = profile.sensitivity
            result["weights"] = allocator._weights(2).tolist()
    files = cache_folder().glob("*") if cache_folder().exists() else ()
    return result | {"files": sorted(path.name for path in files)}


def _until(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
