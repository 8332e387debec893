"""Conversations over several chat requests: they grow, branch, and end early."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from soak_client import Client, Wanted, random_words
from soak_model import NAME, text_of
from soak_nonsense import CHAT
from soak_server import MAX_TOKENS

# The speaker. No speaker continues the conversation of another one.
_OWNERS = (None, "ada", "bob")
_MOST_ANSWER = 40
_MOST_OPEN = 40  # more than any session_memory here holds


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
    asked: list[Wanted] = field(default_factory=list)

    def say(self, role: str, token_ids: list[int]) -> None:
        self.messages.append({"role": role, "content": text_of(token_ids)})
        self.tokens += 1 + len(token_ids)  # a role is a word

    def before(self, count: int) -> Talk:
        """The same conversation when it had so many messages."""
        messages = self.messages[:count]
        words = sum(1 + len(message["content"].split()) for message in messages)
        asked = [w for w in self.asked if len(w.body["messages"]) <= count]
        return Talk(self.owner, messages, words, asked)

    @property
    def full(self) -> bool:
        """Whether another question might not fit."""
        return self.tokens > MAX_TOKENS - 2 * _MOST_ANSWER - _LONGEST_QUESTION


_QUESTIONS = (8, 30, 90)
_LONGEST_QUESTION = max(_QUESTIONS)


class Talks:
    """Conversations with one server; a client who wants to talk takes up any.

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
        """Go on with a conversation, or begin one."""
        talk = self._next(rng)
        if not talk.messages or talk.messages[-1]["role"] != "user":
            talk.say("user", random_words(rng, rng.randint(4, rng.choice(_QUESTIONS))))
        wanted = _request(talk, rng)
        if rng.random() < 0.15:
            await self._leave(client, rng, talk, wanted)
        else:
            await client.ask(wanted)
            talk.asked.append(wanted)
            talk.say("assistant", wanted.tokens[0])
            self._counts["turns"] += 1
        # some forget about it, or there is no room for more
        ends = talk.full or rng.random() < 0.1 or len(self._open) >= _MOST_OPEN
        (self.over if ends else self._open).append(talk)

    async def _leave(
        self, client: Client, rng: random.Random, talk: Talk, wanted: Wanted
    ) -> None:
        """Hear a part of the answer, which stays or is asked for again."""
        wanted.body |= {"stream": True, "stream_options": {"include_usage": True}}
        heard = await client.hang_up(wanted, 60, rng.randint(1, 12))
        talk.asked.append(wanted)
        if heard and rng.random() < 0.5:
            talk.say("assistant", heard)
        self._counts["left in a turn"] += 1

    def _next(self, rng: random.Random) -> Talk:
        """A conversation without a running request."""
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
        # a message is edited: what led there is shared, and the other branch stays
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
        """Long ones first, as they have seen most."""
        found = self.over + self._open
        rng.shuffle(found)
        return sorted(found, key=lambda talk: -len(talk.asked))[:count]


async def replay(client: Client, talk: Talk, owner: str) -> list[tuple[Wanted, Wanted]]:
    """Send the whole conversation again, from a client that shares nothing.

    All of it and not its last request only: which episode a question goes to depends
    on the histories that were asked about before (docs/episodes.md). What was left is
    asked for again, as it belongs to these.

    Returns:
        Greedy requests as they were and as they are alone.
    """
    pairs = []
    for wanted in talk.asked:
        body = wanted.body | {"cache_salt": owner}
        if not wanted.tokens:
            body |= {"max_tokens": 1}
        alone = Wanted(CHAT, body)
        await client.ask(alone)
        if wanted.tokens and wanted.greedy:
            pairs.append((wanted, alone))
    return pairs


def _request(talk: Talk, rng: random.Random) -> Wanted:
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
    return Wanted(CHAT, body)
