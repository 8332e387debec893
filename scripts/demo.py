"""One question about a long document, asked of a running server.

Prints the answer, what the KV-cache policy freed meanwhile and the speed.
Standard library only. `serve.sh --demo` calls it; by hand::

    python scripts/demo.py --port 8000 --policy snapkv
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field

FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. "
    "Here we go. There and back again. "
)
FILLER_TOKENS = 25  # of SmolLM2's and Qwen's tokenizers, rounded up
FREED = "vllm:kv_policy_blocks_freed_total"
COMPRESSIONS = "vllm:kv_policy_compressions_total"
RESIDENT = "vllm:kv_policy_resident_tokens"

# Never through a proxy: the server is on this machine.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class DemoError(RuntimeError):
    """The demo did not show what it should; the message says what."""


def build_prompt(tokens: int, seed: int) -> tuple[str, str]:
    """A document of about `tokens` tokens with one fact in it, and the fact.

    The wording is the classic pass-key test's: a model of 135M parameters
    finds the key in it, and in no other wording that was tried.
    """
    rng = random.Random(seed)
    key = str(rng.randrange(10_000, 100_000))
    lines = [FILLER] * max(2, tokens // FILLER_TOKENS)
    lines.insert(
        rng.randrange(len(lines) // 4, len(lines) // 2),
        f"The pass key is {key}. Remember it. {key} is the pass key. ",
    )
    return (
        "There is an important info hidden inside a lot of irrelevant text. Find it "
        "and memorize it. I will quiz you about the important information there.\n\n"
        + "".join(lines)
        + "\n\nWhat is the pass key? Answer with the 5-digit number only."
    ), key


def read_metrics(base: str) -> dict[str, float]:
    """Every sample of /metrics, summed over its labels."""
    with _opener.open(f"{base}/metrics", timeout=10) as response:
        return parse_metrics(response.read().decode())


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus text to {name: sum over label sets}."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            name = series.partition("{")[0]
            sums[name] = sums.get(name, 0.0) + float(value)
    return sums


@dataclass
class Reply:
    """What one streamed request gave."""

    text: str = ""
    prompt_tokens: int = 0
    tokens: int = 0
    first_s: float = 0.0
    total_s: float = 0.0
    resident: list[float] = field(default_factory=list)


def ask(base: str, model: str, prompt: str, max_tokens: int) -> Reply:
    """Stream one greedy chat completion, watching the resident tokens meanwhile."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"{base}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    reply, start, done = Reply(), time.perf_counter(), threading.Event()
    watcher = threading.Thread(target=_watch, args=(base, reply, done), daemon=True)
    watcher.start()
    try:
        with _opener.open(request, timeout=600) as response:
            for event in _events(response):
                if usage := event.get("usage"):
                    reply.prompt_tokens = usage["prompt_tokens"]
                    reply.tokens = usage["completion_tokens"]
                for choice in event.get("choices", ()):
                    piece = choice["delta"].get("content") or ""
                    if piece and not reply.text:
                        reply.first_s = time.perf_counter() - start
                    reply.text += piece
    finally:
        done.set()
        watcher.join()
    reply.total_s = time.perf_counter() - start
    return reply


def _events(lines: Iterator[bytes]) -> Iterator[dict]:
    for line in lines:
        data = line.decode().strip().removeprefix("data: ")
        if data and data != "[DONE]":
            event = json.loads(data)
            if "error" in event:
                raise DemoError(f"the server answered {event['error']}")
            yield event


def _watch(base: str, reply: Reply, done: threading.Event) -> None:
    """Poll the gauge: it counts running requests, so it is 0 once one has ended."""
    start = time.perf_counter()
    while not done.wait(0.25):
        try:
            reply.resident.append(read_metrics(base).get(RESIDENT, 0.0))
        except OSError:
            continue  # a busy server; the request itself reports real failures
        if sys.stderr.isatty():
            text = f"\r  waiting for the answer, {time.perf_counter() - start:.0f} s"
            print(text, end="", file=sys.stderr)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)


def run(base: str, policy: str, tokens: int, seed: int, known_model: bool) -> None:
    """Ask, print, and check that what was promised has happened.

    Raises:
        DemoError: no answer; or a policy that drops tokens freed nothing; or a
            model known to find the key did not although nothing was dropped.
    """
    with _opener.open(f"{base}/v1/models", timeout=10) as response:
        model = json.load(response)["data"][0]["id"]
    prompt, key = build_prompt(tokens, seed)
    before = read_metrics(base)
    reply = ask(base, model, prompt, max_tokens=48)
    drops = policy not in ("none", "full")
    after = _settled_metrics(base, before.get(FREED, 0.0), wait=drops)
    freed, compressions = (
        after.get(name, 0.0) - before.get(name, 0.0) for name in (FREED, COMPRESSIONS)
    )
    resident = next((value for value in reversed(reply.resident) if value), 0.0)
    found = key in reply.text
    total = reply.prompt_tokens + reply.tokens
    decode_s = reply.total_s - reply.first_s
    rate = (reply.tokens - 1) / decode_s if reply.tokens > 1 and decode_s > 0 else 0.0

    print(f"model            {model}")
    print(f"policy           {policy}")
    print(f"document         {reply.prompt_tokens} tokens, pass key {key} hidden in it")
    print(f"answer           {reply.text.strip()!r}")
    print(f"pass key         {'found' if found else 'NOT found'}")
    if policy != "none":
        print(f"compressions     {compressions:.0f}")
        print(f"blocks freed     {freed:.0f}")
        print(f"resident tokens  {resident:.0f} (whole blocks) of {total}")
    print(f"first token      {reply.first_s:.2f} s after the question")
    print(f"decode           {rate:.1f} tokens/s ({reply.tokens} tokens)")

    if not reply.text.strip():
        raise DemoError("the answer is empty")
    if known_model and not (drops or found):
        raise DemoError(
            "the pass key is not in the answer although every token was kept; the "
            "default model finds it, so something is broken"
        )
    if drops and not (freed > 0 and compressions > 0):
        raise DemoError(
            f"the policy {policy!r} freed {freed:.0f} blocks in {compressions:.0f} "
            "compressions; is its budget above the length of the document?"
        )
    if not found:
        print("\nThe answer lacks the key; compare --policy full, which drops nothing,")
        print("and --policy none. A small model easily loses digits under eviction.")


def _settled_metrics(base: str, before: float, wait: bool) -> dict[str, float]:
    """Metrics after the request; they trail the answer by an engine step or two."""
    deadline = time.perf_counter() + (3.0 if wait else 0.0)
    while True:
        after = read_metrics(base)
        if after.get(FREED, 0.0) > before or time.perf_counter() > deadline:
            return after
        time.sleep(0.2)


def is_ready(base: str) -> bool:
    """Whether the server answers /health."""
    try:
        with _opener.open(f"{base}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--policy", default="none", help="what the server was started with"
    )
    parser.add_argument("--tokens", type=int, default=3000, help="document length")
    parser.add_argument("--seed", type=int, default=0, help="of key and place")
    parser.add_argument(
        "--known-model",
        action="store_true",
        help="the model finds the key when nothing is dropped: fail if it does not",
    )
    parser.add_argument(
        "--is-ready", action="store_true", help="only tell if the server is up (exit 0)"
    )
    chosen = parser.parse_args()
    base = f"http://127.0.0.1:{chosen.port}"
    if chosen.is_ready:
        return 0 if is_ready(base) else 1
    try:
        run(base, chosen.policy, chosen.tokens, chosen.seed, chosen.known_model)
    except urllib.error.HTTPError as error:
        print(f"error: HTTP {error.code}: {error.read().decode()}", file=sys.stderr)
        return 1
    except (DemoError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
