"""What the subcommands share: consoles, error messages, a quiet vLLM."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, TextIO

import typer
from rich.console import Console
from rich.markup import escape

from vllm_kvplugins.default_model import ModelError
from vllm_kvplugins.engine.recorded_run import RunFileError
from vllm_kvplugins.errors import KVPolicyError


def out() -> Console:
    """Results. Made anew each time, as ``sys.stdout`` may have been replaced."""
    return Console(highlight=False)


def fail(message: str, code: int = 1) -> NoReturn:
    """End the command with one message on stderr."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"[bold red]error:[/] {escape(message)}")
    raise typer.Exit(code)


@contextmanager
def user_errors() -> Iterator[None]:
    """Errors that a user can cause end the command without a traceback."""
    try:
        yield
    except (KVPolicyError, ModelError, RunFileError) as error:
        fail(str(error))
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("torch", "transformers", "vllm"):
            raise
        fail(
            f"{missing} is not installed; `kvplugins doctor` says what is missing and "
            "how to install it"
        )


@contextmanager
def quiet_engine(verbose: bool) -> Iterator[Callable[[str], None]]:
    """Hide what an engine prints, also from C++, but show progress.

    Yields:
        A function that shows the current step.

    A KVPolicyError says enough by itself; on any other exception the hidden
    output is printed.
    """
    if verbose:
        yield lambda step: print(f"• {step}", file=sys.stderr, flush=True)
        return
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read on vLLM's import
    with _hidden_output() as terminal:
        console = Console(file=terminal, highlight=False)
        if not console.is_terminal:
            yield lambda step: print(f"• {step}", file=terminal, flush=True)
            return
        with console.status("starting") as status:
            yield lambda step: status.update(escape(step))


@contextmanager
def _hidden_output() -> Iterator[TextIO]:
    """Send file descriptors 1 and 2 to a file; yields the former stderr."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    terminal = os.fdopen(os.dup(saved[1]), "w", encoding="utf-8", errors="replace")
    with tempfile.TemporaryFile() as log, terminal:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            yield terminal
        except (KVPolicyError, KeyboardInterrupt):
            raise
        except BaseException:
            sys.stdout.flush()
            sys.stderr.flush()
            log.seek(0)
            terminal.write(log.read().decode(errors="replace"))
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, original in enumerate(saved, 1):
                os.dup2(original, number)
                os.close(original)
