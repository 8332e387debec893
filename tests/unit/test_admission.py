"""Admission: one decision per waiting request, on a real block manager.

Sessions are a stand-in with a directory that can drop a number of idle sessions.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="install a vLLM (see scripts/)")

from scheduled_blocks import GEOMETRY, SIZE, Schedule
from vllm import SamplingParams
from vllm.v1.request import Request

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.plan.residency_plan import BlockSpan, Compaction
from vllm_kvplugins.sessions.commands import Session
from vllm_kvplugins.sessions.records import Match
from vllm_kvplugins.vllm_adapter.config.host_memory import HostReservations
from vllm_kvplugins.vllm_adapter.scheduler.admission_controller import (
    AdmissionController,
)

SNAPKV = {"name": "snapkv", "window": 3, "budget": 10}
QUEST = {
    "name": "quest",
    "budget": 8,
    "sinks": 2,
    "window": 5,
    "skip_layers": 1,
    "host_memory": "1MiB",
}


class Sessions:
    """At most one session, and a number of idle sessions that can be dropped."""

    def __init__(self, match: Match | None = None, idle: int = 0) -> None:
        self.found, self.idle = match, idle
        self.directory = self
        self.fetched: list[str] = []
        self.responds = True
        self.looks_up = False
        self.copied: list[int] = []
        self.copies = False

    def awaits_copy(self, request: Any, match: Match, cached_tokens: int) -> bool:
        self.copied.append(cached_tokens)
        return self.copies

    def awaits_look_up(self, request: Any) -> bool:
        return self.looks_up

    def match(self, request: Any, more_than: int) -> Match | None:
        match = self.found
        return match if match is not None and match.tokens > more_than else None

    def fetch(self, match: Match, request_id: str) -> bool:
        self.fetched.append(request_id)
        return self.responds

    def oldest(self, besides: str | None = None) -> str | None:
        return f"idle {self.idle}" if self.idle else None

    def evict(self, session_id: str) -> None:
        self.idle -= 1


def request(tokens: int = 40, max_tokens: int = 4) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request("r", list(range(tokens)), params, None, arrival_time=0.0)


def match_of(tokens: int, ready: bool = True, first_query: int = 33) -> Match:
    compaction = Compaction(32, BlockSpan(0, 8), BlockSpan(5, 8))
    ids = np.arange(36, dtype=np.int32)
    session = Session("s", "owner", ids, compaction, 1, first_query)
    return Match(session, tokens, tokens, ready)


def controller(settings: dict[str, Any], sessions: Any = None) -> Any:
    """A controller with its block manager and host memory."""
    policy = parse_policy(settings)
    manager = Schedule(policy, False, True, {}).manager
    host = HostReservations(policy, GEOMETRY)
    return SimpleNamespace(
        admission=AdmissionController(manager, host, sessions),
        manager=manager,
        host=host,
    )


def test_a_hit_is_used_up_to_the_first_block_that_is_rewritten():
    built, waiting = controller(SNAPKV), request()
    admission = built.admission.admit(waiting, 36)
    exact = built.manager.plans.of(waiting).exact_prefix_blocks * SIZE
    assert 0 < exact < 36
    assert (admission.cached_tokens, admission.external_tokens) == (exact, 0)
    assert admission.first_query == exact, "cached tokens have no queries"
    assert built.admission.admit(waiting, 4).cached_tokens == 4


def test_a_policy_that_observes_the_prompt_uses_no_hit():
    built = controller({"name": "h2o", "budget": 12, "prefill_block": 16})
    assert built.admission.admit(request(), 36).cached_tokens == 0


@pytest.mark.parametrize(("tokens", "continues"), [(35, True), (28, False)])
def test_a_session_replaces_a_hit_that_saves_less(tokens, continues):
    built = controller(SNAPKV, Sessions(match_of(tokens)))
    waiting = request()
    hit = built.admission.usable_hit(waiting, 40)
    assert hit == 28
    admission = built.admission.admit(waiting, 40)
    assert built.manager.starts.of(waiting) is admission
    if continues:
        assert (admission.cached_tokens, admission.external_tokens) == (0, tokens)
        assert (admission.first_block, admission.first_query) == (5, 33)
    else:
        assert (admission.cached_tokens, admission.external_tokens) == (hit, 0)
        assert admission.session is None
    restored = built.manager.plans.of(waiting).compactions[0].at_tokens == 32
    assert restored == continues, "the plan begins with the session's compaction"


def test_a_request_waits_while_its_session_is_read():
    sessions = Sessions(match_of(35, ready=False))
    built = controller(SNAPKV, sessions)
    admission = built.admission.admit(request(), 0)
    assert (admission.waits_for, admission.external_tokens) == ("session", None)
    assert sessions.fetched == ["r"]
    sessions.responds = False  # it has waited for too long
    admission = built.admission.admit(request(), 8)
    assert (admission.match, admission.external_tokens) == (None, 0)
    assert admission.cached_tokens == 8
    sessions.found = None  # for example, because its file is damaged
    assert built.admission.admit(request(), 0).external_tokens == 0


def test_a_request_waits_for_its_look_up_before_it_is_matched():
    """A session in a store may restore more than the one that is known."""
    sessions = Sessions(match_of(35))
    built = controller(SNAPKV, sessions)
    sessions.looks_up = True
    admission = built.admission.admit(request(), 8)
    assert (admission.waits_for, admission.external_tokens) == ("session", None)
    assert admission.match is None
    sessions.looks_up = False
    assert built.admission.admit(request(), 8).match is sessions.found


@pytest.mark.parametrize(("idle", "waits"), [(0, True), (1, True), (2, False)])
def test_idle_sessions_make_room_in_host_memory(idle, waits):
    sessions = Sessions(idle=idle)
    built = controller(QUEST, sessions)
    for name in ("one", "two"):
        built.host.hold_session(name, 1 << 20)
    names = ["one", "two"]

    def evict(session_id: str) -> None:
        Sessions.evict(sessions, session_id)
        built.host.release_session(names.pop())

    sessions.evict = evict  # type: ignore[method-assign]
    waiting = request()
    admission = built.admission.admit(waiting, 0)
    assert (admission.waits_for == "host memory") == waits
    assert (admission.external_tokens is None) == waits
    assert len(built.host.waiting) == waits


def test_a_request_waits_for_a_copy_of_its_session_to_the_device():
    """Only if its session is in memory, and nothing else keeps it from starting."""
    sessions = Sessions(match_of(35))
    built, waiting = controller(SNAPKV, sessions), request()
    sessions.copies = True
    admission = built.admission.admit(waiting, 0)
    assert (admission.waits_for, admission.external_tokens) == ("session", None)
    sessions.copies = False
    admission = built.admission.admit(waiting, 0)
    assert (admission.waits_for, admission.external_tokens) == (None, 35)
    assert sessions.copied == [0, 0]


class OnHost(Sessions):
    """Sessions of a retriever in host memory, least recently used first."""

    def __init__(self, match: Match, branches: bool, names: list[str]) -> None:
        super().__init__(match)
        self.branches, self.names, self.evicted = branches, names, []
        self.host: HostReservations | None = None

    def is_branch(self, match: Match) -> bool:
        return self.branches

    def oldest(self, besides: str | None = None) -> str | None:
        return next((name for name in self.names if name != besides), None)

    def evict(self, session_id: str) -> None:
        assert self.host is not None
        self.names.remove(session_id)
        self.evicted.append(session_id)
        self.host.release_session(session_id)


@pytest.mark.parametrize(
    ("branches", "names", "room", "moves", "evicted"),
    [
        (False, ["s"], 3, True, []),
        (False, ["s", "u"], 0, True, ["u"]),
        (True, ["s"], 2, False, []),
        (True, ["s"], 0, True, []),
        (True, ["t", "s", "u"], 0, False, ["t"]),
        (True, ["s", "u"], 0, True, []),
    ],
    ids=[
        "all-of-it",
        "others-go",
        "room",
        "no-room",
        "older-go-first",
        "newer-stay",
    ],
)
def test_a_branch_leaves_its_session_unless_it_is_the_next_to_be_evicted(
    branches, names, room, moves, evicted
):
    """Each session and the request need as much; ``room``: requests that fit."""
    sessions = OnHost(match_of(36), branches, list(names))
    built = controller(QUEST, sessions)
    sessions.host = host = built.host
    waiting = request()
    need = host._need(waiting)
    if not branches and len(names) > 1:
        # what moves is not enough
        host.hold_session("s", need // 2)
        host.hold_session("u", need)
    else:
        for name in names:
            host.hold_session(name, need)
    spare = host._limit - host.reserved_bytes - room * need
    host._reserved["other"] = spare
    admission = built.admission.admit(waiting, 0)
    assert admission.match is sessions.found
    assert admission.moves == moves
    assert sessions.evicted == evicted


def test_a_request_that_waits_for_host_memory_keeps_its_session():
    sessions = OnHost(match_of(36), False, ["s"])
    built = controller(QUEST, sessions)
    sessions.host = host = built.host
    need = host._need(request())
    host.hold_session("s", need)
    host._reserved["other"] = host._limit - need + 1
    assert built.admission.admit(request(), 0).waits_for == "host memory"
    assert not sessions.evicted
    host._reserved["other"] -= 1
    assert built.admission.admit(request(), 0).moves
