"""Starts the measurement of a model that has no sensitivity profile.

The scheduler does this, because one process per engine has it, and because weights and
KV cache are allocated by then: free memory is what the engine leaves. The engine itself
never uses the result. Its processes, and the sessions that it stores, agree on one
configuration; the next start finds the profile.
"""

from __future__ import annotations

import shlex
import sys
import threading
import weakref
from subprocess import Popen
from typing import Any

from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_kvplugins import calibration_job
from vllm_kvplugins.budgets.profile_cache import cached_profile, job_files
from vllm_kvplugins.calibration_job import JobFiles
from vllm_kvplugins.errors import KVPolicyError, coded
from vllm_kvplugins.free_memory import available_bytes
from vllm_kvplugins.model_config import (
    ConfigOnlyModel,
    ModelFingerprint,
    float32_bytes,
    read_model_config,
)
from vllm_kvplugins.vllm_adapter.config import validation
from vllm_kvplugins.vllm_adapter.config.engine_config import fingerprint_of, policy_of

# vLLM configures only the loggers below its own name.
logger = init_logger("vllm.kv_policy")

_PROGRAM = (sys.executable, "-m", "vllm_kvplugins.cli", "research", "calibrate")
# Free memory that a measurement needs, per byte of the model in float32: the weights,
# activations of two sequences, and room for what the engine allocates later.
_MEMORY_FACTOR = 2
_GIB = 1 << 30


class Calibration:
    """A running measurement. It ends with this object or with the process."""

    def __init__(self, process: Popen[bytes], files: JobFiles, command: str) -> None:
        self._process = process
        self.stop = weakref.finalize(self, calibration_job.stop, process)
        arguments = (process, files, command)
        threading.Thread(target=_report, args=arguments, daemon=True).start()

    @property
    def pid(self) -> int:
        """Process ID of the program that runs the measurement."""
        return self._process.pid


def start(vllm_config: Any, cache_bytes: int) -> Calibration | None:
    """Measure the engine's model in the background, if its allocator has no profile.

    Logs what happens; never raises because of the model or of files.

    Args:
        cache_bytes: size of the KV cache.

    Returns:
        None if nothing was started.
    """
    policy = policy_of(vllm_config)
    if policy is None or not policy.page_allocator().wants_calibration:
        return None
    if vllm_config.parallel_config.data_parallel_rank_local:
        return None  # the first engine of this machine does it
    model = vllm_config.model_config.model
    command = shlex.join(["kvplugins", "research", "calibrate", model])
    try:
        fingerprint = fingerprint_of(vllm_config)
        files = job_files(model, fingerprint)
        reason = _obstacle(model, fingerprint, files, cache_bytes)
        if reason is None:
            return _started(model, fingerprint, files, command)
    except (KVPolicyError, OSError, ValueError) as error:
        reason = str(error)
    _warn(reason, command)
    return None


def _started(
    model: str, fingerprint: ModelFingerprint, files: JobFiles, command: str
) -> Calibration | None:
    """Start the process, unless another one has the profile or measures it."""
    if cached_profile(fingerprint).profile is not None:
        logger.info(
            "Layer budgets: a profile of this model has appeared since this server "
            "was configured; the next start uses it"
        )
        return None
    files.profile.parent.mkdir(parents=True, exist_ok=True)
    if calibration_job.is_running(files):
        _log_busy(files)
        return None
    program = [*_PROGRAM, model, "-o", str(files.profile)]
    process = calibration_job.start(files, program)
    logger.info(
        "Layer budgets: this model is measured in the background, in one thread at the "
        "lowest priority, for the next start; this server keeps equal layers. Log: %s. "
        '%s=0 or the option "calibrate": false of the allocator turns it off',
        files.log,
        calibration_job.SWITCH,
    )
    return Calibration(process, files, command)


def _report(process: Popen[bytes], files: JobFiles, command: str) -> None:
    """Wait for a measurement and log its result; nothing if it was stopped."""
    status = process.wait()
    if status == calibration_job.DONE:
        logger.info(
            "Layer budgets: this model was measured; the next start uses %s",
            files.profile,
        )
    elif status == calibration_job.BUSY:  # both had found the lock free
        _log_busy(files)
    elif status == calibration_job.FAILED:
        reason = calibration_job.remembered_failure(files)
        _warn(f"the measurement failed ({reason or f'see {files.log}'})", command)


def _log_busy(files: JobFiles) -> None:
    logger.info(
        "Layer budgets: another process measures this model; a server that starts "
        "after it has finished uses %s",
        files.profile,
    )


def _warn(reason: str, command: str) -> None:
    text = (
        f"all layers get the same budget, and they are not measured in the background: "
        f"{reason}; to measure them yourself, run `{command}` before the next start"
    )
    logger.warning("%s", coded("KVP118", text))


def _obstacle(
    model: str, fingerprint: ModelFingerprint, files: JobFiles, cache_bytes: int
) -> str | None:
    """Why the model is not measured here; None if it can be.

    Raises:
        KVPolicyError: its files are not on this machine, or do not describe it.
        OSError: they cannot be read.
        ValueError: they are damaged.
    """
    if sys.platform != "linux":
        return "only Linux ends the measurement with the server"
    failure = calibration_job.remembered_failure(files)
    if failure is not None:
        return f"an earlier measurement failed ({failure})"
    config = read_model_config(model, "float32")
    needed = float32_bytes(model)
    if needed is None:
        return f"there are no files with weights of {model} on this machine"
    reasons = _model_reasons(config, fingerprint)
    return "; ".join(reasons) if reasons else _memory_reason(needed, cache_bytes)


def _model_reasons(config: ConfigOnlyModel, fingerprint: ModelFingerprint) -> list[str]:
    """Why this model cannot be measured."""
    reasons = validation.calibration_problems(config)
    quantized = config.config.get("quantization_config")
    if quantized is not None:
        reasons.append("its weights are quantized, so the memory it needs is unknown")
    different = config.fingerprint().differences(fingerprint)
    if different:
        reasons.append(f"the engine changes its configuration ({'; '.join(different)})")
    found = cached_profile(fingerprint)
    if found.foreign is not None:
        reasons.append(f"{found.foreign} is in the place of its profile")
    return reasons


def _memory_reason(needed: int, cache_bytes: int) -> str | None:
    available = available_bytes()
    if current_platform.is_cpu():
        available -= cache_bytes  # allocated, but not resident before it is used
    if available >= _MEMORY_FACTOR * needed:
        return None
    return (
        f"{max(available, 0) / _GIB:.1f} GiB of host memory are free, and it needs "
        f"{_MEMORY_FACTOR * needed / _GIB:.1f} GiB (twice the weights in float32)"
    )
