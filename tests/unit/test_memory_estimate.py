"""What ``auto`` knows about an engine's memory before vLLM measures it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm_kvplugins.engine.retrieval import host_tier
from vllm_kvplugins.errors import KVPolicyError
from vllm_kvplugins.vllm_adapter.config import memory_estimate
from vllm_kvplugins.vllm_adapter.config.memory_estimate import host, pool

GIB = 1 << 30


def engine(model: str = "absent", ranks: int = 1, **cache: Any) -> Any:
    defaults = {
        "num_gpu_blocks_override": None,
        "kv_cache_memory_bytes": None,
        "gpu_memory_utilization": 0.5,
    }
    return SimpleNamespace(
        cache_config=SimpleNamespace(**defaults | cache),
        parallel_config=SimpleNamespace(world_size=ranks),
        model_config=SimpleNamespace(model=model),
    )


@pytest.fixture
def weights(tmp_path) -> str:
    """A model with 3 KiB of weights in two files, and a copy in another format."""
    (tmp_path / "config.json").write_text("{}")
    for name in ("model-1.safetensors", "model-2.safetensors"):
        (tmp_path / name).write_bytes(bytes(1536))
    (tmp_path / "consolidated.safetensors").write_bytes(bytes(3072))
    return str(tmp_path)


def test_what_the_user_set_is_no_estimate():
    assert pool(engine(kv_cache_memory_bytes=GIB, ranks=2), 1).num_bytes == 2 * GIB
    blocks = pool(engine(num_gpu_blocks_override=70, kv_cache_memory_bytes=GIB), 100)
    assert blocks.num_bytes == 7000
    assert "estimated" not in blocks.source


def test_else_the_weights_leave_a_share_of_the_device(weights, monkeypatch):
    monkeypatch.setattr(memory_estimate, "_device_bytes", lambda: 10_000)
    memory = pool(engine(weights, ranks=2), 1)
    assert memory.num_bytes == 2 * 5_000 - 3072
    assert "estimated" in memory.source


def test_weights_that_are_elsewhere_leave_nothing_to_estimate():
    with pytest.raises(KVPolicyError) as caught:
        pool(engine("no/such-model"), 1)
    assert caught.value.codes == ("KVP054",)


def test_on_a_cpu_the_kv_cache_takes_from_host_memory(weights, monkeypatch):
    for module in (memory_estimate, host_tier):
        monkeypatch.setattr(module, "available_bytes", lambda: 10 * GIB)
    assert host(GIB, None, weights).num_bytes == 5 * GIB
    assert host(8 * GIB, None, weights).num_bytes == 2 * GIB - 3072
    assert host(20 * GIB, None, weights).num_bytes == 0
    assert host(20 * GIB, GIB, weights).num_bytes == GIB
