"""Device memory of a request outside vLLM's pool of blocks."""

from __future__ import annotations

import pytest
import torch
from fake_engine import GROUP, HEAD_DIM, KV_HEADS, LAYERS, FakeEngine
from policy_settings import configure
from routers import write_random_router

from vllm_kvplugins.engine.device_memory import bytes_of_requests
from vllm_kvplugins.engine.requests import RequestState
from vllm_kvplugins.engine.windows import StepQueries, Window
from vllm_kvplugins.model_config import ModelFingerprint

BLOCK, PROMPT, BUDGET = 16, 400, 96


def compacted(name: str, **settings: object) -> FakeEngine:
    """An engine that has just compacted request ``r``."""
    policy = configure(name, {"budget": BUDGET} | settings)
    engine = FakeEngine(policy, BLOCK, blocks=64)
    engine.add("r", PROMPT, 4)
    assert engine.runtime.device_bytes("r") == 0
    engine.step({"r": PROMPT})
    return engine


def positions_of(engine: FakeEngine) -> torch.Tensor:
    resident = engine.runtime.request_state("r").resident
    assert resident is not None
    return resident.positions


@pytest.mark.parametrize(("allocator", "scopes"), [("uniform", 1), ("cross-layer", 3)])
def test_page_lists_and_positions_count(allocator, scopes):
    engine = compacted("snapkv", window=16, allocator=allocator)
    positions = positions_of(engine)
    pages_per_head = positions.shape[1] // BLOCK
    page_lists = scopes * KV_HEADS * (4 * pages_per_head + 8) + 8  # counts and tail
    expected = positions.numel() * 4 + page_lists
    # The lists have spare room for the next request.
    assert expected <= engine.runtime.device_bytes("r") <= 1.1 * expected
    engine.runtime.finish(["r"])
    assert engine.runtime.device_bytes("r") == 0


@pytest.mark.parametrize("second_order", [False, True])
@pytest.mark.parametrize("routed", [False, True])
def test_the_bytes_that_plans_assume_of_spans_are_those_of_the_tensors(
    routed, second_order, tmp_path
):
    """The plan's formula gives ``device_bytes``; the rest counts tensors."""
    settings: dict[str, object] = {"second_order": second_order}
    if routed:
        settings["router"] = str(tmp_path / "router.safetensors")
        model = ModelFingerprint(
            architecture="LlamaForCausalLM",
            num_layers=LAYERS,
            num_heads=KV_HEADS * GROUP,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            hidden_size=32,
            vocab_size=100,
            rope=None,
        )
        random = torch.Generator().manual_seed(0)
        write_random_router(tmp_path / "router.safetensors", model, random)
    engine = compacted("sekv", **settings)
    # One request alone fills the arena, and no hidden states wait.
    spans = engine.spans
    assert spans.device_bytes("r") == spans.allocated_device_bytes > 0
    held = engine.runtime.device_bytes("r") - engine.runtime.tables.request_bytes
    assert held == spans.device_bytes("r") + positions_of(engine).nbytes
    row_bytes = LAYERS * KV_HEADS * 2 * HEAD_DIM * 4
    in_pages = positions_of(engine).shape[1] * row_bytes
    assert (BUDGET - BLOCK) * row_bytes < in_pages + held <= BUDGET * row_bytes
    engine.runtime.finish(["r"])
    assert spans.device_bytes("r") == spans.allocated_device_bytes == 0


# -- all requests together: vllm:kv_policy_device_table_bytes ----------------------


@pytest.mark.parametrize("name", ["snapkv", "sekv"])
def test_the_total_covers_every_request(name):
    engine = compacted(name)
    runtime = engine.runtime
    one = runtime.device_table_bytes
    assert one >= runtime.device_bytes("r")
    engine.add("s", PROMPT, 4)
    engine.step({"s": PROMPT})
    assert runtime.device_table_bytes >= sum(map(runtime.device_bytes, "rs"))
    assert runtime.device_table_bytes > one
    runtime.finish(["r", "s"])
    # Page lists keep their room; positions, means and entries are gone.
    assert runtime.device_table_bytes == runtime.tables.num_bytes < one


def test_kept_queries_and_observations_count():
    engine = FakeEngine(configure("h2o", {"budget": BUDGET}), BLOCK, blocks=64)
    engine.add("r", PROMPT, 4)
    before = engine.runtime.device_table_bytes
    engine.step({"r": 64})
    state = engine.runtime.request_state("r")
    observed = sum(tensor.nbytes for tensor in state.observed.values())
    window = state.window.num_bytes if state.window else 0
    assert observed > 0
    assert engine.runtime.device_table_bytes == before + observed + window


def test_a_window_counts_its_own_queries():
    step = StepQueries(LAYERS)
    window, other = Window(3, 3), Window(0, 0)
    other.add(step, 0, 5)
    window.add(step, 5, 2)
    assert window.num_bytes == 0, "no layer has attended"
    for layer in range(LAYERS):
        step.put(layer, torch.zeros(7, 4, HEAD_DIM))
    assert window.num_bytes == LAYERS * 2 * 4 * HEAD_DIM * 4
    assert other.num_bytes == LAYERS * 5 * 4 * HEAD_DIM * 4


def test_only_tensors_on_the_device_count():
    device, floats = torch.device("cpu"), torch.zeros(6)
    meta = torch.zeros(9, device="meta")
    state = RequestState(observed={0: (floats, [meta]), 1: {"a": floats[:1]}})
    assert bytes_of_requests([state], device) == 24 + 4
    shared = RequestState(observed=dict.fromkeys(range(3), floats))
    assert bytes_of_requests([shared], device) == 24
