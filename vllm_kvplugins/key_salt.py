"""Gives the requests of each API key a cache salt of their own.

A middleware for vLLM's server, which loads it by name::

    vllm serve MODEL --middleware vllm_kvplugins.key_salt.SaltByApiKey ...

Requests with different salts share neither blocks of the prefix cache nor sessions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

_Scope = MutableMapping[str, Any]
_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[_Scope, _Receive, _Send], Awaitable[None]]

_DOMAIN = b"vllm_kvplugins key_salt\0"  # the salt is no digest of the key alone


class SaltByApiKey:
    """Sets ``cache_salt`` of each request from its API key, in front of a server.

    It does so at every path, because vLLM generates text at many of them, and ignores
    the field where it has no use. A salt that the client sends divides the caches of
    its key further. Requests without a key, and bodies that are no JSON objects, stay
    as they are. Every server gives a key the same salt, so sessions outlive a restart
    and serve all replicas.

    Args:
        app: the server.
    """

    def __init__(self, app: _App) -> None:
        self._app = app

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """Serve one request."""
        key = _key_of(scope)
        if key is None:
            await self._app(scope, receive, send)
            return
        body, ended = await _whole_body(receive)
        salted = _with_salt(body, key)
        headers = [
            (name, str(len(salted)).encode() if name == b"content-length" else value)
            for name, value in scope["headers"]
            if name != b"transfer-encoding"
        ]
        unread = [ended] if ended is not None else []
        unread.insert(0, {"type": "http.request", "body": salted, "more_body": False})

        async def receive_salted() -> _Message:
            return unread.pop(0) if unread else await receive()

        await self._app({**scope, "headers": headers}, receive_salted, send)


def _key_of(scope: _Scope) -> bytes | None:
    """The API key of a request that is to be salted; None: it is not."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return None
    for name, value in scope["headers"]:
        scheme, _, key = value.strip().partition(b" ")
        if name == b"authorization" and scheme.lower() == b"bearer" and key.strip():
            return bytes(key.strip())
    return None


async def _whole_body(receive: _Receive) -> tuple[bytes, _Message | None]:
    """The body; and the message that the client has gone, if it has."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b"".join(parts), message
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts), None


def _with_salt(body: bytes, key: bytes) -> bytes:
    """The body with a salt of the key; unchanged if it is no JSON object."""
    try:
        request = json.loads(body)
    except ValueError:
        return body
    if not isinstance(request, dict):
        return body  # the server refuses it
    own = request.get("cache_salt")
    if own is None:
        own = ""
    if not isinstance(own, str):
        return body  # the server refuses it, too
    digest = hashlib.sha256(_DOMAIN + key + b"\0" + own.encode("utf-8", "replace"))
    return json.dumps(request | {"cache_salt": digest.hexdigest()}).encode()
