"""Conversations with tools through the OpenAI client, under each chat template.

The model says what the conversation has written (``scripted_answers``), tokens of
reasoning and of tool calls included. The client sends it back as messages, and the
template may write these in another way. That is how agents use a server.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chat_fixtures
import pytest
from chat_fixtures import TEMPLATES, TOOLS, Template
from embeddings_server import EmbeddingsServer
from fake_encoder import BagOfWords
from harness import engine_environment
from live_server import post, serving
from tiny_model import write_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BLOCK, BUDGET, PREFILL_BLOCK = 32, 128, 64
EACH = pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
_LAST_ANSWER = 5  # tokens; the conversation ends with a result of a tool


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request of a conversation, and what the server reports of it.

    Attributes:
        history_tokens: prompt tokens before the live question, as the fixture says.
        new_tokens: prompt tokens behind what prompt and answer of the request before
            have in common with this prompt; all of the first request.
        answer_tokens: length of the answer.
        turn_ends: those of the fixture.
        report: of the server.
        worst_difference: largest difference of a log probability from that of the same
            request without sessions.
    """

    prompt_tokens: int
    history_tokens: int
    new_tokens: int
    answer_tokens: int
    turn_ends: list[int]
    report: dict[str, Any]
    worst_difference: float

    @property
    def computed_tokens(self) -> int:
        reused = self.report["session_tokens"] + self.report["cached_tokens"]
        return self.prompt_tokens - reused


class Agent:
    """A client of a server: it sends a conversation request by request."""

    def __init__(self, base: str, template: Template) -> None:
        import openai

        self.base, self.template = base, template
        self.client = openai.OpenAI(base_url=f"{base}/v1", api_key="none")

    def converse(self) -> list[Exchange]:
        template, said = self.template, []
        turns = chat_fixtures.conversation(template.alternates)
        messages = chat_fixtures.messages_of(turns)
        exchanges = []
        for sent in chat_fixtures.requests_of(turns):
            answer = messages[len(sent) : len(sent) + 1]
            prompt = self._tokens(sent, add_generation_prompt=True)
            script = self._script(prompt, [*sent, *answer]) if answer else []
            # A template without tools writes nothing for a call.
            script = script or prompt[-_LAST_ANSWER:]
            shared = common_prefix(prompt, said)
            ends = template.ends[: _finished_turns(sent, template)]
            alone = self._ask(sent, script, f"{template.name} alone", kv_session=False)
            ours = self._ask(sent, script, template.name)
            assert ours.usage.prompt_tokens == len(prompt)
            assert ours.choices[0].token_ids == script
            exchange = Exchange(
                prompt_tokens=len(prompt),
                history_tokens=ends[-1] if ends else 0,
                new_tokens=len(prompt) - shared,
                answer_tokens=len(script),
                turn_ends=list(ends),
                report=ours.kv_transfer_params["kv_policy"],
                worst_difference=largest_difference(alone, ours),
            )
            exchanges.append(exchange)
            said = prompt + script
        return exchanges

    def _tokens(self, messages: list[dict[str, Any]], **settings: Any) -> list[int]:
        body = {"messages": messages, "tools": TOOLS, **settings}
        answer = post(self.base, "/tokenize", chat_template=self.template.text, **body)
        tokens: list[int] = answer["tokens"]
        return tokens

    def _script(self, prompt: list[int], answered: list[dict[str, Any]]) -> list[int]:
        """The tokens of the answer, as the template writes it."""
        whole = self._tokens(answered, add_generation_prompt=False)
        return whole[common_prefix(prompt, whole) :]

    def _ask(self, messages: Any, script: list[int], salt: str, **choices: bool) -> Any:
        xargs = {"kv_report": True, "script": script, **choices}
        return self.client.chat.completions.create(
            model="m",
            messages=messages,
            tools=TOOLS,
            temperature=0,
            max_tokens=len(script),
            logprobs=True,
            extra_body={
                "chat_template": self.template.text,
                "cache_salt": salt,
                "ignore_eos": True,
                "return_token_ids": True,
                "vllm_xargs": xargs,
            },
        )


def _finished_turns(sent: list[dict[str, Any]], template: Template) -> int:
    """How many ends a prompt has: one of each turn before the live one.

    A preamble ends as well, and consecutive questions are one.
    """
    roles = [message["role"] for message in sent if message["role"] != "tool"]
    turns = sum(a != b == "user" for a, b in itertools.pairwise(roles))
    return turns - 1 + (template.preamble is not None)


def common_prefix(first: list[int], second: list[int]) -> int:
    """Number of tokens that two prompts have in common."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def largest_difference(first: Any, second: Any) -> float:
    """Between the log probabilities of two answers with the same tokens."""
    return max(
        abs(a.logprob - b.logprob)
        for a, b in zip(
            first.choices[0].logprobs.content,
            second.choices[0].logprobs.content,
            strict=True,
        )
    )


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Starts a server with a policy, once."""
    folder: Path = write_tiny_model(tmp_path_factory.mktemp("chat") / "model", 7)
    chat_fixtures.chat_tokenizer().save_pretrained(folder)
    started: dict[str, str] = {}
    options = (
        *("--dtype", "float32", "--block-size", str(BLOCK), "--max-model-len", "4096"),
        *("--num-gpu-blocks-override", "600", "--trust-request-chat-template"),
        *("--logits-processors", "scripted_answers:ScriptedAnswers"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    )
    environment = engine_environment(VLLM_ENABLE_V1_MULTIPROCESSING="1")
    with ExitStack() as servers:

        def start(policy: str, settings: dict[str, Any]) -> str:
            if policy not in started:
                ours = ("--kv-policy", policy, "--kv-policy-config")
                command = (*options, *ours, json.dumps(settings))
                server = serving(
                    sys.executable, str(folder), folder.parent, *command, **environment
                )
                started[policy] = servers.enter_context(server)
            return started[policy]

        yield start


@pytest.fixture(scope="module")
def encoder() -> Iterator[str]:
    """The address of an encoder."""
    server = EmbeddingsServer(lambda text: BagOfWords().vector(text).tolist())
    yield server.address
    server.close()


def check_every_policy(
    template: Template, exchanges: list[Exchange], compressions: int
) -> None:
    """What holds under any policy with sessions, with at least as many compressions."""
    reused = [e.computed_tokens < e.prompt_tokens for e in exchanges]
    misses = [number for number, reuses in enumerate(reused) if not reuses]
    assert tuple(misses) == template.misses
    assert max(e.worst_difference for e in exchanges) < 1e-4
    assert sum(e.report["compressions"] for e in exchanges) >= compressions


@EACH
def test_flowkv_computes_the_new_text_of_each_request(serve, template):
    # Turns of thirty tokens are compressed, too.
    small = {"window": 4, "kernel_size": 3}
    base = serve("flowkv", {"ratio": 0.4, "floor": 4, "base_config": small})
    exchanges = Agent(base, template).converse()
    check_every_policy(template, exchanges, compressions=3)
    for exchange in exchanges:
        assert exchange.report["turn_ends"] == exchange.turn_ends
    assert exchanges[-1].turn_ends == list(template.ends)
    later = exchanges[1:]
    new = sum(exchange.new_tokens for exchange in later)
    assert sum(exchange.computed_tokens for exchange in later) <= 1.1 * new
    last = exchanges[-1].report
    assert last["held_blocks"] < 0.8 * last["stock_blocks"]


@EACH
def test_epicache_holds_its_budget_and_a_block(serve, encoder, template):
    settings = {"budget": BUDGET, "prefill_block": PREFILL_BLOCK, "encoder": encoder}
    base = serve("epicache", settings)
    exchanges = Agent(base, template).converse()
    # Idle steps compress a history: a busy machine has fewer of them between requests.
    check_every_policy(template, exchanges, compressions=2)
    # The preamble is exact, and so is what follows the history.
    shared = exchanges[-1].report["cached_tokens"]
    for exchange in exchanges:
        report = exchange.report
        assert report["turn_ends"] in ([], exchange.turn_ends[-1:])
        tokens = exchange.prompt_tokens + exchange.answer_tokens
        live = tokens - exchange.history_tokens
        of_history = report["held_blocks"] * BLOCK - shared - live
        assert of_history <= BUDGET + PREFILL_BLOCK + BLOCK
    compressed = [e for e in exchanges if e.report["episodes"]]
    assert len({e.report["episode"] for e in compressed}) > 1
