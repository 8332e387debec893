"""Well-formed requests, and checks of their answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from soak_model import FIRST_WORD, NAME, word
from soak_nonsense import CHAT, COMPLETIONS, Case
from soak_server import MAX_TOKENS
from tiny_model import VOCABULARY

HANG_S = 240  # An answer that takes longer than this is a hang.
_MOST_TOKENS = MAX_TOKENS - 40  # The chat template adds a few tokens.
_HARMLESS: list[dict[str, Any]] = [
    {"no_such_field": {"a": [-1, None]}},
    {"vllm_xargs": {"kv_policy": "none", "budget": -1, "list": [1, "a", -0.5]}},
    {"kv_transfer_params": {"do_remote_prefill": True}},
    {"kv_transfer_params": {"do_remote_decode": True, "remote_block_ids": [[-1]]}},
    {"kv_transfer_params": {"budget": -(2**40), "deep": [[[{}]]]}},
    {"logprobs": True},
    {"prompt_logprobs": 1},
    {"min_tokens": 1},
    {"cache_salt": "salt"},
]


@dataclass
class SoakRequest:
    """A request whose answer must have exactly `max_tokens` tokens.

    Attributes:
        tokens: generated ids per choice, once answered.
        began_s, ended_s: when, on the monotonic clock.
    """

    path: str
    body: dict[str, Any]
    choices: int = 1
    tokens: list[list[int]] = field(default_factory=list)
    began_s: float = 0.0
    ended_s: float = 0.0

    @property
    def greedy(self) -> bool:
        return self.body["temperature"] == 0

    @property
    def max_tokens(self) -> int:
        return int(self.body["max_tokens"])


class Requests:
    """A source of valid requests, some of which share prefixes."""

    def __init__(self, rng: random.Random) -> None:
        self._heads = [random_words(rng, 500) for _ in range(3)]

    def _prompt(self, rng: random.Random) -> list[int]:
        head = rng.choice(self._heads)[: rng.choice((0, 40, 130, 200, 333))]
        return head + random_words(rng, rng.randint(1, 120))

    def one(self, rng: random.Random, short: bool = False) -> SoakRequest:
        prompt = self._prompt(rng)
        # Long answers exhaust the pool and so cause preemptions.
        longest = rng.choice((20, 40) if short else (20, 80, 300))
        body: dict[str, Any] = {
            "model": NAME,
            "max_tokens": rng.randint(1, min(longest, _MOST_TOKENS - len(prompt))),
            "temperature": 0 if rng.random() < 0.75 else 1.0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": rng.random() < 0.5,
        }
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        if rng.random() < 0.3:
            body |= rng.choice(_HARMLESS)
        if body["stream"]:
            body.pop("prompt_logprobs", None)  # vLLM refuses it together with streaming
        text = " ".join(map(word, prompt))
        kind = rng.random()
        if kind < 0.3:
            middle = len(text) // 2
            parts = [("system", text[:middle]), ("user", text[middle:])]
            messages = [{"role": role, "content": content} for role, content in parts]
            return SoakRequest(CHAT, body | {"messages": messages})
        if body["temperature"] and rng.random() < 0.3:
            body["n"] = 2
            return SoakRequest(COMPLETIONS, body | {"prompt": prompt}, 2)
        if kind < 0.4:
            return SoakRequest(
                COMPLETIONS, body | {"prompt": [prompt, prompt[::-1]]}, 2
            )
        return SoakRequest(
            COMPLETIONS, body | {"prompt": text if kind < 0.6 else prompt}
        )


class Client:
    """Sends requests to one server. Every unexpected answer raises AssertionError."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def ask(self, request: SoakRequest) -> None:
        """Send the request and wait for the complete answer."""
        request.began_s = time.monotonic()
        status, text = await self._post(request)
        request.ended_s = time.monotonic()
        assert status == 200, f"{status} to {_brief(request)}: {text[:300]}"
        streamed = request.body["stream"]
        _take_answer(request, _streamed(text) if streamed else [json.loads(text)])

    async def _post(self, request: SoakRequest) -> tuple[int, str]:
        try:
            async with self._session.post(
                self._url + request.path, json=request.body
            ) as answer:
                return answer.status, await answer.text()
        except TimeoutError:
            raise AssertionError(
                f"no end after {HANG_S} s: {_brief(request)}"
            ) from None

    async def hang_up(
        self, request: SoakRequest, after_s: float, chunks: int
    ) -> list[int]:
        """Close the connection early, after a time or a number of chunks.

        Returns:
            Token ids that were heard until then, of a stream with one choice.
        """
        token_ids: list[int] = []

        async def listen() -> None:
            async with self._session.post(
                self._url + request.path, json=request.body
            ) as answer:
                assert answer.status == 200, f"{answer.status} to {_brief(request)}"
                for _ in range(chunks):
                    line = await answer.content.readline()
                    if not line:
                        return
                    if line.startswith(b"data: {"):
                        for choice in json.loads(line[6:]).get("choices", ()):
                            token_ids.extend(choice.get("token_ids") or ())
                answer.close()

        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(listen(), after_s)
        return token_ids

    async def status(self, case: Case) -> int:
        """The HTTP status with which the server answers a malformed request."""
        try:
            async with self._session.request(
                case.method,
                self._url + case.path,
                data=case.body,
                headers={"Content-Type": case.content_type},
            ) as answer:
                await answer.read()
                return answer.status
        except TimeoutError:
            raise AssertionError(f"{case.name}: no answer in {HANG_S} s") from None

    async def half_a_request(self) -> None:
        """Announce a body, send a part of it, and disconnect."""
        host, port = self._url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
            b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
        )
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()
        await writer.wait_closed()

    async def text(self, path: str) -> str:
        async with self._session.get(self._url + path) as answer:
            assert answer.status == 200, f"{answer.status} to GET {path}"
            return await answer.text()

    async def control(self, path: str, body: dict[str, Any] | None = None) -> Any:
        async with self._session.post(self._url + path, json=body) as answer:
            text = await answer.text()
            assert answer.status == 200, f"{answer.status} to POST {path}: {text[:300]}"
            return json.loads(text) if text else None


def random_words(rng: random.Random, count: int) -> list[int]:
    """Random token ids of plain words."""
    return [rng.randrange(FIRST_WORD, VOCABULARY) for _ in range(count)]


def _streamed(text: str) -> list[dict[str, Any]]:
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert lines, "a stream without data"
    assert lines[-1] == "[DONE]", f"a stream that ends with {lines[-1][:300]}"
    return [json.loads(line) for line in lines[:-1]]


def _take_answer(request: SoakRequest, answers: list[dict[str, Any]]) -> None:
    """Collect the tokens of every choice, and count them."""
    tokens: list[list[int]] = [[] for _ in range(request.choices)]
    reasons: list[str | None] = [None] * request.choices
    usage: dict[str, Any] = {}
    for answer in answers:
        assert "error" not in answer, f"{_brief(request)}: {answer['error']}"
        usage = answer.get("usage") or usage
        for choice in answer["choices"]:
            index = choice["index"]
            tokens[index] += choice.get("token_ids") or []
            reasons[index] = choice["finish_reason"] or reasons[index]
    expected, generated = (
        [request.max_tokens] * request.choices,
        [len(part) for part in tokens],
    )
    assert generated == expected, f"{_brief(request)}: {generated} tokens"
    assert usage["completion_tokens"] == sum(expected), f"{_brief(request)}: {usage}"
    assert set(reasons) == {"length"}, f"{_brief(request)}: {reasons}"
    request.tokens = tokens


def _brief(request: SoakRequest) -> str:
    body = {k: v for k, v in request.body.items() if k not in ("prompt", "messages")}
    return f"{request.path} {json.dumps(body)}"


async def lead(client: Client, request: SoakRequest, choice: int, at: int) -> float:
    """Log-probability of the best token minus that of the second, at one position."""
    body = {k: v for k, v in request.body.items() if not k.startswith("stream")}
    chat = request.path == CHAT
    body |= {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
    answer = await client.control(request.path, body)
    logprobs = answer["choices"][choice]["logprobs"]
    if chat:
        values = [entry["logprob"] for entry in logprobs["content"][at]["top_logprobs"]]
    else:
        values = list(logprobs["top_logprobs"][at].values())
    best, second = sorted(values, reverse=True)[:2]
    return float(best - second)
