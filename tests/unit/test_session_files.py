"""Session files, the worker's session store, and session settings."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
import torch
from click.testing import Result
from safetensors import safe_open
from test_session_store import session, tokens
from token_pool import CopiedCache
from typer.testing import CliRunner
from waiting import wait_for

from vllm_kvplugins.cli.app import app
from vllm_kvplugins.config import parse_policy, parse_sessions
from vllm_kvplugins.errors import KVPolicyError, codes_in
from vllm_kvplugins.sessions import settings as session_settings
from vllm_kvplugins.sessions import tensor_file
from vllm_kvplugins.sessions.directory import SessionDirectory
from vllm_kvplugins.sessions.files import (
    Identity,
    Scan,
    SessionFolder,
)
from vllm_kvplugins.sessions.inspection import list_files, open_folders
from vllm_kvplugins.sessions.snapshot import CacheSnapshot, HeapPart
from vllm_kvplugins.sessions.storage import remove_leftovers
from vllm_kvplugins.sessions.store import SessionStore
from vllm_kvplugins.sessions.tensor_file import SessionFileError

# -- files ---------------------------------------------------------------------------


def cache(n: int = 9) -> CacheSnapshot:
    rng = torch.Generator().manual_seed(n)
    pages = torch.randn(6, 16, generator=rng).to(torch.bfloat16)
    return CacheSnapshot(n, None, (part_of(pages, 2, "l"),))


def part_of(pages: torch.Tensor, rows: int, layout: str) -> HeapPart:
    """A part without a retained region."""
    return HeapPart(
        counts=torch.zeros(rows, dtype=torch.int64),
        positions=torch.zeros(rows, 0, dtype=torch.int32),
        retained=pages[:0].clone(),
        tail=pages,
        layout=layout,
    )


def folder(tmp_path: Path, **facts: object) -> SessionFolder:
    listing = SessionFolder(
        tmp_path, Identity.of(**({"model": "m", "policy": "p"} | facts))
    )
    listing.prepare()
    return listing


def write(files: SessionFolder, name: str = "s", n: int = 9) -> Path:
    files.write(session(name, np.arange(n, dtype=np.int32)), 0, cache(n))
    return files.path(name, 0)


@pytest.mark.parametrize("damage", ["bit", "cut", "empty", "gone", "metadata"])
def test_a_damaged_file_is_never_loaded(tmp_path, damage):
    files = folder(tmp_path)
    path = write(files)
    raw = bytearray(path.read_bytes())
    if damage == "bit":
        raw[-3] ^= 4
    elif damage == "cut":
        raw = raw[:-7]
    elif damage == "empty":
        raw = bytearray()
    elif damage == "metadata":
        raw = bytearray(bytes(raw).replace(b'"layout": "l"', b'"layout": "m"'))
    path.unlink() if damage == "gone" else path.write_bytes(bytes(raw))
    with pytest.raises(SessionFileError, match=r"s\.r0of1"):
        files.read("s", 0)


def test_another_model_finds_nothing(tmp_path):
    write(folder(tmp_path))
    assert folder(tmp_path, model="other").scan() == Scan()
    moved = folder(tmp_path, policy="q")
    os.replace(folder(tmp_path).path("s", 0), moved.path("s", 0))
    with pytest.raises(SessionFileError, match="another model"):
        moved.read("s", 0)
    scan = moved.scan()
    assert (len(scan.problems), scan.sessions) == (1, [])


def test_a_scan_finds_whole_sessions_oldest_first(tmp_path):
    files = folder(tmp_path)
    now = time.time()
    for age, name in zip((500, 900, 1000, -600), "cabd", strict=True):
        used = now - age
        os.utime(write(files, name, 9 + (age > 900)), (used, used))
    (files.folder / "torn.r0of1.safetensors").write_bytes(b"{}")
    scan = files.scan()
    assert [s.session.session_id for s in scan.sessions] == ["b", "a", "c", "d"]
    ages = [s.age_s for s in scan.sessions]
    assert ages == pytest.approx([1000, 900, 500, 0], abs=60)
    assert ages[-1] == 0, "a file from the future is new"
    assert scan.sessions[0].session.tokens.tolist() == list(range(10))
    assert scan.sessions[0].file_bytes == files.path("b", 0).stat().st_size


@pytest.mark.parametrize("ttl_s", [None, 90.5])
def test_a_file_says_how_long_its_session_is_retained(tmp_path, ttl_s):
    files = folder(tmp_path)
    each = replace(session("s", tokens(*range(9))), ttl_s=ttl_s)
    files.write(each, 0, cache())
    (found,) = files.scan().sessions
    assert found.session.ttl_s == ttl_s
    assert files.read("s", 0).tokens == 9


def test_a_failed_write_leaves_no_file(tmp_path, monkeypatch):
    files = folder(tmp_path)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write(files)
    assert list(files.folder.iterdir()) == []


def test_a_write_that_fails_half_way_leaves_no_file(tmp_path, monkeypatch):
    def full(file: BinaryIO, tensors: object, about: object) -> None:
        file.write(b"a part")
        file.flush()
        assert [p.suffix for p in files.folder.iterdir()] == [".part"]
        raise OSError(28, "No space left on device")

    files = folder(tmp_path)
    monkeypatch.setattr(tensor_file, "_write_contents", full)
    with pytest.raises(OSError, match="No space"):
        write(files)
    assert list(files.folder.iterdir()) == []


def test_a_file_is_private_synced_and_written_without_a_copy(tmp_path, monkeypatch):
    """Also with another umask; syncs the whole file."""
    files, large = folder(tmp_path), cache()
    large.parts = (part_of(torch.zeros(6000, 1000), 2, "l"),)
    synced = []
    sync = os.fsync

    def noted(handle: int) -> None:
        stat = os.fstat(handle)
        synced.append((stat.st_ino, stat.st_size))
        sync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    mask = os.umask(0)
    tracemalloc.start()
    try:
        files.write(session("s", np.arange(9, dtype=np.int32)), 0, large)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        os.umask(mask)
    assert peak < large.num_bytes / 20
    stat = files.path("s", 0).stat()
    assert stat.st_mode & 0o777 == 0o600
    assert synced == [(stat.st_ino, stat.st_size)]
    assert torch.equal(files.read("s", 0).parts[0].tail, large.parts[0].tail)


def test_only_the_owner_reads_the_folders(tmp_path):
    root = tmp_path / "above" / "sessions"
    mask = os.umask(0o022)
    try:
        files = SessionFolder(root, Identity.of(model="m", policy="p"))
        files.prepare()
        files.prepare()
    finally:
        os.umask(mask)
    for folder in (root, files.folder):
        assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("what", ["rewritten", "cut off"])
def test_a_file_that_changes_after_it_was_read_changes_nothing(tmp_path, what):
    """Another program copies over it, which keeps the file and replaces its contents.

    A mapped file would then change in memory, after its digest was checked, or end the
    process at the next access.
    """
    path = tmp_path / "one.safetensors"
    tensor_file.write(path, {"pages": torch.arange(4096)}, {"a": "text"})
    _, tensors = tensor_file.read(path)
    _, some = tensor_file.read(path, only=("pages",))
    with path.open("r+b") as file:
        if what == "rewritten":
            file.write(bytes(path.stat().st_size))
        else:
            file.truncate(8)
    for read in (tensors, some):
        assert torch.equal(read["pages"], torch.arange(4096))


def test_only_the_tensors_that_are_asked_for_are_read(tmp_path):
    path = tmp_path / "one.safetensors"
    both = {"tokens": torch.arange(5), "pages": torch.zeros(4 << 20)}
    tensor_file.write(path, both, {"a": "text"})
    tracemalloc.start()
    about, found = tensor_file.read(path, only=("tokens",))
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (about, list(found)) == ({"a": "text"}, ["tokens"])
    assert found["tokens"].tolist() == [0, 1, 2, 3, 4]
    assert most_bytes < 1 << 20, "the pages were read, too"
    with pytest.raises(tensor_file.SessionFileError):
        tensor_file.read(path, only=("unknown",))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    with pytest.raises(tensor_file.SessionFileError, match="bytes instead of"):
        tensor_file.read(path, only=("tokens",))


def test_other_programs_read_the_files(tmp_path):
    """All types of elements, and tensors without elements."""
    tensors = {
        str(dtype): torch.arange(6).reshape(2, 3).to(dtype)
        for dtype in tensor_file._DTYPES
    }
    tensors |= {"empty": torch.zeros(0, 4), "scalar": torch.tensor(3.5)}
    path = tmp_path / "all.safetensors"
    size = tensor_file.write(path, tensors, {"a": "ü", "b": ""})
    assert size == path.stat().st_size
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"a": "ü", "b": ""}
        for name, tensor in tensors.items():
            found = file.get_tensor(name)
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert tensor_file.as_bytes(found) == tensor_file.as_bytes(tensor)


# -- files that are not sessions -------------------------------------------------------

HEADER_DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "owner": lambda raw: raw.replace(b'"owner"', b'"anyer"'),
    "compaction": lambda raw: raw.replace(
        b'"compaction": "null"', b'"compaction": "nul{"'
    ),
    "num_bytes": lambda raw: raw.replace(b'"num_bytes": "1"', b'"num_bytes": "9"'),
    "first_query": lambda raw: raw.replace(
        b'"first_query": "9"', b'"first_query": "x"'
    ),
    "tokens": lambda raw: raw.replace(b"\x05\0\0\0", b"\x06\0\0\0"),
    "shape": lambda raw: raw.replace(b'"shape": [9]', b'"shape": [8]'),
    "digest": lambda raw: raw.replace(b'"header": "', b'"header": "0', 1)[:-1],
    "start": lambda raw: b"\xff" * 8 + raw[8:],
    "nothing": lambda raw: b"",
}


@pytest.mark.parametrize("damage", HEADER_DAMAGE)
def test_a_damaged_header_is_skipped(tmp_path, damage):
    """The sessions next to it are found."""
    files = folder(tmp_path)
    write(files, "good")
    path = write(files, "bad")
    raw = HEADER_DAMAGE[damage](path.read_bytes())
    assert raw != path.read_bytes()
    path.write_bytes(raw)
    scan = files.scan()
    assert [s.session.session_id for s in scan.sessions] == ["good"]
    (problem,) = scan.problems
    assert "bad.r0of1" in str(problem)
    assert scan.other_bytes == path.stat().st_size
    with pytest.raises(SessionFileError):
        files.read("bad", 0)
    problems = {
        f.session_id: f.problem for f in list_files(open_folders(str(tmp_path)))
    }
    assert problems["good"] is None
    assert problems["bad"] is not None


@pytest.mark.parametrize(
    "changes",
    [
        {"num_bytes": -99999999999},
        {"num_bytes": 0},
        {"num_bytes": "abc"},
        {"first_query": 10},
        {"session_id": "another"},
        {"ttl_s": -1.0},
        {"ttl_s": float("nan")},
        {"ttl_s": "soon"},
        {"tokens": np.arange(9, dtype=np.int32), "at": 12},
    ],
)
def test_impossible_numbers_are_skipped(tmp_path, changes):
    """Also with valid digests, as another program may write them."""
    files, changes = folder(tmp_path), dict(changes)
    at = changes.pop("at", 0)
    each = session("s", np.arange(max(at, 9), dtype=np.int32), at)
    each = replace(each, **changes)
    files.write(each, 0, cache())
    os.replace(files.path(each.session_id, 0), files.path("s", 0))
    scan = files.scan()
    assert (len(scan.problems), scan.sessions) == (1, [])


def put_strange_files(files: SessionFolder) -> list[str]:
    """Links, pipes, folders and text; the names of those that look like sessions."""
    at = files.folder
    kinds = [f"{name}.r0of1.safetensors" for name in ("link", "pipe", "folder", "text")]
    (at / kinds[0]).symlink_to(at / "nowhere")
    os.mkfifo(at / kinds[1])
    (at / kinds[2]).mkdir()
    (at / kinds[3]).write_text("hello")
    (at / "notes.txt").write_text("0123456789")
    os.mkfifo(at / "pipe.part")
    (at / "link.part").symlink_to(at / "nowhere")
    return kinds


def test_strange_files_are_skipped(tmp_path):
    files = folder(tmp_path)
    write(files, "good")
    strange = put_strange_files(files)
    files.prepare()
    scan = files.scan()
    assert [s.session.session_id for s in scan.sessions] == ["good"]
    assert sorted(str(p).split(":")[0] for p in scan.problems) == sorted(strange)
    assert scan.other_bytes >= 15
    for name in strange:
        with pytest.raises(SessionFileError):
            files.read(name.split(".")[0], 0)
    listed = CliRunner().invoke(app, ["sessions", "list", str(tmp_path), "--json"])
    problems = {f["session"]: f["problem"] for f in json.loads(listed.stdout)}
    assert problems.pop("good") is None
    assert set(problems) == {"link", "pipe", "folder", "text"}
    assert all(problems.values())


def test_files_that_vanish_during_a_scan_are_skipped(tmp_path, monkeypatch):
    files = folder(tmp_path)
    for name in ("a", "b"):
        write(files, name)
    lstat, gone = Path.lstat, []

    def late(path: Path) -> os.stat_result:
        if path.name.startswith("a.") and not gone:
            gone.append(path.name)
            path.unlink()
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", late)
    assert [s.session.session_id for s in files.scan().sessions] == ["b"]
    assert gone
    files.folder.rename(tmp_path / "elsewhere")
    assert files.scan() == Scan()


def test_one_missing_part_hides_a_session(tmp_path):
    files = SessionFolder(tmp_path, Identity.of(model="m"), ranks=2)
    files.prepare()
    for name, ranks in (("whole", (0, 1)), ("half", (0,)), ("other", (1,))):
        for rank in ranks:
            files.write(session(name, np.arange(9, dtype=np.int32)), rank, cache())
    scan = files.scan()
    (found,) = scan.sessions
    sizes = {p.name: p.stat().st_size for p in files.folder.iterdir()}
    assert found.file_bytes == sum(sizes[f"whole.r{r}of2.safetensors"] for r in (0, 1))
    assert scan.other_bytes == sum(sizes.values()) - found.file_bytes
    assert len(scan.problems) == 1


WRITER = """
import os, signal, sys
from pathlib import Path
import torch
from vllm_kvplugins.sessions import tensor_file
def killed(handle):
    print("half", flush=True)
    signal.pause() if sys.argv[2] == "live" else os.kill(os.getpid(), signal.SIGKILL)
os.fsync = killed
tensor_file.write(Path(sys.argv[1]), {"x": torch.zeros(100000)}, {})
"""


@pytest.mark.parametrize("state", ["killed", "live"])
def test_leftovers_of_killed_saves_are_removed(tmp_path, state):
    """Those of a running process stay."""
    files = folder(tmp_path)
    write(files, "good")
    target = str(files.path("s", 0))
    command = [sys.executable, "-c", WRITER, target, state]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "half\n"
        if state == "killed":
            assert writer.wait(20) == -signal.SIGKILL
        (part,) = files.folder.glob("*.part")
        size = part.stat().st_size
        assert size > 400000
        assert files.scan().other_bytes == size, "it takes disk space"
        files.prepare()
        assert part.exists() == (state == "live")
        assert [s.session.session_id for s in files.scan().sessions] == ["good"]
        writer.kill()
    files.prepare()
    assert [p.name for p in files.folder.iterdir()] == ["good.r0of1.safetensors"]


def test_old_temporary_files_of_the_library_are_removed(tmp_path):
    files = folder(tmp_path)
    for name, age_s in ((".tmpAbC123", 7200), (".tmpNew456", 60)):
        (files.folder / name).write_bytes(b"x")
        os.utime(files.folder / name, (time.time() - age_s,) * 2)
    assert remove_leftovers(files.folder) == 1
    assert [p.name for p in files.folder.iterdir()] == [".tmpNew456"]


def test_a_directory_that_cannot_be_written_to_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(KVPolicyError) as refused:
        folder(tmp_path / "file" / "below")
    assert refused.value.codes == ("KVP304",)


class Caches:
    """A transfer that saves anything and restores nothing."""

    def save(self, request_id, compaction, tokens, blocks, first_query):
        if request_id == "no memory":
            raise MemoryError("none left")
        return CopiedCache(cache(tokens))

    def restore(self, request_id, *arguments):
        raise RuntimeError(f"no room for {request_id}")

    def mismatch(self, saved):
        return None

    def page_formats(self):
        return ()

    def discard(self, saved):
        """A session without memory to free."""


def test_a_save_without_memory_is_reported_and_not_raised():
    store, directory = SessionStore(Caches()), SessionDirectory(10)
    directory.save(session("s", tokens(1, 2, 3)), "no memory", ())
    store.save(directory.take_commands())
    reports = store.take_acks()
    assert codes_in(str(reports[0].problem)) == ("KVP305",)
    directory.process(reports)
    assert (directory.num_sessions, directory.counts.failures) == (0, 1)
    store.close()


@pytest.mark.parametrize("moves", [False, True])
def test_a_load_without_memory_is_reported_and_not_raised(moves):
    """On both ranks, for two requests; one session is lost."""
    stores = [SessionStore(Caches()) for _ in range(2)]
    directory = SessionDirectory(10, ranks=2)
    directory.save(session("s", tokens(1, 2, 3)), "p", ())
    commands = directory.take_commands()
    for store in stores:
        store.save(commands)
    directory.process([report for store in stores for report in store.take_acks()])
    match = next(directory.find("o", tokens(1, 2, 3, 9)), None)
    for request in ("q",) if moves else ("q", "r"):
        directory.load(match, request, 4, (7, 8), moves=moves)
    commands = directory.take_commands()
    for store in stores:
        store.execute(commands)
    reports = [report for store in stores for report in store.take_acks()]
    problems = [str(ack.problem) for ack in reports]
    assert {codes_in(problem) for problem in problems} == {("KVP307",)}
    assert {ack.load for ack in reports} == set(commands.loads)
    assert [report.load for report in reports] == 2 * commands.loads
    directory.process(reports)
    assert (directory.num_sessions, directory.counts.failures) == (0, 1)
    directory.check_integrity()
    commands = directory.take_commands()
    for store in stores:
        store.execute(commands)
        assert store.num_held == 0
        store.close()


def test_a_session_dropped_and_staged_in_one_step_is_read(tmp_path):
    files = folder(tmp_path)
    store, directory = SessionStore(Caches(), files), SessionDirectory(1, writes=True)
    for name, ids in (("s", tokens(1, 2, 3)), ("t", tokens(4, 5, 6))):
        directory.save(session(name, ids), name, ())
        commands = directory.take_commands()
        store.save(commands)
        store.wait_for_writes()
        store.execute(commands)
        directory.process(store.take_acks())
    assert store.num_held == 1
    match = next(directory.find("o", tokens(1, 2, 3, 9)), None)
    directory.fetch(match, "r")  # drops t, which was in memory
    other = next(directory.find("o", tokens(4, 5, 6, 9)), None)
    assert not other.ready
    commands = directory.take_commands()
    assert (commands.drop, commands.stage) == (["t"], ["s"])
    commands.drop.append("s")  # as after an eviction earlier in the same step
    store.execute(commands)
    wait_for(lambda: store._reads["s"].done())
    directory.process(store.take_acks())
    assert next(directory.find("o", tokens(1, 2, 3, 9)), None).ready
    store.close()


# -- settings and the command line --------------------------------------------------


def test_sessions_are_on_for_policies_that_work_by_turns():
    assert parse_sessions({"name": "flowkv"}).on_for(works_by_turns=True)
    assert not parse_sessions({"name": "snapkv"}).on_for(works_by_turns=False)
    assert parse_sessions({"session_memory": "1GiB"}).on_for(works_by_turns=False)
    assert not parse_sessions({"sessions": False}).on_for(works_by_turns=True)
    assert parse_sessions({"sessions": True}).on_for(works_by_turns=False)
    # settings that have no effect, or that nothing else requires
    unset = {
        "session_memory": None,
        "session_max_age_s": None,
        "session_keep_on_device": False,
    }
    assert not parse_sessions(unset).on_for(works_by_turns=False)


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"session_disk": "1GiB"}, "KVP302"),
        ({"sessions": False, "session_memory": 9}, "KVP301"),
        ({"session_park": False, "session_keep_on_device": False}, "KVP303"),
        ({"name": "icecache", "session_dir": "d"}, "KVP035"),
        ({"name": "sekv", "sessions": True}, "KVP034"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, code):
    with pytest.raises(KVPolicyError) as refused:
        parse_policy({"name": "snapkv"} | settings)
    assert code in refused.value.codes


def test_the_default_limit_on_files_is_a_share_of_the_free_space(tmp_path):
    """The same after a restart; no limit only if the user says so."""
    pytest.importorskip("vllm")
    from vllm_kvplugins.vllm_adapter.scheduler.session_config import disk_limit

    def limit(**settings: object) -> int | None:
        parsed = parse_sessions({"session_dir": str(tmp_path)} | settings)
        return disk_limit(parsed, files, files.scan())

    files = folder(tmp_path)
    empty, free = limit(), shutil.disk_usage(tmp_path).free
    assert empty == pytest.approx(free / 4, rel=0.01)
    (files.folder / "notes").write_bytes(b"x" * 1000)
    large = cache()
    large.parts = (part_of(torch.zeros(5000, 1000), 2, "l"),)
    files.write(session("s", np.arange(9, dtype=np.int32)), 0, large)
    assert limit() == pytest.approx(empty, rel=0.01)
    assert limit(session_disk=None) is None
    assert limit(session_disk="2KiB") == 2048
    assert disk_limit(parse_sessions({"name": "flowkv"}), None, Scan()) is None


@pytest.mark.parametrize(
    "settings",
    [
        {"session_memory": "much"},
        {"session_memroy": 9},
        {"session_max_age_s": 0},
        {"session_disk": 0},
        {"session_disk": "all"},
    ],
)
def test_an_invalid_setting_is_named(settings):
    (name,) = settings
    with pytest.raises(KVPolicyError, match=name):
        parse_policy({"name": "snapkv"} | settings)


def test_the_old_name_of_a_setting_works_and_warns_once(monkeypatch, caplog):
    monkeypatch.setattr(session_settings, "_warned", set())
    with caplog.at_level(logging.WARNING, "vllm.kv_policy"):
        for _ in range(2):
            parsed = parse_sessions({"name": "flowkv", "session_park": False})
            assert not parsed.session_keep_on_device
    (warning,) = caplog.messages
    assert "session_keep_on_device" in warning
    parse_policy({"name": "flowkv", "session_park": False})


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["sessions", *map(str, arguments)])


@pytest.mark.parametrize(("ls", "rm"), [("list", "delete"), ("ls", "rm")])
def test_the_command_line_lists_and_deletes(tmp_path, ls, rm):
    """Also under the old names."""
    files = folder(tmp_path)
    for name in ("aaa", "abb", "ccc"):
        write(files, name)
    (files.folder / "bad.r0of1.safetensors").write_bytes(b"x")
    listed = json.loads(run(ls, tmp_path, "--json").stdout)
    assert {item["session"] for item in listed} == {"aaa", "abb", "ccc", "bad"}
    assert {item["tokens"] for item in listed} == {0, 9}
    assert "cannot be read" in run(ls, tmp_path).stdout
    assert run(rm, tmp_path).exit_code == 2
    assert run(rm, tmp_path, "zzz").exit_code == 1
    assert "removed 2" in run(rm, tmp_path, "a").stdout
    os.utime(files.path("ccc", 0), (1000, 1000))
    run(rm, tmp_path, "--older-than", "1")
    assert [p.name for p in files.folder.iterdir()] == ["bad.r0of1.safetensors"]
    assert "removed 1" in run(rm, tmp_path, "--all").stdout
    assert run(ls, tmp_path / "nowhere").exit_code == 1


def test_the_command_line_shows_a_session_and_checks_its_contents(tmp_path):
    files = folder(tmp_path)
    each = session("abc", np.arange(9, dtype=np.int32), at=8)
    files.write(each, 0, cache())
    write(files, "abe")
    shown = run("show", tmp_path, "abc", "--json")
    assert shown.exit_code == 0
    found = json.loads(shown.stdout)
    assert (found["session"], found["tokens"], found["owner"]) == ("abc", 9, "o")
    assert found["compaction"]["at_tokens"] == 8
    assert (found["facts"]["model"], found["problems"]) == ("m", [])
    assert "model: m" in run("show", tmp_path, "abc").stdout
    assert codes_in(run("show", tmp_path, "ab").stderr) == ("KVP605",)
    path = files.path("abc", 0)
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 4
    path.write_bytes(raw)
    assert json.loads(run("list", tmp_path, "--json").stdout)[0]["problem"] is None
    damaged = run("show", tmp_path, "abc")
    assert damaged.exit_code == 1
    assert "contents have changed" in damaged.stdout


def test_the_command_line_collects_garbage(tmp_path):
    """And nothing else: files of other versions, links and new parts stay."""
    files = folder(tmp_path)
    two = SessionFolder(tmp_path, files.identity, ranks=2)
    write(files, "good")
    put_strange_files(files)
    for name, ranks, age_s in (("whole", (0, 1), 9999), ("half", (1,), 9999)):
        for rank in ranks:
            two.write(session(name, np.arange(9, dtype=np.int32)), rank, cache())
            os.utime(two.path(name, rank), (time.time() - age_s,) * 2)
    two.write(session("new", np.arange(9, dtype=np.int32)), 0, cache())
    other = {"format": "kvp-session-2"}
    tensor_file.write(files.path("other", 0), {"tokens": torch.zeros(3)}, other)
    for name in ("cut", "bit"):
        path = write(files, name)
        raw = path.read_bytes()
        changed = raw.replace(b'"owner": "o"', b'"owner": "p"')
        path.write_bytes(raw[:-7] if name == "cut" else changed)
    (files.folder / "s.r0of1.safetensors.12.part").write_bytes(b"half")
    before = {path.name for path in files.folder.iterdir()}
    garbage = {
        "s.r0of1.safetensors.12.part",
        *(f"{name}.r0of1.safetensors" for name in ("cut", "bit", "text")),
        "half.r1of2.safetensors",
    }
    planned = run("gc", tmp_path, "--dry-run")
    assert "would remove 1 temporary" in planned.stdout
    assert {path.name for path in files.folder.iterdir()} == before
    done = run("gc", tmp_path)
    assert "3 damaged files, 1 files of incomplete sessions" in done.stdout
    assert before - {path.name for path in files.folder.iterdir()} == garbage
    assert "removed 0 temporary" in run("gc", tmp_path).stdout


def test_a_file_that_cannot_be_deleted_is_named(tmp_path):
    files = folder(tmp_path)
    (files.folder / "folder.r0of1.safetensors").mkdir()
    failed = run("delete", tmp_path, "--all")
    assert codes_in(failed.stderr) == ("KVP608",)
