"""Runs GPU code without a GPU, in Triton's interpreter: vLLM's model runner V2 and this
package's Triton backend.

Runner V2 prepares its inputs with Triton kernels. vLLM requires a Triton driver called
``cpu``, which the upstream wheel of Triton does not have. With ``TRITON_INTERPRET=1``
no driver is ever called, so a dummy suffices.

Python imports this module at start-up when this folder is on ``PYTHONPATH``, also in
the worker processes that vLLM starts. For tests only.

Environment:
    KVP_TEST_ASYNC=1: turn on asynchronous scheduling, which vLLM's CPU platform turns
    off, so that both schedulers are tested.
    KVP_TEST_KERNEL=triton: run whole integration tests on our Triton kernel, with tile
    sizes that suit Triton's interpreter.
    KVP_TEST_INTERPRETER=torch: run that kernel's source on torch instead, with a GPU's
    tile sizes and much faster.
"""

import importlib.abc
import importlib.util
import os
import sys
from types import SimpleNamespace

from quick_triton import look_up_once, use_large_tiles


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function on a module right after its first import."""

    def __init__(self, name, then):
        self._name = name
        self._then = then

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            self._then(module)

        spec.loader.exec_module = exec_module
        return spec


def _name_a_cpu_driver(triton_backends):
    driver = SimpleNamespace(is_active=lambda: True)
    triton_backends.backends.setdefault(
        "cpu", SimpleNamespace(driver=driver, compiler=None)
    )


def _allow_async_scheduling(platform):
    update = platform.CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls, vllm_config):
        update(cls, vllm_config)
        if os.environ.get("KVP_TEST_ASYNC") == "1":  # of this engine, not of the import
            vllm_config.scheduler_config.async_scheduling = True

    platform.CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def _write_caches_in_torch(op):
    """vLLM's Triton kernel that writes the cache asks for the type of the GPU."""

    def write(key, value, key_cache, value_cache, slot_mapping, dtype, *scales):
        slots = slot_mapping[slot_mapping >= 0]
        assert len(slots) == len(slot_mapping), "padding"
        at = slots // key_cache.shape[1], slots % key_cache.shape[1]
        parts = (key_cache, key, scales[0]), (value_cache, value, scales[1])
        for cache, rows, scale in parts:
            rows = rows[: len(slots)]
            if dtype.startswith("fp8"):
                rows = (rows.float() / scale).to(cache.dtype)
                # torch cannot write fp8 elements to many places at once.
                cache, rows = cache.view(op.torch.uint8), rows.view(op.torch.uint8)
            cache[at] = rows

    op.triton_reshape_and_cache_flash = write


def _run_on_torch(paged_attention):
    from kernel_on_torch import replace_kernels  # imports torch

    replace_kernels(paged_attention)


if os.environ.get("TRITON_INTERPRET") == "1":
    interpreter = "triton.runtime.interpreter"
    sys.meta_path.insert(0, _AfterImport(interpreter, look_up_once))
    sys.meta_path.insert(0, _AfterImport("triton.backends", _name_a_cpu_driver))
    writer = "vllm.v1.attention.ops.triton_reshape_and_cache_flash"
    sys.meta_path.insert(0, _AfterImport(writer, _write_caches_in_torch))
if os.environ.get("KVP_TEST_KERNEL") == "triton":
    attention = "vllm_kvplugins.ops.triton.paged_attention"
    on_torch = os.environ.get("KVP_TEST_INTERPRETER") == "torch"
    change = _run_on_torch if on_torch else use_large_tiles
    sys.meta_path.insert(0, _AfterImport(attention, change))
sys.meta_path.insert(0, _AfterImport("vllm.platforms.cpu", _allow_async_scheduling))
