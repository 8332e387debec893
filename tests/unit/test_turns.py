"""Turns from roles of messages; tokens of messages; rendering with a small template."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_kvplugins.config import parse_policy

pytest.importorskip("vllm")
from vllm_kvplugins.vllm_adapter.frontend import chat_turns, message_tokens
from vllm_kvplugins.vllm_adapter.frontend.conversation_turns import (
    questions_of,
    turn_starts,
)
from vllm_kvplugins.vllm_adapter.frontend.rendered_turns import (
    tokens_before,
    tokens_of_pieces,
)

NAMED = {"<eos>": 1, "<end_of_turn>": 2, "<start>": 3, "<end>": 4}


class Tokenizer:
    """Each character is a token, except named ones. ``write`` renders one message."""

    eos_token_id = 1

    def __init__(self, write: Any, template: str | None = "jinja") -> None:
        self.write, self.chat_template = write, template

    def apply_chat_template(self, dialogue: list[dict], tokenize: bool) -> str:
        assert not tokenize
        return "".join(map(self.write, dialogue))

    def get_added_vocab(self) -> dict[str, int]:
        return NAMED

    def decode(self, tokens: list[int]) -> str:
        names = {token: name for name, token in NAMED.items()}
        return "".join(names.get(token) or chr(token) for token in tokens)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        token_ids = []
        while text:
            name = next((n for n in NAMED if text.startswith(n)), text[0])
            token_ids.append(NAMED[name] if name in NAMED else ord(name))
            text = text[len(name) :]
        return token_ids


def gemma(message: dict) -> str:
    return f"<start>{message['role']}\n{message['content']}<end_of_turn>\n"


def spaced(message: dict) -> str:
    return f"<start>{message['role']}\n{message['content']} \n<end>"


def llama2(message: dict) -> str:
    """Only answers end with a token."""
    if message["role"] == "assistant":
        return f" {message['content']} <eos>"
    return f"[INST] {message['content']} [/INST]"


def mixed(message: dict) -> str:
    """Answers begin with the token that ends questions."""
    if message["role"] == "assistant":
        return f"<end_of_turn>{message['content']}<end>"
    return f"<start>{message['content']}<end_of_turn>"


def plain(message: dict) -> str:
    return f"{message['role']}: {message['content']}\n\n"


def silent(message: dict) -> str:
    """A template that omits the messages of the assistant."""
    return gemma(message) if message["role"] == "user" else "<start>"


def refusing(message: dict) -> str:
    raise RuntimeError("only images")


@pytest.mark.parametrize(
    ("write", "token"),
    [
        (gemma, 2),
        (spaced, 4),
        (llama2, None),
        (mixed, None),
        (plain, None),
        (silent, None),
    ],
)
def test_finds_the_token_after_every_message(write, token):
    assert message_tokens.message_end_token(Tokenizer(write)) == token


def test_ignores_a_name_that_the_tokenizer_splits(monkeypatch):
    tokenizer = Tokenizer(gemma)
    monkeypatch.setattr(tokenizer, "encode", lambda text, **_: list(map(ord, text)))
    assert message_tokens.message_end_token(tokenizer) is None


def test_finds_the_token_of_a_real_tokenizer(model_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_path)
    token = message_tokens.message_end_token(tokenizer)
    assert tokenizer.decode([token]) == "<|im_end|>"
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.content }}<|endoftext|>\n{% endfor %}"
    )
    token = message_tokens.message_end_token(tokenizer)
    assert tokenizer.decode([token]) == "<|endoftext|>"
    assert token != tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("tokenizer", "token", "logged"),
    [
        (Tokenizer(gemma), 2, ""),
        (Tokenizer(plain, template=None), 1, "has no chat template"),
        (Tokenizer(plain), None, "from their messages"),
        (Tokenizer(refusing), None, "only images"),
        (None, None, ""),
    ],
)
def test_resolves_the_turn_end_token(tokenizer, token, logged, caplog):
    policy = parse_policy("flowkv")
    caplog.set_level(logging.INFO)
    # Loggers of vLLM do not propagate messages to the root logger.
    message_tokens.logger.parent.addHandler(caplog.handler)
    try:
        resolved = message_tokens.resolve_message_tokens(
            {"name": "flowkv"}, policy, lambda: tokenizer
        )
    finally:
        message_tokens.logger.parent.removeHandler(caplog.handler)
    assert resolved.get("turn_end_token") == token
    assert logged in caplog.text
    assert bool(logged) == bool(caplog.text)


def test_keeps_settings_of_other_policies_and_of_the_user():
    def load() -> Any:
        raise AssertionError("needs no tokenizer")

    snapkv = {"name": "snapkv"}
    assert (
        message_tokens.resolve_message_tokens(snapkv, parse_policy("snapkv"), load)
        == snapkv
    )
    settings = {"name": "flowkv", "turn_end_token": 7}
    assert (
        message_tokens.resolve_message_tokens(settings, parse_policy(settings), load)
        == settings
    )


# -- messages ------------------------------------------------------------------

ROLES = {
    "s": "system",
    "d": "developer",
    "u": "user",
    "a": "assistant",
    "t": "tool",
    "f": "function",
}


def conversation(kinds: str) -> list[dict[str, str]]:
    return [{"role": ROLES[kind], "content": kind * 3} for kind in kinds]


@pytest.mark.parametrize(
    ("kinds", "starts"),
    [
        ("", []),
        ("s", []),
        ("u", [0]),
        ("su", [1]),
        ("suau", [1, 3]),
        ("uauau", [0, 2, 4]),
        ("uatatau", [0, 6]),
        ("uattau", [0, 5]),
        ("uatu", [0, 3]),
        ("uuaauu", [0, 4]),
        ("usua", [0]),
        ("uasu", [0, 2]),
        ("uausua", [0, 2]),
        ("uas", [0]),
        ("uatsau", [0, 5]),
        ("au", [1]),
        ("asu", [2]),
        ("uad", [0]),
        ("duadu", [1, 3]),
        ("ufau", [0, 3]),
    ],
)
def test_a_turn_starts_where_a_user_asks_after_an_answer(kinds, starts):
    assert turn_starts(conversation(kinds)) == starts


def test_a_question_may_be_several_messages():
    messages = conversation("uausuatu")
    assert questions_of(messages, 2) == [messages[2], messages[4]]
    assert questions_of(messages, 7) == [messages[7]]
    assert questions_of(conversation("uasua"), 2) == [conversation("u")[0]]


@pytest.mark.parametrize(
    ("ends", "tokens"),
    [
        ([], []),
        ([0], []),
        ([1], [2]),
        ([1, 5], [2, 3]),
        ([5, 6], [3]),
        ([7, 8], [4]),
        ([9], []),
        ([20], []),
    ],
)
def test_a_token_on_both_sides_of_an_end_belongs_to_what_follows(ends, tokens):
    """The tokenizer added the first token; the fourth is longer."""
    offsets = [(0, 0), (0, 1), (1, 4), (4, 7), (7, 9)]
    assert tokens_before(offsets, ends) == tokens


def test_pieces_must_have_the_tokens_of_the_prompt():
    from vllm_kvplugins.vllm_adapter.frontend.conversation_turns import TurnsUnknown

    prompt = [5, 6, 7, 8, 9]
    assert tokens_of_pieces(prompt, [[5, 6], [7]]) == [2, 3]
    assert tokens_of_pieces(prompt, [[], [5], [6, 7, 8, 9]]) == [1, 5]
    with pytest.raises(TurnsUnknown, match="reach across turns"):
        tokens_of_pieces(prompt, [[5, 6], [1]])


def renderer(write: Any, policy: Any, **settings: Any) -> Any:
    """A renderer of vLLM with our own template and tokenizer."""
    from vllm.renderers.base import BaseRenderer
    from vllm.renderers.params import TokenizeParams

    chat_turns.install()
    tokenizer = Tokenizer(write)

    class Renderer(BaseRenderer):
        default_chat_tok_params = TokenizeParams(max_total_tokens=None)

        def __init__(self) -> None:
            config = {"kv_policy": {"name": policy, **settings}} if policy else {}
            self.config = SimpleNamespace(
                additional_config=config,
                kv_transfer_config=None,
                cache_config=SimpleNamespace(enable_prefix_caching=False),
            )

        def get_tokenizer(self) -> Any:
            return tokenizer

        def _apply_prompt_extras(self, *_: Any) -> None:
            """Needs a real model."""

        def render_messages(self, messages: Any, params: Any) -> Any:
            text = tokenizer.apply_chat_template(messages, tokenize=False)
            if params.chat_template_kwargs.get("add_generation_prompt"):
                text += "<start>assistant\n"
            return messages, {"prompt": text}

        def tokenize_prompts(self, prompts: Any, params: Any) -> Any:
            return [
                prompt
                | {
                    "prompt_token_ids": tokenizer.encode(
                        prompt["prompt"], add_special_tokens=False
                    )
                }
                for prompt in prompts
            ]

        async def tokenize_prompts_async(self, prompts: Any, params: Any) -> Any:
            return self.tokenize_prompts(prompts, params)

        def process_for_engine(self, prompt: Any, *_: Any, **__: Any) -> Any:
            return {"type": "token", **prompt}

        async def process_for_engine_async(self, prompt: Any, *_: Any, **__: Any):
            return self.process_for_engine(prompt)

    return Renderer()


def rendered(wrapped: Any, messages: Any, asynchronous: bool) -> Any:
    from vllm.renderers import ChatParams

    params = ChatParams(chat_template_kwargs={"add_generation_prompt": True})
    if asynchronous:
        _, prompts = asyncio.run(wrapped.render_chat_async([messages], params))
    else:
        _, prompts = wrapped.render_chat([messages], params)
    return prompts[0]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("write", "preamble"),
    [
        (plain, "sss"),
        (gemma, "sss"),
        (spaced, "sss"),
        (mixed, "sss<end_of_turn>"),
        (llama2, None),
    ],
)
def test_turns_end_after_the_text_of_an_answer(write, preamble, asynchronous):
    """What no special token separates from the first question belongs to it."""
    messages = conversation("suauau")
    prompt = rendered(renderer(write, "flowkv"), messages, asynchronous)
    tokens = prompt["prompt_token_ids"]
    texts = [
        Tokenizer(write).decode(tokens[:end])
        for end in prompt["kv_policy_parameters"]["turn_ends"]
    ]
    if preamble is not None:
        assert texts.pop(0).endswith(preamble)
    assert [text.endswith("aaa") for text in texts] == [True, True]
    assert [text.count("uuu") for text in texts] == [1, 2]


def test_an_empty_question_and_answer_end_turns_too():
    messages = [m | {"content": ""} for m in conversation("uauau")]
    parameters = rendered(renderer(gemma, "flowkv"), messages, False)
    assert len(parameters["kv_policy_parameters"]["turn_ends"]) == 2


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_template_that_refuses_more_turns_does_not_fail_the_request(asynchronous):
    wrapped = renderer(plain, "flowkv")
    whole = wrapped.render_messages

    def render(messages: Any, params: Any) -> Any:
        if len(messages) > 5:
            raise ValueError("too long")
        return whole(messages, params)

    wrapped.render_messages = render
    prompt = rendered(wrapped, conversation("uauau"), asynchronous)
    assert prompt["kv_policy_parameters"] == {"turn_ends": []}


@pytest.mark.parametrize(
    ("write", "policy", "settings"),
    [
        (plain, None, {}),
        (plain, "snapkv", {}),
    ],
)
def test_messages_are_rendered_once_if_the_policy_needs_no_turns(
    write, policy, settings
):
    wrapped = renderer(write, policy, **settings)
    calls = []
    whole = wrapped.render_messages
    wrapped.render_messages = lambda *a: calls.append(a) or whole(*a)
    assert "kv_policy_parameters" not in rendered(wrapped, conversation("uau"), False)
    assert len(calls) == 1


def test_adds_turn_ends_to_requests_that_have_none():
    from vllm import SamplingParams

    flow, prompt = (
        parse_policy("flowkv"),
        {"kv_policy_parameters": {"turn_ends": [4, 9]}},
    )
    params = SamplingParams(extra_args={"other": 1})
    shared = params.extra_args
    chat_turns.add_parameters(flow, prompt, params)
    assert params.extra_args == {"other": 1, "turn_ends": [4, 9]}
    assert shared == {"other": 1}, "other requests may share it"
    own = SamplingParams(extra_args={"turn_ends": [2]})
    chat_turns.add_parameters(flow, prompt, own)
    assert own.extra_args == {"turn_ends": [2]}
    for policy, settings in (
        (flow, {}),
        (flow, "text"),
        (parse_policy("knorm"), prompt),
    ):
        bare = SamplingParams()
        chat_turns.add_parameters(policy, settings, bare)
        assert bare.extra_args is None
    chat_turns.add_parameters(flow, prompt, None)
