"""Servers under random traffic and faults over HTTP; not part of the default run.

    python -m pytest tests/soak --soak-minutes 10 --soak-seed 20261121

Stock vLLM runs first, as the reference: servers with a policy must answer malformed
requests as stock vLLM does.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from soak_model import NAME
from soak_nonsense import all_cases, refused_by_policy
from soak_server import Server
from soak_sessions import Store
from soak_traffic import Traffic

_RETRIEVAL = {"budget": 64, "sinks": 16, "window": 32, "skip_layers": 1}
POLICIES: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "snapkv": {"name": "snapkv", "budget": 96, "window": 16},
    "streaming-llm": {
        "name": "streaming-llm",
        "budget": 96,
        "decode_budget": 64,
        "fold_blocks": 1,
    },
    "kvzip": {"name": "kvzip", "budget": 96},
    # Host memory for a few requests only, so that others have to wait.
    "icecache": {"name": "icecache", **_RETRIEVAL, "host_memory": "1MiB"},
    "quest": {"name": "quest", **_RETRIEVAL},
    "protokv": {
        "name": "protokv",
        "budget": 96,
        "window": 16,
        "chunk_size": 8,
        "hash_bits": 2,
    },
    # Zoom into some spans of a prompt; host memory for a few requests.
    "sekv": {
        "name": "sekv",
        "budget": 96,
        "span_tokens": 8,
        "least_span": 4,
        "rank": 8,
        "host_memory": "8MiB",
    },
    # Sessions: memory for a few conversations, too little for the longest request.
    "flowkv": {
        "name": "flowkv",
        "ratio": 0.3,
        "floor": 16,
        "base_config": {"window": 16},
        "session_memory": "768KiB",
        "session_dir": "sessions",
        "session_disk": "4MiB",
    },
    "epicache": {
        "name": "epicache",
        "budget": 96,
        "prefill_block": 64,
        "longest_patched_prompt": 64,
        "episodes": 2,
        "segment_utterances": 2,
        "patched_utterances": 2,
        "session_memory": "768KiB",
    },
    "icecache-sessions": {
        "name": "icecache",
        **_RETRIEVAL,
        "host_memory": "2MiB",
        "session_memory": "768KiB",
    },
}
# They fetch text from the host. A preempted request may go on with other tokens: of
# those that retrieve the pages say so; sekv's page promises nothing.
_FETCHING = ("icecache", "quest", "icecache-sessions", "sekv")
_TURN_BY_TURN = ("flowkv", "epicache")
# Events without which a run has not tested what it is meant to test.
EVENTS = (
    "answered",
    "hung up early",
    "hung up in a stream",
    "nonsense",
    "preemptions",
    "compared",
    "turns",
    "branches",
    "left in a turn",
)
SESSION_EVENTS = (
    "session hits",
    "session misses",
    "session evictions",
    "session refused",
)


@pytest.fixture(scope="session")
def short_folder() -> Iterator[Path]:
    """A short path, because sockets have length limits."""
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def stock_answers() -> dict[str, int]:
    """Stock vLLM's answers to malformed requests, requested once."""
    return {}


@pytest.mark.timeout(0)  # the minutes are an option; every wait has its own limit
@pytest.mark.parametrize("name", POLICIES)
def test_server_survives(
    name,
    pytestconfig,
    soak_seed,
    soak_model,
    soak_summary,
    short_folder,
    stock_answers,
):
    policy = POLICIES[name]
    expected = dict(stock_answers)
    if expected and policy is not None:
        refused = refused_by_policy(needs_turns=name in _TURN_BY_TURN)
        expected |= dict.fromkeys(refused, 400)
    sessions = policy is not None and "session_memory" in policy
    traffic_s = pytestconfig.getoption("soak_minutes") * 60 / len(POLICIES)
    folder = short_folder / name
    folder.mkdir()
    with Server(soak_model, NAME, policy, folder) as server:
        traffic = Traffic(
            server,
            seed=soak_seed,
            cases=all_cases(),
            expected=expected or None,
            preempted_differ=name in _FETCHING,
            store=Store(policy, folder) if sessions else None,
            restored_differ=sessions and name not in _TURN_BY_TURN,
        )
        try:
            asyncio.run(traffic.run(traffic_s))
            traffic.check_memory()
            server.check_log()
        except BaseException:
            time.sleep(1)  # the log of a dead engine tells more
            raise
        finally:
            print("log:", server.keep_log(f"soak-{name}.log"))
            soak_summary.append(f"{name}: {traffic.summary()}")
    if name == "stock":
        stock_answers |= traffic.statuses
    missing = [event for event in _events(name) if not traffic.counts[event]]
    assert not missing, f"too short, it had no {missing}: {traffic.summary()}"


def _events(name: str) -> list[str]:
    """Events that the run of one server must have had."""
    policy, events = POLICIES[name], [*EVENTS]
    if policy is None:
        return [*events, "turns compared"]
    events.append("compressions")
    if name in _FETCHING:
        events.append("fetched tokens")
    if "session_memory" in policy:
        events += SESSION_EVENTS
    if name not in _FETCHING:
        events.append("turns compared")
    return events
