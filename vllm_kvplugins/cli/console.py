"""Shared by all subcommands: consoles, error messages, hidden engine output."""

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
from vllm_kvplugins.errors import KVPolicyError, coded

# Libraries that commands may lack.
_INSTALLED = ("torch", "transformers", "vllm")
_WITH_VLLM = ("httpx", "starlette", "uvicorn")


def out() -> Console:
    """Console for results; a new one per call, because tests replace ``sys.stdout``."""
    return Console(highlight=False)


def fail(message: str, code: int = 1) -> NoReturn:
    """End the command with one message on stderr."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"[bold red]error:[/] {escape(message)}")
    raise typer.Exit(code)


@contextmanager
def user_errors() -> Iterator[None]:
    """End the command without a traceback for errors that a user can cause."""
    try:
        yield
    except (KVPolicyError, ModelError) as error:
        fail(str(error))
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in (*_INSTALLED, *_WITH_VLLM):
            raise
        what = f"vLLM, which brings {missing}," if missing in _WITH_VLLM else missing
        fail(
            coded(
                "KVP600",
                f"{what} is not installed; `kvplugins doctor` shows how to install it",
            )
        )


@contextmanager
def quiet_engine(verbose: bool) -> Iterator[Callable[[str], None]]:
    """Hide the output of an engine, including output from C++, and show progress.

    Prints the hidden output if an exception other than KVPolicyError occurs.

    Args:
        verbose: do not hide anything.

    Yields:
        A function that shows the current step.
    """
    if verbose:
        yield lambda step: print(f"• {step}", file=sys.stderr, flush=True)
        return
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # vLLM reads it when imported
    with _hidden_output() as terminal:
        console = Console(file=terminal, highlight=False)
        if not console.is_terminal:
            yield lambda step: print(f"• {step}", file=terminal, flush=True)
            return
        with console.status("starting") as status:
            yield lambda step: status.update(escape(step))


@contextmanager
def _hidden_output() -> Iterator[TextIO]:
    """Redirect file descriptors 1 and 2 to a file; yield the former stderr."""
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
