"""Decode steps in simulated CUDA graphs equal eager steps, bit for bit.

``tests/unit/test_suites.py`` runs it in its own process, in Triton's interpreter, which
is chosen at import. Two engines run the same steps: one replays graphs where vLLM
would, with steps padded to the captured sizes; the other runs eagerly.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import fake_flashinfer
import pytest
import torch
from fake_flash import flash_attn_varlen_func
from graphed_engine import (
    BLOCK,
    KV_HEADS,
    LAYERS,
    MODES,
    SEED,
    SIZES,
    Engine,
    vllm_config,
)
from policy_settings import configure
from simulated_graph import Launched, launch
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.config.compilation import CompilationConfig
from vllm.v1.attention.backend import AttentionCGSupport

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.engine.runtime import PolicyRuntime
from vllm_kvplugins.ops.triton import paged_attention
from vllm_kvplugins.plan.geometry import Geometry
from vllm_kvplugins.policies.registry import available_policies
from vllm_kvplugins.vllm_adapter.attention import flash, flat, graphs, triton
from vllm_kvplugins.vllm_adapter.worker.context import WorkerContext


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """The kernels that CUDA graphs can capture."""
    for name in ("attend", "merge"):
        monkeypatch.setattr(
            paged_attention, name, Launched(getattr(paged_attention, name))
        )
    monkeypatch.setattr(
        flash.fa_utils,
        "flash_attn_varlen_func",
        launch(flash_attn_varlen_func),
        raising=False,
    )
    monkeypatch.setattr(flat, "probe_model", lambda *_: None)
    fake_flashinfer.install(monkeypatch)
    # parts, as a GPU splits long sequences
    monkeypatch.setattr(paged_attention, "_splits", lambda *_: 2)


SETTINGS = {"budget": 48, "window": 5, "sinks": 2, "recent": 1, "chunk_size": 4}
FOLDING = {"decode_budget": 48, "fold_blocks": 1}
UNEVEN = {"allocator": "head-adaptive"}
LIVES = [
    ("triton", "V1", "snapkv", UNEVEN),
    ("flash", "V2", "streaming-llm", {}),
    ("flash", "V1", "full", {}),
    ("flash", "V2", "snapkv", {}),
    ("flash", "V1", "snapkv", {**UNEVEN, **FOLDING}),
    ("flash", "V2", "snapkv", {**UNEVEN, **FOLDING}),
    ("flash", "V2", "knorm", {**UNEVEN, **FOLDING}),
    ("flashinfer", "V1", "snapkv", FOLDING),
]


@pytest.mark.parametrize(("kernel", "runner", "name", "more"), LIVES)
def test_graphs_find_what_is_found_without(monkeypatch, kernel, runner, name, more):
    """Steps of 1 to 4 requests that start, are compacted, and end."""
    print("seed", SEED)
    policy = parse_policy(configure(name, SETTINGS | more))
    plain, graphed = (
        Engine(monkeypatch, policy, kernel, mode, runner) for mode in MODES
    )
    graphed.capture()
    steps = 0
    while plain.scheduled():
        results = [engine.step() for engine in (plain, graphed)]
        assert torch.equal(*results), f"step {steps}"
        steps += 1
        if steps % 5 == 0:
            graphed.idle()
    assert not graphed.scheduled()
    assert plain.replays == 0
    assert graphed.replays > steps / 3
    # the last token of a prompt alone, queries before compactions during decoding
    needs_queries = policy.queries_needed > 0
    assert (graphed.refusals > 0) == needs_queries


def give_context(config: Any, runtime: PolicyRuntime) -> None:
    """Initialize a worker that has loaded a model of one layer."""
    layers = {"0": SimpleNamespace(impl=SimpleNamespace())}
    WorkerContext(runtime).bind_layers(layers.values())
    config.compilation_config.static_forward_context = layers


def test_who_may_be_in_graphs():
    """Graphs depend on what policies do between layers, not on their names."""
    config, results = vllm_config(MODES[1]), {}
    geometry = Geometry(BLOCK, LAYERS, KV_HEADS, 1024)
    for name in available_policies():
        policy = parse_policy(configure(name, SETTINGS))
        for sessions in (False, True):
            runtime = PolicyRuntime(policy, geometry, sessions)
            give_context(config, runtime)
            support_level = triton.TritonPolicyBuilder.get_cudagraph_support(
                config, None
            )
            results[name, sessions] = support_level == (
                AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
            )
        if policy.host_storage is not None or policy.observation is not None:
            assert not results[name, True]
        if policy.queries_needed:
            assert not results[name, True], "sessions keep the newest queries"
    alone = {name for (name, sessions), may in results.items() if may and not sessions}
    assert {"full", "snapkv", "streaming-llm", "kvzip", "flowkv"} <= alone
    assert not {"icecache", "sekv", "quest"} & alone
    assert results["streaming-llm", True]


@pytest.mark.parametrize("folds", [False, True])
def test_who_observes_answers_stays_out(folds):
    """Graphs depend on the settings of the policy."""
    policy = parse_policy(configure("h2o", SETTINGS | (FOLDING if folds else {})))
    runtime = PolicyRuntime(policy, Geometry(BLOCK, LAYERS, KV_HEADS, 1024))
    assert runtime.observer.decode_needs_only_page_lists != folds


@pytest.mark.parametrize(("window", "may"), [(15, True), (16, False)])
def test_who_wants_the_queries_of_every_step_stays_out(window, may):
    """Blocks have 16 tokens, and each is compacted."""
    settings = SETTINGS | FOLDING | {"budget": 64, "window": window}
    policy = parse_policy(configure("snapkv", settings | {"decode_budget": 64}))
    runtime = PolicyRuntime(policy, Geometry(BLOCK, LAYERS, KV_HEADS, 1024))
    assert (graphs.problems(vllm_config(MODES[1]), runtime) == []) == may


def test_flashinfer_does_not_plan_every_layer_for_every_size(monkeypatch):
    for more, has_table in (({}, True), (UNEVEN, False)):
        policy = parse_policy(configure("snapkv", SETTINGS | more))
        engine = Engine(monkeypatch, policy, "flashinfer", MODES[1], "V2")
        assert (engine.builder.table is not None) == has_table


def test_flashinfer_s_graphs_share_their_page_lists(monkeypatch):
    """Only captured sizes have metadata buffers; other sizes are never replayed."""
    policy = parse_policy(configure("snapkv", SETTINGS | FOLDING))
    engine = Engine(monkeypatch, policy, "flashinfer", MODES[1], "V1")
    batch_sizes = set()
    engine.capture()
    while rows := engine.scheduled():
        batch_sizes.add(len(rows))
        engine.step()
    assert batch_sizes - set(SIZES)
    wrappers = engine.builder._wrappers
    assert {rows for kind, rows in wrappers if kind == "captured"} == set(SIZES)
    buffers = [wrappers["captured", rows].buffers for rows in SIZES]
    for parts in zip(*buffers, strict=True):
        assert len({part.data_ptr() for part in parts}) == 1


def test_tables_that_are_too_large_stay_out(monkeypatch, caplog):
    policy = parse_policy(configure("snapkv", SETTINGS | UNEVEN))
    runtime = PolicyRuntime(policy, Geometry(BLOCK, 32, 8, 1024))
    config = vllm_config(MODES[1])
    give_context(config, runtime)
    assert graphs.problems(config, runtime) == []
    config.model_config.max_model_len = 1 << 24
    (problem,) = graphs.problems(config, runtime)
    assert "32 x 4 requests x 8 KV heads x 1048576 pages" in problem
    support_level = triton.TritonPolicyBuilder.get_cudagraph_support(config, None)
    assert support_level is AttentionCGSupport.NEVER
    with caplog.at_level("INFO", logger="vllm.kv_policy"):
        cpu = torch.device("cpu")
        assert graphs.fixed_table(config, runtime, cpu, [problem]) is None
    assert "stays outside of CUDA graphs" in caplog.text


@pytest.mark.parametrize(
    ("support", "mode"),
    [
        (AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, "FULL_AND_PIECEWISE"),
        (AttentionCGSupport.NEVER, "PIECEWISE"),
    ],
)
def test_what_vllm_makes_of_it(support, mode):
    config = CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE,
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
    )
    config.set_splitting_ops_for_v1(all2all_backend="naive", data_parallel_size=1)
    results = config.resolve_cudagraph_mode_and_sizes(support, "CUSTOM")
    assert results.name == mode


def test_a_cache_made_to_measure_graphs_with_is_let_go(monkeypatch):
    policy = parse_policy(configure("snapkv", SETTINGS))
    engine = Engine(monkeypatch, policy, "flash", MODES[1], "V1")
    engine.capture()
    first = engine.runtime.heap
    assert first is not None
    engine.context.register_heap_binding(engine.builder._bind_heap)
    assert engine.runtime.heap is engine.runtime.tables is None
    engine.capture()
    assert engine.runtime.heap is not first


def test_a_step_that_is_wanted_may_not_be_replayed(monkeypatch):
    """If vLLM replays such a graph nevertheless, an error is raised."""
    policy = parse_policy(configure("snapkv", SETTINGS))
    engine = Engine(monkeypatch, policy, "flash", MODES[1], "V1")
    monkeypatch.setattr(engine.runtime, "requires_layers", lambda rows: False)
    engine.adapter._needs_layers = lambda rows: False
    engine.capture()
    with pytest.raises(AssertionError, match="did not report"):
        engine.live()
