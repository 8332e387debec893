"""A client for the demos: streamed chats with a running server, and its metrics.

Standard library only.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

Message = dict[str, str]

_USAGE = "vllm:kv_cache_usage_perc"
_HOST = "vllm:kv_policy_host_bytes"
_POOL = re.compile(r"^vllm:cache_config_info\{(.*)\} ", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
# What closes a message in chat templates: <|im_end|>, </s>, <end_of_turn>, <eos>.
_END_OF_ANSWER = re.compile(r"<\|[^|>]*\|>|</s>|<end_of_turn>|<eos>")

# Never through a proxy: the server is on this machine.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class DemoError(RuntimeError):
    """A demo did not show what it should; the message says what."""


@dataclass
class Reply:
    """Result of one streamed request.

    Attributes:
        text: the answer, up to the token that closes it.
        held_blocks: blocks in use in the pool while the answer was generated.
        peak_blocks: most blocks in use during the request.
        host_bytes: most host memory reserved during the request.
    """

    text: str = ""
    prompt_tokens: int = 0
    tokens: int = 0
    first_s: float = 0.0
    total_s: float = 0.0
    held_blocks: int = 0
    peak_blocks: int = 0
    host_bytes: int = 0


@dataclass
class Server:
    """A running server with one model.

    Attributes:
        base: its address, such as ``http://127.0.0.1:8000``.
        model: name under which it serves the model.
        pool_blocks: blocks that requests can have.
        block_size: tokens of a block.
    """

    base: str
    model: str = ""
    pool_blocks: int = 0
    block_size: int = 0
    _samples: list[tuple[float, float]] = field(default_factory=list, repr=False)

    @classmethod
    def connect(cls, base: str) -> Server:
        """Read the name of the model and the size of the pool."""
        with _opener.open(f"{base}/v1/models", timeout=10) as response:
            model = json.load(response)["data"][0]["id"]
        blocks, size = pool_of(_get(f"{base}/metrics"))
        return cls(base, model, blocks, size)

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics, summed over its labels."""
        return parse_metrics(_get(f"{self.base}/metrics"))

    def memory(self) -> tuple[float, float]:
        """Blocks in use now, and bytes of host memory."""
        metrics = self.metrics()
        host_bytes = metrics.get(_HOST, 0.0)
        return metrics.get(_USAGE, 0.0) * self.pool_blocks, host_bytes

    def ask(
        self, messages: Sequence[Message], max_tokens: int, to_the_end: bool = False
    ) -> Reply:
        """Stream one greedy chat completion; read the pool's usage meanwhile.

        Args:
            to_the_end: generate ``max_tokens`` tokens even if the answer ends before;
                the rest only serves to measure.
        """
        body = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": to_the_end,
            "skip_special_tokens": False,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        request = urllib.request.Request(
            f"{self.base}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        reply, start, pieces = Reply(), time.perf_counter(), 0
        self._samples.clear()
        held: list[tuple[float, float]] = []
        with self._watched(), _opener.open(request, timeout=600) as response:
            for event in _events(response):
                if usage := event.get("usage"):
                    reply.prompt_tokens = usage["prompt_tokens"]
                    reply.tokens = usage["completion_tokens"]
                for choice in event.get("choices", ()):
                    piece = choice["delta"].get("content") or ""
                    if not piece:
                        continue
                    if not reply.text:
                        reply.first_s = time.perf_counter() - start
                    reply.text += piece
                    pieces += 1
                    if pieces % 4 == 2:  # a policy acts after the first token
                        held.append(self.memory())
        reply.total_s = time.perf_counter() - start
        reply.text = _END_OF_ANSWER.split(reply.text, maxsplit=1)[0].strip()
        # Usage is 0 as soon as the request has ended.
        in_use = [blocks for blocks, _ in held or self._samples if blocks]
        reply.held_blocks = round(in_use[-1]) if in_use else 0
        samples = [*self._samples, *held]
        reply.peak_blocks = round(max((blocks for blocks, _ in samples), default=0.0))
        reply.host_bytes = round(max((host for _, host in samples), default=0.0))
        return reply

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Sample the pool's usage in a thread and show how long the request takes."""
        done = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(done,), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()

    def _watch(self, done: threading.Event) -> None:
        start = time.perf_counter()
        while not done.wait(0.25):
            try:
                self._samples.append(self.memory())
            except OSError:
                continue  # a busy server; the request itself reports real failures
            if sys.stderr.isatty():
                text = (
                    f"\r  waiting for the answer, {time.perf_counter() - start:.0f} s"
                )
                print(text, end="", file=sys.stderr)
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr)


def is_ready(base: str) -> bool:
    """Whether the server answers /health."""
    try:
        with _opener.open(f"{base}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus text to {name: sum over label sets}."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            name = series.partition("{")[0]
            sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def pool_of(metrics: str) -> tuple[int, int]:
    """Blocks that requests can have, and tokens of a block."""
    found = _POOL.search(metrics)
    if found is None:
        raise DemoError("/metrics has no vllm:cache_config_info; is this vLLM?")
    labels = dict(_LABEL.findall(found[1]))
    # vLLM never hands out the first block
    return int(labels["num_gpu_blocks"]) - 1, int(labels["block_size"])


def _get(url: str) -> str:
    with _opener.open(url, timeout=30) as response:
        text: str = response.read().decode()
    return text


def _events(lines: Iterator[bytes]) -> Iterator[dict]:
    for line in lines:
        data = line.decode().strip().removeprefix("data: ")
        if data and data != "[DONE]":
            event = json.loads(data)
            if "error" in event:
                raise DemoError(f"the server answered {event['error']}")
            yield event
