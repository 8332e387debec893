"""The processes behind ``harness.run_scenario``.

``runner.py`` is a fork server: it imports vLLM once, then forks one child process per
scenario. It reads requests, one JSON object per line, from standard input and answers
each with one line, the child's exit code, on standard output. When its standard input
closes, it kills a running child and ends.

A request names the files of the scenario's arguments, of its result and of the child's
output, and has the child's working directory and complete environment.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import select
import signal
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

# Imports that take seconds and that every scenario needs. This package is not among
# them: an engine without its plugin must not find it imported.
_PRELOADED = (
    "torch",
    "transformers",
    "vllm",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.llm",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.llama",
    "vllm.plugins.lora_resolvers.filesystem_resolver",
    "vllm.plugins.lora_resolvers.hf_hub_resolver",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
)
_POLL_SECONDS = 0.02


def serve() -> None:
    """Fork a child for each request, until standard input closes."""
    # Replies use a descriptor to which no import prints and which no child inherits.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in _PRELOADED:
        # Not every supported vLLM has every one.
        with contextlib.suppress(ModuleNotFoundError):
            import_module(name)
    _do_once()
    threads = len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 1
    assert threads == 1, f"{threads} threads; a fork would copy one of them"
    gc.collect()
    gc.freeze()  # so that the child's collector does not write to shared pages
    while line := sys.stdin.buffer.readline():
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            replies.close()
            _become(request)
            code = 1
            try:
                run(Path(request["arguments"]), Path(request["result"]))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                _leave(code)
        print(_wait(child), file=replies, flush=True)


def _do_once() -> None:
    """Do what every engine would do again: a third of the start of a tiny one."""
    # vLLM looks at a model's class for the first time in a process of its own, which
    # imports vLLM again: 20 seconds. The engine loads the class here anyway.
    registry = import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda look: look()
    # Functions in place of Triton's kernels, where there is no Triton: vLLM looks for
    # references to them in all modules.
    platform = import_module("vllm.platforms.cpu").CpuPlatform
    platform.register_triton_kernel_overrides()
    platform.register_triton_kernel_overrides = staticmethod(lambda: None)


def _leave(code: int) -> None:
    """End the child: exit handlers run, but nothing collects garbage.

    vLLM's shutdown and the interpreter's collect it four times, which takes seconds
    where everything that vLLM imported is looked at.
    """
    gc.collect = lambda *generation: 0
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(request_path: Path, result_path: Path) -> None:
    """Call the scenario that the request's file names, and write its result."""
    request = json.loads(request_path.read_text())
    module, _, function = request["scenario"].partition(":")
    result = getattr(import_module(module), function)(**request["arguments"])
    result_path.write_text(json.dumps(result))


def _become(request: dict[str, Any]) -> None:
    """Give the child its own session, environment, folder and output."""
    os.setsid()
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(output)


def _wait(child: int) -> int:
    """The child's exit code. Kills the child if standard input closes meanwhile."""
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            _kill_group(child)
            return os.waitstatus_to_exitcode(status)
        if select.select([sys.stdin], [], [], _POLL_SECONDS)[0]:  # end of input
            _kill_group(child)
            os.waitpid(child, 0)
            raise SystemExit(1)


def _kill_group(child: int) -> None:
    """Kill a child and the processes that it started."""
    # PermissionError: on macOS, only zombies are left
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)


if __name__ == "__main__":
    serve()
