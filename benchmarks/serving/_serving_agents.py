"""Agents: users that send results of tools instead of messages.

All agents share a system prompt and the definitions of their tools. An agent gets a
task, calls tools one after the other, answers, and gets the next task. The client
writes the tool calls into the history, because answers have a fixed length and a
random end; the next prompt therefore has an answer, a call and a result behind the
last one.

    system + tools | task  answer call  result  answer call  result  answer | task ...
                   |---- turn 1 ------|---- turn 2 ---------|--- turn 3 ----|
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from _serving_chat import ChatLoad, Message, Talk, Turn, words
from _serving_server import ServerError

TOOLS = {
    "search": ("Finds documents that mention words.", "words"),
    "read": ("Reads a file of the project.", "path"),
    "edit": ("Replaces text in a file of the project.", "change"),
    "run": ("Runs a command and returns what it prints.", "command"),
}
SYSTEM_SEED = 7


@dataclass(frozen=True, slots=True)
class AgentLoad(ChatLoad):
    """Settings of the agents.

    ``turns`` counts requests. ``first_words`` is the length of a task, ``next_words``
    that of a tool's result.

    Attributes:
        system_words: length of the system prompt, the same for all agents.
        tool_calls: tool calls after each task.
    """

    system_words: int = 300
    tool_calls: int = 4

    def talks(self, random: np.random.Generator) -> list[Talk]:
        """The conversations of all agents."""
        # Equal in all runs, like the system prompt of a product.
        text = words(np.random.default_rng(SYSTEM_SEED), self.system_words)
        opening = [{"role": "system", "content": text}]
        return [
            Talk(self._turns(random), opening, definitions()) for _ in range(self.users)
        ]

    def _turns(self, random: np.random.Generator) -> list[Turn]:
        turns, call = [], None
        for number in range(self.turns):
            if call is None:
                message = {"role": "user", "content": words(random, self.first_words)}
            else:
                message = {
                    "role": "tool",
                    "tool_call_id": call["id"],
                    "content": words(random, self.next_words),
                }
            is_last = number % (self.tool_calls + 1) == self.tool_calls
            call = None if is_last else call_of(random, number)
            turns.append(Turn([message], call))
        return turns


def definitions() -> list[Message]:
    """The tools, as requests name them."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": about,
                "parameters": {
                    "type": "object",
                    "properties": {argument: {"type": "string"}},
                    "required": [argument],
                },
            },
        }
        for name, (about, argument) in TOOLS.items()
    ]


def call_of(random: np.random.Generator, number: int) -> Message:
    """A call of a random tool with four words.

    Args:
        number: of the turn. The id has nine letters and digits, as Mistral requires.
    """
    name = str(random.choice(list(TOOLS)))
    arguments = json.dumps({TOOLS[name][1]: words(random, 4)})
    function = {"name": name, "arguments": arguments}
    return {"id": f"call{number:05}", "type": "function", "function": function}


# -- the chat template ----------------------------------------------------------


def require_tools(url: str, model: str, talk: Talk) -> None:
    """Check that the chat template writes tools, calls and results.

    Raises:
        ServerError: it leaves one of them out, or refuses them.
    """
    first, second = talk.turns[:2]
    plain = [*talk.opening, *first.messages, Turn([]).answer("Yes.")]
    called = [*talk.opening, *first.messages, first.answer("Yes.")]
    counts = [
        count_tokens(url, model, plain, ()),
        count_tokens(url, model, plain, talk.tools),
        count_tokens(url, model, called, talk.tools),
        count_tokens(url, model, [*called, *second.messages], talk.tools),
    ]
    parts = ("tools", "tool calls", "results of tools")
    for part, before, after in zip(parts, counts, counts[1:], strict=False):
        if after <= before:
            raise ServerError(
                f"the chat template of {model} leaves out {part}; give one that writes "
                'them, with --server-args "--chat-template FILE"'
            )


def count_tokens(
    url: str, model: str, messages: Sequence[Message], tools: Sequence[Message]
) -> int:
    """Tokens of a rendered conversation.

    Raises:
        ServerError: the server refuses it.
    """
    body: dict[str, Any] = {"model": model, "messages": list(messages)}
    body |= {"add_generation_prompt": False} | ({"tools": list(tools)} if tools else {})
    request = urllib.request.Request(
        f"{url}/tokenize",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(json.load(answer)["count"])
    except urllib.error.HTTPError as error:
        told = error.read().decode(errors="replace")[:300]
        raise ServerError(f"{url}/tokenize: {error.code}: {told}") from error
    except (OSError, ValueError, KeyError) as error:
        raise ServerError(f"{url}/tokenize: {error}") from error
