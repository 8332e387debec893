"""Options and fixtures of the soak test; see CONTRIBUTING.md."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="install a vLLM (see scripts/) to run the soak")

SUMMARY = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("soak")
    group.addoption(
        "--soak-minutes",
        type=float,
        default=10,
        help="minutes of traffic, shared by all servers (default: 10); start-up "
        "and final checks come on top",
    )
    group.addoption(
        "--soak-seed", type=int, default=20261121, help="of all traffic (20261121)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Handle SIGTERM like Ctrl-C, so that no server is left behind."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def pytest_report_header(config: pytest.Config) -> str:
    seed, minutes = config.getoption("soak_seed"), config.getoption("soak_minutes")
    return f"soak: --soak-seed {seed} --soak-minutes {minutes}"


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """A summary of each server's traffic, shown whether the tests pass or fail."""
    lines = config.stash.get(SUMMARY, [])
    if lines:
        terminalreporter.section(pytest_report_header(config))
    for line in lines:
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def soak_summary(pytestconfig: pytest.Config) -> list[str]:
    """The summaries at the end of the run."""
    return pytestconfig.stash.setdefault(SUMMARY, [])


@pytest.fixture(scope="session")
def soak_seed(pytestconfig: pytest.Config) -> int:
    return int(pytestconfig.getoption("soak_seed"))


@pytest.fixture(scope="session")
def soak_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from soak_model import write_soak_model

    return write_soak_model(tmp_path_factory.mktemp("soak") / "model")
