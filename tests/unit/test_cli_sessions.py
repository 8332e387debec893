"""``kvplugins sessions`` on a shared store: a directory, fsspec's memory, and S3."""

from __future__ import annotations

import json
import time
import uuid

import numpy as np
import pytest
from click.testing import Result
from replica import BLOCK, IDENTITY, Replica, talk
from s3_server import BUCKET, s3_server
from typer.testing import CliRunner

from vllm_kvplugins.cli.app import app
from vllm_kvplugins.episodes.clustering import Clustering
from vllm_kvplugins.episodes.store import ClusteredHistory, ClusteringRecord
from vllm_kvplugins.errors import codes_in
from vllm_kvplugins.sessions import inspection
from vllm_kvplugins.sessions.clusterings import ClusteringFiles
from vllm_kvplugins.sessions.files import Identity
from vllm_kvplugins.sessions.object_store import open_storage

CLUSTERINGS = Identity.of(encoder="e")


@pytest.fixture(
    params=["file", "memory", pytest.param("s3", marks=pytest.mark.slow)],
)
def url(request, tmp_path):
    """A URL with the sessions of two engines; the second one has no sessions yet."""
    if request.param == "s3":
        with s3_server():
            yield f"s3://{BUCKET}/{uuid.uuid4()}"
    elif request.param == "memory":
        yield f"memory://x/{uuid.uuid4()}"
    else:
        yield f"file://{tmp_path}"


@pytest.fixture
def saved(url) -> list[str]:
    """IDs of two conversations, the second one a branch of the first."""
    storage = open_storage(url, IDENTITY.fingerprint)
    replica = Replica(storage)
    replica.files.prepare()
    branch = talk(1, 41 * BLOCK)
    branch[-1] += 1
    names = [replica.save("me", talk(1, 41 * BLOCK)), replica.save("me", branch)]
    replica.finish_writes()
    replica.close()
    assert None not in names
    return [str(name) for name in names]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["sessions", *map(str, arguments)])


def listed(url: str) -> dict[str, dict]:
    done = run("list", url, "--json")
    assert done.exit_code == 0, done.output
    return {each["session"]: each for each in json.loads(done.stdout)}


def test_sessions_are_listed_and_shown(url, saved):
    found = listed(url)
    assert set(found) == set(saved)
    for each in found.values():
        assert each["tokens"] == 41 * BLOCK
        assert each["problem"] is None
        assert each["facts"] == {"model": "m"}
        assert abs(each["last_used"] - time.time()) < 100
    one = run("show", url, saved[0], "--json")
    assert one.exit_code == 0, one.output
    assert json.loads(one.stdout)["problems"] == []


def test_the_table_shows_what_names_a_session(url, saved):
    """IDs of conversations that begin alike differ in their last part only."""
    table = run("list", url).stdout
    for session_id in saved:
        short = session_id.rpartition("-")[2][:12]
        assert short in table
        shown = json.loads(run("show", url, short, "--json").stdout)
        assert shown["session"] == session_id


def test_a_common_beginning_is_not_unique(url, saved):
    done = run("show", url, saved[0][:24])
    assert done.exit_code == 1
    assert codes_in(done.output) == ("KVP605",)


def test_sessions_are_deleted(url, saved):
    assert run("delete", url, "--older-than", 1).exit_code == 0
    assert len(listed(url)) == 2
    assert run("delete", url, saved[0].rpartition("-")[2]).exit_code == 0
    assert set(listed(url)) == {saved[1]}
    assert run("delete", url, "--all").exit_code == 0
    assert listed(url) == {}


def test_damaged_and_incomplete_sessions_are_garbage(url, saved, monkeypatch):
    storage = open_storage(url, IDENTITY.fingerprint)
    about, tensors = storage.read(f"{saved[0]}.r0of1.safetensors")
    damaged = {name: tensor + 1 for name, tensor in tensors.items()}
    storage.write("damaged.r0of1.safetensors", damaged, about)
    storage.write("foreign.r0of1.safetensors", tensors, {"note": "another program"})
    storage.write("half.r0of2.safetensors", tensors, about | {"session": "half"})
    assert listed(url)["damaged"]["problem"]
    dry = run("gc", url, "--dry-run")
    assert "would remove" in dry.stdout
    assert len(listed(url)) == 5
    monkeypatch.setattr(inspection, "_WRITE_S", -1)
    assert run("gc", url).exit_code == 0
    assert set(listed(url)) == {*saved, "foreign"}


# -- clusterings of conversations ------------------------------------------------------


@pytest.fixture
def clustered(url, saved) -> list[str]:
    """Names of clusterings: one of the saved conversations, and one of another one."""
    storage = open_storage(url, CLUSTERINGS.fingerprint)
    for seed, tokens in ((1, talk(1, 30 * BLOCK)), (2, talk(2, 30 * BLOCK))):
        files = ClusteringFiles(storage, CLUSTERINGS, 20, 20)
        files.save(record_of(seed), tokens)
        files.close()
    found = {file.name for file in storage.list()}
    assert len(found) == 2
    return sorted(found, key=lambda name: not name.startswith(bytes([1] * 12).hex()))


def record_of(seed: int) -> ClusteringRecord:
    clustering = Clustering(
        np.zeros(1, np.int64), np.ones((1, 2), np.float32), np.zeros(1, np.int64), "one"
    )
    history = ClusteredHistory(clustering, (f"Ann: hello {seed}",))
    return ClusteringRecord((bytes([seed] * 32),), history)


def clusterings_at(url: str) -> set[str]:
    storage = open_storage(url, CLUSTERINGS.fingerprint)
    return {file.name for file in storage.list()}


def test_clusterings_are_counted_and_are_no_sessions(url, saved, clustered):
    assert set(listed(url)) == set(saved)
    assert "2 clusterings" in run("list", url).stdout
    done = run("gc", url)
    assert done.exit_code == 0, done.output
    assert clusterings_at(url) == set(clustered)


def test_a_clustering_is_deleted_with_its_conversation(url, saved, clustered):
    done = run("delete", url, saved[0].rpartition("-")[2])
    assert "removed 1 sessions and 1 clusterings" in done.stdout
    assert clusterings_at(url) == {clustered[1]}, "of another conversation"
    assert set(listed(url)) == {saved[1]}
    done = run("delete", url, "--older-than", 1)
    assert "removed 0 sessions" in done.stdout
    assert clusterings_at(url) == {clustered[1]}
    assert run("delete", url, "--all").exit_code == 0
    assert clusterings_at(url) == set()


def test_old_clusterings_are_deleted(url, saved, clustered, monkeypatch):
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 7200)
    done = run("delete", url, "--older-than", 1)
    assert "removed 2 sessions and 2 clusterings" in done.stdout
    assert clusterings_at(url) == set()


def test_damaged_clusterings_are_garbage_and_those_of_other_versions_are_not(
    url, saved, clustered
):
    storage = open_storage(url, CLUSTERINGS.fingerprint)
    about, tensors = storage.read(clustered[0])
    key = bytes([3] * 12).hex()
    suffix = ".clustering.safetensors"
    damaged, other = (f"{key}-1-{key}-{n:016}{suffix}" for n in (1, 2))
    changed = {name: tensor + 1 for name, tensor in tensors.items()}
    storage.write(damaged, changed, about)
    storage.write(other, changed, about | {"format": "kvp-clustering-9"})
    assert "4 clusterings" in run("list", url).stdout
    assert run("gc", url).exit_code == 0
    assert clusterings_at(url) == {*clustered, other}


# -- errors ----------------------------------------------------------------------------


def test_a_store_that_cannot_be_used_ends_the_command(tmp_path):
    for place in (f"{tmp_path}/none", f"file://{tmp_path}/none"):
        done = run("list", place)
        assert (done.exit_code, codes_in(done.output)) == (1, ("KVP605",))
    done = run("list", "s3://user@bucket/x")
    assert (done.exit_code, codes_in(done.output)) == (1, ("KVP314",))


def test_a_store_that_fails_ends_the_command(monkeypatch):
    from fsspec.implementations.memory import MemoryFileSystem

    def fail(*unused, **more):
        raise ConnectionError("no route")

    monkeypatch.setattr(MemoryFileSystem, "ls", fail)
    done = run("list", "memory://x/any")
    assert (done.exit_code, codes_in(done.output)) == (1, ("KVP608",))
    assert "no route" in done.output
