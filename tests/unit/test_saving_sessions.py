"""Sessions that a thread copies out of the pool while the model computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_session_store import session
from token_pool import Pool, num_bytes

from vllm_kvplugins.sessions.commands import (
    Load,
    Place,
    Save,
    SessionAck,
    SessionCommands,
    Tokens,
)
from vllm_kvplugins.sessions.files import Identity, SessionFolder
from vllm_kvplugins.sessions.store import SessionStore

TALK = torch.arange(40, dtype=torch.int32).numpy()


class Worker:
    """A store whose copies begin when ``pool.may_copy`` is set."""

    def __init__(self, folder: Path) -> None:
        self.pool = Pool()
        self.pool.may_copy.clear()
        self.files = SessionFolder(folder, Identity.of(model="m"))
        self.files.prepare()
        self.store = SessionStore(self.pool, self.files, copied_at_once_bytes=0)  # type: ignore[arg-type]

    def save(self, name: str, ids: Tokens = TALK, **more: object) -> None:
        self.pool.caches[name] = ids
        made = session(name, ids, size=num_bytes(ids))
        save = Save(made, name, (1, 2), writes=True, **more)  # type: ignore[arg-type]
        self.run(saves=[save])

    def run(self, **commands: list[object]) -> list[SessionAck]:
        sent = SessionCommands(**commands)  # type: ignore[arg-type]
        self.store.save(sent)
        self.store.execute(sent)
        return self.store.take_acks()

    def finish(self) -> list[tuple[str, str | None]]:
        """Copy and write everything; what is acknowledged then."""
        self.pool.may_copy.set()
        self.store.wait_for_writes()
        acks = self.store.take_acks()
        return [(ack.event, ack.problem and "failed") for ack in acks]

    @property
    def names(self) -> list[str]:
        return sorted(path.name.split(".")[0] for path in self.files.folder.iterdir())


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    made = Worker(tmp_path)
    yield made
    made.pool.may_copy.set()
    made.store.close()


def test_the_step_does_not_wait_for_the_copy(worker):
    worker.save("a")
    assert worker.run() == []
    assert (worker.store.num_held, worker.store.held_bytes) == (0, num_bytes(TALK))
    assert worker.finish() == [("saved", None), ("written", None)]
    assert (worker.store.num_held, worker.store.held_bytes) == (1, num_bytes(TALK))
    worker.run(loads=[Load("a", "r", 44, 40, (3, 4))])
    assert (worker.pool.restored["r"] == TALK).all()


def test_a_small_cache_is_copied_at_once(worker):
    worker.pool.may_copy.set()
    worker.store._copied_at_once_bytes = num_bytes(TALK)
    worker.save("a")
    assert worker.store.num_held == 1


def test_a_step_that_computes_nothing_waits_for_a_copy(worker):
    worker.save("a")
    worker.pool.may_copy.set()
    for _ in range(1000):
        worker.store.wait_for_copies()
        if worker.store.take_acks():
            return
    pytest.fail("it has not waited")


def test_a_copy_that_fails_leaves_no_session(worker):
    worker.save("a")
    worker.pool.fails = True
    assert worker.finish() == [("saved", "failed"), ("written", None)]
    assert (worker.store.num_held, worker.names) == (0, [])


def test_a_session_that_is_dropped_meanwhile_is_acknowledged(worker):
    """Its blocks are needed until then."""
    worker.save("a")
    assert worker.run(drop=["a"], unlink=["a"]) == []
    assert worker.finish() == [("saved", None), ("written", None)]
    assert (worker.store.num_held, worker.names) == (0, [])


def test_no_file_is_written_that_was_deleted_before(worker):
    """Another rank could not write its part."""
    worker.save("a")
    worker.run(unlink=["a"])
    assert worker.finish() == [("saved", None), ("written", None)]
    assert (worker.store.num_held, worker.names) == (1, [])


def test_an_earlier_turn_is_reduced_after_the_copy(worker):
    worker.save("a")
    worker.finish()
    worker.pool.may_copy.clear()
    worker.run(loads=[Load("a", "b", 60, 40, (3, 4))])
    worker.save("b", torch.arange(60, dtype=torch.int32).numpy(), reduces="a")
    assert worker.run() == []
    worker.pool.may_copy.set()
    events: list[str] = []
    while len(events) < 3:
        worker.store.wait_for_copies()
        worker.store.wait_for_writes()
        events += [ack.event for ack in worker.store.take_acks()]
    assert events[0] == "saved"
    assert set(events) == {"saved", "reduced", "written"}


def test_an_earlier_turn_stays_whole_if_the_next_one_is_not_saved(worker):
    worker.save("a")
    worker.finish()
    worker.pool.may_copy.clear()
    worker.run(loads=[Load("a", "b", 60, 40, (3, 4))])
    worker.save("b", torch.arange(60, dtype=torch.int32).numpy(), reduces="a")
    worker.pool.fails = True
    worker.pool.may_copy.set()
    worker.store.wait_for_writes()
    acks = {ack.event: ack for ack in worker.store.take_acks()}
    assert acks["reduced"].num_bytes == 0
    assert worker.store.num_held == 1


def test_what_is_being_copied_is_written_before_the_store_closes(worker):
    worker.save("a")
    worker.pool.may_copy.set()
    worker.store.close()
    assert worker.names == ["a"]


# -- sessions that a thread copies to the device ---------------------------------------


@pytest.fixture
def placing(worker):
    """A worker that has a session, whose next copies take time."""
    worker.save("a")
    worker.finish()
    worker.pool.may_copy.clear()
    return worker


def test_a_session_is_copied_to_blocks_while_the_model_computes(placing):
    placing.run(places=[Place("a", 40, tuple(range(5, 15)))])
    assert placing.run() == []
    placing.pool.may_copy.set()
    placing.store.wait_for_copies()
    (ack,) = placing.store.take_acks()
    assert (ack.event, ack.problem) == ("placed", None)
    saved = placing.store._snapshots["a"]
    assert saved.blocks == tuple(range(5, 15))
    assert saved.parts[0].retained_ids is not None


@pytest.mark.parametrize("dropped", ["before", "meanwhile"])
def test_blocks_of_a_session_that_is_gone_are_acknowledged(placing, dropped):
    acks = placing.run(drop=["a"]) if dropped == "before" else []
    acks += placing.run(places=[Place("a", 40, tuple(range(5, 15)))])
    acks += placing.run(drop=["a"])
    placing.pool.may_copy.set()
    placing.store.wait_for_copies()
    acks += placing.store.take_acks()
    assert [ack.event for ack in acks] == ["placed"]
    assert placing.store.num_held == 0


def test_a_copy_to_blocks_that_fails_leaves_the_session(placing):
    placing.run(places=[Place("a", 40, tuple(range(5, 15)))])
    placing.pool.fails = True
    placing.pool.may_copy.set()
    placing.store.wait_for_copies()
    (ack,) = placing.store.take_acks()
    assert ack.event == "placed"
    assert ack.problem is not None
    assert placing.store.num_held == 1
