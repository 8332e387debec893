"""The error message of a command."""

from __future__ import annotations

from typing import Any


def refused(done: Any) -> str:
    """The one-line error in a result of typer's test runner."""
    assert done.exit_code == 1, done.output
    assert isinstance(done.exception, SystemExit), "another exception escaped"
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.output
    assert done.stderr.count("\n") == 1
    message: str = done.stderr
    return message
