"""Servers under random traffic and faults over HTTP; not part of the default run.

    python -m pytest tests/soak --soak-minutes 10 --soak-seed 20261121

Stock vLLM comes first: it is the control. What it answers to nonsense is what the
servers with a policy must answer.
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
from soak_nonsense import all_cases
from soak_server import Server
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
    # Host memory for a few requests only, so that others are held.
    "icecache": {"name": "icecache", **_RETRIEVAL, "host_memory": "1MiB"},
    "quest": {"name": "quest", **_RETRIEVAL},
}
_RETRIEVERS = ("icecache", "quest")
# Without these a run has not tested what it is there for.
EVENTS = (
    "answered",
    "hung up early",
    "hung up in a stream",
    "nonsense",
    "preemptions",
    "compared",
)


@pytest.fixture(scope="session")
def short_folder() -> Iterator[Path]:
    """For logs and sockets, whose paths must not be long."""
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def stock_answers() -> dict[str, int]:
    """What stock vLLM answered to nonsense, once it was asked."""
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
    traffic_s = pytestconfig.getoption("soak_minutes") * 60 / len(POLICIES)
    folder = short_folder / name
    folder.mkdir()
    with Server(soak_model, NAME, POLICIES[name], folder) as server:
        traffic = Traffic(
            server,
            seed=soak_seed,
            cases=all_cases(),
            expected=stock_answers or None,
            preempted_differ=name in _RETRIEVERS,
        )
        try:
            asyncio.run(traffic.run(traffic_s))
            traffic.check_memory()
        except BaseException:
            time.sleep(1)  # an engine that dies has more to say
            print("log:", server.keep_log(f"soak-{name}.log"))
            raise
        finally:
            soak_summary.append(f"{name}: {traffic.summary()}")
    if name == "stock":
        stock_answers |= traffic.statuses
    events = EVENTS if POLICIES[name] is None else (*EVENTS, "compressions")
    missing = [event for event in events if not traffic.counts[event]]
    assert not missing, f"too short, it had no {missing}: {traffic.summary()}"
