"""Saving and restoring a request's cache, for every policy that drops tokens."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from fake_engine import LAYERS, Request
from fake_sessions import SessionEngine
from policy_settings import EACH_KIND, drop, policies_that
from test_flowkv import COMPRESSORS, SMALL, contents, flow
from tiers import tiered

from vllm_kvplugins.policies import get_policy_class
from vllm_kvplugins.sessions.commands import Session
from vllm_kvplugins.sessions.files import Identity, SessionFolder
from vllm_kvplugins.sessions.snapshot import CacheSnapshot
from vllm_kvplugins.sessions.stored_pages import ExactPages

BLOCK = 4
DROPPING = [name for name in policies_that(drop) if name != "flowkv"]
# ends of turns, and of the prompts of the requests; the first request has no finished
# turn
ENDS = (52, 71)
PROMPTS = (40, 60, 100)
LONGEST = 130


@pytest.fixture(autouse=True)
def _as_in_an_engine():
    """vLLM runs steps in inference mode, and tensors created there stay inference
    tensors.
    """
    with torch.inference_mode():
        yield


def small(name: str) -> dict[str, object]:
    fields = get_policy_class(name).model_fields
    config = {key: value for key, value in SMALL.items() if key in fields}
    budget = {"budget": 20} if "budget" in fields else {}
    return {"name": name} | config | budget


def says(request: Request) -> Request:
    """The request with the tokens of the whole conversation, for a comparison."""
    source = Request.make("r", LONGEST, 0)
    request.keys, request.values = source.keys, source.values
    request.queries, request.visible = source.queries, source.visible
    return request


def run(engine: SessionEngine, request: Request, chunk: int) -> None:
    while not request.done:
        engine.step({request.name: chunk})


def talk(
    engine: SessionEngine, chunk: int, by_turns: bool, in_place: bool = False
) -> Request:
    """Three requests, each with the previous ones as history."""
    saved, request = None, None
    for turn, prompt in enumerate(PROMPTS):
        answer = 12 if turn < 2 else 20
        ends = ENDS[:turn] if by_turns else ()
        if saved is None:
            request = says(engine.add("r", prompt, answer, ends))
        else:
            assert request is not None
            request = engine.resume(
                request, saved, prompt, answer, ends, in_place=in_place
            )
            assert request.computed == saved.tokens, "tokens were recomputed"
        run(engine, request, chunk)
        saved = engine.save("r")
        if turn < 2:
            engine.remove("r")
    assert request is not None
    return request


def alone(policy: dict[str, object], chunk: int) -> tuple[SessionEngine, Request]:
    """One request with all turns."""
    engine = SessionEngine(policy, BLOCK, 80, sessions=True)
    request = says(engine.add("r", PROMPTS[-1], 20, ENDS))
    run(engine, request, chunk)
    return engine, request


@pytest.mark.each_value
@pytest.mark.parametrize("base", COMPRESSORS)
@pytest.mark.parametrize("chunk", [7, 200])
def test_several_requests_keep_the_same_tokens_as_one(base, chunk):
    """FlowKV: the retained region is bitwise equal."""
    policy = flow(base, ratio=0.4)
    parts = SessionEngine(policy, BLOCK, 80, sessions=True)
    request = talk(parts, chunk, by_turns=True)
    one, expected = alone(policy, chunk)
    assert request.kept == expected.kept
    assert contents(parts, request) == contents(one, expected)
    for engine in (parts, one):
        engine.remove("r")
        engine.check_idle()


def copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, fail on any copy from the host to the pool."""

    def refused(*arguments: object) -> None:
        raise AssertionError("pages that are there are copied")

    monkeypatch.setattr(ExactPages, "copy_in", refused)


@pytest.mark.parametrize("base", tiered(COMPRESSORS, EACH_KIND))
def test_a_session_in_place_copies_nothing(base, monkeypatch):
    """The pages equal those of one long request."""
    copies_nothing(monkeypatch)
    policy = flow(base, ratio=0.4)
    parts = SessionEngine(policy, BLOCK, 80, sessions=True)
    request = talk(parts, 7, by_turns=True, in_place=True)
    one, expected = alone(policy, 7)
    assert request.kept == expected.kept
    assert contents(parts, request) == contents(one, expected)
    parts.remove("r")
    parts.check_idle()


def test_a_branch_continues_in_the_first_of_the_blocks(monkeypatch):
    copies_nothing(monkeypatch)
    runs = []
    for in_place in (True, False):
        if not in_place:
            monkeypatch.undo()
        engine = SessionEngine(small("snapkv"), BLOCK, 80, sessions=True)
        request = says(engine.add("r", 40, 20))
        run(engine, request, 9)
        saved = engine.save("r")
        engine.remove("r")
        request = engine.resume(
            request, saved, 70, 10, max_tokens=49, in_place=in_place
        )
        assert request.computed == 49
        run(engine, request, 9)
        runs.append((request.kept, contents(engine, request)))
        engine.remove("r")
        engine.check_idle()
    assert runs[0] == runs[1]


def test_other_blocks_cannot_be_reused_in_place():
    engine = SessionEngine(small("snapkv"), BLOCK, 80, sessions=True)
    run(engine, says(engine.add("r", 40, 12)), 9)
    saved, blocks = engine.save("r"), [3, 2, 1]
    with pytest.raises(AssertionError, match="saved from other blocks"):
        engine.transfer.restore("s", 60, saved, saved.tokens, blocks, in_place=True)
    saved.blocks = None
    with pytest.raises(AssertionError, match="read from a file"):
        engine.transfer.restore("s", 60, saved, saved.tokens, blocks, in_place=True)


@pytest.mark.parametrize("seed", tiered(range(30), range(10)))
def test_needed_queries_survive_aborts_preemptions_and_branches(seed):
    """Requests are aborted in flight, preempted, branched and chunked in any way;
    kept tokens do not change.
    """
    print("seed", seed)
    rng = random.Random(seed)
    policy = flow(rng.choice(["snapkv", "protokv", "tova"]), ratio=0.4)
    one, expected = alone(policy, 200)
    engine = SessionEngine(policy, BLOCK, 80, sessions=True)
    saved: CacheSnapshot | None = None
    ended: Request | None = None
    for prompt in (33, 52, 60, 71, 85, 100):
        ends = tuple(end for end in ENDS if end <= prompt)
        if saved is None or ended is None:
            request = says(engine.add("r", prompt, 12, ends))
        else:
            at = saved.compaction.at_tokens if saved.compaction else 0
            branch = max(prompt - rng.randrange(1, 30), at + 1)
            limit = branch if rng.random() < 0.3 else prompt - 1
            request = engine.resume(ended, saved, prompt, 12, ends, limit)
            cut = engine.plan("r").next_cut(at) or prompt
            if saved.first_query <= saved.tokens - 6 and saved.tokens <= min(
                limit, cut
            ):
                assert request.computed == saved.tokens, "tokens were recomputed"
        stop = rng.randrange(prompt // 2, prompt + 12)
        while not request.done and request.computed < stop:
            engine.step({"r": rng.choice([1, 2, 3, 7, 30])})
            if rng.random() < 0.05:
                engine.preempt("r")
                engine.known_from.pop("r", None)
                request.restored = None
        if prompt == PROMPTS[-1]:
            break
        known = request.computed - min(rng.choice([0, 0, 1, 2, 3]), request.computed)
        plan = engine.plan("r")
        if known and plan.num_done(known) == plan.num_done(request.computed):
            saved = engine.save("r", request.computed - known)
            ended = replace(
                request, kept=list(request.kept), visible=request.visible.clone()
            )
        engine.remove("r")
    run(engine, request, 200)
    assert request.kept == expected.kept
    assert contents(engine, request) == contents(one, expected)


@pytest.mark.each_value
@pytest.mark.parametrize("in_place", [False, True], ids=["loaded", "parked"])
@pytest.mark.parametrize("name", DROPPING)
def test_every_policy_continues_from_its_snapshot(name, in_place):
    """The fake engine checks every step against a dense copy of the request."""
    engine = SessionEngine(small(name), BLOCK, 80, sessions=True)
    request = talk(engine, 9, by_turns=False, in_place=in_place)
    if get_policy_class(name).compresses:
        assert len(request.kept) == len(PROMPTS)
        assert len(request.held) < 20
    engine.remove("r")
    engine.check_idle()


@pytest.mark.parametrize("name", ["full", "snapkv", "pyramidkv"])
def test_two_requests_continue_one_session(name):
    """A branch changes neither its sibling nor the saved session."""
    engine = SessionEngine(small(name), BLOCK, 120, sessions=True)
    first = says(engine.add("r", 40, 12))
    run(engine, first, 9)
    saved = engine.save("r")
    (part,) = saved.parts
    before = [part.retained.clone(), part.tail.clone()]
    engine.remove("r")
    twins = []
    for twin, limit in (("r", None), ("s", 44)):
        other = Request(
            twin,
            *(40, 12, first.keys.clone(), first.values.clone()),
            *(first.queries, first.visible.clone()),
            kept=list(first.kept),
        )
        if limit:  # from there on, the sibling's tokens differ
            other.keys[:, :, limit:] += 1.0
        twins.append(engine.resume(other, saved, 70, 10, max_tokens=limit))
    assert twins[1].computed <= 44
    while not all(t.done for t in twins):
        engine.step({t.name: 5 for t in twins if not t.done})
    assert torch.equal(part.retained, before[0])
    assert torch.equal(part.tail, before[1])
    for twin in twins:
        engine.remove(twin.name)
    engine.check_idle()


@pytest.mark.parametrize("name", ["h2o", "snapkv"])
def test_a_snapshot_survives_its_file(tmp_path, name):
    engine = SessionEngine(small(name), BLOCK, 80, sessions=True)
    request = engine.add("r", 40, 12)
    run(engine, request, 9)
    saved = engine.save("r")
    assert set(saved.observed) == (set(range(LAYERS)) if name == "h2o" else set())
    assert saved.first_query == (51 if name == "h2o" else 40)
    tokens = torch.arange(saved.tokens).numpy().astype("int32")
    session = Session(
        "s",
        "owner",
        tokens,
        saved.compaction,
        saved.num_bytes,
        saved.first_query,
    )
    files = SessionFolder(tmp_path, Identity.of(model="m"))
    files.prepare()
    files.write(session, 0, saved)
    read = files.read("s", 0)
    assert (read.tokens, read.compaction) == (saved.tokens, saved.compaction)
    for tensor in ("counts", "positions", "retained", "tail"):
        expected = getattr(saved.parts[0], tensor)
        assert torch.equal(getattr(read.parts[0], tensor), expected), tensor
    assert (read.queries is None) == (saved.queries is None) == (name == "h2o")
    if saved.queries is not None:
        expected = request.queries[:, 40:51]
        assert torch.equal(read.queries, expected)
        pages = saved.parts[0].num_bytes
        assert read.num_bytes == pages + expected.numel() * 4
    (file,) = files.scan().sessions
    assert file.session.first_query == saved.first_query
    # other requests' tokens in its partial page are not saved
    assert saved.parts[0].tail.isfinite().all()
    for layer, packed in saved.observed.items():
        assert torch.equal(read.observed[layer]["observed"], packed["observed"])
    assert engine.transfer.mismatch(read) is None


def test_a_snapshot_of_another_layout_does_not_fit():
    engine = SessionEngine(small("snapkv"), BLOCK, 80, sessions=True)
    run(engine, engine.add("r", 40, 2), 9)
    saved = engine.save("r")
    other = SessionEngine(small("snapkv"), 2 * BLOCK, 80, sessions=True)
    assert "its pages are" in str(other.transfer.mismatch(saved))
    saved.parts = (replace(saved.parts[0], layout="other"),)
    assert "instruction set" in str(engine.transfer.mismatch(saved))


def test_a_request_compacted_elsewhere_is_not_saved():
    engine = SessionEngine(small("snapkv"), BLOCK, 80, sessions=True)
    run(engine, engine.add("r", 40, 2), 9)
    with pytest.raises(ValueError, match="compacted at 40"):
        engine.transfer.save("r", None, 41, engine.requests["r"].table, 41).finish()
    assert isinstance(engine.save("r"), CacheSnapshot)
