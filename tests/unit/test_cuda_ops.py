"""The CUDA ops against the CPU's, on a machine with a GPU; skipped elsewhere.

``test_csrc.py`` tests their kernels without a GPU. scripts/check_compute_sanitizer.sh
runs these tests under compute-sanitizer.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layouts import make_layout

from vllm_kvplugins import ops
from vllm_kvplugins.engine.retrieval import pinned
from vllm_kvplugins.engine.retrieval.host_tier import HostTier
from vllm_kvplugins.ops import clusters, host_fetch
from vllm_kvplugins.ops.extension import load_extension
from vllm_kvplugins.scoring import attention_votes

LAYOUTS = ["natural", "interleaved", "transposed", "permuted"]
NUM_PAGES = 9


@pytest.fixture(autouse=True)
def device(monkeypatch) -> torch.device:
    """The GPU; skips the test without a GPU or without ops for it."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    if not load_extension().has_cuda:
        pytest.skip(load_extension().reason or "the extension has no CUDA kernels")
    monkeypatch.setenv("KVP_OPS", "compiled")
    return torch.device("cuda")


def moved(arguments: Any, device: torch.device) -> Any:
    """Move tensors, and objects that contain them, to a device."""
    if isinstance(arguments, torch.Tensor | ops.PageLayout):
        return arguments.to(device)
    if isinstance(arguments, tuple):
        return tuple(moved(argument, device) for argument in arguments)
    if isinstance(arguments, ops.PagedKV | ops.VoteSlots | ops.VoteQueries):
        names = [each.name for each in dataclasses.fields(arguments)]
        return dataclasses.replace(
            arguments,
            **{name: moved(getattr(arguments, name), device) for name in names},
        )
    return arguments


def check_same_bits(op: Callable[..., Any], arguments: tuple[Any, ...], device) -> None:
    """The result of an op, and its first argument, which it may modify."""
    here, there = moved(arguments, torch.device("cpu")), moved(arguments, device)
    if device.type == "cpu":  # to test this test
        there = copy.deepcopy(there)
    expected, on_gpu = op(*here), moved(op(*there), torch.device("cpu"))
    written, right = memory_of(there[0]).cpu(), memory_of(here[0])
    for result, expected_result in ((written, right), (on_gpu, expected)):
        if not isinstance(expected_result, tuple):
            result, expected_result = (result,), (expected_result,)
        for one, other in zip(result, expected_result, strict=True):
            if other is not None:
                assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def memory_of(argument: torch.Tensor | ops.PagedKV) -> torch.Tensor:
    return argument.pages if isinstance(argument, ops.PagedKV) else argument


def random_bits(generator: torch.Generator, *shape: int, dtype: torch.dtype):
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    low, high = torch.iinfo(bits).min, torch.iinfo(bits).max
    factors = torch.randint(low, high, shape, generator=generator)
    return factors.to(bits).view(dtype)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize(("block_size", "head_dim"), [(16, 128), (32, 80), (5, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_page_copies(device, dtype, block_size, head_dim, kind):
    seed = 100 * block_size + head_dim
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    layout = make_layout(kind, block_size, head_dim, seed)
    heap = random_bits(generator, NUM_PAGES, layout.page_elems, dtype=dtype)
    places = torch.randperm(NUM_PAGES * block_size, generator=generator)
    pages, slots = places // block_size, places % block_size
    n = len(places) // 2
    source, target = (pages[:n], slots[:n]), (pages[n : 2 * n], slots[n : 2 * n])
    rows = [random_bits(generator, n, head_dim, dtype=dtype) for _ in range(2)]
    table = torch.randint(NUM_PAGES, (3, 4), generator=generator)
    kv = ops.PagedKV(heap, layout)
    check_same_bits(ops.gather_tokens, (kv, *source), device)
    check_same_bits(ops.gather_keys, (kv, table), device)
    check_same_bits(ops.gather_values, (kv, table), device)
    for op, places in (
        (ops.scatter_tokens, (*target, *rows)),
        (ops.move_tokens, (*source, *target)),
    ):
        written = ops.PagedKV(heap.clone(), layout)
        check_same_bits(op, (written, *places), device)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize(("block_size", "head_dim"), [(16, 128), (5, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fetching_out_of_pinned_memory(device, dtype, block_size, head_dim, kind):
    """The kernel reads host memory at the host's addresses."""
    print("seed 9")
    generator = torch.Generator().manual_seed(9)
    layout = make_layout(kind, block_size, head_dim, 9)
    n, num_rows = 3 * block_size, 500
    heap = random_bits(generator, NUM_PAGES, layout.page_elems, dtype=dtype)
    places = torch.randperm(NUM_PAGES * block_size, generator=generator)[:n]
    places = places // block_size, places % block_size
    expected_result = torch.randint(num_rows, (2, n), generator=generator)
    arena = pinned.PinnedArena(num_rows * head_dim * dtype.itemsize, device)
    arena.cover(len(arena.memory))
    rows = arena.memory.view(dtype).view(num_rows, head_dim)
    rows.copy_(random_bits(generator, num_rows, head_dim, dtype=dtype))
    expected, actual = heap.clone(), heap.to(device)
    ops.fetch_tokens(ops.PagedKV(expected, layout), *places, rows, *expected_result)
    ids = moved((*places, *expected_result), device)
    kv = ops.PagedKV(actual, layout.to(device))
    ops.fetch_tokens(kv, *ids[:2], rows, *ids[2:])
    arena.reads.note()
    arena.close()
    assert torch.equal(actual.cpu().view(torch.uint8), expected.view(torch.uint8))
    with pytest.raises(ValueError, match="unpin_host"):
        host_fetch.unpin(arena.memory)


def test_pages_are_given_again_when_they_are_read(device):
    """One request after another in a tier that holds only one."""
    tier = HostTier(2 * 16 * 128 * 2 * 8, 16, 128, torch.bfloat16, device)
    layout = ops.PageLayout.interleaved(16, 128).to(device)
    heap = torch.zeros(8, layout.page_elems, dtype=torch.bfloat16, device=device)
    spots = torch.arange(128).view(1, 1, 128)
    for turn in range(200):
        pages = tier.take(8)
        rows_ = torch.full((1, 128, 128), float(turn), dtype=torch.bfloat16)
        tier.write(pages[None], 0, rows_, -rows_)
        table = pages.flip(0).repeat(2).view(1, 1, 16)  # the tokens from 128 on again
        hot = ops.HotSet(spots + 128, spots // 16, spots % 16, torch.tensor([128]))
        kv = ops.PagedKV(heap, layout)
        slot_index = torch.tensor([0])
        reads = tier.reads
        assert reads is not None
        host = ops.HostPages(tier.pages, table, reads)
        ops.fill_hot(kv, host, spots, slot_index, hot)
        tier.release(pages)
        if turn % 10 == 9:
            own = heap.view(8, 16, 2, 128)
            assert bool((own[:, :, 0] == turn).all() and (own[:, :, 1] == -turn).all())
    tier.close()


@pytest.mark.parametrize("page_elems", [2048, 12, 7])
def test_bulk_copies(device, page_elems):
    print("seed 5")
    generator = torch.Generator().manual_seed(5)
    source = random_bits(generator, 6, page_elems, dtype=torch.bfloat16)
    target = random_bits(generator, 9, page_elems, dtype=torch.bfloat16)
    to, come_from = torch.tensor([8, 0, 3, 5]), torch.tensor([5, 1, 1, 0])
    for targets in (None, to):
        for sources in (None, come_from):
            arguments = (target.clone(), targets, source[:4], sources)
            if sources is not None:
                arguments = (target.clone(), targets, source, sources)
            check_same_bits(ops.copy_pages, arguments, device)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("largest", [False, True])
def test_page_votes(device, dtype, kind, largest):
    """Its exponentials differ from the CPU's in the last bits."""
    print("seed 6")
    generator = torch.Generator().manual_seed(6)
    layout = make_layout(kind, 16, 128, seed=6)
    heap = torch.randn(200, layout.page_elems, generator=generator).to(dtype)
    table = torch.randperm(200, generator=generator)[:140].view(2, 70)
    positions = torch.randperm(1110, generator=generator).repeat(2, 1)
    positions[1, ::7] = -1
    queries = torch.randn(6, 40, 128, generator=generator).to(dtype)
    own = torch.randn(2, 40, 128, generator=generator).to(dtype)
    for first, keys in ((1070, None), (1110, own)):
        at = torch.arange(first, first + 40)
        arguments = (
            ops.PagedKV(heap, layout),
            ops.VoteSlots(table, positions),
            ops.VoteQueries(queries, at, keys),
            0.09,
            largest,
        )
        expected = ops.page_votes(*arguments)
        votes = [ops.page_votes(*moved(arguments, device)).cpu() for _ in range(2)]
        torch.testing.assert_close(votes[0], expected, atol=1e-6, rtol=1e-4)
        assert torch.equal(*votes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reconstruction(device, dtype):
    print("seed 7")
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(2, 130, 80, generator=generator).to(dtype)
    starts, lengths = torch.tensor([0, 33, 97]), torch.tensor([33, 64, 16])
    factors = ops.truncated_svd(rows, starts, lengths, 32)
    there = dataclasses.replace(factors, factors=factors.factors.to(device))
    which = torch.tensor([5, 0, 4])
    expected = ops.reconstruct(factors, which)
    actual = ops.reconstruct(there, which)
    near = {"rtol": 1e-2, "atol": 1e-5} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(actual.cpu(), expected, **near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("holes", [False, True])
def test_assignment(device, dtype, holes):
    """Clusters are as close as the CPU's; their means are equal bit for bit."""
    print("seed 8")
    generator = torch.Generator().manual_seed(8)
    keys = torch.randn(3, 700, 128, generator=generator).to(dtype)
    rows = torch.randn(3, 90, 128, generator=generator)
    rows = rows / rows.norm(dim=2, keepdim=True)
    rows[:, ::9] = 0
    values = torch.randn(3, 700, generator=generator)
    token = torch.rand(3, 700, generator=generator) < (0.8 if holes else 2)
    arguments = moved((keys, rows, values, token if holes else None), device)
    assert clusters.backend_for(device, dtype, 128) == "compiled"
    result = clusters.assign_and_average(*arguments)
    means, actual = moved(result, torch.device("cpu"))
    cosine = keys.float() @ rows.transpose(1, 2)
    cosine = cosine.masked_fill((rows == 0).all(2)[:, None], -torch.inf)
    reached = cosine.gather(2, actual.clamp(max=89)[..., None])[..., 0]
    assert bool((cosine.amax(2) - reached)[token].max() < 1e-4)
    assert bool((actual[~token] == 90).all())
    expected_result = attention_votes.cluster_mean(
        values.masked_fill(~token, 0), actual, 91
    )
    assert torch.equal(means[token], expected_result[token])
    assert bool((means[~token] == 0).all())


def test_an_index_out_of_range_traps(device):
    """In its own process, because a trap destroys the CUDA context."""
    code = (
        "import torch; from vllm_kvplugins import ops\n"
        "layout = ops.PageLayout.interleaved(4, 8).to('cuda')\n"
        "heap = torch.zeros(3, layout.page_elems, device='cuda')\n"
        "table = torch.tensor([[3]], device='cuda')\n"
        "ops.gather_keys(ops.PagedKV(heap, layout), table)\n"
        "torch.cuda.synchronize()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode != 0
    assert "CUDA error" in done.stderr
