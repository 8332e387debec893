"""Storages of session files: a directory, fsspec's memory, and a local S3 server."""

from __future__ import annotations

import os
import random
import sys
import time
import uuid

import fsspec
import numpy as np
import pytest
import torch
from replica import FaultyStorage, Replica, ids, talk
from s3_server import BUCKET, s3_server
from safetensors.torch import load as load_safetensors

from vllm_kvplugins.config import parse_policy, parse_sessions
from vllm_kvplugins.errors import KVPolicyError, codes_in
from vllm_kvplugins.sessions import object_store, tensor_file
from vllm_kvplugins.sessions.object_store import (
    ObjectStorage,
    StoreError,
    open_storage,
    start_up_problem,
    url_problems,
)
from vllm_kvplugins.sessions.tensor_file import SessionFileError
from vllm_kvplugins.sessions.weights import weights_digest

TENSORS = {
    "tokens": torch.arange(900, dtype=torch.int32),
    "odd": torch.arange(7, dtype=torch.uint8),
    "pages": torch.randn(50, 33, generator=torch.Generator().manual_seed(1)),
    "half": torch.ones(3, 5, dtype=torch.bfloat16),
    "none": torch.zeros(0, 4),
    "fp8": torch.arange(8).to(torch.float8_e4m3fn),
}
ABOUT = {"session": "s", "note": "ü"}


@pytest.fixture(scope="module")
def s3():
    with s3_server():
        yield f"s3://{BUCKET}"


@pytest.fixture(
    params=["file", "memory", pytest.param("s3", marks=pytest.mark.slow)],
)
def url(request, tmp_path):
    """A URL of an empty folder."""
    if request.param == "file":
        return f"file://{tmp_path}"
    root = request.getfixturevalue("s3") if request.param == "s3" else "memory://x"
    return f"{root}/{uuid.uuid4()}"


@pytest.fixture
def storage(url):
    opened = open_storage(url, "folder")
    assert start_up_problem(opened) is None
    return opened


# -- all storages do the same ----------------------------------------------------------


def test_files_are_written_listed_read_and_deleted(storage):
    assert list(storage.list()) == []
    before = time.time()
    sizes = {}
    for name in ("a-1.safetensors", "a-2.safetensors", "b-1.safetensors"):
        sizes[name] = storage.write(name, TENSORS, ABOUT)
    found = {file.name: file for file in storage.list()}
    assert {name: file.num_bytes for name, file in found.items()} == sizes
    assert all(before - 2 < f.modified < time.time() + 2 for f in found.values())
    assert {file.name for file in storage.list("a-")} == set(list(sizes)[:2])
    assert list(storage.list("c")) == []
    storage.touch("a-1.safetensors")
    about, tensors = storage.read("a-1.safetensors")
    assert about == ABOUT
    assert list(tensors) == sorted(TENSORS) or list(tensors) == list(TENSORS)
    for name, tensor in tensors.items():
        assert tensor.dtype == TENSORS[name].dtype
        assert tensor.shape == TENSORS[name].shape
        assert tensor_file.as_bytes(tensor) == tensor_file.as_bytes(TENSORS[name])
    about, tensors = storage.read("a-1.safetensors", only=("tokens",))
    assert (about, list(tensors)) == (ABOUT, ["tokens"])
    assert torch.equal(tensors["tokens"], TENSORS["tokens"])
    for _ in range(2):
        storage.delete("a-1.safetensors")
    assert len(list(storage.list())) == 2
    with pytest.raises(SessionFileError):
        storage.read("a-1.safetensors")
    with pytest.raises(SessionFileError):
        storage.read("a-1.safetensors", only=("tokens",))


def test_other_folders_and_their_files_are_not_listed(url, storage):
    other = open_storage(url, "folder-2")
    other.prepare()
    other.write("x", TENSORS, ABOUT)
    storage.write("y", TENSORS, ABOUT)
    nested = open_storage(f"{url}/folder", "nested")
    nested.prepare()
    nested.write("z", TENSORS, ABOUT)
    assert {file.name for file in storage.list()} - {"nested"} == {"y"}
    assert [file.name for file in other.list()] == ["x"]
    assert list(open_storage(url, "none").list()) == []


def test_long_beginnings_and_large_files_are_read_in_pieces(storage, monkeypatch):
    monkeypatch.setattr(object_store, "_PIECE_BYTES", 10_000)
    monkeypatch.setattr(object_store, "_PIECES_AT_ONCE", 3)
    tensors = {"tokens": torch.arange(70_000, dtype=torch.int32)} | TENSORS
    tensors["tokens"] = torch.arange(70_000, dtype=torch.int32)
    about = {"long": "x" * 100_000}
    storage.write("large", tensors, about)
    found, (first, *_) = storage.read("large"), TENSORS
    assert found[0] == about
    assert all(torch.equal(found[1][n], t) for n, t in tensors.items() if n != "fp8")
    head = storage.read("large", only=(first,))
    assert head[0] == about
    assert torch.equal(head[1][first], tensors[first])


def test_two_replicas_share_a_store(storage):
    """Over the whole stack, also on S3: save, look up, load, list, expire."""
    faulty = FaultyStorage(storage)
    first, second = Replica(faulty), Replica(faulty)
    first.save("o", talk(1, 5000), at=64)
    first.save("p", talk(1, 5000))
    first.finish_writes()
    prompt = np.append(talk(1, 5000), ids(7))
    assert len(second.ask("o", prompt)) == 5000
    assert second.directory.counts.store_hits == 1
    assert len(second.ask("q", prompt)) == 0
    second.save("o", talk(1, 6000))
    second.finish_writes()
    assert len(first.ask("o", np.append(talk(1, 6000), ids(7)))) == 6000
    assert len(list(storage.list())) == 3
    first.close()
    second.close()
    third = Replica(faulty, refresh_s=0.1, max_age_s=1e-9, lookup_s=0)
    third.replicas.start()
    deadline = time.monotonic() + 20
    while list(storage.list()):
        assert time.monotonic() < deadline, "old files stay"
        time.sleep(0.05)
    third.close()


# -- object stores ---------------------------------------------------------------------


def test_contents_are_those_of_the_format():
    loaded = load_safetensors(tensor_file.packed(TENSORS, ABOUT))
    assert set(loaded) == set(TENSORS)
    assert torch.equal(loaded["pages"], TENSORS["pages"])


def test_damaged_contents_raise_one_error():
    """Cut at every length, and with changed bytes of the header."""
    whole = bytearray(tensor_file.packed(TENSORS, ABOUT))
    for n in [*range(1200), *range(1200, len(whole), 97)]:
        with pytest.raises(SessionFileError):
            tensor_file.unpacked(whole[:n])
    with pytest.raises(SessionFileError):
        tensor_file.unpacked(whole + b"more")
    rng = random.Random(1)
    for _ in range(2000):
        changed = whole.copy()
        for _ in range(rng.choice((1, 1, 3))):
            changed[rng.randrange(700)] = rng.randrange(256)
        try:
            tensor_file.unpacked(changed)
            tensor_file.first_tensor_end(changed)
        except SessionFileError:
            pass


def test_a_store_that_does_not_answer_at_start_up_is_a_warning(monkeypatch):
    """A server starts without it; wrong settings are refused."""
    storage = FaultyStorage(ObjectStorage(f"memory://{uuid.uuid4()}", "f"))
    storage.responds.clear()
    monkeypatch.setattr(object_store, "_PREPARE_S", 0.05)
    assert "did not respond" in start_up_problem(storage)
    storage.responds.set()

    class Failing(ObjectStorage):
        error: Exception = OSError()

        def prepare(self) -> None:
            with self._store():
                raise self.error

    failing = Failing("memory://x", "f")
    for error in (ConnectionError("refused"), TimeoutError(), OSError("503")):
        failing.error = error
        assert type(error).__name__ in start_up_problem(failing)
    credentials = type("NoCredentialsError", (Exception,), {})
    for error in (PermissionError("403"), FileNotFoundError("bucket"), credentials()):
        failing.error = error
        with pytest.raises(KVPolicyError) as refused:
            start_up_problem(failing)
        assert refused.value.codes == ("KVP315",)


def test_a_directory_that_cannot_be_written_to_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(KVPolicyError) as refused:
        start_up_problem(open_storage(f"file://{tmp_path}/file", "f"))
    assert refused.value.codes == ("KVP315",)


def test_temporary_files_of_other_machines_stay(tmp_path):
    """Their locks may not be visible here. Old ones are leftovers."""
    storage = open_storage(f"file://{tmp_path}", "f")
    storage.prepare()
    for name, age_s in (("new.part", 60), ("old.part", 7200)):
        path = tmp_path / "f" / name
        path.write_bytes(b"half")
        os.utime(path, (time.time() - age_s,) * 2)
    storage.prepare()
    assert [path.name for path in (tmp_path / "f").iterdir()] == ["new.part"]


def test_files_of_a_shared_directory_are_private(tmp_path):
    storage = open_storage(f"file://{tmp_path}/a%20b", "f")
    storage.prepare()
    storage.write("x", TENSORS, ABOUT)
    folder = tmp_path / "a b" / "f"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "x").stat().st_mode & 0o777 == 0o600


def test_any_error_of_a_driver_is_an_error_of_the_store(monkeypatch):
    """Drivers raise exceptions of their own, which no caller knows."""

    class Odd(Exception):
        pass

    storage = ObjectStorage(f"memory://{uuid.uuid4()}", "f")
    storage.write("x", TENSORS, ABOUT)
    fs = type(fsspec.filesystem("memory"))

    def fail(*arguments: object, **options: object) -> None:
        raise Odd("no reason")

    for method in ("find", "pipe_file", "cat_ranges", "cat_file", "rm_file"):
        monkeypatch.setattr(fs, method, fail)
    for call in (
        lambda: storage.list(),
        lambda: storage.read("x"),
        lambda: storage.read("x", only=("tokens",)),
        lambda: storage.write("y", TENSORS, ABOUT),
        lambda: storage.delete("x"),
        lambda: storage.prepare(),
    ):
        with pytest.raises(StoreError, match="Odd: no reason"):
            call()


# -- settings --------------------------------------------------------------------------


def refused_codes(**settings: object) -> tuple[str, ...]:
    with pytest.raises(KVPolicyError) as refused:
        parse_policy({"name": "snapkv"} | settings)
    return refused.value.codes


def test_settings_that_contradict_each_other_are_refused(tmp_path):
    url = {"session_url": "memory://x"}
    assert refused_codes(**url, session_dir=str(tmp_path)) == ("KVP313",)
    assert refused_codes(**url, session_disk="1GiB") == ("KVP302",)
    assert refused_codes(**url, sessions=False) == ("KVP301",)
    for name in ("session_refresh_s", "session_lookup_s", "session_load_s"):
        assert refused_codes(**{name: 1.0}) == ("KVP302",)
    assert refused_codes(session_index_memory="1GiB") == ("KVP302",)
    assert refused_codes(**url, session_refresh_s=None, session_lookup_s=0) == (
        "KVP318",
    )
    assert refused_codes(name="icecache", **url) == ("KVP035",)
    settings = {"name": "snapkv", "session_lookup_s": 0, "session_load_s": 2} | url
    assert parse_policy(settings).name == "snapkv"
    assert parse_sessions(settings).on_for(works_by_turns=False)
    assert not parse_sessions({"name": "snapkv"}).on_for(works_by_turns=False)


def test_urls_that_cannot_be_opened_are_refused(monkeypatch):
    for url in (
        "sessions",
        "/mnt/sessions",
        "s3://",
        "s3://key:secret@bucket",
        "s3://bucket/x?y=1",
        "file://host/path",
        "nosuchstore://x",
    ):
        (problem,) = url_problems(url)
        assert codes_in(problem) == ("KVP314",), url
        assert "secret" not in problem
    assert url_problems("memory://x") == url_problems("file:///mnt/x") == []
    # Not s3: fsspec keeps a class that an earlier test has loaded.
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    (problem,) = url_problems("gs://bucket/x")
    assert codes_in(problem) == ("KVP314",)
    assert "vllm-kvplugins[fleet]" in problem


def test_a_digest_of_weights_is_that_of_all_copies(tmp_path):
    """And another one after training, which changes all of a tensor."""
    tensors = {"a": torch.randn(500, 40), "b": torch.randn(7)}

    def digest(name: str, tensors: dict[str, torch.Tensor]) -> str:
        (tmp_path / name).mkdir(exist_ok=True)
        tensor_file.write(tmp_path / name / "model.safetensors", tensors, {})
        (tmp_path / name / "old.bin").write_bytes(bytes(range(256)) * 300)
        return weights_digest(tmp_path / name)

    first = digest("one", tensors)
    time.sleep(0.02)
    assert digest("two", tensors) == first
    for name in tensors:
        assert digest("two", tensors | {name: tensors[name] * 1.001}) != first
    (tmp_path / "one" / "old.bin").write_bytes(bytes(range(1, 256)) * 300)
    assert weights_digest(tmp_path / "one") != first
    assert weights_digest(tmp_path / "nothing") == ""
