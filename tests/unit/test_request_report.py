"""Reports about single requests: from the scheduler's state into the response."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections import Counter
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="install a vLLM (see scripts/)")

from scheduled_blocks import SIZE, Life, Schedule, Scheduling
from test_admission import QUEST, SNAPKV, Sessions, controller, match_of, request
from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.request import RequestStatus

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.errors import codes_in
from vllm_kvplugins.vllm_adapter.config.request_params import (
    kv_report_problem,
    requested_episode,
    wants_report,
)
from vllm_kvplugins.vllm_adapter.frontend import stream_reports

PROMPT, ANSWER = 40, 5
END = "data: [DONE]\n\n"


@pytest.fixture(autouse=True, scope="module")
def _hashes() -> None:
    init_none_hash(sha256)


class ReportingSchedule(Schedule):
    """Tells the connector of each request that ends, as vLLM's scheduler does."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(parse_policy(settings), False, True, Counter())
        self.reports: list[dict[str, Any] | None] = []

    def end(self, life: Life, status: RequestStatus) -> None:
        ended, admission = life.request, self.ours.connector.admission
        ended.status = status
        self.manager.remove_skipped_blocks(
            ended.request_id, ended.num_computed_tokens, ended.num_prompt_tokens
        )
        admission.finish(ended)
        self.reports.append(admission.take_report(ended.request_id))
        super().end(life, status)

    def run(self, prompt: list[int], **extra_args: Any) -> dict[str, Any] | None:
        """Run one request to its end; its report."""
        self.add("r", prompt, ANSWER, [])
        self.waiting[0].request.sampling_params.extra_args |= extra_args
        self.admit(chunk=100)
        while self.running:
            self.go_on(self.running[0], chunk=100)
        return self.reports[-1]


def test_a_report_counts_blocks_and_compactions_of_its_request():
    schedule = ReportingSchedule(SNAPKV)
    report = schedule.run(list(range(PROMPT)), kv_report=1)
    tokens = PROMPT + ANSWER - 1  # the last token is sampled, not computed
    assert report == {
        "policy": "snapkv",
        "tokens": tokens,
        "cached_tokens": 0,
        "loaded_tokens": 0,
        "session_tokens": 0,
        "session_on_device": False,
        "turn_ends": None,
        "compressions": 1,
        "block_size": SIZE,
        "held_blocks": 4,  # 10 tokens of the budget in 3 blocks, and the answer
        "stock_blocks": 11,
        "host_bytes": 0,
        "session_bytes": 0,
        "episode": None,
        "episodes": None,
    }
    again = schedule.run(list(range(PROMPT)), kv_report=1)
    assert again["cached_tokens"] == 28, "the blocks that no compaction rewrote"


def test_full_holds_what_stock_holds():
    report = ReportingSchedule({"name": "full"}).run(list(range(PROMPT)), kv_report=1)
    assert report["held_blocks"] == report["stock_blocks"] == 11
    assert report["compressions"] == 0


@pytest.mark.parametrize("turn_ends", [[9, 30], [], None])
def test_turns_are_those_that_the_policy_has_found(turn_ends):
    """None asked for: those that the tokens show."""
    schedule = ReportingSchedule({"name": "flowkv", "turn_end_token": 20})
    prompt = [20 if at in (10, 20, 39) else 0 for at in range(PROMPT)]
    report = schedule.run(prompt, kv_report=1, turn_ends=turn_ends)
    assert report["turn_ends"] == ([21] if turn_ends is None else turn_ends)


@pytest.mark.parametrize("extra_args", [{}, {"kv_report": 0}])
def test_nobody_gets_a_report_without_asking(extra_args):
    assert ReportingSchedule(SNAPKV).run(list(range(PROMPT)), **extra_args) is None


def test_host_memory_is_that_of_the_running_request():
    built, running = controller(QUEST), request()
    running.sampling_params.extra_args = {"kv_report": 1}
    built.admission.start(running)
    reserved = built.host.request_bytes
    assert reserved > 0
    built.admission.finish(running)
    assert built.host.request_bytes == 0
    assert built.admission.take_report("r")["host_bytes"] == reserved


def test_sessions_and_episodes_are_reported():
    class Saving(Sessions):
        def start(self, request: Any, admission: Any) -> None:
            pass

        def finish(self, request: Any, admission: Any) -> int:
            return 4096

    built, running = controller(SNAPKV, Saving(match_of(35))), request()
    running.sampling_params.extra_args = {"kv_report": 1, "kv_episode": [2, 4]}
    built.admission.admit(running, 0)
    built.manager.freed_compactions["r"] = 1  # the session's own
    built.admission.finish(running)
    report = built.admission.take_report("r")
    assert (report["session_tokens"], report["cached_tokens"]) == (35, 0)
    assert report["session_on_device"] is False
    assert report["session_bytes"] == 4096
    assert report["compressions"] == 0, "the session's does not count again"
    assert (report["episode"], report["episodes"]) == (2, 4)
    assert built.admission.take_report("r") is None, "reports are not kept"


@pytest.mark.parametrize("theirs", [None, {"remote_engine_id": "a"}])
def test_the_scheduler_adds_the_report_to_what_a_connector_returns(theirs):
    class Stock:
        def _connector_finished(self, request: Any) -> tuple[bool, Any]:
            return True, theirs

    class Ours(Scheduling, Stock):
        def __init__(self) -> None:
            admission = SimpleNamespace(take_report={"r": {"tokens": 1}}.get)
            self.connector = SimpleNamespace(admission=admission)

    def finished(name: str) -> tuple[bool, Any]:
        return Ours()._connector_finished(SimpleNamespace(request_id=name))

    assert finished("r") == (True, (theirs or {}) | {"kv_policy": {"tokens": 1}})
    assert finished("other") == (True, theirs)


# -- parameters of requests ---------------------------------------------------------


@pytest.mark.parametrize("choice", [True, False, 0, 1])
def test_a_request_can_ask_for_a_report(choice):
    params = SamplingParams(extra_args={"kv_report": choice})
    assert kv_report_problem(params) is None
    assert wants_report(params) == bool(choice)


@pytest.mark.parametrize("choice", ["true", 2, 1.0, None, [], "x" * 10**6])
def test_an_invalid_choice_has_a_code(choice):
    problem = kv_report_problem(SamplingParams(extra_args={"kv_report": choice}))
    assert codes_in(problem) == ("KVP515",)
    assert len(problem) < 500


@pytest.mark.parametrize("written", [None, 5, "ab", [], [1], [1, 2, 3], [1, "x"], {}])
def test_an_episode_that_a_client_made_up_does_not_reach_the_engine(written):
    params = SamplingParams(extra_args={"kv_episode": written})
    assert requested_episode(params) is None


# -- streams ------------------------------------------------------------------------


async def outputs(*returned: Any) -> AsyncIterator[Any]:
    for each in returned:
        yield SimpleNamespace(kv_transfer_params=each)


async def vllm_stream(self: Any, request: Any, results: Any, *_: Any) -> Any:
    """Stands in for vLLM's generator."""
    async for _each in results:
        yield "data: {}\n\n"
    yield END


def streamed(monkeypatch, asks: Any, *returned: Any) -> list[str]:
    """The events of a stream in which each output returns these parameters."""
    original = OpenAIServingChat.chat_completion_stream_generator
    vllm_stream.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    monkeypatch.setattr(
        OpenAIServingChat, "chat_completion_stream_generator", vllm_stream
    )
    monkeypatch.delattr(OpenAIServingChat, "_kvplugins_installed", raising=False)
    stream_reports.install()
    stream_reports.install()

    async def collect() -> list[str]:
        stream = OpenAIServingChat.chat_completion_stream_generator(
            SimpleNamespace(),
            SimpleNamespace(vllm_xargs=asks),
            outputs(*returned),
            "chatcmpl-1",
            "m",
            [],
            None,
            None,
        )
        return [event async for event in stream]

    try:
        return asyncio.run(collect())
    finally:
        if hasattr(OpenAIServingChat, "_kvplugins_installed"):
            del OpenAIServingChat._kvplugins_installed


REPORT = {"kv_policy": {"tokens": 7}}


def test_a_stream_ends_with_the_report_and_then_as_before(monkeypatch):
    events = streamed(monkeypatch, {"kv_report": 1}, None, None, REPORT)
    assert events[:3] == ["data: {}\n\n"] * 3
    assert events[4:] == [END]
    event = json.loads(events[3].removeprefix("data: "))
    assert event["kv_transfer_params"] == REPORT
    assert (event["id"], event["model"]) == ("chatcmpl-1", "m")
    assert event["object"] == "chat.completion.chunk"
    assert event["choices"] == []


@pytest.mark.parametrize("asks", [None, {}, {"kv_report": 0}])
def test_other_streams_are_those_of_vllm(monkeypatch, asks):
    assert streamed(monkeypatch, asks, None, REPORT) == ["data: {}\n\n"] * 2 + [END]


def test_a_stream_without_a_report_is_that_of_vllm(monkeypatch):
    """A request that was aborted has none."""
    events = streamed(monkeypatch, {"kv_report": 1}, None)
    assert events == ["data: {}\n\n", END]


def test_a_client_that_leaves_closes_the_engine_s_outputs():
    closed = []

    async def endless() -> AsyncIterator[Any]:
        try:
            while True:
                yield SimpleNamespace(kv_transfer_params=None)
        finally:
            closed.append("outputs")

    async def chunks(results: Any) -> Any:
        async for _each in results:
            yield "data: {}\n\n"

    async def leave() -> None:
        source = endless()
        stream = stream_reports.with_report(chunks, source, {})
        await anext(stream)
        await stream.aclose()
        await source.aclose()

    asyncio.run(leave())
    assert closed == ["outputs"]
