"""Conversations over several chat requests: they grow, branch, and end early."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from soak_client import Client, SoakRequest, random_words
from soak_model import NAME, text_of
from soak_nonsense import CHAT
from soak_server import MAX_TOKENS

# The owner's cache salt. No owner continues the conversation of another one.
_OWNERS = (None, "ada", "bob")
_MOST_ANSWER = 40
_MOST_OPEN = 40  # more than any session_memory of these servers holds


@dataclass
class Talk:
    """One branch of a conversation.

    Attributes:
        tokens: of its prompt so far, without the opening of an answer.
        asked: its requests in order; those left in the middle have no tokens.
    """

    owner: str | None
    messages: list[dict[str, str]] = field(default_factory=list)
    tokens: int = 0
    requests: list[SoakRequest] = field(default_factory=list)

    def say(self, role: str, token_ids: list[int]) -> None:
        self.messages.append({"role": role, "content": text_of(token_ids)})
        self.tokens += 1 + len(token_ids)  # a role is one word

    def before(self, count: int) -> Talk:
        """The same conversation, cut after `count` messages."""
        messages = self.messages[:count]
        words = sum(1 + len(message["content"].split()) for message in messages)
        requests = [w for w in self.requests if len(w.body["messages"]) <= count]
        return Talk(self.owner, messages, words, requests)

    @property
    def full(self) -> bool:
        """Whether another question might exceed the context."""
        return self.tokens > MAX_TOKENS - 2 * _MOST_ANSWER - _LONGEST_QUESTION


_QUESTIONS = (8, 30, 90)
_LONGEST_QUESTION = max(_QUESTIONS)


class Talks:
    """Conversations with one server. Any client may continue any of them.

    Args:
        counts: gets what happened.

    Attributes:
        over: conversations and branches that no request continues.
    """

    def __init__(self, rng: random.Random, counts: Counter[str]) -> None:
        self._counts = counts
        self._system = random_words(rng, 60)
        self._open: list[Talk] = []
        self.over: list[Talk] = []

    async def turn(self, client: Client, rng: random.Random) -> None:
        """Continue a conversation, or start one."""
        talk = self._next(rng)
        if not talk.messages or talk.messages[-1]["role"] != "user":
            talk.say("user", random_words(rng, rng.randint(4, rng.choice(_QUESTIONS))))
        request = _request(talk, rng)
        if rng.random() < 0.15:
            await self._leave(client, rng, talk, request)
        else:
            await client.ask(request)
            talk.requests.append(request)
            talk.say("assistant", request.tokens[0])
            self._counts["turns"] += 1
        # some clients stop here, or there is no room for more conversations
        ends = talk.full or rng.random() < 0.1 or len(self._open) >= _MOST_OPEN
        (self.over if ends else self._open).append(talk)

    async def _leave(
        self, client: Client, rng: random.Random, talk: Talk, request: SoakRequest
    ) -> None:
        """Disconnect during the answer.

        The client keeps the partial answer, or repeats the request.
        """
        request.body |= {"stream": True, "stream_options": {"include_usage": True}}
        received = await client.hang_up(request, 60, rng.randint(1, 12))
        talk.requests.append(request)
        if received and rng.random() < 0.5:
            talk.say("assistant", received)
        self._counts["left in a turn"] += 1

    def _next(self, rng: random.Random) -> Talk:
        """A conversation that has no running request."""
        if not self._open or rng.random() < 0.2:
            talk = Talk(rng.choice(_OWNERS))
            if rng.random() < 0.5:
                talk.say("system", self._system)
            self._counts["talks"] += 1
            return talk
        talk = self._open.pop(rng.randrange(len(self._open)))
        users = [n for n, m in enumerate(talk.messages) if m["role"] == "user"]
        if len(users) < 2 or rng.random() > 0.3:
            return talk
        # edit a message: both branches share what precedes it
        self._open.append(talk)
        self._counts["branches"] += 1
        at = rng.choice(users[1:])
        kept = talk.messages[at]["content"].split()
        branch = talk.before(at)
        branch.messages.append({"role": "user", "content": " ".join(kept[:9])})
        branch.messages[-1]["content"] += f" {text_of(random_words(rng, 8))}"
        branch.tokens += 1 + len(branch.messages[-1]["content"].split())
        return branch

    def sample(self, rng: random.Random, count: int) -> list[Talk]:
        """Random conversations, longest first, because those cover most."""
        all_talks = self.over + self._open
        rng.shuffle(all_talks)
        return sorted(all_talks, key=lambda talk: -len(talk.requests))[:count]


async def replay(
    client: Client, talk: Talk, owner: str
) -> list[tuple[SoakRequest, SoakRequest]]:
    """Send the whole conversation again under a salt that shares nothing.

    All of it and not its last request only: which episode a question goes to depends
    on the histories that were asked about before (docs/episodes.md). What was left is
    asked for again, as it belongs to these.

    Returns:
        Greedy requests as they were and as they are alone.
    """
    pairs = []
    for request in talk.requests:
        body = request.body | {"cache_salt": owner}
        if not request.tokens:
            body |= {"max_tokens": 1}
        alone = SoakRequest(CHAT, body)
        await client.ask(alone)
        if request.tokens and request.greedy:
            pairs.append((request, alone))
    return pairs


def _request(talk: Talk, rng: random.Random) -> SoakRequest:
    body: dict[str, Any] = {
        "model": NAME,
        "messages": list(talk.messages),
        "max_tokens": rng.randint(1, _MOST_ANSWER),
        "temperature": 0 if rng.random() < 0.9 else 1.0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": rng.random() < 0.5,
        "stream_options": {"include_usage": True},
    }
    if not body["stream"]:
        del body["stream_options"]
    if talk.owner is not None:
        body["cache_salt"] = talk.owner
    return SoakRequest(CHAT, body)
