"""Snapshots: pages are copied to the host and back in pieces; a load may fail."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from fake_engine import Request
from fake_sessions import SessionEngine
from test_flowkv import contents, flow
from test_sessions_runtime import BLOCK, run, says, small

from vllm_kvplugins.engine import retained_regions
from vllm_kvplugins.engine.page_table import PageTables
from vllm_kvplugins.engine.requests import Row
from vllm_kvplugins.engine.windows import Window
from vllm_kvplugins.policies import get_policy_class
from vllm_kvplugins.sessions import stored_pages
from vllm_kvplugins.sessions.snapshot import CacheSnapshot


@pytest.fixture(autouse=True)
def _as_in_an_engine() -> Iterator[None]:
    """vLLM runs steps in inference mode, and tensors created there stay inference
    tensors.
    """
    with torch.inference_mode():
        yield


def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every copy from now on."""
    sizes: list[int] = []
    copy = stored_pages.copy_pages

    def noted(target, target_ids, source, source_ids) -> None:
        ids = source_ids if target_ids is None else target_ids
        sizes.append(len(ids) * target[:1].nbytes)
        copy(target, target_ids, source, source_ids)

    monkeypatch.setattr(stored_pages, "copy_pages", noted)
    return sizes


def go_on(name: str, max_tokens: int | None) -> tuple[CacheSnapshot, list[object]]:
    """Save a request and continue it; returns the second one's final state."""
    engine = SessionEngine(small(name), BLOCK, 80, sessions=True)
    request = says(engine.add("r", 40, 20))
    run(engine, request, 9)
    saved = engine.save("r")
    engine.remove("r")
    request = engine.resume(request, saved, 70, 10, max_tokens=max_tokens)
    run(engine, request, 9)
    saved_objects: list[object] = [request.kept]
    if get_policy_class(name).compresses:  # without this, every step has been compared
        saved_objects.append(contents(engine, request))
    engine.remove("r")
    engine.check_idle()
    return saved, saved_objects


@pytest.mark.each_value
@pytest.mark.parametrize("pages", [1, 3, 7])
@pytest.mark.parametrize("max_tokens", [None, 49])
@pytest.mark.parametrize("name", ["full", "snapkv", "pyramidkv"])
def test_pieces_are_the_whole(
    monkeypatch, name: str, max_tokens: int | None, pages: int
):
    """Bit for bit, also for a session that is cut off."""
    whole, expected = go_on(name, max_tokens)
    page = whole.parts[0].tail[:1].nbytes
    monkeypatch.setattr(stored_pages, "PIECE_BYTES", pages * page + page // 2)
    sizes = copied(monkeypatch)
    saved, saved_objects = go_on(name, max_tokens)
    for part in ("retained", "tail", "counts", "positions"):
        assert getattr(saved.parts[0], part).equal(getattr(whole.parts[0], part)), part
    assert saved_objects == expected
    assert max(sizes) == pages * page
    both_ways = whole.parts[0].num_bytes
    assert both_ways < sum(sizes) <= 2 * both_ways


def test_a_page_larger_than_a_piece_is_one(monkeypatch):
    whole, expected = go_on("snapkv", None)
    monkeypatch.setattr(stored_pages, "PIECE_BYTES", 1)
    sizes = copied(monkeypatch)
    assert go_on("snapkv", None)[1] == expected
    assert set(sizes) == {whole.parts[0].tail[:1].nbytes}


# -- loads that fail -----------------------------------------------------------------


def fails(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, after: int
) -> None:
    """Let all calls but the first ``after`` fail."""
    whole, left = getattr(owner, name), [after]

    def no_room(*args, **kwargs):
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("out of memory")
        return whole(*args, **kwargs)

    monkeypatch.setattr(owner, name, no_room)


def lost(engine: SessionEngine, request: Request) -> None:
    """The failed request has no state, no layer observes it, and it cannot be saved."""
    runtime, tokens = engine.runtime, request.computed
    assert runtime.request_state("r").lost
    assert runtime.tables is not None
    assert runtime.tables.num_slot_indices == 0
    row = Row("r", request.prompt, tokens, 1, 0)
    assert not runtime.requires_layers([row])
    table = torch.tensor([request.table + [0] * 9], dtype=torch.int32)
    step = runtime.begin_step([row], torch.tensor([tokens + 1]), table)
    assert step.lengths.eq(tokens + 1).all()
    runtime.end_step()
    with pytest.raises(ValueError, match="session failed to load"):
        engine.transfer.save("r", None, tokens, request.table, tokens).finish()


@pytest.mark.parametrize("in_place", [False, True], ids=["loaded", "in place"])
@pytest.mark.parametrize(
    ("owner", "name", "after"),
    [
        (stored_pages, "copy_pages", 0),
        (stored_pages, "copy_pages", 1),
        (PageTables, "assign", 0),
        (PageTables, "assign", 1),  # queries of the compaction that is due
        (retained_regions, "compact", 0),
        (Window, "restored", 0),
    ],
    ids=["tail", "retained", "slot", "later-slot", "compaction", "queries"],
)
def test_a_request_whose_session_fails_to_load_is_recomputed(
    monkeypatch, owner: object, name: str, after: int, in_place: bool
):
    """Any copy may fail, after any number of written pages."""
    engine = SessionEngine(flow("snapkv", ratio=0.4), BLOCK, 80, sessions=True)
    request = says(engine.add("r", 60, 25, (30,)))
    run(engine, request, 9)
    saved = engine.save("r")
    engine.remove("r")
    if in_place and owner is stored_pages:
        pytest.skip("nothing is copied")
    with monkeypatch.context() as patch:
        fails(patch, owner, name, after)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.resume(request, saved, 100, 10, (30, 84), in_place=in_place)
    request = engine.requests["r"]
    lost(engine, request)
    engine.preempt("r")
    request.restored = None
    run(engine, request, 9)
    assert request.kept
    engine.remove("r")
    engine.check_idle()
