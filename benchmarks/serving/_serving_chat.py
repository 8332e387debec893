"""Conversations with think time over ``/v1/chat/completions``.

Users arrive as a Poisson process. Each sends a message, reads the answer, waits for an
exponentially distributed think time, and sends the next message with the whole history,
as chat front ends do. The history contains the server's real answers. Arrivals, think
times and texts depend on the seed alone, so every policy gets the same load.

``_serving_agents.py`` makes users that are agents: they send results of tools.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from _serving_metrics import Answer

Message = dict[str, Any]

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
class Turn:
    """What a user sends before one answer.

    Attributes:
        messages: appended to the history.
        call: a tool call that the client adds to the answer, as if the model had made
            it; None: none.
    """

    messages: list[Message]
    call: Message | None = None

    def answer(self, text: str) -> Message:
        """The answer as the history has it."""
        calls = {"tool_calls": [self.call]} if self.call else {}
        return {"role": "assistant", "content": text} | calls


@dataclass(frozen=True, slots=True)
class Talk:
    """All that one user sends.

    Attributes:
        opening: messages before the first turn.
        tools: definitions of tools, in every request.
    """

    turns: list[Turn]
    opening: Sequence[Message] = ()
    tools: Sequence[Message] = ()


@dataclass(frozen=True, slots=True)
class User:
    """One user: when it comes, what it sends, and the think time before later turns."""

    arrival_s: float
    talk: Talk
    think_s: list[float]


@dataclass(frozen=True, slots=True)
class ChatLoad:
    """Settings of the users.

    Attributes:
        texts: file whose paragraphs they send; "": generated words.
    """

    users: int
    turns: int
    think_s: float
    first_words: int
    next_words: int
    answer_tokens: int
    texts: str = ""

    def talks(self, random: np.random.Generator) -> list[Talk]:
        """The conversations of all users."""
        counts = [self.first_words] + [self.next_words] * (self.turns - 1)
        pool = paragraphs(Path(self.texts)) if self.texts else []
        talks = []
        for _ in range(self.users):
            if pool:
                texts = [pool[i] for i in random.choice(len(pool), self.turns)]
            else:
                texts = [words(random, count) + "?" for count in counts]
            turns = [Turn([{"role": "user", "content": text}]) for text in texts]
            talks.append(Talk(turns))
        return talks


def words(random: np.random.Generator, count: int) -> str:
    """Common words in random order."""
    return " ".join(random.choice(WORDS, count))


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
    talks = load.talks(np.random.default_rng(text_seed))
    return [
        User(float(arrival), talk, pauses.tolist())
        for arrival, talk, pauses in zip(np.cumsum(gaps), talks, thinks, strict=True)
    ]


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    messages: Sequence[Message],
    max_tokens: int,
    tools: Sequence[Message] = (),
) -> Answer:
    """Stream one answer of exactly ``max_tokens`` tokens; never raises on failure.

    Answers have a fixed length (``ignore_eos``), so that policies with different
    answers do the same work. For the same reason the model does not choose tools; the
    prompt still contains their definitions.
    """
    body = {
        "model": model,
        "messages": list(messages),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        # The usage count in every chunk tells chunks with tokens from those without.
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    if tools:
        body |= {"tools": list(tools), "tool_choice": "none"}
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
    talk = user.talk
    history, answers = list(talk.opening), list[Answer]()
    for turn, pause_s in zip(talk.turns, [0.0, *user.think_s], strict=True):
        await asyncio.sleep(pause_s)
        history += turn.messages
        answers.append(
            await ask(session, url, model, history, answer_tokens, talk.tools)
        )
        if answers[-1].error:
            break
        history.append(turn.answer(answers[-1].text))
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
