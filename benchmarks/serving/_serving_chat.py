"""Conversations with think time over ``/v1/chat/completions``.

Users arrive as a Poisson process. Each sends a message, reads the answer, waits for an
exponentially distributed think time, and sends the next message with the whole history,
as chat front ends do. The history contains the server's real answers. Arrivals, think
times and texts depend on the seed alone, so every policy gets the same load.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from _serving_metrics import Answer

# words of generated messages; each is one token in most vocabularies
COMMON = """
time year people way day man thing woman life child world school state family
student group country problem hand part place case week company system program
question work number night point home water room mother area money story fact
month lot right study book eye job word business issue side kind head house
service friend father power hour game line end member law car city name team
"""
WORDS = COMMON.split()


@dataclass(frozen=True, slots=True)
class ChatLoad:
    """Settings of the users. ``texts``: file whose paragraphs they send; "" =
    generated.
    """

    users: int
    turns: int
    think_s: float
    first_words: int
    next_words: int
    answer_tokens: int
    texts: str = ""


@dataclass(frozen=True, slots=True)
class User:
    """One user: arrival time, messages, and the think time before each."""

    arrival_s: float
    messages: list[str]
    think_s: list[float]


def paragraphs(path: Path) -> list[str]:
    """The parts of a text file between empty lines.

    Raises:
        ValueError: the file has no text.
    """
    parts = [part.strip() for part in path.read_text().split("\n\n")]
    texts = [part for part in parts if part]
    if not texts:
        raise ValueError(f"{path} has no text; give a file with paragraphs")
    return texts


def users_of(load: ChatLoad, rate: float, seed: int) -> list[User]:
    """The users of a run; the same arguments give the same users.

    Args:
        load: number of users, and lengths of messages and answers.
        rate: arrivals per second; infinite = all at once.
        seed: of arrivals, think times and texts.
    """
    arrivals_seed, think_seed, text_seed = np.random.SeedSequence(seed).spawn(3)
    gaps = np.random.default_rng(arrivals_seed).exponential(1 / rate, load.users)
    shape = (load.users, max(0, load.turns - 1))
    thinks = np.random.default_rng(think_seed).exponential(load.think_s, shape)
    words = np.random.default_rng(text_seed)
    pool = paragraphs(Path(load.texts)) if load.texts else []
    users = []
    for arrival, pauses in zip(np.cumsum(gaps), thinks, strict=True):
        counts = [load.first_words] + [load.next_words] * (load.turns - 1)
        if pool:
            messages = [pool[index] for index in words.choice(len(pool), load.turns)]
        else:
            messages = [" ".join(words.choice(WORDS, count)) + "?" for count in counts]
        users.append(User(float(arrival), messages, pauses.tolist()))
    return users


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    messages: list[dict[str, str]],
    max_tokens: int,
) -> Answer:
    """Stream one answer of exactly ``max_tokens`` tokens; never raises on failure.

    Answers have a fixed length (``ignore_eos``), so that policies with different
    answers do the same work.
    """
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        # The usage count in every chunk tells chunks with tokens from those without.
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    answer = Answer(time.perf_counter())
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                answer.error = f"{response.status}: {await response.text()}"
                return answer
            async for line in response.content:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    take(answer, json.loads(line[6:]), time.perf_counter())
    except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
        answer.error = answer.error or f"{type(error).__name__}: {error}"
    if not answer.token_s and not answer.error:
        answer.error = "no token came"
    return answer


def take(answer: Answer, chunk: dict[str, Any], now_s: float) -> None:
    """Add one chunk of a stream to an answer."""
    if "error" in chunk:
        answer.error = str(chunk["error"])
        return
    content = ""
    for choice in chunk.get("choices", ()):
        content += choice["delta"].get("content") or ""
    answer.text += content
    usage = chunk.get("usage")
    # The first chunk has only the role and the last only the totals.
    count = usage["completion_tokens"] if usage else answer.tokens + bool(content)
    if usage:
        answer.prompt_tokens = usage["prompt_tokens"]
    if count > answer.tokens:
        answer.tokens = count
        answer.token_s.append(now_s)


async def _converse(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    user: User,
    answer_tokens: int,
    start_s: float,
) -> list[Answer]:
    """Run all turns of one user; a failure ends the conversation."""
    await asyncio.sleep(max(0.0, start_s + user.arrival_s - time.perf_counter()))
    history: list[dict[str, str]] = []
    answers: list[Answer] = []
    for message, pause_s in zip(user.messages, [0.0, *user.think_s], strict=True):
        await asyncio.sleep(pause_s)
        history.append({"role": "user", "content": message})
        answers.append(await ask(session, url, model, history, answer_tokens))
        if answers[-1].error:
            break
        history.append({"role": "assistant", "content": answers[-1].text})
    return answers


async def _all_users(
    url: str, model: str, users: list[User], answer_tokens: int, timeout_s: float
) -> list[Answer]:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        start_s = time.perf_counter()
        talks = (
            _converse(session, url, model, user, answer_tokens, start_s)
            for user in users
        )
        done = await asyncio.gather(*talks)
    return [answer for answers in done for answer in answers]


def chat(
    url: str,
    model: str,
    load: ChatLoad,
    rate: float,
    seed: int,
    timeout_s: float,
) -> list[Answer]:
    """Run the whole load against the server at ``url``.

    Args:
        url: address of the server.
        model: name of the model on the server.
        load: the users.
        rate: arrivals per second.
        seed: of arrivals, think times and texts.
        timeout_s: time limit of a request; a slower request counts as failed.

    Returns:
        All requests, including failed ones.
    """
    users = users_of(load, rate, seed)
    return asyncio.run(_all_users(url, model, users, load.answer_tokens, timeout_s))
