"""The server of ``kvplugins chat``: a page, and a proxy for one vLLM server.

| path | answers |
|---|---|
| ``/``, ``/style.css``, ``/script.js`` | the page |
| ``GET /api/server`` | models of the vLLM server, and whether it can drop sessions |
| ``GET /api/metrics`` | sums of its metrics |
| ``POST /api/chat`` | ``/v1/chat/completions``, always streamed |
| ``POST /api/reset`` | ``/reset_prefix_cache``, which drops all sessions |

The page has one origin, so the vLLM server needs no CORS, and the API key stays here.
Pages of other origins can use none of this: requests need the host name of this
machine, and ``POST`` needs JSON, for which browsers ask first.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator
from importlib import resources
from typing import Any
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from vllm_kvplugins.errors import KVPolicyError, coded

_PAGE = {
    "/": ("index.html", "text/html"),
    "/style.css": ("style.css", "text/css"),
    "/script.js": ("script.js", "text/javascript"),
}
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; "
    "style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_THIS_MACHINE = ("127.0.0.1", "localhost")
_CONNECT_S, _SMALL_ANSWER_S = 5.0, 30.0
_RESET = "/reset_prefix_cache"
# Mean over engines; all other metrics are summed.
_MEAN = "vllm:kv_cache_usage_perc"
_POOL = "vllm:cache_config_info"


def server_address(base_url: str) -> str:
    """The address of a server, without ``/v1``.

    Raises:
        KVPolicyError: it is not an address of HTTP.
    """
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise KVPolicyError(
            coded(
                "KVP603",
                f"--base-url must be like http://127.0.0.1:8000/v1, got {base_url!r}",
            )
        )
    return base_url.rstrip("/").removesuffix("/v1")


def create_app(server: str, api_key: str | None = None) -> Starlette:
    """The application.

    Args:
        server: address of the vLLM server, without ``/v1``.
        api_key: sent to it.
    """
    proxy = Proxy(server, api_key)
    page = [
        Route(path, _file(name, kind), methods=["GET"])
        for path, (name, kind) in _PAGE.items()
    ]
    api = [
        Route("/api/server", proxy.describe, methods=["GET"]),
        Route("/api/metrics", proxy.metrics, methods=["GET"]),
        Route("/api/chat", proxy.chat, methods=["POST"]),
        Route("/api/reset", proxy.reset, methods=["POST"]),
    ]
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=list(_THIS_MACHINE))
    return Starlette(routes=page + api, middleware=[hosts], lifespan=proxy.lifespan)


def _file(name: str, kind: str) -> Any:
    """An endpoint that returns a file of the page."""
    content = resources.files(__package__).joinpath("chat_page", name).read_bytes()

    def endpoint(request: Request) -> Response:
        return Response(content, media_type=kind, headers=_HEADERS)

    return endpoint


class Proxy:
    """Forwards requests of the page to one vLLM server.

    Errors have the form of the OpenAI API: ``{"error": {"message": ...}}``.
    """

    def __init__(self, server: str, api_key: str | None) -> None:
        self._server = server
        self._client = httpx.AsyncClient(
            base_url=server,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(_SMALL_ANSWER_S, connect=_CONNECT_S),
            # Never through a proxy if the server is on this machine.
            trust_env=urlsplit(server).hostname not in (*_THIS_MACHINE, "::1"),
        )

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Close the connections at the end."""
        async with self._client:
            yield

    async def describe(self, request: Request) -> Response:
        """Models, and whether sessions can be dropped."""
        try:
            answer = await self._client.get("/v1/models")
            if answer.status_code != 200:
                return _forwarded(answer)
            models = [model["id"] for model in answer.json()["data"]]
            interface = await self._client.get("/openapi.json")
        except httpx.HTTPError as error:
            return self._unreachable(error)
        except (ValueError, KeyError, TypeError):
            return self._unreachable(TypeError("the answer is not a list of models"))
        # Servers without this file (--disable-fastapi-docs) may still have the path.
        can_reset = interface.status_code == 200 and f'"{_RESET}"' in interface.text
        found = {"server": self._server, "models": models, "can_reset": can_reset}
        return JSONResponse(found)

    async def metrics(self, request: Request) -> Response:
        """Sums of the metrics."""
        try:
            answer = await self._client.get("/metrics")
        except httpx.HTTPError as error:
            return self._unreachable(error)
        if answer.status_code != 200:
            return _forwarded(answer)
        return JSONResponse(sums(answer.text), headers={"Cache-Control": "no-store"})

    async def chat(self, request: Request) -> Response:
        """Stream a chat completion with its usage and the policy's report."""
        body = await _json(request)
        if body is None:
            return _error(415, "the body must be a JSON object")
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        body["vllm_xargs"] = (body.get("vllm_xargs") or {}) | {"kv_report": 1}
        try:
            answer = await self._client.send(
                self._client.build_request(
                    "POST",
                    "/v1/chat/completions",
                    json=body,
                    # Reading a long prompt may take any time.
                    timeout=httpx.Timeout(None, connect=_CONNECT_S),
                ),
                stream=True,
            )
            if answer.status_code != 200:
                await answer.aread()
                return _forwarded(answer)
        except httpx.HTTPError as error:
            return self._unreachable(error)
        return StreamingResponse(
            self._events(answer),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store"},
            # Also if the browser leaves before the first byte. vLLM then stops.
            background=BackgroundTask(answer.aclose),
        )

    async def _events(self, answer: httpx.Response) -> AsyncIterator[bytes]:
        """The bytes of a stream, and an event with an error if it breaks."""
        try:
            async for part in answer.aiter_bytes():
                yield part
        except httpx.HTTPError as error:
            yield b"\n\ndata: " + bytes(self._unreachable(error).body) + b"\n\n"

    async def reset(self, request: Request) -> Response:
        """Drop all sessions and the prefix cache; servers in development mode only."""
        if await _json(request) is None:
            return _error(415, "the body must be a JSON object")
        try:
            answer = await self._client.post(_RESET, params={"reset_external": "true"})
        except httpx.HTTPError as error:
            return self._unreachable(error)
        return _forwarded(answer)

    def _unreachable(self, error: Exception) -> JSONResponse:
        reason = str(error) or type(error).__name__
        text = f"no vLLM server responds at {self._server}: {reason}"
        return _error(
            502, coded("KVP610", f"{text}; wait until it is ready, or start it")
        )


async def _json(request: Request) -> dict[str, Any] | None:
    """The JSON object of a request; None if it has none."""
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        return None
    try:
        body = await request.json()
    except ValueError:
        return None
    return body if isinstance(body, dict) else None


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message}}, status)


def _forwarded(answer: httpx.Response) -> Response:
    """A finished answer of the vLLM server, errors as JSON."""
    with contextlib.suppress(ValueError):
        return JSONResponse(answer.json(), answer.status_code)
    if answer.is_success:
        return JSONResponse({})
    text = answer.text.strip() or answer.reason_phrase
    return _error(answer.status_code, f"HTTP {answer.status_code}: {text}")


def sums(text: str) -> dict[str, Any]:
    """The metrics of vLLM and of the policy, over models and engines.

    Args:
        text: answer of ``/metrics``.

    Returns:
        ``values``: by name, without buckets. ``block_size`` and ``pool_blocks``: of
        the pool; None if they are not reported.
    """
    values: dict[str, float] = {}
    usage: list[float] = []
    pool_blocks, block_size = 0, None
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == _POOL:
                blocks, size = (
                    sample.labels.get(label, "")
                    for label in ("num_gpu_blocks", "block_size")
                )
                pool_blocks += int(blocks) if blocks.isdecimal() else 0
                block_size = int(size) if size.isdecimal() else block_size
            elif sample.name == _MEAN:
                usage.append(sample.value)
            elif sample.name.startswith("vllm:") and not sample.name.endswith(
                ("_bucket", "_created")
            ):
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
    if usage:
        values[_MEAN] = math.fsum(usage) / len(usage)
    finite = {name: value for name, value in values.items() if math.isfinite(value)}
    return {
        "values": finite,
        "block_size": block_size,
        "pool_blocks": pool_blocks or None,
    }
