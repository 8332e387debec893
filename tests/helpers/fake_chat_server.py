"""Stand-ins for ``vllm serve`` that answer chats: no model, no vLLM.

``serving`` runs any ASGI application in a thread. ``FakeServer`` streams the words of
its answer, waits in the middle if asked, and remembers what clients did.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.responses import StreamingResponse as Streaming
from starlette.routing import Route

BLOCK = 32
_START_S = 30


@contextlib.contextmanager
def serving(app: Any, port: int = 0) -> Iterator[str]:
    """The address at which an application is served until the block ends."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(
        target=server.run, kwargs={"sockets": [listener]}, daemon=True
    )
    thread.start()
    deadline = time.monotonic() + _START_S
    while not server.started:
        assert thread.is_alive(), "the application did not start"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


class FakeServer:
    """A server with one model and a policy.

    Attributes:
        answer: words that it streams.
        holds_after: words after which it waits for ``release``; None: it does not wait.
        policy: whether it has a policy, which reports.
        refuses: error that it answers instead, with its status; None: it answers.
        breaks: whether the stream ends with an error.
        bodies, headers: of the chats so far.
        left: set when a client leaves during an answer.
        resets: number of calls that dropped all sessions.
    """

    def __init__(self, policy: bool = True) -> None:
        self.answer = ["You", "have", "two", "cats", "and", "a", "dog"]
        self.holds_after: int | None = None
        self.release = threading.Event()
        self.policy = policy
        self.refuses: tuple[int, dict[str, Any]] | None = None
        self.breaks = False
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.left = threading.Event()
        self.resets = 0
        self.counts = {"vllm:request_success_total": 0.0}
        self.app = Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/openapi.json", self._interface),
                Route("/metrics", self._metrics),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/reset_prefix_cache", self._reset, methods=["POST"]),
            ]
        )

    def _models(self, request: Request) -> Response:
        if self.refuses:
            return JSONResponse(self.refuses[1], self.refuses[0])
        return JSONResponse({"data": [{"id": "tiny"}]})

    def _interface(self, request: Request) -> Response:
        return JSONResponse({"paths": {"/reset_prefix_cache": {}}})

    def _reset(self, request: Request) -> Response:
        assert request.query_params["reset_external"] == "true"
        self.resets += 1
        return JSONResponse({"success": True})

    def _metrics(self, request: Request) -> Response:
        engine = '{engine="0",model_name="tiny"}'
        lines = [
            f'vllm:cache_config_info{{block_size="{BLOCK}",num_gpu_blocks="100"}} 1.0',
            f"vllm:kv_cache_usage_perc{engine} 0.25",
            f"vllm:num_requests_running{engine} 0",
        ]
        if self.policy:
            lines.append(f"vllm:kv_policy_session_bytes{engine} {3 * 2**20}")
        lines += [f"{name}{engine} {value}" for name, value in self.counts.items()]
        return PlainTextResponse("\n".join(lines) + "\n")

    def count(self, **amounts: float) -> None:
        for name, amount in amounts.items():
            full = f"vllm:{name}_total"
            self.counts[full] = self.counts.get(full, 0.0) + amount

    async def _chat(self, request: Request) -> Response:
        self.headers.append(request.headers)
        self.bodies.append(await request.json())
        if self.refuses:
            return JSONResponse(self.refuses[1], self.refuses[0])
        return Streaming(self._stream(self.bodies[-1]), media_type="text/event-stream")

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        turns, sent = len(body["messages"]), 0
        try:
            yield event(choices=[{"delta": {"role": "assistant", "content": ""}}])
            for word in self.answer:
                while sent == self.holds_after and not self.release.is_set():
                    await asyncio.sleep(0.01)
                yield event(choices=[{"delta": {"content": f"{word} "}}])
                sent += 1
            if self.breaks:
                yield event(error={"message": "the engine died"})
                return
            prompt_tokens = 100 * turns
            self.count(request_success=1, prompt_tokens=prompt_tokens)
            usage = {"prompt_tokens": prompt_tokens, "completion_tokens": sent}
            yield event(choices=[], usage=usage)
            if self.policy:
                self.count(kv_policy_compressions=1, kv_policy_session_hits=turns > 1)
                report = self.report(prompt_tokens, turns)
                yield event(choices=[], kv_transfer_params={"kv_policy": report})
            yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.left.set()
            raise

    def report(self, prompt_tokens: int, turns: int) -> dict[str, Any]:
        """The policy's report of an answer."""
        stock = -(-(prompt_tokens + len(self.answer)) // BLOCK)
        return {
            "policy": "flowkv",
            "tokens": prompt_tokens + len(self.answer),
            "cached_tokens": 0,
            "loaded_tokens": 0,
            "session_tokens": prompt_tokens - 40 if turns > 1 else 0,
            "session_on_device": turns > 1,
            "turn_ends": [20, prompt_tokens - 60] if turns > 1 else [],
            "compressions": 1,
            "block_size": BLOCK,
            "held_blocks": 3,
            "stock_blocks": stock,
            "host_bytes": 0,
            "session_bytes": 5 * 2**20,
            "episode": None,
            "episodes": None,
        }


def event(**fields: Any) -> str:
    return f"data: {json.dumps(fields)}\n\n"
