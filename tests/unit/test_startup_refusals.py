"""Refusals at start-up: the output of the command, and the exception in a program."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from vllm_kvplugins.errors import KVPolicyError, coded

pytest.importorskip("vllm", reason="start-up is a part of the adapter")
from vllm_kvplugins.vllm_adapter.startup import refusals

REASON = coded("KVP016", "layer 0 uses ALiBi; serve this model without a policy")


@pytest.fixture
def report(tmp_path, monkeypatch):
    """The report file of a starting engine."""
    path = tmp_path / "refused"
    path.touch()
    monkeypatch.setenv(refusals.REPORT, str(path))
    return path


def logged(name: str, error: Exception) -> bool:
    """Log an error as vLLM does; returns whether the record passes the filter."""
    record = logging.LogRecord(
        name, logging.ERROR, "", 0, "failed", None, (type(error), error, None)
    )
    return refusals._ReportFilter().filter(record)


WORKER, ENGINE = refusals._WORKER_LOGGER, refusals._ENGINE_LOGGER


def test_a_worker_reports_its_reasons_once_and_logs_no_traceback(report):
    assert not logged(WORKER, KVPolicyError(REASON))
    assert not logged(WORKER, KVPolicyError(REASON))
    assert report.read_text() == f"{REASON}\n"


def test_the_engine_ends_without_a_traceback_once_its_worker_has_reported(report):
    assert not logged(WORKER, KVPolicyError(REASON))
    with pytest.raises(SystemExit):
        logged(ENGINE, RuntimeError("WorkerProc initialization failed"))


def test_the_engine_reports_its_own_reasons(report):
    with pytest.raises(SystemExit):
        logged(ENGINE, KVPolicyError(REASON))
    assert report.read_text() == f"{REASON}\n"


def test_other_failures_are_logged_as_before(report):
    assert logged(WORKER, RuntimeError("out of memory"))
    assert logged(ENGINE, RuntimeError("out of memory"))
    assert report.read_text() == ""


def test_an_engine_that_has_started_logs_tracebacks_again(report):
    report.unlink()  # the front end does this
    assert logged(WORKER, KVPolicyError(REASON))
    assert logged(ENGINE, KVPolicyError(REASON))


@pytest.mark.parametrize(
    ("raised", "printed"),
    [("KVPolicyError('no')", "error: no\n"), ("ValueError('no')", "Traceback")],
)
def test_a_command_prints_a_refusal_without_a_traceback(raised, printed):
    code = (
        "from vllm_kvplugins.errors import KVPolicyError\n"
        "from vllm_kvplugins.vllm_adapter.startup.refusals import *\n"
        "print_without_traceback(); print_without_traceback()\n"
        f"raise {raised}"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith(printed)
    assert ("Traceback" in done.stderr) == (printed == "Traceback")
