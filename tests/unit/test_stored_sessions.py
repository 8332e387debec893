"""Sessions stored in 8 or 4 bits: contents, sizes, files, and what they are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine import HEAD_DIM, KV_HEADS, LAYERS, Request
from fake_sessions import SessionEngine
from test_sessions_runtime import BLOCK, run, says, small

from vllm_kvplugins import ops
from vllm_kvplugins.config import parse_policy, parse_sessions
from vllm_kvplugins.engine.heap import Heap
from vllm_kvplugins.engine.windows import Window
from vllm_kvplugins.errors import KVPolicyError, codes_in
from vllm_kvplugins.ops import QuantizedRows
from vllm_kvplugins.ops.layout import PageLayout
from vllm_kvplugins.plan.geometry import Geometry
from vllm_kvplugins.sessions import stored_pages
from vllm_kvplugins.sessions.commands import Session
from vllm_kvplugins.sessions.files import Identity, SessionFolder
from vllm_kvplugins.sessions.snapshot import CacheSnapshot
from vllm_kvplugins.sessions.stored_pages import query_rows, stored_bytes
from vllm_kvplugins.sessions.tensor_file import SessionFileError
from vllm_kvplugins.vllm_adapter.scheduler import session_config

DTYPES = {"int8": 8, "int4": 4}


@pytest.fixture(autouse=True)
def _as_in_an_engine():
    """vLLM runs steps in inference mode, and tensors created there stay inference
    tensors.
    """
    with torch.inference_mode():
        yield


def saved_request(
    session_dtype: str, name: str = "snapkv", **changes: Any
) -> tuple[SessionEngine, Request, CacheSnapshot]:
    """An engine whose request has ended and is saved.

    Its 51 tokens end inside of a block.
    """
    policy = small(name) | changes
    engine = SessionEngine(policy, BLOCK, 80, True, session_dtype=session_dtype)
    request = says(engine.add("r", 40, 12))
    run(engine, request, 9)
    saved = engine.save("r")
    engine.remove("r")
    return engine, request, saved


def rounded(bits: int, values: torch.Tensor) -> torch.Tensor:
    rows = QuantizedRows(HEAD_DIM, bits)
    return rows.dequantize(rows.quantize(values))


def restored(
    engine: SessionEngine, request: Request, saved: CacheSnapshot, tokens: int
) -> dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values after a load: by layer, KV head and position."""
    first = saved.compaction.retained.start if saved.compaction else 0
    blocks = [engine.free.pop() for _ in range(-(-tokens // BLOCK) - first)]
    engine.runtime.add_request("again", range(tokens + 9))
    engine.transfer.restore("again", tokens + 9, saved, tokens, blocks)
    return contents(engine, "again", tokens, blocks, first)


def contents(
    engine: SessionEngine, name: str, tokens: int, blocks: list[int], first: int
) -> dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]]:
    state = engine.runtime.request_state(name)
    runtime, found = engine.runtime, {}
    assert runtime.tables is not None
    tail = first
    if state.resident is not None:
        tail = state.resident.tail_block
        pages, counts = runtime.tables.retained(state.resident.slot_index)
        for row in range(engine.heap.rows):
            held = pages[row : row + 1, : counts[row]]
            keys = ops.gather_keys(engine.heap.kv, held)[0]
            values = ops.gather_values(engine.heap.kv, held)[0]
            positions = state.resident.positions[row, : len(keys)].tolist()
            for slot, position in enumerate(positions):
                layer, head = divmod(row, KV_HEADS)
                found[layer, head, position] = keys[slot], values[slot]
    ids = engine.heap.page_ids(torch.tensor(blocks[tail - first :]))
    keys = ops.gather_keys(engine.heap.kv, ids)
    values = ops.gather_values(engine.heap.kv, ids)
    for row in range(engine.heap.rows):
        for slot, position in enumerate(range(tail * BLOCK, tokens)):
            layer, head = divmod(row, KV_HEADS)
            found[layer, head, position] = keys[row, slot], values[row, slot]
    return found


@pytest.mark.parametrize("tokens", [51, 45], ids=["whole", "cut-off"])
@pytest.mark.parametrize("name", ["full", "snapkv", "pyramidkv"])
@pytest.mark.parametrize("session_dtype", DTYPES)
def test_a_load_restores_the_rounded_keys_and_values(session_dtype, name, tokens):
    """Bit for bit, at the positions of an exact session."""
    engine, request, saved = saved_request(session_dtype, name)
    found = restored(engine, request, saved, tokens)
    exact_engine, exact_request, exact = saved_request("auto", name)
    expected = restored(exact_engine, exact_request, exact, tokens)
    assert found.keys() == expected.keys()
    assert len(found) > LAYERS * KV_HEADS * 20
    bits = DTYPES[session_dtype]
    for place, (key, value) in found.items():
        assert key.equal(rounded(bits, expected[place][0][None])[0]), place
        assert value.equal(rounded(bits, expected[place][1][None])[0]), place


@pytest.mark.parametrize("session_dtype", DTYPES)
def test_unused_slots_leave_nothing(session_dtype):
    """The last block has one unused slot, which holds NaN in the pool."""
    saved = saved_request(session_dtype)[2]
    rows = QuantizedRows(HEAD_DIM, DTYPES[session_dtype])
    last = saved.parts[0].tail.view(LAYERS * KV_HEADS, -1, 2, BLOCK, rows.row_bytes)[
        :, -1
    ]
    assert saved.tokens % BLOCK == 3
    assert not last[:, :, 3:].any()
    assert rows.dequantize(last).isfinite().all()
    assert last[:, :, :3].any()


@pytest.mark.parametrize("pages", [1, 3, 7])
def test_pieces_are_the_whole(monkeypatch, pages):
    whole_engine, request, whole = saved_request("int8")
    expected = restored(whole_engine, request, whole, 45)
    page_bytes = whole_engine.heap.pages[:1].nbytes
    monkeypatch.setattr(stored_pages, "QUANTIZED_PIECE_BYTES", pages * page_bytes + 1)
    engine, request, saved = saved_request("int8")
    for part in ("retained", "tail"):
        assert getattr(saved.parts[0], part).equal(getattr(whole.parts[0], part)), part
    found = restored(engine, request, saved, 45)
    assert found.keys() == expected.keys()
    for place, rows in found.items():
        assert all(map(torch.equal, rows, expected[place])), place


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["natural", "transposed_keys", "interleaved"])
def test_stored_pages_do_not_depend_on_the_kernels_order(layout, dtype):
    """Pages of one CPU can be loaded by another; every dtype is rounded alike."""
    dim = 48
    rng = torch.Generator().manual_seed(1)
    rows = torch.randn(2, 5 * BLOCK, dim, generator=rng).to(dtype)
    kept = {}
    for kind in ("natural", layout):
        order = getattr(PageLayout, kind)(BLOCK, dim)
        pages = torch.zeros(8, order.page_elems, dtype=dtype)
        heap = Heap(pages, order, 1, 8, 1)
        ids = torch.tensor([6, 1, 3, 7, 0])
        place = ids.repeat_interleave(BLOCK), torch.arange(BLOCK).repeat(5)
        ops.scatter_tokens(heap.kv, *place, *rows)
        stored = stored_pages.stored_pages(heap, "int8")
        kept[kind] = stored.copy_out(ids)
        pages.zero_()
        stored.copy_in(ids.flip(0), kept[kind].flip(0))
        codec = QuantizedRows(dim, 8)
        near = codec.dequantize(codec.quantize(rows.float())).to(dtype)
        assert ops.gather_tokens(heap.kv, *place)[0].equal(near[0])
        assert ops.gather_tokens(heap.kv, *place)[1].equal(near[1])
    assert kept["natural"].equal(kept[layout])


# -- queries, sizes -------------------------------------------------------------------


@pytest.mark.parametrize("session_dtype", DTYPES)
def test_queries_are_stored_in_8_bits(monkeypatch, session_dtype):
    engine, request, saved = saved_request(session_dtype)
    exact = saved_request("auto")[2]
    assert exact.queries is not None
    taken, original = [], Window.restored

    def noted(queries: torch.Tensor, first: int, tokens: int) -> Window | None:
        taken.append(queries)
        return original(queries, first, tokens)

    monkeypatch.setattr(Window, "restored", noted)
    restored(engine, request, saved, 51)
    assert saved.first_query == exact.first_query < 51
    assert taken[0].equal(rounded(8, exact.queries))


@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize(("session_dtype", "row_bytes"), [("int8", 68), ("int4", 40)])
def test_the_scheduler_counts_codes_and_scales(session_dtype, row_bytes, element_bytes):
    """Of 64 elements: 68 and 40 bytes instead of 128 or 256."""
    per_token = 2 * 30 * 3 * 64 * element_bytes
    shape = Geometry(32, 30, 3, per_token, 64, element_bytes)
    assert stored_bytes(320, shape, "auto") == 320 * per_token
    assert stored_bytes(320, shape, session_dtype) == 320 * 2 * 30 * 3 * row_bytes


@pytest.mark.parametrize("session_dtype", ["auto", *DTYPES])
def test_scheduler_and_worker_count_the_same_bytes(session_dtype):
    engine, _, saved = saved_request(session_dtype)
    per_token = engine.heap.bytes_per_token
    shape = Geometry(BLOCK, LAYERS, KV_HEADS, per_token, HEAD_DIM, 4)
    assert saved.compaction is not None
    held_blocks = -(-saved.tokens // BLOCK) - saved.compaction.retained.start
    rows = query_rows(session_dtype, HEAD_DIM)
    query_bytes = rows.row_bytes if rows else HEAD_DIM * 4
    assert saved.queries is not None
    queries = saved.queries[..., 0].numel() * query_bytes
    counted = stored_bytes(held_blocks * BLOCK, shape, session_dtype) + queries
    assert saved.num_bytes == counted


@pytest.mark.parametrize(("bits", "once", "often"), [(8, 0.008, 0.012), (4, 0.1, 0.12)])
def test_many_saves_lose_little_more_than_one(bits, once, often):
    """A conversation may be saved and loaded at every turn."""
    rng = torch.Generator().manual_seed(1)
    exact = torch.randn(2000, 64, generator=rng) * torch.linspace(0.2, 5, 64)
    exact = exact.to(torch.bfloat16)
    rows, stored, errors = QuantizedRows(64, bits), exact, []
    for _ in range(20):
        stored = rows.dequantize(rows.quantize(stored), torch.bfloat16)
        errors.append(float((stored.float() - exact.float()).norm()))
    norm = float(exact.float().norm())
    print(f"{bits} bits: {errors[0] / norm:.4f}, after 20: {errors[-1] / norm:.4f}")
    assert errors[0] < once * norm
    assert errors[-1] < often * norm


# -- files ----------------------------------------------------------------------------


def written(
    tmp_path: Path, saved: CacheSnapshot, **facts: object
) -> tuple[SessionFolder, Path]:
    tokens = torch.arange(saved.tokens).numpy().astype("int32")
    about = saved.compaction, saved.num_bytes, saved.first_query
    session = Session("s", "owner", tokens, *about)
    files = SessionFolder(tmp_path, Identity.of(**facts))
    files.prepare()
    files.write(session, 0, saved)
    return files, files.path("s", 0)


@pytest.mark.parametrize("session_dtype", DTYPES)
def test_a_file_is_as_small_as_memory_and_loads(tmp_path, session_dtype):
    engine, request, saved = saved_request(session_dtype)
    files, path = written(tmp_path, saved)
    exact = written(tmp_path, saved_request("auto")[2], other=1)[1]
    saves = saved_request("auto")[2].num_bytes - saved.num_bytes
    assert exact.stat().st_size - path.stat().st_size == pytest.approx(saves, abs=32)
    assert files.scan().sessions[0].session.num_bytes == saved.num_bytes
    read = files.read("s", 0)
    assert engine.transfer.mismatch(read) is None
    assert read.queries is not None
    assert read.queries.equal(saved.queries)
    expected = restored(engine, request, saved, 51)
    found = restored(*saved_request(session_dtype)[:2], read, 51)
    assert found.keys() == expected.keys()
    for place, rows in found.items():
        assert all(map(torch.equal, rows, expected[place])), place


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_file_names_the_dtype_of_queries(tmp_path, dtype):
    saved = replace(saved_request("int8")[2], queries_dtype=dtype)
    assert written(tmp_path, saved)[0].read("s", 0).queries_dtype == dtype


@pytest.mark.parametrize("wrong", ["auto", "int4"])
def test_pages_of_another_dtype_do_not_fit(tmp_path, wrong):
    saved = saved_request(wrong)[2]
    read = written(tmp_path, saved)[0].read("s", 0)
    engine = saved_request("int8")[0]
    assert f"its session_dtype is {wrong}, not int8" in str(
        engine.transfer.mismatch(read)
    )
    # a name without its contents
    assert "its pages are" in str(engine.transfer.mismatch(replace(read, dtype="int8")))


def test_a_file_of_an_unknown_dtype_is_not_loaded(tmp_path):
    saved = replace(saved_request("int8")[2], dtype="int2")
    files, _ = written(tmp_path, saved)
    with pytest.raises(SessionFileError, match="stored as 'int2'"):
        files.read("s", 0)


# -- the setting ----------------------------------------------------------------------


def test_the_setting_turns_sessions_on_and_contradicts_their_absence():
    assert parse_sessions({"name": "snapkv", "session_dtype": "int8"}).on_for(False)
    assert not parse_sessions({"name": "snapkv"}).on_for(False)
    for wrong, code in (
        ({"session_dtype": "int8", "sessions": False}, "KVP301"),
        ({"session_dtype": "fp8"}, "KVP037"),
    ):
        with pytest.raises(KVPolicyError) as caught:
            parse_policy({"name": "snapkv"} | wrong)
        assert codes_in(str(caught.value)) == (code,)


@pytest.mark.parametrize("cache_dtype", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_fp8_elements_are_not_quantized_again(cache_dtype):
    for session_dtype in DTYPES:
        settings = {"name": "snapkv", "session_dtype": session_dtype}
        (problem,) = session_config.fp8_problems(settings, cache_dtype)
        assert codes_in(problem) == ("KVP312",)
        assert not session_config.fp8_problems(settings, "bfloat16")
    assert not session_config.fp8_problems({"name": "snapkv"}, cache_dtype)
