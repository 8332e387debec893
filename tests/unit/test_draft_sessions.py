"""Sessions with a drafter: the pages of its layers are saved and restored, too.

The drafter of the fake engine is a copy of the model with every KV head twice, so its
layers hold what the model's layers hold.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_engine import HEAD_DIM, KV_HEADS, LAYERS, Request, fp8_elements
from fake_sessions import SessionEngine
from profiles import write_made
from test_flowkv import contents, flow
from test_sessions_runtime import (
    BLOCK,
    ENDS,
    PROMPTS,
    copies_nothing,
    run,
    says,
    small,
    talk,
)
from test_snapshots import fails

from vllm_kvplugins.engine import retained_regions
from vllm_kvplugins.engine.heap import Fp8
from vllm_kvplugins.engine.page_table import PageTables
from vllm_kvplugins.ops import gather_tokens
from vllm_kvplugins.plan.geometry import Geometry
from vllm_kvplugins.sessions import stored_pages
from vllm_kvplugins.sessions.commands import Session
from vllm_kvplugins.sessions.files import Identity, SessionFolder
from vllm_kvplugins.sessions.settings import SessionDtype
from vllm_kvplugins.sessions.snapshot import CacheSnapshot
from vllm_kvplugins.sessions.stored_pages import stored_bytes

DRAFT_HEADS = 2 * KV_HEADS
Contents = dict[tuple[int, ...], bytes]


@pytest.fixture(autouse=True)
def _as_in_an_engine() -> Iterator[None]:
    """vLLM runs steps in inference mode, and tensors created there stay inference
    tensors.
    """
    with torch.inference_mode():
        yield


def engine_with_drafter(
    policy: Any, dtype: SessionDtype = "auto", fp8: Fp8 | None = None
) -> SessionEngine:
    return SessionEngine(
        policy, BLOCK, 80, sessions=True, session_dtype=dtype, fp8=fp8, drafts=True
    )


def of_draft_layers(found: Contents) -> Contents:
    """What the draft layers hold, if the model's layers hold this."""
    return {
        (layer, 2 * head + twin, position): both
        for (layer, head, position), both in found.items()
        for twin in range(2)
    }


def draft_contents(engine: SessionEngine, request: Request) -> Contents:
    """Keys and values of all tokens in the draft layers, by layer, head, position."""
    heap, runtime = engine.draft_heap, engine.runtime
    assert heap is not None
    resident = runtime.residents(request.name)[1]
    assert resident is not None
    pages, counts = runtime.regions[1].tables.retained(resident.slot_index)
    tail = heap.page_ids(torch.tensor(request.table[resident.tail_block :]))
    found = {}
    for row in range(heap.rows):
        held = torch.cat([pages[row, : counts[row]], tail[row]])
        positions = resident.positions[row, : int(counts[row]) * BLOCK].tolist()
        positions += range(resident.tail_block * BLOCK, request.computed)
        slots = torch.arange(len(positions))
        both = gather_tokens(heap.kv, held[slots // BLOCK], slots % BLOCK)
        for position, *pair in zip(positions, *both, strict=True):
            place = (*divmod(row, DRAFT_HEADS), position)
            found[place] = torch.cat(pair).numpy().tobytes()
    return found


def check_copied(engine: SessionEngine, request: Request) -> None:
    """The draft layers hold the tokens of the model's layers, bit for bit."""
    retained = of_draft_layers(contents(engine, request))
    held = draft_contents(engine, request)
    assert {place: held[place] for place in retained} == retained
    for (layer, head, position), both in held.items():
        pair = [
            part[layer, head // 2, position] for part in (request.keys, request.values)
        ]
        assert both == torch.cat(pair).numpy().tobytes(), (layer, head, position)


@pytest.mark.parametrize("in_place", [False, True], ids=["loaded", "in place"])
@pytest.mark.parametrize("chunk", [7, 200])
def test_draft_layers_hold_the_same_tokens_as_in_one_request(
    monkeypatch, chunk, in_place
):
    policy = flow("snapkv", ratio=0.4)
    if in_place:
        copies_nothing(monkeypatch)
    parts = engine_with_drafter(policy)
    request = talk(parts, chunk, by_turns=True, in_place=in_place)
    one = engine_with_drafter(policy)
    expected = says(one.add("r", PROMPTS[-1], 20, ENDS))
    run(one, expected, chunk)
    assert draft_contents(parts, request) == draft_contents(one, expected)
    check_copied(parts, request)
    for engine in (parts, one):
        engine.remove("r")
        engine.check_idle()


def saved_request(
    policy: Any, dtype: SessionDtype = "auto"
) -> tuple[SessionEngine, Request, CacheSnapshot]:
    engine = engine_with_drafter(policy, dtype)
    request = says(engine.add("r", 60, 25, (30,)))
    run(engine, request, 9)
    saved = engine.save("r")
    engine.remove("r")
    return engine, request, saved


@pytest.mark.parametrize("max_tokens", [None, 75])
def test_a_session_can_be_cut_off(max_tokens):
    engine, request, saved = saved_request(flow("snapkv", ratio=0.4))
    request = engine.resume(request, saved, 100, 10, (30,), max_tokens=max_tokens)
    assert request.computed == (max_tokens or saved.tokens)
    check_copied(engine, request)
    run(engine, request, 9)
    check_copied(engine, request)
    engine.remove("r")
    engine.check_idle()


def check_drafters_elements(engine: SessionEngine, request: Request) -> None:
    """The draft layers hold the elements that the drafter wrote, bit for bit."""
    heap = engine.draft_heap
    assert heap is not None
    assert heap.fp8 is not None
    written = fp8_elements(heap.fp8, request.keys, request.values)
    held = draft_contents(engine, request)
    assert len(held) > heap.rows * BLOCK
    for (layer, head, position), both in held.items():
        pair = [part[layer, head // 2, position] for part in written]
        assert both == torch.cat(pair).numpy().tobytes(), (layer, head, position)


@pytest.mark.parametrize("name", ["flowkv", "snapkv"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_elements_of_the_drafter_move_bit_by_bit(tmp_path, name, dtype):
    """In compactions and through the file of a session. The drafter has scales of its
    own, and so other elements than the model."""
    scales = [0.3 + layer / 10 for layer in range(LAYERS)]
    fp8 = Fp8(dtype, torch.float32, tuple(scales), tuple(scales[::-1]))
    policy = flow("snapkv", ratio=0.4) if name == "flowkv" else small(name)
    engine = engine_with_drafter(policy, fp8=fp8)
    request = engine.add("r", 60, 80, (30,))
    while request.generated < 25:
        engine.step({"r": 9})
    assert request.kept
    check_drafters_elements(engine, request)
    retained = contents(engine, request)
    held = of_draft_layers(retained)
    drafters = draft_contents(engine, request)
    assert held.keys() <= drafters.keys(), "they keep other tokens than the model"
    assert any(drafters[place] != both for place, both in held.items())
    saved = engine.save("r")
    engine.remove("r")
    tokens = torch.arange(saved.tokens).int().numpy()
    files = SessionFolder(tmp_path, Identity.of(model="m"))
    files.prepare()
    files.write(
        Session("s", "o", tokens, saved.compaction, saved.num_bytes, saved.first_query),
        0,
        saved,
    )
    read = files.read("s", 0)
    assert [part.retained.dtype for part in read.parts] == [torch.uint8] * 2
    request = engine.resume(request, read, 100, 10, (30,))
    assert request.computed == saved.tokens
    check_drafters_elements(engine, request)
    run(engine, request, 9)
    check_drafters_elements(engine, request)
    engine.remove("r")
    engine.check_idle()


@pytest.mark.parametrize("name", ["full", "snapkv"])
def test_a_snapshot_survives_its_file(tmp_path, name):
    engine, request, saved = saved_request(small(name))
    tokens = torch.arange(saved.tokens).int().numpy()
    session = Session(
        "s", "o", tokens, saved.compaction, saved.num_bytes, saved.first_query
    )
    files = SessionFolder(tmp_path, Identity.of(model="m"))
    files.prepare()
    files.write(session, 0, saved)
    read = files.read("s", 0)
    assert read.num_bytes == saved.num_bytes
    assert len(read.parts) == 2
    for part, expected in zip(read.parts, saved.parts, strict=True):
        assert part.layout == expected.layout
        for tensor in ("counts", "positions", "retained", "tail"):
            assert getattr(part, tensor).equal(getattr(expected, tensor)), tensor
        # Other requests' tokens in the partial page are not saved.
        assert part.tail.isfinite().all()
    assert engine.transfer.mismatch(read) is None
    request = engine.resume(request, read, 100, 10)
    if name == "snapkv":
        check_copied(engine, request)


def test_a_snapshot_fits_a_worker_with_the_same_drafter_only():
    engine, _, saved = saved_request(small("snapkv"))
    without = SessionEngine(small("snapkv"), BLOCK, 80, sessions=True)
    assert "layers of 2 models, not 1" in str(without.transfer.mismatch(saved))
    model, drafts = saved.parts
    saved.parts = (model,)
    assert "layers of 1 models, not 2" in str(engine.transfer.mismatch(saved))
    saved.parts = (model, model)
    rows = LAYERS * KV_HEADS
    assert f"{rows} rows of pages, the layers {2 * rows}" in str(
        engine.transfer.mismatch(saved)
    )
    saved.parts = (model, replace(drafts, layout="other"))
    assert "instruction set" in str(engine.transfer.mismatch(saved))


@pytest.mark.parametrize("dtype", ["auto", "int8", "int4"])
def test_the_scheduler_counts_the_pages_of_draft_layers(dtype):
    """As many bytes as the worker holds."""
    _, _, saved = saved_request(small("snapkv"), dtype)
    dropped = saved.compaction.retained.start if saved.compaction else 0
    slots = (-(-saved.tokens // BLOCK) - dropped) * BLOCK
    expected = 0
    for heads in (KV_HEADS, DRAFT_HEADS):
        per_token = 2 * LAYERS * heads * HEAD_DIM * 4
        shape = Geometry(BLOCK, LAYERS, heads, per_token, HEAD_DIM, 4)
        expected += stored_bytes(slots, shape, dtype)
    assert saved.queries is not None
    assert saved.num_bytes == expected + saved.queries.nbytes


@pytest.mark.parametrize("in_place", [False, True], ids=["loaded", "in place"])
@pytest.mark.parametrize(
    ("owner", "name", "after"),
    [
        *((stored_pages, "copy_pages", after) for after in range(4)),
        *((PageTables, "assign", after) for after in range(4)),
        *((retained_regions, "compact", after) for after in range(2)),
    ],
)
def test_a_failed_load_leaves_no_state(monkeypatch, owner, name, after, in_place):
    """Any copy may fail, in the layers of the model and in those of the drafter."""
    engine, request, saved = saved_request(flow("snapkv", ratio=0.4))
    if in_place and owner is stored_pages:
        pytest.skip("nothing is copied")
    with monkeypatch.context() as patch:
        fails(patch, owner, name, after)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.resume(request, saved, 100, 10, (30, 84), in_place=in_place)
    request = engine.requests["r"]
    assert engine.runtime.request_state("r").lost
    assert engine.runtime.residents("r") == (None, None)
    for regions in engine.runtime.regions:
        assert regions.tables.num_slot_indices == 0
    engine.preempt("r")
    request.restored = None
    run(engine, request, 9)
    check_copied(engine, request)
    engine.remove("r")
    engine.check_idle()


# -- the adapter: shape of the draft layers, identity of files -------------------------


def model_config(folder: Path, **config: Any) -> SimpleNamespace:
    """vLLM's configuration of a model, as far as sessions read it."""
    folder.mkdir(exist_ok=True)
    weights = folder / "model.safetensors"
    if not weights.exists():  # files of a server are told apart by their times
        weights.write_bytes(b"weights of " + folder.name.encode())
    facts = {"_name_or_path": str(folder), "model": {"_name_or_path": str(folder)}}
    facts |= {"num_hidden_layers": 2} | config
    hf_config = SimpleNamespace(to_dict=lambda: dict(facts), _commit_hash=None)
    return SimpleNamespace(
        model=str(folder),
        hf_config=hf_config,
        revision=None,
        quantization=None,
        dtype=torch.float32,
        max_model_len=100,
    )


def fingerprint(
    folder: Path,
    drafter: Any,
    method: str = "draft_model",
    of_replicas: bool = False,
    **settings: Any,
) -> str:
    """Of a server with this drafter, given as vLLM's configuration of its model."""
    pytest.importorskip("vllm", reason="a part of the adapter")
    from vllm_kvplugins.vllm_adapter.scheduler import session_config

    speculative = None
    if drafter is not None:
        speculative = SimpleNamespace(
            method=method, draft_model_config=drafter, num_speculative_tokens=3
        )
    config = SimpleNamespace(
        model_config=model_config(folder / "model"),
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=BLOCK),
        speculative_config=speculative,
    )
    settings = {"name": "flowkv"} | settings
    return session_config._identity(config, settings, of_replicas).fingerprint


@pytest.mark.parametrize("of_replicas", [False, True], ids=["server", "replicas"])
def test_another_drafter_finds_no_files(tmp_path, of_replicas):
    """Another model, its weights, its number of layers, its method, or none."""
    first = model_config(tmp_path / "drafter")
    drafter = fingerprint(tmp_path, first, of_replicas=of_replicas)
    assert fingerprint(tmp_path, first, of_replicas=of_replicas) == drafter
    deeper = model_config(tmp_path / "drafter", num_hidden_layers=3)
    others = [
        fingerprint(tmp_path, None, of_replicas=of_replicas),
        fingerprint(tmp_path, first, "eagle", of_replicas),
        fingerprint(tmp_path, deeper, of_replicas=of_replicas),
        fingerprint(tmp_path, model_config(tmp_path / "b"), of_replicas=of_replicas),
    ]
    (tmp_path / "drafter" / "model.safetensors").write_bytes(b"other weights")
    others.append(fingerprint(tmp_path, first, of_replicas=of_replicas))
    assert len({drafter, *others}) == 1 + len(others)


def test_a_drafter_without_a_cache_changes_no_fingerprint(tmp_path):
    without = fingerprint(tmp_path, None)
    assert fingerprint(tmp_path, SimpleNamespace(), "ngram") == without


def test_replicas_find_files_wherever_their_models_lie(tmp_path):
    found = []
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        drafter = model_config(tmp_path / place / "drafter")
        found.append(fingerprint(tmp_path / place, drafter, of_replicas=True))
    assert found[0] == found[1]
    assert fingerprint(tmp_path / "here", None, of_replicas=True) != found[0]


def test_other_layer_budgets_find_no_files(tmp_path):
    """Options and contents count, the place of a file does not."""
    profiles = [tmp_path / f"{name}.json" for name in ("one", "same", "other")]
    for path, last in zip(profiles, (0.3, 0.3, 0.4), strict=True):
        write_made(path, [0.1, last])
    weights = [tmp_path / f"{name}.json" for name in ("light", "heavy")]
    for path, weight in zip(weights, (1, 2), strict=True):
        path.write_text(json.dumps({"layer_weights": [1, weight]}))

    def of(name: str, **options: Any) -> str:
        allocator = {"name": name, **options}
        return fingerprint(tmp_path, None, name="snapkv", allocator=allocator)

    one, same, other = (of("sensitivity", profile=str(path)) for path in profiles)
    assert one == same
    kinds = [one, other, of("sensitivity"), of("sensitivity", alpha=2.0)]
    kinds += [of("sensitivity", profile=str(profiles[0]), floor=0.5)]
    kinds += [of("file", path=str(path)) for path in weights]
    assert len(set(kinds)) == len(kinds)


def test_default_layer_budgets_keep_the_fingerprint(tmp_path):
    default = {"name": "sensitivity", "floor": 0.5}
    named = fingerprint(tmp_path, None, name="epicache", allocator=default)
    assert named == fingerprint(tmp_path, None, name="epicache")


def test_the_scheduler_learns_the_shape_of_the_draft_layers():
    pytest.importorskip("vllm", reason="a part of the adapter")
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from vllm_kvplugins.config import parse_policy
    from vllm_kvplugins.vllm_adapter.scheduler.spec import with_policy
    from vllm_kvplugins.vllm_adapter.worker import draft_layers

    def spec(heads: int, size: int) -> Any:
        return FullAttentionSpec(
            block_size=32, num_kv_heads=heads, head_size=size, dtype=torch.bfloat16
        )

    specs = {"model.0": spec(2, 64), "draft.0": spec(4, 32), "draft.1": spec(4, 32)}
    model = Geometry(32, 1, 2, 2 * 2 * 64 * 2, 64, 2)
    names = ["draft.0", "draft.1"]
    drafts = draft_layers.geometry(names, specs, ranks=1)
    assert drafts == Geometry(32, 2, 4, 2 * 2 * 4 * 32 * 2, 32, 2)
    of_three_ranks = draft_layers.geometry(names, specs, ranks=3)
    assert of_three_ranks == Geometry(32, 2, 4, 3 * 2 * 2 * 4 * 32 * 2, 32, 2)
    assert draft_layers.geometry([], specs, ranks=1) is None
    policy = parse_policy("snapkv")
    converted = with_policy(specs["model.0"], policy, model, drafts)
    assert (converted.geometry, converted.draft_geometry) == (model, drafts)
    assert type(converted).merge([converted, converted]).draft_geometry == drafts
