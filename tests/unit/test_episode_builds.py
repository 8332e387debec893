"""Episode builds and embedding jobs run while the engine is idle."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("vllm")


def build(number: int, length: int = 10, salt: str | None = None) -> Any:
    from vllm_kvplugins.vllm_adapter.frontend.episode_builds import EpisodeBuild

    return EpisodeBuild(tuple(range(length)), (number,), salt)


class Engine:
    """Runs builds until the test lets them finish."""

    def __init__(self, eager: bool = False, builds_ahead: bool = True) -> None:
        from vllm_kvplugins.vllm_adapter.frontend.episode_builds import EpisodeBuilder

        self.busy = False
        self.started: list[Any] = []
        self.done: list[Any] = []
        self.may_finish = asyncio.Event()
        self.builder = EpisodeBuilder(self.run, lambda: self.busy, eager, builds_ahead)

    async def run(self, requested: Any) -> None:
        self.started.append(requested)
        await self.may_finish.wait()
        if requested.patched_prompt == (13,):
            raise ValueError("too long")
        self.done.append(requested)

    async def let_builder_run(self) -> None:
        """Sleep longer than the builder's polling interval."""
        await asyncio.sleep(0.2)


def test_a_build_waits_until_the_engine_is_idle():
    async def scene() -> None:
        engine = Engine()
        engine.busy = True
        engine.builder.submit([build(1)])
        await engine.let_builder_run()
        assert not engine.started
        engine.busy = False
        engine.may_finish.set()
        await engine.let_builder_run()
        assert engine.done == [build(1)]
        assert engine.builder.num_waiting == 0
        engine.builder.submit([build(2)])  # starts a new worker task
        await engine.let_builder_run()
        assert engine.done[1:] == [build(2)]

    asyncio.run(scene())


def test_an_eager_build_does_not_wait_and_is_not_interrupted():
    async def scene() -> None:
        engine = Engine(eager=True)
        engine.busy = True
        engine.builder.submit([build(1)])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        engine.builder.interrupt()
        engine.may_finish.set()
        await engine.let_builder_run()
        assert engine.started == engine.done == [build(1)]

    asyncio.run(scene())


def test_an_interrupted_build_runs_again_later():
    async def scene() -> None:
        engine = Engine()
        engine.builder.submit([build(1)])
        await engine.let_builder_run()
        engine.busy = True
        engine.builder.interrupt()
        await engine.let_builder_run()
        assert engine.started == [build(1)]
        assert not engine.done
        engine.busy = False
        engine.may_finish.set()
        await engine.let_builder_run()
        assert engine.started == [build(1)] * 2
        assert engine.done == [build(1)]

    asyncio.run(scene())


def test_builds_the_newest_history_of_the_newest_conversation_first():
    async def scene() -> None:
        engine = Engine()
        engine.busy = True
        engine.builder.submit([build(1), build(2), build(1, salt="s")])
        engine.builder.submit([build(1, length=20)])
        engine.busy = False
        engine.may_finish.set()
        await engine.let_builder_run()
        expected = [build(1, length=20), build(1, salt="s"), build(2)]
        assert engine.done == expected

    asyncio.run(scene())


def test_a_longer_history_replaces_an_interrupted_build():
    async def scene() -> None:
        engine = Engine()
        engine.builder.submit([build(1)])
        await engine.let_builder_run()
        engine.busy = True
        engine.builder.interrupt()
        engine.builder.submit([build(1, length=20)])
        await engine.let_builder_run()
        engine.busy = False
        engine.may_finish.set()
        await engine.let_builder_run()
        assert engine.done == [build(1, length=20)]

    asyncio.run(scene())


def test_a_build_that_fails_is_logged_and_the_next_one_runs(monkeypatch):
    from vllm_kvplugins.vllm_adapter.frontend import episode_builds

    logged: list[Any] = []
    monkeypatch.setattr(episode_builds.logger, "warning", lambda *a: logged.append(a))

    async def scene() -> Engine:
        engine = Engine()
        engine.may_finish.set()
        engine.builder.submit([build(1), build(13)])
        await engine.let_builder_run()
        return engine

    engine = asyncio.run(scene())
    assert engine.done == [build(1)]
    (message,) = logged
    assert "too long" in str(message)


def test_drops_the_oldest_builds_if_too_many_wait():
    async def scene() -> None:
        engine = Engine()
        engine.busy = True
        engine.builder.submit([build(n) for n in range(100, 200)])
        assert engine.builder.num_waiting == 64
        await engine.let_builder_run()

    asyncio.run(scene())


def test_embedding_jobs_wait_for_an_idle_engine_and_run_before_builds():
    async def scene() -> None:
        engine = Engine()
        engine.busy = True
        embedded: list[int] = []
        engine.builder.submit([build(1)], lambda: embedded.append(len(engine.started)))
        await engine.let_builder_run()
        assert not embedded
        engine.busy = False
        engine.may_finish.set()
        await engine.let_builder_run()
        assert embedded == [0]
        assert engine.done == [build(1)]
        engine.builder.submit([], lambda: embedded.append(2))  # also without a build
        await engine.let_builder_run()
        assert embedded == [0, 2]

    asyncio.run(scene())


def test_an_embedding_job_that_fails_is_logged_and_builds_run(monkeypatch):
    from vllm_kvplugins.errors import KVPolicyError
    from vllm_kvplugins.vllm_adapter.frontend import episode_builds

    logged: list[Any] = []
    monkeypatch.setattr(episode_builds.logger, "warning", lambda *a: logged.append(a))

    def fail() -> None:
        raise KVPolicyError("no encoder")

    async def scene() -> Engine:
        engine = Engine()
        engine.may_finish.set()
        engine.builder.submit([build(1)], fail)
        await engine.let_builder_run()
        return engine

    assert asyncio.run(scene()).done == [build(1)]
    assert "no encoder" in str(logged)


def test_embedding_jobs_run_without_builds_ahead():
    async def scene() -> None:
        engine = Engine(builds_ahead=False)
        engine.may_finish.set()
        embedded: list[int] = []
        engine.builder.submit([build(1)], lambda: embedded.append(1))
        await engine.let_builder_run()
        assert embedded == [1]
        assert not engine.started
        assert engine.builder.num_waiting == 0

    asyncio.run(scene())


def test_no_episode_is_built_for_a_request_without_a_session(monkeypatch):
    """A build leaves a session."""
    from vllm import SamplingParams

    from vllm_kvplugins.vllm_adapter.frontend import episode_builds
    from vllm_kvplugins.vllm_adapter.frontend.chat_episodes import (
        EMBEDDING_JOB,
        OTHER_EPISODES,
    )

    class Client:
        async def add_request(self, request_id: str, prompt: Any, params: Any) -> None:
            pass

    async def scene() -> None:
        engine = Engine()
        engine.busy = True
        embedded: list[bool] = []
        monkeypatch.setattr(episode_builds, "AsyncLLM", Client)
        monkeypatch.setattr(episode_builds, "builder_of", lambda _: engine.builder)
        episode_builds.install()
        other = {"turn_ends": [2], "patched_prompt": [7]}
        prompt = {
            "prompt_token_ids": [1, 2, 3],
            OTHER_EPISODES: [other],
            EMBEDDING_JOB: lambda: embedded.append(True),
        }
        without = SamplingParams(extra_args={"kv_session": False})
        await Client().add_request("a", prompt, params=without)
        assert engine.builder.num_waiting == 0
        await Client().add_request("b", prompt, SamplingParams())
        assert engine.builder.num_waiting == 1
        engine.busy = False
        engine.may_finish.set()
        await engine.let_builder_run()
        assert embedded == [True, True], "vectors stay in memory"

    asyncio.run(scene())
