"""Builds of episodes wait for idle engines, and for nobody who asks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("vllm")


def build(number: int, length: int = 10, salt: str | None = None) -> Any:
    from vllm_kvplugins.vllm_adapter.frontend.embedding_jobs import EpisodeBuild

    return EpisodeBuild(tuple(range(length)), (number,), salt)


class Engine:
    """Runs builds for as long as it is told."""

    def __init__(self, eager: bool = False, ahead: bool = True) -> None:
        from vllm_kvplugins.vllm_adapter.frontend.embedding_jobs import Builder

        self.busy = False
        self.begun: list[Any] = []
        self.done: list[Any] = []
        self.go_on = asyncio.Event()
        self.builder = Builder(self.run, lambda: self.busy, eager, ahead)

    async def run(self, asked: Any) -> None:
        self.begun.append(asked)
        await self.go_on.wait()
        if asked.patched_prompt == (13,):
            raise ValueError("too long")
        self.done.append(asked)

    async def settle(self) -> None:
        """Longer than the builder looks away."""
        await asyncio.sleep(0.2)


def test_a_build_waits_until_the_engine_is_idle():
    async def scene() -> None:
        engine = Engine()
        engine.busy = True
        engine.builder.offer([build(1)])
        await engine.settle()
        assert not engine.begun
        engine.busy = False
        engine.go_on.set()
        await engine.settle()
        assert engine.done == [build(1)]
        assert engine.builder.num_waiting == 0
        engine.builder.offer([build(2)])  # the worker begins again
        await engine.settle()
        assert engine.done[1:] == [build(2)]

    asyncio.run(scene())


def test_an_eager_one_does_not_and_is_not_interrupted():
    async def scene() -> None:
        engine = Engine(eager=True)
        engine.busy = True
        engine.builder.offer([build(1)])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        engine.builder.interrupt()
        engine.go_on.set()
        await engine.settle()
        assert engine.begun == engine.done == [build(1)]

    asyncio.run(scene())


def test_an_interrupted_build_goes_on_later():
    async def scene() -> None:
        engine = Engine()
        engine.builder.offer([build(1)])
        await engine.settle()
        engine.busy = True
        engine.builder.interrupt()
        await engine.settle()
        assert engine.begun == [build(1)]
        assert not engine.done
        engine.busy = False
        engine.go_on.set()
        await engine.settle()
        assert engine.begun == [build(1)] * 2
        assert engine.done == [build(1)]

    asyncio.run(scene())


def test_the_newest_history_is_built_and_the_newest_conversation_first():
    async def scene() -> None:
        engine = Engine()
        engine.busy = True
        engine.builder.offer([build(1), build(2), build(1, salt="s")])
        engine.builder.offer([build(1, length=20)])
        engine.busy = False
        engine.go_on.set()
        await engine.settle()
        wanted = [build(1, length=20), build(1, salt="s"), build(2)]
        assert engine.done == wanted

    asyncio.run(scene())


def test_a_longer_history_replaces_one_that_was_interrupted():
    async def scene() -> None:
        engine = Engine()
        engine.builder.offer([build(1)])
        await engine.settle()
        engine.busy = True
        engine.builder.interrupt()
        engine.builder.offer([build(1, length=20)])
        await engine.settle()
        engine.busy = False
        engine.go_on.set()
        await engine.settle()
        assert engine.done == [build(1, length=20)]

    asyncio.run(scene())


def test_what_fails_is_said_and_the_next_is_built(monkeypatch):
    from vllm_kvplugins.vllm_adapter.frontend import embedding_jobs

    said: list[Any] = []
    monkeypatch.setattr(embedding_jobs.logger, "warning", lambda *a: said.append(a))

    async def scene() -> Engine:
        engine = Engine()
        engine.go_on.set()
        engine.builder.offer([build(1), build(13)])
        await engine.settle()
        return engine

    engine = asyncio.run(scene())
    assert engine.done == [build(1)]
    (message,) = said
    assert "too long" in str(message)


def test_only_so_many_wait():
    async def scene() -> None:
        engine = Engine()
        engine.busy = True
        engine.builder.offer([build(n) for n in range(100, 200)])
        assert engine.builder.num_waiting == 64
        await engine.settle()

    asyncio.run(scene())


def test_lessons_wait_for_an_idle_engine_and_come_before_builds():
    async def scene() -> None:
        engine = Engine()
        engine.busy = True
        learned: list[int] = []
        engine.builder.offer([build(1)], lambda: learned.append(len(engine.begun)))
        await engine.settle()
        assert not learned
        engine.busy = False
        engine.go_on.set()
        await engine.settle()
        assert learned == [0]
        assert engine.done == [build(1)]
        engine.builder.offer([], lambda: learned.append(2))  # without a build, too
        await engine.settle()
        assert learned == [0, 2]

    asyncio.run(scene())


def test_a_lesson_that_fails_is_said_and_stops_nobody(monkeypatch):
    from vllm_kvplugins.errors import KVPolicyError
    from vllm_kvplugins.vllm_adapter.frontend import embedding_jobs

    said: list[Any] = []
    monkeypatch.setattr(embedding_jobs.logger, "warning", lambda *a: said.append(a))

    def fail() -> None:
        raise KVPolicyError("no encoder")

    async def scene() -> Engine:
        engine = Engine()
        engine.go_on.set()
        engine.builder.offer([build(1)], fail)
        await engine.settle()
        return engine

    assert asyncio.run(scene()).done == [build(1)]
    assert "no encoder" in str(said)


def test_who_builds_nothing_ahead_learns_all_the_same():
    async def scene() -> None:
        engine = Engine(ahead=False)
        engine.go_on.set()
        learned: list[int] = []
        engine.builder.offer([build(1)], lambda: learned.append(1))
        await engine.settle()
        assert learned == [1]
        assert not engine.begun
        assert engine.builder.num_waiting == 0

    asyncio.run(scene())
