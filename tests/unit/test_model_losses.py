"""Surprisal computed by the engine: settings that prevent it, and the model hooks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="install a vLLM (see scripts/)")

from vllm.config import CUDAGraphMode

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.errors import codes_in
from vllm_kvplugins.vllm_adapter.worker.context import WorkerContext
from vllm_kvplugins.vllm_adapter.worker.surprisal import LogitsSurprisal, problems


def test_a_trained_router_is_refused_with_tensor_parallelism():
    trained = parse_policy({"name": "sekv", "router": "shipped"})
    for ranks, policy, refused in (
        (1, trained, False),
        (2, trained, True),
        (2, parse_policy("sekv"), False),
        (2, parse_policy("snapkv"), False),
    ):
        parallel = SimpleNamespace(tensor_parallel_size=ranks)
        config = SimpleNamespace(parallel_config=parallel, lora_config=None)
        refusals = problems(config, policy)
        assert [codes_in(problem) for problem in refusals] == [("KVP041",)] * refused


@pytest.mark.parametrize(
    ("policy", "breakable", "mode", "refused"),
    [
        ("sekv", "1", "PIECEWISE", True),
        ("sekv", "1", "NONE", False),  # an eager engine, or a CPU
        ("sekv", "0", "PIECEWISE", False),
        ("snapkv", "1", "PIECEWISE", False),
    ],
)
def test_graphs_that_replay_the_whole_model_are_refused(
    monkeypatch, policy, breakable, mode, refused
):
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", breakable)
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        lora_config=None,
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode[mode]),
    )
    refusals = problems(config, parse_policy(policy))
    assert [codes_in(problem) for problem in refusals] == [("KVP041",)] * refused


def test_the_hook_of_a_cache_that_is_gone_is_gone():
    """vLLM creates one of them to measure graphs."""
    context = WorkerContext(SimpleNamespace(heap=None, unbind_heap=lambda: None))
    model = torch.nn.Identity()
    instances: list[LogitsSurprisal] = []
    for _ in range(2):
        context.register_heap_binding(
            lambda: instances.append(context.new_surprisal_model(model))
        )
        context.ensure_heap()
        model(torch.arange(3.0))
    assert len(model._forward_hooks) == 1
    with pytest.raises(AssertionError, match="no step has run"):
        instances[0].states(0, 1)
    assert instances[1].states(1, 2).tolist() == [1, 2]
    context.register_heap_binding(lambda: None)
    assert not model._forward_hooks


def test_states_that_a_model_returns_for_its_drafter_are_not_its_hidden_states():
    class WithStates(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
            return x, [x + 1, x + 2]  # as vLLM's models do for EAGLE-3

    model = WithStates()
    losses = LogitsSurprisal(model)
    model(torch.arange(3.0))
    assert losses.states(1, 2).tolist() == [1, 2]
