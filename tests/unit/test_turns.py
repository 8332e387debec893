"""Turn ends: from the token after each message, or from renderings of messages."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_kvplugins.config import parse_policy

pytest.importorskip("vllm")
from vllm_kvplugins.vllm_adapter.frontend import chat_turns, turn_ends

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
    assert turn_ends.message_end_token(Tokenizer(write)) == token


def test_ignores_a_name_that_the_tokenizer_splits(monkeypatch):
    tokenizer = Tokenizer(gemma)
    monkeypatch.setattr(tokenizer, "encode", lambda text, **_: list(map(ord, text)))
    assert turn_ends.message_end_token(tokenizer) is None


def test_finds_the_token_of_a_real_tokenizer(model_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_path)
    token = turn_ends.message_end_token(tokenizer)
    assert tokenizer.decode([token]) == "<|im_end|>"
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.content }}<|endoftext|>\n{% endfor %}"
    )
    token = turn_ends.message_end_token(tokenizer)
    assert tokenizer.decode([token]) == "<|endoftext|>"
    assert token != tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("tokenizer", "token", "logged"),
    [
        (Tokenizer(gemma), 2, ""),
        (Tokenizer(plain, template=None), 1, "has no chat template"),
        (Tokenizer(plain), None, "by rendering their messages"),
        (Tokenizer(refusing), None, "only images"),
        (None, None, ""),
    ],
)
def test_resolves_the_turn_end_token(tokenizer, token, logged, caplog):
    policy = parse_policy("flowkv")
    caplog.set_level(logging.INFO)
    # Loggers of vLLM do not propagate messages to the root logger.
    turn_ends.logger.parent.addHandler(caplog.handler)
    try:
        resolved = turn_ends.resolve_turn_end_token(
            {"name": "flowkv"}, policy, lambda: tokenizer
        )
    finally:
        turn_ends.logger.parent.removeHandler(caplog.handler)
    assert resolved.get("turn_end_token") == token
    assert logged in caplog.text
    assert bool(logged) == bool(caplog.text)


def test_keeps_settings_of_other_policies_and_of_the_user():
    def load() -> Any:
        raise AssertionError("needs no tokenizer")

    snapkv = {"name": "snapkv"}
    assert (
        turn_ends.resolve_turn_end_token(snapkv, parse_policy("snapkv"), load) == snapkv
    )
    settings = {"name": "flowkv", "turn_end_token": 7}
    assert (
        turn_ends.resolve_turn_end_token(settings, parse_policy(settings), load)
        == settings
    )


# -- renderings ----------------------------------------------------------------

ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}


def conversation(kinds: str) -> list[dict[str, str]]:
    return [{"role": ROLES[kind], "content": kind * 3} for kind in kinds]


@pytest.mark.parametrize(
    ("kinds", "counts"),
    [
        ("u", []),
        ("su", []),
        ("suau", [3]),
        ("uauau", [2, 4]),
        ("uatau", [4]),
        ("uu", []),
        ("uaua", [2]),
        ("uasu", [3]),
    ],
)
def test_a_turn_ends_before_the_next_user_message(kinds, counts):
    assert turn_ends.messages_per_turn_end(conversation(kinds)) == counts


@pytest.mark.parametrize(
    ("beginning", "ends"),
    [
        ([1, 2, 3, 4], [4]),
        ([1, 2, 3, 4, 99], [4]),
        ([1, 2, 3, 4, 98, 99], [4]),
        ([1, 2, 3, 97, 98, 99], []),
        ([9, 2], []),
        ([1, 2, 3, 4, 5, 6, 7, 8], [6]),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], []),
        ([], []),
        (None, []),
    ],
)
def test_a_rendering_may_differ_from_the_prompt_in_its_last_two_tokens(beginning, ends):
    prompt = [1, 2, 3, 4, 5, 6]
    assert turn_ends.common_prefixes(prompt, [beginning]) == ends
    assert turn_ends.common_prefixes(prompt, [beginning, [1], beginning]) == [1, *ends]


def renderer(write: Any, policy: Any, **settings: Any) -> Any:
    """A renderer of vLLM with our own template and tokenizer."""
    from vllm.renderers.base import BaseRenderer

    chat_turns.install()
    tokenizer = Tokenizer(write)

    class Renderer(BaseRenderer):
        default_chat_tok_params = None

        def __init__(self) -> None:
            config = {"kv_policy": {"name": policy, **settings}} if policy else {}
            self.config = SimpleNamespace(
                additional_config=config, kv_transfer_config=None
            )

        def _apply_prompt_extras(self, *_: Any) -> None:
            """Needs a real model."""

        def render_messages(self, messages: Any, params: Any) -> Any:
            text = tokenizer.apply_chat_template(messages, tokenize=False)
            if params.chat_template_kwargs.get("add_generation_prompt"):
                text += "<start>assistant\n"
            return messages, text

        def tokenize_prompts(self, prompts: Any, params: Any) -> Any:
            return [
                {"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}
                for text in prompts
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
@pytest.mark.parametrize("write", [plain, llama2])
def test_finds_turns_of_a_chat_without_an_end_token(write, asynchronous):
    messages = conversation("suauau")
    prompt = rendered(renderer(write, "flowkv"), messages, asynchronous)
    length = [0]
    for message in messages:
        text = Tokenizer(write).encode(write(message), add_special_tokens=False)
        length.append(length[-1] + len(text))
    assert prompt["kv_policy_parameters"] == {"turn_ends": [length[3], length[5]]}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_template_that_rewrites_history_gives_no_turn_end(asynchronous):
    def changing(message: dict) -> str:
        # With five messages, the template leaves out the second one.
        return plain(message) if message.get("kept", True) else ""

    wrapped = renderer(changing, "flowkv")
    messages = conversation("uauau")
    whole = wrapped.render_messages

    def render(messages: Any, params: Any) -> Any:
        if len(messages) == 5:
            messages = [m | {"kept": i != 1} for i, m in enumerate(messages)]
        return whole(messages, params)

    wrapped.render_messages = render
    parameters = rendered(wrapped, messages, asynchronous)["kv_policy_parameters"]
    assert parameters == {"turn_ends": []}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_beginning_that_cannot_be_rendered_does_not_fail_the_request(asynchronous):
    wrapped = renderer(plain, "flowkv")
    whole = wrapped.render_messages

    def render(messages: Any, params: Any) -> Any:
        if len(messages) == 2:
            raise ValueError("the last role must be a user's")
        return whole(messages, params)

    wrapped.render_messages = render
    prompt = rendered(wrapped, conversation("uauau"), asynchronous)
    assert len(prompt["kv_policy_parameters"]["turn_ends"]) == 1


@pytest.mark.parametrize(
    ("write", "policy", "settings"),
    [
        (plain, None, {}),
        (plain, "snapkv", {}),
        (gemma, "flowkv", {"turn_end_token": 2}),
    ],
)
def test_messages_are_rendered_once_if_turns_are_known(write, policy, settings):
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
