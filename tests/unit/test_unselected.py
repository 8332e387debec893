"""Attention to means of the tokens that a query does not select."""

from __future__ import annotations

import random

import pytest
import torch
from fake_engine import LAYERS, Request
from fake_sessions import SessionEngine
from mean_engine import MeanEngine
from retrieving_engine import BLOCK, BLOCKS, RETRIEVERS, SINKS, SKIP, WINDOW, engine

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.errors import KVPolicyError, codes_in
from vllm_kvplugins.ops.unselected import (
    ChunkRuns,
    logarithms,
    unselected_logs,
    write_unselected,
)
from vllm_kvplugins.plan.geometry import Geometry
from vllm_kvplugins.policies import get_policy_class

SEED = 20261128
CPU = torch.device("cpu")
PROMPTS = (40, 75, 120)


@pytest.fixture(autouse=True)
def _as_in_an_engine():
    with torch.inference_mode():
        yield


def answered(fake: MeanEngine, prompt: int = 43) -> Request:
    request = fake.add("r", prompt, 60)
    while not request.done:
        fake.step({"r": 11})
    return request


@pytest.mark.each_value
@pytest.mark.parametrize("name", RETRIEVERS)
@pytest.mark.parametrize("size", [1, 3, 8])
def test_tokens_that_are_not_selected_count_by_their_means(name, size):
    """Chunks fill while tokens are generated, and end inside of blocks."""
    fake = engine(name, kind=MeanEngine, mean_tokens=size)
    answered(fake)
    assert fake.with_means > 100
    fake.remove("r")
    fake.check_idle()
    assert fake.retrieval.allocated_device_bytes == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"age_blocks": 3},
        {"reuse_every": 2},
        {"prefill_block": 16},
        {"name": "icecache", "index": "device", "host_memory": 1 << 20},
        {"name": "icecache", "index": "dci", "fetch": "pages"},
    ],
    ids=str,
)
def test_settings_of_retrieval_go_with_means(settings):
    fake = engine(
        **{"name": "icecache", "kind": MeanEngine, "mean_tokens": 4} | settings
    )
    answered(fake, 90)
    assert fake.with_means > 100
    fake.remove("r")
    fake.check_idle()


def test_requests_do_not_share_entries():
    """They come, go, grow and are preempted in any order."""
    print("seed", SEED)
    rng = random.Random(SEED)
    fake = engine("exact-topk", kind=MeanEngine, mean_tokens=3)
    for number in range(4):
        fake.add(f"r{number}", rng.randint(6, 70), rng.randint(20, 60))
    step = 0
    while fake.requests:
        alive = [name for name, request in fake.requests.items() if not request.done]
        chosen = rng.sample(alive, rng.randint(1, len(alive)))
        fake.step(dict.fromkeys(chosen, 9))
        step += 1
        fake.runtime.check_integrity()
        if step == 25:
            fake.preempt("r1")
        for name, request in list(fake.requests.items()):
            if request.done:
                fake.remove(name)
    fake.check_idle()
    assert fake.with_means > 100


def test_many_tokens_that_are_computed_again_attend_to_means():
    """After a preemption, each selects its own tokens, as it did before."""
    fake = engine("exact-topk", kind=MeanEngine, mean_tokens=3, age_blocks=20)
    request = fake.add("r", 40, 76)
    while request.generated < 75:
        fake.step({"r": 40})
    fake.preempt("r")
    fake.step({"r": 40})
    fake.with_means = 0
    fake.step({"r": 33})
    assert fake.with_means >= 33 * (LAYERS - SKIP)
    fake.remove("r")
    fake.check_idle()


class Sessions(SessionEngine, MeanEngine):
    """Checks attention to means in continued requests, too."""


def with_sessions(name: str, size: int) -> Sessions:
    config = {"name": name, "budget": 9, "sinks": SINKS, "window": WINDOW}
    config |= {"skip_layers": SKIP, "mean_tokens": size}
    if "page_tokens" in get_policy_class(name).model_fields:
        config["page_tokens"] = 3
    return Sessions(config, BLOCK, BLOCKS, sessions=True)


@pytest.mark.parametrize("in_place", [False, True], ids=["loaded", "parked"])
@pytest.mark.parametrize("name", ["exact-topk", "icecache"])
def test_a_session_keeps_its_means_on_the_host(name, in_place):
    fake = with_sessions(name, 3)
    source, saved = Request.make("r", 140, 0), None
    for prompt in PROMPTS:
        if saved is None:
            request = fake.add("r", prompt, 15)
            request.keys, request.values = source.keys, source.values
            request.queries, request.visible = source.queries, source.visible
        else:
            request = fake.resume(request, saved, prompt, 15, in_place=in_place)
        while not request.done:
            fake.step({"r": 10})
        saved = fake.save("r")
        assert fake.retrieval.allocated_device_bytes == 0, "it waits on the host"
        fake.retrieval.check_integrity()
        fake.remove("r")
    assert fake.with_means > 50
    fake.transfer.discard(saved)
    fake.check_idle()


@pytest.mark.parametrize("size", [1, 4, 32])
def test_bytes_are_those_that_the_policy_plans(size):
    """The plan of a request counts what the engine allocates for it."""
    fake = engine("exact-topk", kind=MeanEngine, mean_tokens=size)
    request = answered(fake, 110)
    policy = fake.runtime.policy
    geometry = Geometry(BLOCK, LAYERS, 2, fake.heap.bytes_per_token, 8, 4)
    used = fake.retrieval.device_bytes("r")
    assert 0 < used <= policy.device_bytes(request.computed, geometry)
    more = policy.device_bytes(request.computed + 8 * size, geometry)
    assert used >= policy.device_bytes(request.computed, geometry) * 0.7
    assert more > policy.device_bytes(request.computed, geometry)
    full = policy.model_copy(update={"host_memory": 1 << 20})
    row = 2 * 8 * 4
    entries = (1 << 20) // row // size
    assert full.reserved_device_bytes(geometry) == pytest.approx(entries * (row + 4))
    without = parse_policy({"name": "exact-topk"})
    assert without.device_bytes(4000, geometry) == 0


def test_biases_are_logarithms_of_what_is_left():
    selected = torch.tensor([[[0, 5, 6, 7, 9]], [[1, 2, 0, 0, 0]]])
    logs = logarithms(4, CPU)
    left = unselected_logs(selected, torch.tensor([5, 2]), 3, logs)
    expected = torch.tensor([[[3.0, 1.0, 3.0]], [[2.0, 4.0, 4.0]]]).log()
    torch.testing.assert_close(left, expected)
    every = torch.arange(8)[None, None]
    assert unselected_logs(every, torch.tensor([8]), 2, logs).eq(-torch.inf).all()


@pytest.mark.parametrize("size", [1, 5, 64])
def test_compiled_biases_are_those_of_torch(monkeypatch, size):
    """Bit for bit, with runs of different lengths, and nothing else is written."""
    generator = torch.Generator().manual_seed(SEED)
    heads, tokens, width = 3, (0, size - 1, 130, 333), 40
    held = [torch.randperm(max(n, width), generator=generator)[:width] for n in tokens]
    token = torch.stack([rows.expand(heads, -1) for rows in held])[[2, 0, 3, 1]]
    slot_indices, counts = torch.tensor([1, 3, 0, 2]), torch.tensor([0, 0, 40, 31])
    chunks = torch.tensor([n // size for n in tokens])
    room = int(chunks.max()) + 2
    first = torch.arange(4 * heads).view(4, heads).flip(0) * room + 1
    runs = ChunkRuns.of(first, chunks, CPU, CPU)
    logs, biases = logarithms(size, CPU), {}
    for ops in ("compiled", "torch"):
        monkeypatch.setenv("KVP_OPS", ops)
        biases[ops] = torch.full((4 * heads * room + 1,), torch.nan)
        write_unselected(biases[ops], runs, token, slot_indices, counts, logs)
    torch.testing.assert_close(
        biases["compiled"], biases["torch"], rtol=0, atol=0, equal_nan=True
    )
    written = int((~biases["torch"].isnan()).sum())
    assert written == heads * int(chunks.sum())


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"token": torch.tensor([[[3, 3]]])}, "token"),
        ({"token": torch.tensor([[[3, -1]]])}, "token"),
        ({"slot_indices": torch.tensor([1])}, "slot_indices"),
        ({"counts": torch.tensor([3])}, "counts"),
        ({"logs": torch.zeros(1)}, "logs"),
        ({"bias": torch.zeros(1)}, "starts"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_wrong_arguments_are_named(monkeypatch, change, what):
    monkeypatch.setenv("KVP_OPS", "compiled")
    good = {
        "bias": torch.zeros(5),
        "runs": ChunkRuns.of(torch.tensor([[0]]), torch.tensor([5]), CPU, CPU),
        "token": torch.tensor([[[3, 4]]]),
        "slot_indices": torch.tensor([0]),
        "counts": torch.tensor([2]),
        "logs": logarithms(1, CPU),
    }
    write_unselected(**good)
    with pytest.raises(ValueError, match=rf"kvp\.unselected_bias: {what}"):
        write_unselected(**good | change)


@pytest.mark.parametrize(
    "settings", [{"prefetch": "step"}, {"prefetch": "layer"}, {"fetch": "pages"}]
)
def test_settings_without_means_are_refused(settings):
    config = {"name": "icecache", "mean_tokens": 32, **settings}
    with pytest.raises(KVPolicyError) as refused:
        parse_policy(config)
    assert "KVP144" in codes_in(str(refused.value))
