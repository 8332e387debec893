"""Pages of a session go to the host and come back in pieces."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from fake_sessions import SessionEngine
from test_flowkv import contents
from test_sessions_runtime import BLOCK, run, says, small

from vllm_kvplugins.policies import get_policy_class
from vllm_kvplugins.residency import saved as saved_caches
from vllm_kvplugins.residency.saved import SavedCache


@pytest.fixture(autouse=True)
def _as_in_an_engine() -> Iterator[None]:
    """vLLM runs steps in inference mode, and tensors made there stay there."""
    with torch.inference_mode():
        yield


def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every copy from now on."""
    sizes: list[int] = []
    copy = saved_caches.copy_pages

    def noted(target, target_ids, source, source_ids) -> None:
        ids = source_ids if target_ids is None else target_ids
        sizes.append(len(ids) * target[:1].nbytes)
        copy(target, target_ids, source, source_ids)

    monkeypatch.setattr(saved_caches, "copy_pages", noted)
    return sizes


def go_on(name: str, most: int | None) -> tuple[SavedCache, list[object]]:
    """A request, and one that goes on from it; what it has in the end."""
    engine = SessionEngine(small(name), BLOCK, 80, sessions=True)
    request = says(engine.add("r", 40, 20))
    run(engine, request, 9)
    saved = engine.save("r")
    engine.remove("r")
    request = engine.resume(request, saved, 70, 10, most=most)
    run(engine, request, 9)
    found: list[object] = [request.kept]
    if get_policy_class(name).compresses:  # else every step has been compared
        found.append(contents(engine, request))
    engine.remove("r")
    engine.check_idle()
    return saved, found


@pytest.mark.parametrize("pages", [1, 3, 7])
@pytest.mark.parametrize("most", [None, 49])
@pytest.mark.parametrize("name", ["full", "snapkv", "pyramidkv"])
def test_pieces_are_the_whole(monkeypatch, name: str, most: int | None, pages: int):
    """Bit for bit, also of a session that is cut off."""
    whole, expected = go_on(name, most)
    page = whole.tail[:1].nbytes
    monkeypatch.setattr(saved_caches, "PIECE_BYTES", pages * page + page // 2)
    sizes = copied(monkeypatch)
    saved, found = go_on(name, most)
    for part in ("zone", "tail", "counts", "positions"):
        assert getattr(saved, part).equal(getattr(whole, part)), part
    assert found == expected
    assert max(sizes) == pages * page
    both_ways = whole.tail.nbytes + whole.zone.nbytes
    assert both_ways < sum(sizes) <= 2 * both_ways


def test_a_page_larger_than_a_piece_is_one(monkeypatch):
    whole, expected = go_on("snapkv", None)
    monkeypatch.setattr(saved_caches, "PIECE_BYTES", 1)
    sizes = copied(monkeypatch)
    assert go_on("snapkv", None)[1] == expected
    assert set(sizes) == {whole.tail[:1].nbytes}
