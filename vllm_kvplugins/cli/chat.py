"""``kvplugins chat``: a page that talks to a server and shows what its policy does."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import webbrowser
from typing import Annotated

import typer

from vllm_kvplugins.cli.console import out, user_errors
from vllm_kvplugins.errors import KVPolicyError, coded

HOST = "127.0.0.1"


def chat(
    base_url: Annotated[
        str, typer.Option(metavar="URL", help="The vLLM server, with or without /v1.")
    ] = "http://127.0.0.1:8000/v1",
    port: Annotated[
        int,
        typer.Option(metavar="N", min=0, max=65535, help="Of the page; 0: a free one."),
    ] = 8765,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            envvar="VLLM_API_KEY",
            help="Key of the server. Prefer the variable: others see command lines.",
        ),
    ] = None,
) -> None:
    """Serve a local page that chats with a running server.

    It shows for each turn what was computed, restored and kept, which episode answered,
    and the server's counters. The page answers on this machine only and loads nothing
    from elsewhere.
    """
    with user_errors():
        from vllm_kvplugins.cli.chat_server import create_app, server_address

        app = create_app(server_address(base_url), api_key)
        with _listening(port) as listener:
            address = f"http://{HOST}:{listener.getsockname()[1]}/"
            out().print(f"{address} talks to {base_url}; Ctrl-C ends it")
            if browser and _has_display():
                webbrowser.open(address)
            _serve(app, listener)


def _listening(port: int) -> socket.socket:
    """A socket that accepts connections from this machine.

    Raises:
        KVPolicyError: the port is not free.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise KVPolicyError(
            coded(
                "KVP609",
                f"cannot serve the page at {HOST}:{port}: {error.strerror}; choose "
                "another --port, or 0 for a free one",
            )
        ) from error
    return listener


def _has_display() -> bool:
    """Whether a browser has a window; Python would start a text browser without one."""
    if not sys.platform.startswith("linux"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _serve(app: object, listener: socket.socket) -> None:
    import uvicorn

    # An answer that is being streamed does not delay Ctrl-C.
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
        log_level="warning",
        timeout_graceful_shutdown=1,
    )
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])
