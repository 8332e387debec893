"""Clusterings in files: restarts, replicas, damage, limits, sick storages."""

from __future__ import annotations

import gc
import os
import random
import stat
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_encoder import TOPICS, BagOfWords, speak
from replica import FaultyStorage, talk
from s3_server import BUCKET, s3_server
from waiting import wait_for

from vllm_kvplugins.episodes.routing import EpisodeRouter, Route
from vllm_kvplugins.episodes.settings import EpisodeSettings
from vllm_kvplugins.episodes.utterances import Utterance
from vllm_kvplugins.sessions import clusterings, tensor_file
from vllm_kvplugins.sessions.clusterings import ClusteringFiles
from vllm_kvplugins.sessions.files import Identity
from vllm_kvplugins.sessions.object_store import open_storage
from vllm_kvplugins.sessions.storage import DirectoryStorage, SessionStorage

RNG = random.Random(7)
LONG = [u for topic in (*TOPICS, *TOPICS) for u in speak(RNG, 8, topic)]  # 16 segments
HISTORY = LONG[:32]
QUERY = TOPICS["tea"]
IDENTITY = Identity.of(encoder="e")
TOKENS = talk(1, 100)


def in_folder(folder: Path) -> DirectoryStorage:
    return DirectoryStorage(folder, folder / IDENTITY.fingerprint)


def files_of(storage: SessionStorage, **settings: Any) -> ClusteringFiles:
    """A store on a machine that may be busy."""
    options: dict[str, Any] = {"lookup_s": 20.0, "load_s": 20.0} | settings
    return ClusteringFiles(storage, options.pop("identity", IDENTITY), **options)


class Server:
    """A router with a store, as one process of a server has it."""

    def __init__(
        self,
        storage: SessionStorage,
        routing: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.encoder = BagOfWords()
        self.files = files_of(storage, **settings)
        self.router = EpisodeRouter(
            EpisodeSettings(**(routing or {})),
            lambda _: self.encoder,
            store=self.files,
        )

    def ask(
        self,
        history: list[Utterance],
        query: str = QUERY,
        owner: str = "me",
        saves: bool = True,
    ) -> Route:
        route = self.router.route(owner, history, query)
        assert route is not None
        if saves:
            self.files.save(route.record, TOKENS)
            wait_for(lambda: not self.files._num_waiting, 20)
        return route


def same(one: Route, other: Route) -> bool:
    """Whether two routes have the same episodes, byte for byte."""
    a, b = one.record, other.record
    arrays = [
        (x.tobytes(), x.dtype, x.shape) == (y.tobytes(), y.dtype, y.shape)
        for x, y in (
            (a.clustered.clustering.labels, b.clustered.clustering.labels),
            (a.clustered.clustering.centroids, b.clustered.clustering.centroids),
            (a.clustered.clustering.medoids, b.clustered.clustering.medoids),
        )
    ]
    return (
        all(arrays)
        and a.digests == b.digests
        and a.clustered.guides == b.clustered.guides
        and (one.episode, one.guide, one.similarity)
        == (other.episode, other.guide, other.similarity)
    )


@pytest.fixture
def storage(tmp_path):
    return in_folder(tmp_path)


def names(storage: SessionStorage) -> list[str]:
    return [file.name for file in storage.list()]


# -- restarts and replicas -------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["directory", "memory", pytest.param("s3", marks=pytest.mark.slow)]
)
def test_a_restarted_router_routes_as_the_one_before(tmp_path, kind):
    with s3_server() if kind == "s3" else nullcontext():
        root = f"s3://{BUCKET}" if kind == "s3" else "memory://c"
        routes_as_before(
            in_folder(tmp_path)
            if kind == "directory"
            else open_storage(f"{root}/{tmp_path.name}", "folder")
        )


def routes_as_before(storage: SessionStorage) -> None:
    first = Server(storage)
    before = first.ask(HISTORY)
    assert before.clustered
    assert not before.found
    first.files.close()
    second = Server(storage)
    for length in (32, 40, 44):  # of 64 utterances, which would be clustered again
        history = LONG[:length]
        stayed, restarted = (
            first.router.route("me", history, QUERY),
            second.ask(history),
        )
        assert same(stayed, restarted)
        assert same(before, replace(restarted, **of_route(before)))
        assert not restarted.clustered
        assert restarted.found == (length == 32)
    assert second.encoder.seen == [QUERY] * 3, "no segment is embedded again"
    without = EpisodeRouter(EpisodeSettings(), lambda _: BagOfWords())
    alone = without.route("me", LONG[:44], QUERY)
    assert set(alone.guides) != set(before.guides), "the test shows nothing otherwise"


def of_route(route: Route) -> dict[str, Any]:
    return {name: getattr(route, name) for name in ("episode", "guide", "similarity")}


def test_a_history_that_has_grown_enough_is_clustered_again(storage):
    Server(storage).ask(HISTORY)  # 8 segments
    second = Server(storage)
    route = second.ask(LONG[:48])
    assert route.clustered
    assert len(names(storage)) == 2
    third = Server(storage)
    assert third.ask(LONG[:48]).found
    longest = third.ask(LONG[:52])
    assert set(longest.guides) == set(route.guides), "of the longest beginning"


@pytest.mark.parametrize("growth", [0.25, 0.5, 1.0, 3.0])
def test_the_store_obeys_the_growth_at_every_length(storage, growth):
    settings = {"recluster_growth": growth}
    for first in (3, 8):
        Server(storage, settings).ask(LONG[: 4 * first], owner=f"{first}")
        for length in range(first, 17):
            memory = Server(in_folder(Path("/nonexistent")), settings, lookup_s=0)
            memory.router.route(f"{first}", LONG[: 4 * first], QUERY)
            expected = memory.ask(LONG[: 4 * length], owner=f"{first}", saves=False)
            found = Server(storage, settings).ask(
                LONG[: 4 * length], owner=f"{first}", saves=False
            )
            assert found.clustered == expected.clustered
            assert found.guides == expected.guides or found.unknown_segments


def test_servers_use_each_others_clusterings(storage):
    one, two = Server(storage), Server(storage)
    first = one.ask(HISTORY)
    assert same(two.ask(HISTORY), first)
    again = two.ask(LONG[:48])
    assert again.clustered
    assert same(one.ask(LONG[:48]), again), "outgrown in memory, found in the store"
    assert len(names(storage)) == 2


def test_servers_that_cluster_at_the_same_time_agree_afterwards(storage, monkeypatch):
    """Two files of one history, as on machines that compute different vectors."""
    one, two = Server(storage), Server(storage)
    two.encoder.dim = 32
    routes = [server.router.route("me", HISTORY, QUERY) for server in (one, two)]
    monkeypatch.setattr(DirectoryStorage, "list", lambda self, prefix="": iter(()))
    for server, route in zip((one, two), routes, strict=True):
        server.files.save(route.record, TOKENS)
        server.files.close()
    monkeypatch.undo()
    assert len(names(storage)) == 2
    found = [files_of(storage).find(routes[0].record.digests, 1) for _ in range(4)]
    assert len({each.clustering.centroids.tobytes() for each in found}) == 1


@pytest.mark.parametrize("seed", range(4))
def test_servers_that_restart_at_random_route_as_one_that_does_not(storage, seed):
    """Conversations grow and branch; each turn goes to any of three servers."""
    rng = random.Random(seed)
    settings = {"recluster_growth": rng.choice([0.2, 0.5, 1.5])}
    alone = EpisodeRouter(EpisodeSettings(**settings), lambda _: BagOfWords())
    servers = [Server(storage, settings) for _ in range(3)]
    talks = [(owner, LONG[: rng.randrange(3, 30)]) for owner in ("ann", "bob", "ann")]
    found = 0
    for _ in range(50):
        number = rng.randrange(len(servers))
        if rng.random() < 0.2:
            servers[number] = Server(storage, settings)
        if rng.random() < 0.1 and len(talks) < 6:
            talks.append(rng.choice(talks))  # a branch
        at = rng.randrange(len(talks))
        owner, history = talks[at]
        talks[at] = owner, [*history, *speak(rng, rng.randrange(9))]
        query = rng.choice(list(TOPICS.values()))
        expected = alone.route(owner, talks[at][1], query)
        alone.embed_new_segments(owner, talks[at][1])
        route = servers[number].ask(talks[at][1], query, owner)
        found += route.found
        assert same(route, expected)
    assert found > 3


def test_branches_of_a_conversation_find_their_own(storage, caplog):
    """Their names begin alike."""
    ends = [speak(RNG, 4) for _ in range(8)]
    settings = {"recluster_growth": 0.1}
    for end in ends:
        assert Server(storage, settings).ask([*HISTORY, *end]).clustered
    assert len({name.split("-")[0] for name in names(storage)}) == 1
    for end in ends:
        assert Server(storage, settings).ask([*HISTORY, *end]).found
    assert "KVP309" not in caplog.text


def test_a_saved_clustering_is_not_written_again(storage):
    server = Server(storage)
    for _ in range(3):
        server.ask(HISTORY)
    late = Server(storage, lookup_s=0)  # it finds nothing, and clusters
    assert late.ask(HISTORY).clustered
    assert len(names(storage)) == 1


# -- who must not find it --------------------------------------------------------------


def test_owners_do_not_share_files(storage):
    Server(storage).ask(HISTORY, owner="ann")
    second = Server(storage)
    assert second.ask(HISTORY, owner="bob").clustered
    assert second.ask(HISTORY, owner="").clustered
    parts = [name.split(".")[0].split("-") for name in names(storage)]
    assert len(parts) == 3
    assert len({key for key, *_ in parts}) == len({each[2] for each in parts}) == 3


def test_another_identity_does_not_read_the_file(storage, caplog):
    first = Server(storage)
    first.ask(HISTORY)
    other = Server(storage, identity=Identity.of(encoder="f"))  # even in this folder
    assert other.ask(HISTORY, saves=False).clustered
    assert "KVP309" in caplog.text


def test_an_encoder_of_the_same_name_with_other_vectors_is_noticed(storage):
    Server(storage).ask(HISTORY)
    other = Server(storage)
    other.encoder.dim = 20
    assert other.ask(HISTORY).clustered


def test_a_router_does_not_ask_the_store_if_it_must_not(storage):
    Server(storage).ask(HISTORY)
    faulty = FaultyStorage(storage)
    second = Server(faulty)
    route = second.router.route("me", HISTORY, QUERY, asks_store=False)
    assert route.clustered
    assert faulty.calls == 0


# -- damaged and foreign files ---------------------------------------------------------


def rewritten(path: Path, change: Any) -> None:
    """Write a file again with a correct digest and other contents."""
    about, tensors = tensor_file.read(path)
    change(about, tensors)
    about.pop("digest")
    about["digest"] = tensor_file.digest(about, tensors)
    path.unlink()
    tensor_file.write(path, tensors, about)


DAMAGE: dict[str, Any] = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 9),
    "empty": lambda path: os.truncate(path, 0),
    "text": lambda path: path.write_text("no file of ours"),
    "one bit": lambda path: path.write_bytes(
        path.read_bytes()[:-3] + bytes([path.read_bytes()[-3] ^ 1, *b"ab"])
    ),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "huge": lambda path: rewritten(path, lambda a, t: a.update(reason="x" * 5000000)),
    "format": lambda path: rewritten(path, lambda a, t: a.update(format="x")),
    "history": lambda path: rewritten(path, lambda a, t: a.update(history="00")),
    "guides": lambda path: rewritten(path, lambda a, t: a.update(guides='["one"]')),
    "no guides": lambda path: rewritten(path, lambda a, t: a.pop("guides")),
    "labels": lambda path: rewritten(path, lambda a, t: t["labels"].add_(3)),
    "medoids": lambda path: rewritten(path, lambda a, t: t["medoids"].sub_(9)),
    "nan": lambda path: rewritten(path, lambda a, t: t["centroids"].fill_(np.nan)),
    "dtype": lambda path: rewritten(
        path, lambda a, t: t.update(centroids=t["centroids"].double().float()[0])
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_skipped_and_replaced(storage, damage, caplog):
    expected = Server(storage).ask(HISTORY)
    (path,) = storage.folder.iterdir()
    DAMAGE[damage](path)
    second = Server(storage)
    route = second.ask(HISTORY)
    assert route.clustered
    assert same(route, expected)
    assert caplog.text.count("KVP309") == 1, "one line for look-up and write"
    assert Server(storage).ask(HISTORY).found, "a good file was written next to it"


def test_other_files_in_the_folder_do_no_harm(storage):
    server = Server(storage)
    server.ask(HISTORY)
    (name,) = names(storage)
    for other in ("x", "x.clustering.safetensors", f"{name}.1.part", f".{name}"):
        (storage.folder / other).write_text("?")
    assert Server(storage).ask(HISTORY).found


# -- storages that fail, hang or are full ----------------------------------------------


def test_a_failing_storage_is_no_error_and_is_used_again(storage):
    faulty = FaultyStorage(storage)
    faulty.fails = True
    server = Server(faulty)
    assert server.ask(HISTORY).clustered
    assert server.files.counts.failures == 2, "a look-up and a write"
    faulty.fails = False
    server.ask(HISTORY)
    assert len(names(storage)) == 1, "the next request saves it"
    second = Server(faulty)
    faulty.fails = True
    second.ask(LONG[:16], saves=False)
    assert not second.files._responds
    faulty.fails = False
    assert second.ask(HISTORY, owner="you", saves=False).clustered
    wait_for(lambda: second.files._responds, 20)
    assert second.ask(HISTORY, saves=False).found


def test_a_slow_store_delays_one_request_and_no_more(storage):
    Server(storage).ask(HISTORY)
    faulty = FaultyStorage(storage)
    server = Server(faulty, lookup_s=0.2)
    assert server.ask(HISTORY, owner="first", saves=False).clustered  # it is open now
    faulty.responds.clear()
    started = time.monotonic()
    assert server.ask(HISTORY, saves=False).clustered
    assert time.monotonic() - started >= 0.2
    calls = faulty.calls
    for number in range(20):
        server.ask(HISTORY, owner=f"{number}", saves=False)
    assert faulty.calls - calls <= 1, "one look-up tries whether it responds"
    assert server.files.counts.failures == 1
    faulty.responds.set()
    wait_for(lambda: server.files._num_running == 0, 20)
    server.ask(HISTORY, owner="x", saves=False)
    wait_for(lambda: server.files._responds, 20)
    assert server.ask(HISTORY[:31], saves=False).clustered
    assert server.files.find(Server(storage).ask(HISTORY).record.digests, 1) is not None


def test_a_file_that_is_being_read_is_waited_for_longer(storage):
    Server(storage).ask(HISTORY)
    faulty = FaultyStorage(storage)
    released = threading.Event()
    faulty.before_read = lambda name: released.wait(20)
    server = Server(faulty, lookup_s=0.05)
    timer = threading.Timer(0.5, released.set)
    server.files._is_open = True
    timer.start()
    assert server.ask(HISTORY, saves=False).found
    late = Server(faulty, lookup_s=0.05, load_s=0.1)
    late.files._is_open = True
    released.clear()
    assert late.ask(HISTORY, saves=False).clustered
    released.set()


def test_nothing_waits_while_files_are_written(storage, caplog):
    faulty = FaultyStorage(storage)
    server = Server(faulty)
    route = server.ask(HISTORY, saves=False)
    faulty.responds.clear()
    records = [
        replace(route.record, digests=(*route.record.digests[:-1], bytes([n] * 32)))
        for n in range(70)
    ]
    started = time.monotonic()
    for record in records:
        server.files.save(record, TOKENS)
    assert time.monotonic() - started < 5
    assert server.files.counts.refused == 6
    assert caplog.text.count("KVP319") == 1
    faulty.responds.set()
    wait_for(lambda: server.files.counts.saved == 64, 60)


def test_a_full_disk_is_no_error(storage, monkeypatch, caplog):
    def full(*unused: Any) -> int:
        raise OSError(28, "No space left on device")

    server = Server(storage)
    monkeypatch.setattr(tensor_file, "write", full)
    assert server.ask(HISTORY).clustered
    assert "KVP319" in caplog.text
    assert names(storage) == []
    monkeypatch.undo()
    server.ask(HISTORY)
    assert len(names(storage)) == 1


def test_a_folder_that_is_removed_is_created_again(storage):
    server = Server(storage)
    server.ask(HISTORY)
    (path,) = storage.folder.iterdir()
    path.unlink()
    storage.folder.rmdir()
    server.ask(LONG[:48])
    server.ask(LONG[:48])
    assert len(names(storage)) == 1


# -- privacy, limits, age --------------------------------------------------------------


def test_only_its_owner_can_read_a_file(storage):
    Server(storage).ask(HISTORY)
    (path,) = storage.folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(storage.folder.stat().st_mode) == 0o700


def test_files_take_no_more_than_their_limit(storage):
    probe = Server(storage)
    probe.ask(HISTORY)
    ((size,),) = ([f.num_bytes for f in storage.list()],)
    limit = int(3.5 * size)
    server = Server(storage, limit_bytes=limit)
    first = names(storage)
    for number in range(6):
        before = set(names(storage))
        for path in storage.folder.iterdir():  # older than what is written now
            status = path.stat()
            os.utime(path, (status.st_atime, status.st_mtime - 100))
        server.ask(HISTORY, owner=f"{number}")
        assert len(set(names(storage)) - before) == 1
        assert sum(file.num_bytes for file in storage.list()) <= limit
    assert len(names(storage)) == 3
    assert first[0] not in names(storage)
    small = Server(storage, limit_bytes=size // 2)
    small.ask(HISTORY, owner="small")
    assert small.files.counts.refused == 1
    assert len(names(storage)) == 3, "nothing was deleted for it"


def test_what_is_used_stays(storage, monkeypatch):
    server = Server(storage)
    for owner in ("old", "used"):
        server.ask(HISTORY, owner=owner)
    for path in storage.folder.iterdir():
        os.utime(path, (1, 1))
    Server(storage).ask(HISTORY, owner="used")  # reads it
    monkeypatch.setattr(clusterings, "_TOUCH_S", 0)
    sizes = [file.num_bytes for file in storage.list()]
    tight = Server(storage, limit_bytes=int(2.5 * max(sizes)))
    tight.ask(HISTORY, owner="new")
    assert Server(storage).ask(HISTORY, owner="used", saves=False).found
    assert not Server(storage).ask(HISTORY, owner="old", saves=False).found
    for path in storage.folder.iterdir():
        os.utime(path, (1, 1))
    server.ask(HISTORY, owner="used")  # is in memory
    assert sorted(file.modified > 1e6 for file in storage.list()) == [False, True]


def test_an_idle_server_deletes_old_files(storage):
    Server(storage).ask(HISTORY)
    (storage.folder / "x.r0of1.safetensors").write_text("of a session")
    server = Server(storage, max_age_s=0.5)
    wait_for(lambda: names(storage) == ["x.r0of1.safetensors"], 20)
    server.files.close()


def test_a_store_without_listings_is_not_swept(storage):
    Server(storage).ask(HISTORY)
    server = Server(storage, max_age_s=0.2, sweeps=False)
    time.sleep(0.5)
    assert len(names(storage)) == 1
    assert server.ask(HISTORY, saves=False).clustered, "it is too old"


def test_an_old_file_is_not_used_and_a_conversation_that_goes_on_gets_a_new_one(
    storage, monkeypatch
):
    monkeypatch.setattr(clusterings, "_sweep_repeatedly", lambda *unused: None)
    monkeypatch.setattr(clusterings, "_TOUCH_S", 0)
    Server(storage).ask(HISTORY)
    (path,) = storage.folder.iterdir()
    os.utime(path, (time.time() - 200,) * 2)
    assert Server(storage, max_age_s=100).ask(HISTORY, saves=False).clustered
    os.utime(path, (time.time() - 60,) * 2)
    monkeypatch.setattr(DirectoryStorage, "touch", lambda self, name: None)  # as on S3
    server = Server(storage, max_age_s=100)
    assert server.ask(HISTORY, saves=False).found
    server.ask(HISTORY)
    assert len(names(storage)) == 2
    server.ask(HISTORY)
    assert len(names(storage)) == 2, "the new one is young"


def test_a_closed_store_does_nothing(storage):
    server = Server(storage)
    server.files.close()
    assert server.ask(HISTORY).clustered
    assert names(storage) == []


def test_a_store_that_nobody_uses_leaves_no_thread(storage):
    before = set(threading.enumerate())
    server = Server(storage, max_age_s=1)
    server.ask(HISTORY)
    new = set(threading.enumerate()) - before
    assert len({thread.name for thread in new}) == 3
    del server
    gc.collect()
    wait_for(lambda: not any(thread.is_alive() for thread in new), 20)


def test_every_count_is_told_as_it_grows(tmp_path):
    """What metrics are made of: found, saved and failures, each when it happens."""
    told: list[str] = []
    storage = FaultyStorage(in_folder(tmp_path))
    first = Server(storage, counted=told.append)
    first.ask(HISTORY)
    wait_for(lambda: told == ["saved"])
    second = Server(storage, counted=told.append)
    second.ask(HISTORY, saves=False)
    assert told == ["saved", "found"]
    storage.fails = True
    third = Server(storage, counted=told.append)
    third.ask(HISTORY, saves=False)
    assert told == ["saved", "found", "failures"]
