"""A device that selects tokens itself, in the fake engine and in its surroundings.

The device is the CPU here, which runs the torch versions. The fake engine checks that
attention covers sinks, window and the tokens in hot slots, and nothing else.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_engine import GROUP, HEAD_DIM, KV_HEADS, LAYERS, SCALE, Request
from fake_sessions import SessionEngine
from retrieving_engine import (
    BLOCK,
    BLOCKS,
    SINKS,
    SKIP,
    WINDOW,
    RetrievingEngine,
    engine,
)

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.errors import KVPolicyError, codes_in
from vllm_kvplugins.index import CodeScan, DeviceSelection, Keys
from vllm_kvplugins.plan.geometry import Geometry

SEED = 20261126
ON_DEVICE = {"index": "device", "host_memory": 1 << 20}
EIGHT_GIB = {"name": "icecache", "host_memory": "8GiB"}
PAGE = 16


@pytest.fixture(autouse=True)
def _as_in_an_engine():
    with torch.inference_mode():
        yield


def selected(fake: RetrievingEngine, request: Request, layer: int) -> torch.Tensor:
    """What the last step's query selects by codes, bool [KV_HEADS, host tokens]."""
    tokens = fake.retrieval._requests[request.name].tokens
    keys = request.keys[layer][:, SINKS : SINKS + tokens]
    index = CodeScan(KV_HEADS, HEAD_DIM)
    index.append(keys, 0)
    query = request.queries[layer, request.computed - 1].view(KV_HEADS, GROUP, -1)
    count = fake.retrieval.hot_tokens(request.name, layer).shape[1]
    chosen = index.select(query, Keys.dense(keys), SCALE, count)
    return torch.zeros(KV_HEADS, tokens, dtype=torch.bool).scatter_(1, chosen, True)


def retrieved(fake: RetrievingEngine, request: Request, chunk: int) -> bool:
    """Run a step. Whether the request fetched tokens, which no compaction replaced."""
    compactions = len(request.kept)
    fake.step({request.name: chunk})
    return len(request.kept) == compactions and bool(fake.retrieval._batches)


def check_hot(fake: RetrievingEngine, request: Request, layer: int, by: int) -> None:
    hot = fake.retrieval.hot_tokens(request.name, layer)
    expected = selected(fake, request, by)
    here = torch.zeros_like(expected).scatter_(1, hot, True)
    assert here.sum(1).equal(expected.sum(1))
    assert here.equal(expected)


@pytest.mark.each_value
@pytest.mark.parametrize("age_blocks", [1, 3])
@pytest.mark.parametrize("prompt", [6, 40, 43, 110, 145, 210])
def test_hot_tokens_are_those_that_codes_choose(prompt, age_blocks):
    """Also before and after the first 128 tokens, which measure the codes."""
    fake = engine("icecache", age_blocks=age_blocks, **ON_DEVICE)
    request, compared = fake.add("r", prompt, 60), 0
    while not request.done:
        if not retrieved(fake, request, 11):
            continue
        for layer in range(SKIP, LAYERS):
            check_hot(fake, request, layer, layer)
            compared += 1
    assert compared > 40
    traffic = fake.retrieval.take_traffic()
    assert traffic.selected > traffic.fetched > 0
    fake.remove("r")
    fake.check_idle()
    assert fake.retrieval.tier.num_free == len(fake.retrieval.tier.pages)


def test_layers_that_reuse_a_selection_keep_its_best():
    """Layer 1 selects for layer 2, which may have another number of hot slots."""
    fake = engine("icecache", reuse_every=2, **ON_DEVICE)
    request, sizes = fake.add("r", 150, 40), set()
    while not request.done:
        if not retrieved(fake, request, 150):
            continue
        hot = [fake.retrieval.hot_tokens("r", layer) for layer in (1, 2)]
        sizes.add(tuple(each.shape[1] for each in hot))
        few, many = sorted((row for row in hot), key=lambda each: each.shape[1])
        for head in range(KV_HEADS):
            assert set(few[head].tolist()) <= set(many[head].tolist())
        check_hot(fake, request, 1, 1)
    state = fake.retrieval._requests["r"]
    assert (state.first_layer, len(state.pages)) == (1, 2)
    assert set(state.spaces) == {1}, "codes that no query scores"
    assert any(few != many for few, many in sizes)
    fake.remove("r")
    fake.check_idle()


@pytest.mark.parametrize("seed", range(4))
def test_random_traffic(seed):
    """Chunks of any length, several requests at once, preemptions and aborts."""
    rng = random.Random(seed)
    fake = engine(
        "icecache",
        prefill_block=rng.choice([None, 9, 16]),
        age_blocks=rng.choice([1, 3]),
        reuse_every=rng.choice([1, 2]),
        **ON_DEVICE,
    )
    numbers = iter(range(1000))
    for _ in range(60):
        if len(fake.requests) < 3:
            name = f"{seed}.{next(numbers)}"
            fake.add(name, rng.randint(3, 200), rng.randint(1, 12))
        alive = [n for n, request in fake.requests.items() if not request.done]
        some = {n: rng.randint(1, 40) for n in alive if rng.random() < 0.8}
        fake.step(some or {alive[0]: 1})
        for n in [n for n, request in fake.requests.items() if request.done]:
            fake.remove(n)
        if fake.requests and rng.random() < 0.1:
            victim = rng.choice(list(fake.requests))
            (fake.preempt if rng.random() < 0.7 else fake.remove)(victim)
    for n in list(fake.requests):
        fake.remove(n)
    fake.check_idle()
    assert fake.retrieval.take_traffic().fetched > 0


class Engine(SessionEngine, RetrievingEngine):
    """Checks attention over fetched tokens, also in continued requests."""


@pytest.mark.parametrize("in_place", [False, True], ids=["loaded", "parked"])
def test_sessions_keep_their_codes(in_place):
    """If the session leaves the pool, another request has other codes in between, in
    the same slot index.
    """
    config = {"name": "icecache", "budget": 9, "sinks": SINKS, "window": WINDOW}
    config |= {"skip_layers": SKIP, **ON_DEVICE}
    fake = Engine(config, BLOCK, 2 * BLOCKS, sessions=True)
    source, saved = Request.make("r", 260, 0), None
    for turn, prompt in enumerate((160, 200, 240)):
        if saved is None:
            request = fake.add("r", prompt, 15)
            request.keys, request.values = source.keys, source.values
            request.queries, request.visible = source.queries, source.visible
        else:
            request = fake.resume(request, saved, prompt, 15, in_place=in_place)
        while not request.done:
            if retrieved(fake, request, 10):
                check_hot(fake, request, SKIP, SKIP)
        saved = fake.save("r")
        fake.remove("r")
        if in_place:
            continue
        other = fake.add(f"other {turn}", 150, 8)
        while not other.done:
            fake.step({other.name: 50})
        fake.remove(other.name)
    fake.transfer.discard(saved)
    fake.check_idle()
    assert fake.retrieval.tier.num_free == len(fake.retrieval.tier.pages)


def test_a_request_with_nan_keys_leaves_others_alone():
    fakes = [engine("icecache", **ON_DEVICE) for _ in range(2)]
    hot = []
    for number, fake in enumerate(fakes):
        well, sick = fake.add("well", 150, 20), fake.add("sick", 140, 20)
        fake.attend_every = 10_000  # a sick request attends to NaN
        if number:
            sick.keys[:, :, 60:] = torch.nan
            sick.queries[:, 150:] = torch.inf
        while not well.done:
            fake.step({"well": 150, "sick": 140})
        hot.append([fake.retrieval.hot_tokens("well", layer) for layer in (1, 2)])
        tokens = fake.retrieval.hot_tokens("sick", 1)
        assert all(len(set(head)) == tokens.shape[1] for head in tokens.tolist())
        assert fake.retrieval.take_traffic().failed == 0
    for one, other in zip(*hot, strict=True):
        assert one.sort().values.equal(other.sort().values)


# -- device memory ---------------------------------------------------------------------


def test_codes_count_as_device_memory():
    """head_dim + 4 bytes per token, KV head and layer that selects."""
    fake = engine("icecache", **ON_DEVICE)
    runtime, tier = fake.runtime, fake.retrieval.tier
    policy, geometry = runtime.policy.retrieval, runtime.geometry
    codes = len(tier.pages) * PAGE * (HEAD_DIM + 4)
    assert policy.reserved_device_bytes(geometry) == codes
    assert fake.retrieval.allocated_device_bytes == codes
    request = fake.add("r", 150, 30)
    peak = 0
    while not request.done:
        fake.step({"r": 150})
        used = (len(tier.pages) - tier.num_free) * PAGE * (HEAD_DIM + 4)
        assert fake.retrieval.device_bytes("r") == used > 0
        assert runtime.device_bytes("r") > used
        peak = max(peak, used)
    widths = fake.retrieval.allocated_device_bytes - codes
    assert 0 < widths <= 2 * (LAYERS - SKIP) * KV_HEADS * HEAD_DIM * 4
    assert runtime.device_table_bytes > codes
    assert peak <= policy.device_bytes(180, geometry) < codes
    fake.remove("r")
    fake.check_idle()
    assert fake.retrieval.device_bytes("r") == 0
    host = engine("icecache", host_memory=1 << 20)
    assert host.retrieval.allocated_device_bytes == 0
    assert host.runtime.policy.retrieval.reserved_device_bytes(geometry) == 0


def test_a_quarter_of_what_the_host_stores_in_bfloat16():
    """Llama-3.1-8B on two ranks: 132 bytes of codes next to 512 of keys and values."""
    policy = parse_policy(EIGHT_GIB | {"index": "device"})
    geometry = Geometry(16, 32, 4, 2 * 32 * 8 * 128 * 2, 128, 2)
    assert geometry.rank_share == 0.5
    reserved = policy.retrieval.reserved_device_bytes(geometry)
    assert reserved == (8 << 30) * 132 // 512
    assert policy.host_bytes(4096, geometry) == policy.offloaded_bytes(4096, geometry)


def test_vllm_gets_the_rest(monkeypatch):
    pytest.importorskip("vllm")
    from vllm.v1.worker.gpu_worker import Worker

    from vllm_kvplugins.vllm_adapter.worker.gpu_worker import KVPolicyGPUWorker

    monkeypatch.setattr(Worker, "determine_available_memory", lambda self: 10 << 30)
    geometry = Geometry(16, 32, 4, 2 * 32 * 8 * 128 * 2, 128, 2)

    def given(pool: int | None = None, **settings: Any) -> int:
        worker = KVPolicyGPUWorker.__new__(KVPolicyGPUWorker)
        policy = parse_policy(EIGHT_GIB | settings)
        runtime = SimpleNamespace(policy=policy, geometry=geometry)
        worker.kv_policy = SimpleNamespace(runtime=runtime)
        worker.cache_config = SimpleNamespace(kv_cache_memory_bytes=pool)
        return worker.determine_available_memory()

    codes_here = (4 << 30) * 132 // 512
    assert given(index="device") == (10 << 30) - codes_here
    assert given() == given(5 << 30, index="device") == 10 << 30
    means_here = (4 << 30) // 64 * 516 // 512
    assert given(mean_tokens=64) == pytest.approx((10 << 30) - means_here, abs=4)
    with pytest.raises(KVPolicyError, match="KVP145"):
        given(mean_tokens=1, host_memory="40GiB")


# -- settings --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"host_memory": None}, "KVP142"),
        ({"fetch": "pages"}, "KVP143"),
        ({"prefetch": "step"}, "KVP143"),
        ({"host_dtype": "int8"}, "KVP143"),
        ({"lazy_index": True}, "KVP143"),
    ],
    ids=str,
)
def test_settings_of_a_search_on_the_host_are_refused(more: dict[str, Any], code: str):
    config = {"name": "icecache", **ON_DEVICE}
    assert isinstance(parse_policy(config).retrieval.device_selection, DeviceSelection)
    with pytest.raises(KVPolicyError) as caught:
        parse_policy(config | more)
    assert codes_in(str(caught.value)) == (code,)


def test_it_needs_no_extension_on_a_cpu(monkeypatch):
    monkeypatch.setenv("KVP_OPS", "torch")
    assert parse_policy({"name": "icecache", **ON_DEVICE}).name == "icecache"
    with pytest.raises(KVPolicyError, match="KVP403"):
        parse_policy({"name": "icecache"})


def test_a_gpu_must_read_host_memory_and_a_cpu_need_not(monkeypatch):
    pytest.importorskip("vllm")
    from vllm_kvplugins.vllm_adapter.config import host_memory

    policy = parse_policy({"name": "icecache", **ON_DEVICE})
    messages = {}
    for kind in ("cpu", "cuda"):
        platform = SimpleNamespace(is_cpu=lambda kind=kind: kind == "cpu")
        monkeypatch.setattr("vllm.platforms.current_platform", platform)
        messages[kind] = host_memory.fetch_problems(policy)
    assert messages["cpu"] == []
    (message,) = messages["cuda"]
    assert codes_in(message) == ("KVP033",)
    assert "index 'device' needs" in message
    assert host_memory.pinning_problems(policy, torch.device("cpu")) == []
    (message,) = host_memory.pinning_problems(policy, torch.device("cuda"))
    assert "set index 'auto'" in message
