"""Scenarios on tiny models with recurrent layers, with what vLLM lacks on CPUs.

``FIXES`` change vLLM 0.32 in this process, with and without a policy alike:

- ``checkpoints``: its kernel of Mamba-2 for CPUs returns no state inside of a chunk.
  Without a policy, vLLM fails with an IndexError once it needs one, unless the prefix
  cache is off. A policy does the same as this fix.
- ``rotary``: its kernel of RoPE for CPUs takes queries [tokens, heads, head_dim] for
  more tokens than there are, and reads positions behind the last one. LFM2 passes such
  queries, so its answers are wrong and differ between runs.
- ``torchvision``: vLLM's file of Qwen3.5 imports it for images, and the CPU set-up has
  none.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.metadata
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, ClassVar

import scenarios_fuzz
import scenarios_hybrids
from scenarios_hybrids import Policy


def traffic(model: str, policy: Policy, fixes: Sequence[str], **settings: Any) -> Any:
    """See ``scenarios_hybrids.traffic``."""
    _fix(fixes)
    return scenarios_hybrids.traffic(model, policy, **settings)


def reclaim(model: str, policy: Policy, fixes: Sequence[str], **settings: Any) -> Any:
    """See ``scenarios_hybrids.reclaim``."""
    _fix(fixes)
    return scenarios_hybrids.reclaim(model, policy, **settings)


def fuzz(
    model: str,
    policy: Policy,
    seed: int,
    rounds: int,
    fixes: Sequence[str],
    **more: Any,
) -> Any:
    """See ``scenarios_fuzz.fuzz``."""
    _fix(fixes)
    return scenarios_fuzz.fuzz(model, policy, seed, rounds, **more)


def _fix(names: Sequence[str]) -> None:
    for name in names:
        FIXES[name]()


def _without_checkpoints() -> None:
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    original = MambaMixer2.get_kv_cache_spec

    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        return replace(
            original(self, vllm_config),
            num_prefill_checkpoint_blocks=0,
            prefill_checkpoint_alignment=None,
        )

    MambaMixer2.get_kv_cache_spec = get_kv_cache_spec


def _flatten_rotary() -> None:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    original = RotaryEmbedding.forward_cpu

    def forward_cpu(self: Any, positions: Any, query: Any, key: Any) -> Any:
        return original(
            self, positions, query.flatten(1).contiguous(), key.flatten(1).contiguous()
        )

    RotaryEmbedding.forward_cpu = forward_cpu


class _Stub(ModuleType):
    """A module with every name; none of them can be used."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _name_torchvision() -> None:
    """Let modules import names from torchvision; text needs none of them."""
    for part in ("", ".io", ".transforms", ".transforms.functional"):
        _stub("torchvision" + part)
    for part in (".v2", ".v2.functional"):
        _stub("torchvision.transforms" + part)
    original = importlib.metadata.version

    @functools.wraps(original)
    def version(name: str) -> str:
        return "0.30.0" if name == "torchvision" else original(name)

    importlib.metadata.version = version
    from vllm import ModelRegistry
    from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM

    # vLLM would inspect the class in a process of its own.
    ModelRegistry.register_model("Qwen3_5ForCausalLM", Qwen3_5ForCausalLM)


def _stub(name: str) -> None:
    module = sys.modules[name] = _Stub(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)


FIXES = {
    "checkpoints": _without_checkpoints,
    "rotary": _flatten_rotary,
    "torchvision": _name_torchvision,
}
