"""Session files that store only what earlier files do not have."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_sessions import SessionEngine
from replica import BLOCK as STORE_BLOCK
from replica import IDENTITY, Replica, ids, talk
from test_head_shards import TOKENS, Dense, check_equal
from test_session_store import session, tokens
from test_sessions_runtime import BLOCK, ENDS, PROMPTS, flow, run, says, small
from typer.testing import CliRunner

from vllm_kvplugins.cli.app import app
from vllm_kvplugins.sessions import deltas, tensor_file
from vllm_kvplugins.sessions.commands import Session, SessionAck
from vllm_kvplugins.sessions.directory import SessionDirectory
from vllm_kvplugins.sessions.files import (
    FoundSession,
    Identity,
    SessionFolder,
    WrittenFile,
)
from vllm_kvplugins.sessions.head_shards import Heads
from vllm_kvplugins.sessions.object_store import open_storage
from vllm_kvplugins.sessions.page_tokens import PageFormat, PartSlots
from vllm_kvplugins.sessions.snapshot import CacheSnapshot
from vllm_kvplugins.sessions.tensor_file import SessionFileError

FORM = torch.arange(6).view(3, 2).T  # a page of two slots
PARTS = ("counts", "positions", "retained", "tail")


@pytest.fixture(autouse=True)
def _as_in_an_engine():
    with torch.inference_mode():
        yield


class Conversation:
    """Requests of an engine that continue each other, each saved to a file."""

    def __init__(self, tmp_path: Path, policy: dict[str, object], **more: object):
        self.engine = SessionEngine(policy, BLOCK, 120, sessions=True, **more)
        if more.get("session_dtype", "auto") != "auto":
            # Restored keys are not those of the dense copy.
            self.engine._check_attention = lambda *arguments: None  # type: ignore[method-assign]
        self.files = SessionFolder(tmp_path, Identity.of(model="m"))
        self.files.prepare()
        self.saved: list[CacheSnapshot] = []
        self.written: list[WrittenFile] = []
        self.request = None

    def turn(
        self,
        prompt: int,
        answer: int = 8,
        ends: tuple[int, ...] = (),
        source: CacheSnapshot | None = None,
    ) -> WrittenFile:
        """One request; ``source``: the session as it was read from its file."""
        if self.request is None:
            self.request = says(self.engine.add("r", prompt, answer, ends))
        else:
            self.request = self.engine.resume(
                self.request, source or self.saved[-1], prompt, answer, ends
            )
        run(self.engine, self.request, 9)
        saved = self.engine.save("r")
        self.engine.remove("r")
        self.saved.append(saved)
        self.written.append(self.write(len(self.saved) - 1, saved))
        return self.written[-1]

    def write(self, number: int, saved: CacheSnapshot) -> WrittenFile:
        ids_of = np.arange(saved.tokens, dtype=np.int32)
        about = saved.compaction, saved.num_bytes, saved.first_query
        made = Session(f"s{number}", "owner", ids_of, *about)
        lineage = saved.lineage
        if lineage is not None and lineage.file.origins is None:
            lineage = None
        return self.files.write(made, 0, saved, self.formats, lineage)

    @property
    def formats(self) -> tuple[PageFormat, ...]:
        return self.engine.transfer.page_formats()

    def read(self, number: int) -> CacheSnapshot:
        return self.files.read(f"s{number}", 0, formats=self.formats)


def assert_equal(read: CacheSnapshot, saved: CacheSnapshot) -> None:
    """Bit for bit, except for unused slots, which a delta does not store."""
    assert (read.tokens, read.compaction) == (saved.tokens, saved.compaction)
    for one, other in zip(read.parts, saved.parts, strict=True):
        for name in PARTS:
            assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert (read.queries is None) == (saved.queries is None)


CONVERSATIONS = [
    pytest.param(flow("snapkv", ratio=0.4), id="flowkv"),
    pytest.param(small("full"), id="full"),
    pytest.param(small("snapkv"), id="snapkv"),
    pytest.param(small("pyramidkv"), id="pyramidkv"),
    pytest.param(small("h2o"), id="h2o"),
]


@pytest.mark.parametrize("policy", CONVERSATIONS)
@pytest.mark.parametrize("session_dtype", ["auto", "int8", "int4"])
def test_a_conversation_is_read_as_it_was_saved(tmp_path, policy, session_dtype):
    """Also from files that need several others, and when a turn begins from one."""
    talks = Conversation(tmp_path, policy, session_dtype=session_dtype)
    by_turns = policy["name"] == "flowkv"
    for turn, prompt in enumerate(PROMPTS):
        source = talks.read(turn - 1) if turn == 2 else None
        talks.turn(prompt, 12, ENDS[:turn] if by_turns else (), source)
    assert [bool(each.sources) for each in talks.written] == [False, True, True]
    for number, saved in enumerate(talks.saved):
        if session_dtype == "auto":
            assert_equal(talks.read(number), saved)
        else:
            assert talks.engine.transfer.mismatch(talks.read(number)) is None
    whole = talks.saved[-1].num_bytes
    assert talks.written[-1].num_bytes - talks.written[0].num_bytes < whole


def test_quantized_tokens_are_stored_once(tmp_path):
    """What a file has is not quantized again, so it loses nothing by later turns."""
    talks = Conversation(tmp_path, small("full"), session_dtype="int4")
    for prompt in (40, 60, 80):
        talks.turn(prompt)
    first, last = (talks.read(n).parts[0].tail for n in (0, 2))
    rows = talks.saved[0].parts[0].counts.numel()
    blocks = talks.saved[0].tokens // BLOCK
    first, last = (each.view(rows, -1, each.shape[1]) for each in (first, last))
    assert torch.equal(first[:, :blocks], last[:, :blocks])


def test_a_file_needs_a_bounded_number_of_others(tmp_path):
    """The next one is whole, and later ones need only that one and its followers."""
    talks = Conversation(tmp_path, small("full"))
    for turn in range(deltas.MAX_FILES + 3):
        talks.turn(40 + 6 * turn, 2)
    needed = [len(each.sources) for each in talks.written]
    assert needed == [*range(deltas.MAX_FILES), 0, 1, 2]
    assert talks.written[-1].sources == ("s8", "s9")
    assert_equal(talks.read(deltas.MAX_FILES - 1), talks.saved[deltas.MAX_FILES - 1])
    assert_equal(talks.read(deltas.MAX_FILES + 2), talks.saved[-1])


def test_files_of_a_conversation_do_not_fill_the_disk(tmp_path):
    """Earlier files also have what was dropped since: three times a whole one."""
    talks = Conversation(tmp_path, small("snapkv"))
    for turn in range(7):
        talks.turn(40 + 12 * turn, 2)
    newest = [s.num_bytes for s in talks.saved]
    for number, each in enumerate(talks.written):
        stored = [read_bytes(talks, name) for name in each.sources]
        assert sum(stored) <= 2 * newest[number]
    assert {bool(each.sources) for each in talks.written} == {True, False}


def read_bytes(talks: Conversation, name: str) -> int:
    """Bytes of keys and values in a file."""
    _, tensors = talks.files.storage.read(talks.files.name(name, 0))
    return sum(tensors[key].nbytes for key in ("zone", "tail", "own") if key in tensors)


def test_a_file_that_is_mostly_new_is_whole(tmp_path):
    talks = Conversation(tmp_path, small("full"))
    talks.turn(16, 2)
    assert talks.turn(110, 2).sources == ()
    assert_equal(talks.read(1), talks.saved[1])


def test_tokens_that_a_request_computed_again_are_new(tmp_path):
    """It may have restored fewer tokens than the session has."""
    talks = Conversation(tmp_path, small("full"))
    talks.turn(60, 8)
    first = talks.request
    assert first is not None
    talks.request = talks.engine.resume(first, talks.saved[0], 80, 4, max_tokens=50)
    talks.request.keys[:, :, 50:] += 1.0  # another text from there on
    run(talks.engine, talks.request, 9)
    saved = talks.engine.save("r")
    assert talks.write(1, saved).sources == ("s0",)
    assert_equal(talks.read(1), saved)
    assert not torch.equal(
        talks.read(0).parts[0].tail[13], talks.read(1).parts[0].tail[13]
    )


def test_files_of_a_shared_store_need_none_that_is_old(tmp_path, monkeypatch):
    """It may be deleted by its age, in the bucket or by another replica."""
    talks = Conversation(tmp_path, small("full"))
    talks.files.max_source_age_s = 100.0
    now = time.time()
    talks.turn(40)
    monkeypatch.setattr(time, "time", lambda: now + 60)
    assert talks.turn(50).sources == ("s0",)
    monkeypatch.setattr(time, "time", lambda: now + 120)
    assert talks.turn(60).sources == (), "s0 is old, not s1"
    assert talks.turn(70).sources == ("s2",)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.uint8])
def test_elements_of_any_size_are_joined(dtype):
    """Whole pages from a whole file and a delta, bit for bit."""
    form = PageFormat("l", torch.arange(24).view(3, 8).T.reshape(4, 6))
    raw = torch.randint(0, 255, (5, 24 * dtype.itemsize), dtype=torch.uint8)
    pages = raw.view(dtype)
    slots = PartSlots(torch.zeros(1).long(), torch.zeros(1, 0).int(), 3)
    record = deltas.FileRecord(deltas.Origins((deltas.FileRef("a", "", 0),), None, 0.0))
    lineage = deltas.Lineage(record, 10, 12, None, (slots,))
    longer = PartSlots(slots.counts, slots.positions, 5)
    new = [(longer, pages[:0], pages)]
    delta = deltas.delta_of(None, 20, new, [form], lineage)
    assert delta is not None
    own = {"counts": slots.counts, **delta.tensors}
    assert len(own["own"]) == 10
    first = {"zone": pages[:0], "tail": pages[:3].clone()}
    first["tail"].view(torch.uint8)[2, -1] ^= 1  # of a token that is computed again
    read, _ = deltas.whole_pages(own, delta.files, [form], lambda ref: ({}, first))
    assert torch.equal(read["tail"].view(torch.uint8), raw)


@pytest.mark.parametrize("ranks", [1, 4])
def test_another_tensor_parallel_size_reads_them(tmp_path, ranks):
    """Each of its ranks joins or cuts heads of files that need others."""
    dense, form = Dense((4,), compacted=False), PageFormat("l0", FORM)
    heads = Heads((4,))
    two = SessionFolder(tmp_path, Identity.of(model="m"), 2, heads)
    two.prepare()
    ids_of = np.arange(TOKENS, dtype=np.int32)
    for rank in range(2):
        first = dense.part(rank, 2)
        two.write(Session("a", "o", ids_of, None, 99, 13), rank, first, [form])
        slots = tuple(part.slots for part in first.parts)
        lineage = deltas.Lineage(first.file, 2, TOKENS, None, slots)
        second = Session("b", "o", ids_of, None, 99, 13)
        saved = dense.part(rank, 2)
        assert two.write(second, rank, saved, [form], lineage).sources == ("a",)
    other = SessionFolder(tmp_path, Identity.of(model="m"), ranks, heads)
    (found,) = [each for each in other.scan().sessions if each.sources]
    assert (found.session.session_id, found.sources) == ("b", ("a",))
    for rank in range(ranks):
        read = other.read("b", rank, found.session.file_ranks, [form])
        check_equal(read, dense.part(rank, ranks))
        assert read.file.origins is None, "its files are not of these heads"


def test_slots_in_files_that_are_not_listed_are_refused():
    form = PageFormat("l", FORM)
    own = {
        "counts": torch.zeros(1).long(),
        "file": torch.tensor([0, 2], dtype=torch.uint8),
        "place": torch.zeros(2, dtype=torch.int32),
        "own": torch.zeros(1, 3),
    }
    ref = deltas.FileRef("a", "", 0)
    with pytest.raises(ValueError, match="not all in 2 files"):
        deltas.whole_pages(own, [ref], [form], lambda ref: ({}, {}))


# -- files that are not there, or others -----------------------------------------------


@pytest.mark.parametrize("damage", ["gone", "bit", "another"])
def test_a_session_whose_source_is_damaged_is_not_loaded(tmp_path, damage):
    talks = Conversation(tmp_path, small("full"))
    talks.turn(40)
    talks.turn(50)
    path = talks.files.path("s0", 0)
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 4
    path.unlink()
    if damage == "bit":
        path.write_bytes(raw)
    elif damage == "another":  # valid, but not the file of then
        other = replace(talks.saved[0], lineage=None)
        other.parts[0].tail[0] += 1
        talks.write(0, other)
    with pytest.raises(SessionFileError, match=r"s0\.r0of1"):
        talks.read(1)
    problems = talks.files.scan().problems
    assert len(problems) == (damage == "gone")


def test_pages_of_another_layout_are_not_joined(tmp_path):
    talks = Conversation(tmp_path, small("full"))
    talks.turn(40)
    talks.turn(50)
    other = [replace(form, layout="other") for form in talks.formats]
    with pytest.raises(SessionFileError, match="instruction set"):
        talks.files.read("s1", 0, formats=other)


def test_a_scan_says_what_a_session_needs(tmp_path):
    talks = Conversation(tmp_path, small("full"))
    for prompt in (40, 50, 60):
        talks.turn(prompt)
    scan = talks.files.scan()
    assert [found.sources for found in scan.sessions] == [(), ("s0",), ("s0", "s1")]
    assert scan.other_bytes == 0
    sizes = [found.file_bytes for found in scan.sessions]
    assert sizes == [each.num_bytes for each in talks.written]


# -- the directory ---------------------------------------------------------------------


def directory(**settings: object) -> SessionDirectory:
    return SessionDirectory(1000, writes=True, **settings)  # type: ignore[arg-type]


def saved(
    listing: SessionDirectory, name: str, n: int, continues: str | None, **ack: object
) -> list[str]:
    """Save a session; returns the names of files that are deleted."""
    assert listing.save(session(name, tokens(*range(n))), name, (), continues)
    commands = listing.take_commands()
    sources = tuple(ack.get("sources", ()))  # type: ignore[call-overload]
    done = SessionAck("written", name, num_bytes=10, sources=sources)
    reduced = [save.reduces for save in commands.saves if save.reduces]
    kept_whole = [SessionAck("reduced", each) for each in reduced]
    listing.process([SessionAck("saved", name), done, *kept_whole])
    listing.check_integrity()
    return commands.unlink


def test_files_that_others_need_stay_until_these_are_gone():
    listing = directory()
    saved(listing, "a", 3, None)
    saved(listing, "b", 5, "a", sources=("a",))
    listing.evict("a")
    listing.check_integrity()
    assert listing.take_commands().unlink == []
    assert listing.written_bytes == 20
    listing.evict("b")
    listing.check_integrity()
    assert sorted(listing.take_commands().unlink) == ["a", "b"]
    assert listing.written_bytes == 0


def test_a_file_that_stays_for_another_keeps_what_it_needs():
    """So that it can be read: an engine that starts later finds its session."""
    listing = directory()
    saved(listing, "a", 3, None)
    saved(listing, "b", 5, "a", sources=("a",))
    saved(listing, "c", 7, "b", sources=("b",))
    for name in ("a", "b"):
        listing.evict(name)
        listing.check_integrity()
        assert listing.take_commands().unlink == []
    assert listing.kept_files == {"a", "b"}
    listing.evict("c")
    listing.check_integrity()
    assert sorted(listing.take_commands().unlink) == ["a", "b", "c"]


def test_after_a_detach_nothing_is_deleted():
    listing = directory()
    saved(listing, "a", 3, None)
    saved(listing, "b", 5, "a", sources=("a",))
    saved(listing, "c", 7, "b", sources=("b",))
    listing.evict("b")
    listing.detach()
    listing.check_integrity()
    assert listing.take_commands().unlink == []
    assert listing.written_bytes == 0


def test_a_file_that_is_being_written_may_need_the_last_one():
    listing = directory()
    saved(listing, "a", 3, None)
    assert listing.save(session("b", tokens(*range(5))), "b", (), "a")
    listing.evict("a")
    commands = listing.take_commands()
    assert (commands.saves[0].continues, commands.unlink) == ("a", [])
    # It has turned out to need nothing.
    listing.process([SessionAck("saved", "b"), SessionAck("written", "b", num_bytes=9)])
    listing.check_integrity()
    assert listing.take_commands().unlink == ["a"]


def test_a_session_without_a_file_is_not_needed():
    listing = directory()
    assert listing.save(session("a", tokens(*range(3))), "a", ())
    listing.take_commands()
    listing.process([SessionAck("saved", "a")])  # not written yet
    assert listing.save(session("b", tokens(*range(5))), "b", (), "a")
    assert listing.take_commands().saves[0].continues is None


def test_files_on_a_full_disk_are_deleted_from_the_last_turn_on():
    """Deleting those that others need would free nothing."""
    big = replace(session("c", tokens(9, 9, 9)), num_bytes=900)
    listing = directory(disk_bytes=5015)  # for the expected size of its file
    for name, n, continues in (("a", 3, None), ("b", 5, "a")):
        saved(listing, name, n, continues, sources=[continues] if continues else ())
    assert listing.written_bytes == 20
    assert listing.save(big, "c", ())
    assert listing.take_commands().unlink == ["b", "a"]
    listing.check_integrity()


def test_a_restarted_engine_keeps_what_its_sessions_need():
    """Even if the needed session is the oldest and there is no room for all."""
    listing = directory(disk_bytes=100)
    listing.add_files(
        [
            FoundSession(session("a", tokens(1, 2, 3)), 9.0, 50),
            FoundSession(session("x", tokens(7, 8, 9)), 5.0, 60),
            FoundSession(session("b", tokens(1, 2, 3, 4)), 1.0, 20, ("a",)),
        ]
    )
    assert listing.take_commands().unlink == ["x"]
    listing.check_integrity()
    listing.clear()
    assert sorted(listing.take_commands().unlink) == ["a", "b"]


# -- replicas --------------------------------------------------------------------------


def test_replicas_continue_each_other_s_files(tmp_path):
    """Each reads what the other has left out."""
    url = f"file://{tmp_path}"
    replicas = [Replica(open_storage(url, IDENTITY.fingerprint)) for _ in range(2)]
    replicas[0].files.prepare()
    sizes = []
    for turn in range(6):
        each, n = replicas[turn % 2], 200 + 12 * turn
        if turn:
            restored = each.ask("o", talk(1, n))
            assert len(restored) == n - 12
        name = each.save("o", talk(1, n), at=n // STORE_BLOCK * STORE_BLOCK)
        each.finish_writes()
        path = next(Path(each.files.storage.location).glob(f"{name}.*"))
        sizes.append(path.stat().st_size)
    for each in replicas:
        each.close()
    listed = json.loads(invoke("list", url, "--json"))
    assert len(listed) == 6
    shown = json.loads(invoke("show", url, str(name), "--json"))
    assert len(shown["needs"]) == 5


def invoke(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["sessions", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def two_turns(tmp_path) -> tuple[str, list[str]]:
    """A store with two turns of a conversation, and another conversation."""
    url = f"file://{tmp_path}"
    each = Replica(open_storage(url, IDENTITY.fingerprint))
    each.files.prepare()
    names = [each.save("o", talk(1, 200))]
    each.finish_writes()
    assert len(each.ask("o", np.append(talk(1, 200), ids(7)))) == 200
    names.append(each.save("o", talk(1, 212)))
    names.append(each.save("o", talk(2, 200)))
    each.finish_writes()
    each.close()
    return url, [str(name) for name in names]


def left_in(url: str) -> set[str]:
    return {each["session"] for each in json.loads(invoke("list", url, "--json"))}


def test_a_needed_session_is_deleted_with_those_that_need_it(two_turns):
    url, (first, _, other) = two_turns
    assert "removed 2 sessions" in invoke("delete", url, first)
    assert left_in(url) == {other}


def test_a_session_that_nothing_needs_is_deleted_alone(two_turns):
    url, (first, second, other) = two_turns
    assert "removed 1 sessions" in invoke("delete", url, second)
    assert left_in(url) == {first, other}


def test_old_sessions_that_new_ones_need_are_left(two_turns, tmp_path):
    url, (first, second, other) = two_turns
    for name in (first, other):
        (path,) = tmp_path.glob(f"*/{name}.*")
        os.utime(path, (0, 0))
    invoke("delete", url, "--older-than", 1)
    assert left_in(url) == {first, second}


def test_what_a_session_needs_is_no_garbage_although_it_cannot_be_read(tmp_path):
    """As a file of the middle turn, when that of the first one is gone."""
    talks = Conversation(tmp_path, small("full"))
    for prompt in (40, 50, 60):
        talks.turn(prompt)
    storage, name = talks.files.storage, talks.files.name("s2", 0)
    about, tensors = storage.read(name)
    refs = deltas.unpacked_refs(about.pop("files"))
    about["files"] = deltas.packed_refs(refs[1:])  # the last one needs s1 only
    del about["digest"], about["header"]
    about["header"] = tensor_file.digest(about, {"tokens": tensors["tokens"]})
    about["digest"] = tensor_file.digest(about, tensors)
    storage.write(name, tensors, about)
    talks.files.path("s0", 0).unlink()
    assert "0 files of incomplete sessions" in invoke("gc", tmp_path)
    assert left_in(str(tmp_path)) == {"s1", "s2"}


def test_a_session_without_what_it_needs_is_garbage(two_turns, tmp_path):
    url, (first, second, other) = two_turns
    (path,) = tmp_path.glob(f"*/{first}.*")
    path.unlink()
    assert "1 files of incomplete sessions" in invoke("gc", url)
    assert left_in(url) == {other}
    assert second not in left_in(url)
