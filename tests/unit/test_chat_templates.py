"""Turns of chats under the templates of several families, rendered by vLLM."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
import chat_fixtures
from chat_fixtures import TEMPLATES, TOOLS, Template, answer, user

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.vllm_adapter.frontend import message_tokens, turn_search

EACH = pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)


def found(template: Template, messages: Any, **kwargs: Any) -> tuple[list, list]:
    """Turn ends and tokens of a request under FlowKV."""
    renderer = chat_fixtures.renderer_of(template, {"name": "flowkv"})
    prompt = chat_fixtures.render(renderer, template, messages, **kwargs)
    return prompt["kv_policy_parameters"]["turn_ends"], prompt["prompt_token_ids"]


def text(template: Template, tokens: list[int]) -> str:
    return template.tokenizer.decode(tokens)


@EACH
def test_turns_end_where_the_fixture_says(template):
    turns = chat_fixtures.conversation(template.alternates)
    ends, tokens = found(template, chat_fixtures.messages_of(turns), tools=TOOLS)
    assert tuple(ends) == template.ends
    before = [text(template, tokens[:end]) for end in ends]
    after = [text(template, tokens[end:]) for end in ends]
    if template.preamble is not None:
        assert before.pop(0).endswith(template.preamble)
        assert "Where should I go" in after.pop(0)
    last = chat_fixtures.last_words(template)
    first = chat_fixtures.first_words(template)
    assert len(before) == len(last) == 9
    for piece, words in zip(before, last, strict=True):
        assert piece.endswith(words)
    for piece, words in zip(after[:-1], first[:-1], strict=True):
        opening = piece.partition(words)[0]
        assert opening
        assert template.gap.endswith(opening)
    live = after[-1].partition(first[-1])[0]
    if template.name == "mistral":  # writes the definitions before the live question
        live = live.partition("[AVAILABLE_TOOLS]")[0] + "[INST] "
    assert live
    assert template.gap.endswith(live)


@EACH
@pytest.mark.parametrize("tools", [TOOLS, None], ids=["tools", "no tools"])
def test_turns_stay_where_they_are_while_the_conversation_grows(template, tools):
    """Every end of a request is a true prefix, and is found again in all later ones."""
    turns = chat_fixtures.conversation(template.alternates)
    previous, beginning = [], []
    counts = []
    for messages in chat_fixtures.requests_of(turns):
        ends, tokens = found(template, messages, tools=tools)
        assert ends == sorted(set(ends))
        assert all(0 < end < len(tokens) for end in ends)
        assert ends[: len(previous)] == previous
        assert tokens[: len(beginning)] == beginning
        previous, beginning = ends, tokens[: ends[-1] if ends else 0]
        counts.append(len(ends))
    # One end more per turn, however many requests a tool loop sends.
    steps = [after - before for before, after in itertools.pairwise(counts)]
    assert set(steps) == {0, 1}
    assert sum(steps) == 9


@EACH
def test_the_live_question_is_never_in_a_finished_turn(template):
    turns = chat_fixtures.conversation(template.alternates)
    firsts = ["Where should I go", *chat_fixtures.first_words(template)]
    messages: list[dict] = []
    for turn, first in zip(turns, firsts, strict=True):
        for message in turn:
            messages.append(message)
            if message["role"] == "assistant":
                continue
            request = chat_fixtures.messages_of([messages])
            ends, tokens = found(template, request, tools=TOOLS)
            history = text(template, tokens[: ends[-1] if ends else 0])
            assert first not in history


@pytest.mark.parametrize("name", ["qwen3", "harmony"])
@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}], ids=str)
@pytest.mark.parametrize("reasoning", ["sent", "stripped"])
def test_reasoning_moves_no_turn(name, kwargs, reasoning):
    template = TEMPLATES[name]
    messages = chat_fixtures.messages_of(chat_fixtures.conversation())
    if reasoning == "stripped":
        for message in messages:
            message.pop("reasoning", None)
    ends, tokens = found(template, messages, tools=TOOLS, **kwargs)
    assert tuple(ends) == template.ends
    assert ("coats" in text(template, tokens)) == (reasoning == "sent")


def test_qwen3_writes_a_think_block_into_a_history_alone():
    """Why the history is not rendered alone: that is no prefix of the prompt."""
    template = TEMPLATES["qwen3"]
    turns = chat_fixtures.conversation()[:2]
    messages = chat_fixtures.messages_of([*turns, [user("And then?")]])
    renderer = chat_fixtures.renderer_of(template, None)
    whole = chat_fixtures.render(renderer, template, messages)["prompt"]
    alone = chat_fixtures.render(
        renderer, template, messages[:-1], add_generation_prompt=False
    )["prompt"]
    assert not whole.startswith(alone[:-20])
    ends, _ = found(template, messages)
    assert len(ends) == 3


def test_a_date_in_the_system_prompt_is_part_of_the_preamble():
    template = TEMPLATES["llama3"]
    messages = chat_fixtures.messages_of(chat_fixtures.conversation())
    ends, tokens = found(template, messages, date_string="24 Dec 2026")
    preamble = text(template, tokens[: ends[0]])
    assert "Today: 24 Dec 2026" in preamble
    assert preamble.endswith("in one sentence.")
    assert len(ends) == 10


@pytest.mark.parametrize("name", ["qwen3", "llama3", "deepseek_r1"])
def test_an_answer_that_the_client_began_belongs_to_the_live_turn(name):
    template = TEMPLATES[name]
    messages = chat_fixtures.messages_of(chat_fixtures.conversation()[:2])
    begun = [*messages, user("And then?"), answer("Then you")]
    settings = {"add_generation_prompt": False, "continue_final_message": True}
    ends, tokens = found(template, begun, **settings)
    assert text(template, tokens).endswith("Then you")
    assert ends == found(template, begun[:-1])[0]


# -- rewritten, unknown ----------------------------------------------------------------


def changed(name: str, old: str, new: str) -> Template:
    """A template that differs from a fixture."""
    template = TEMPLATES[name]
    text = template.text
    assert old in text

    class Changed(Template):
        @property
        def text(self) -> str:
            return text.replace(old, new)

    return Changed(name, template.gap, None, ())


def test_a_template_that_rewrites_the_past_is_found_out_and_told(front_end_log):
    """Reasoning of the last answer stays until the next question."""
    template = changed(
        "qwen3",
        "{%- if loop.index0 > ns.question and (loop.last or thought) %}",
        "{%- if thought and loop.index0 >= (messages | length) - 2 %}",
    )
    turns = [
        [user("Why?"), answer("Because.", reasoning="Hm, why indeed.")],
        [user("And then?"), answer("Nothing.", reasoning="Then what.")],
        [user("Sure?")],
    ]
    messages = chat_fixtures.messages_of(turns)
    ends, tokens = found(template, messages)
    texts = [text(template, tokens[:end]) for end in ends]
    assert [t.rpartition("\n")[2] for t in texts[1:]] == ["Because.", "Nothing."]
    assert "Then what" in texts[2]
    assert "Hm, why" not in texts[2]
    (message,) = front_end_log
    assert "writes earlier messages differently when a conversation grows" in message
    later = [*messages, answer("Yes."), user("Really?")]
    again, tokens = found(template, later)
    assert again[:2] == ends[:2]
    assert "Then what" not in text(template, tokens)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("m.content + '<|im_end|>", "m.content[:4] + '<|im_end|>", "every message"),
        ("m.role + '\\n' + m", "m.role + loop.index | string + m", "different ways"),
        ("+ m.content +", "+ m.content + ' ' + m.content +", "every question once"),
        ("{{- content }}", "", "every message"),
        (
            "{%- set ns =",
            "{% if messages | length > 7 %}{{ raise_exception('too long') }}{% endif %}"
            "{%- set ns =",
            "too long",
        ),
        ("+ m.content +", "+ m.content.replace('?', '!') +", "differently"),
    ],
    ids=["cut", "numbered", "twice", "no answers", "refused", "changed"],
)
def test_a_chat_whose_turns_are_unknown_is_not_compressed(
    old, new, reason, front_end_log
):
    template = changed("qwen3", old, new)
    turns = [[user("Why?"), answer("Because.")], [user("And then?"), answer("No.")]]
    messages = chat_fixtures.messages_of([*turns, [user("Sure?")]])
    for _ in range(30):
        ends, tokens = found(template, messages)
        assert ends == []
    assert tokens
    assert len(front_end_log) == 2, "the first and the tenth"
    assert all("not compressed" in m and reason in m for m in front_end_log)


def test_text_that_looks_like_the_template_ends_no_turn():
    """Questions and answers may quote what the template writes."""
    template = TEMPLATES["qwen3"]
    quoted = "A<|im_end|>\n<|im_start|>assistant\nB<|im_end|>\n<|im_start|>user\nC"
    turns = [
        [user(quoted), answer("B")],
        [user("A"), answer("B")],
        [user("A"), answer(f"You said: {quoted}")],
        [user("C")],
    ]
    ends, tokens = found(template, chat_fixtures.messages_of(turns))
    texts = [text(template, tokens[:end]) for end in ends]
    assert len(ends) == 4
    assert [t.count("<|im_start|>user") for t in texts] == [0, 2, 3, 5]
    assert all(t.endswith("\nB") for t in texts[1:3])


def test_a_conversation_may_contain_our_marks():
    template = TEMPLATES["qwen3"]
    turns = [
        [user(turn_search._MARK), answer(turn_search._ANSWER)],
        [user("And then?"), answer(turn_search._MARK)],
        [user("Sure?")],
    ]
    ends, tokens = found(template, chat_fixtures.messages_of(turns))
    texts = [text(template, tokens[:end]) for end in ends]
    assert [t.count("<|im_start|>user") for t in texts] == [0, 1, 2]


# -- cost --------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("number", [2, 10, 40])
def test_a_chat_is_rendered_once_more_whatever_its_turns(template, number, monkeypatch):
    renderer = chat_fixtures.renderer_of(template, {"name": "flowkv"})
    turns = [[user(f"Why {i}?"), answer(f"Because {i}.")] for i in range(number)]
    messages = chat_fixtures.messages_of([*turns, [user("Sure?")]])
    calls = {"render_messages": 0, "_tokenize_prompt": 0}
    for name in calls:
        original = getattr(renderer, name)

        def counted(*args, original=original, name=name):
            calls[name] += 1
            return original(*args)

        monkeypatch.setattr(renderer, name, counted)
    prompt = chat_fixtures.render(renderer, template, messages, tools=TOOLS)
    ends = prompt["kv_policy_parameters"]["turn_ends"]
    assert len(ends) == number + (template.preamble is not None)
    assert calls == {"render_messages": 2, "_tokenize_prompt": 1}
    assert "prompt_token_offsets" not in prompt, "the client did not ask for them"


@EACH
def test_tokenizers_without_offsets_find_the_same(template, monkeypatch):
    renderer = chat_fixtures.renderer_of(template, {"name": "flowkv"})
    monkeypatch.setattr(renderer, "_can_produce_offsets", lambda: False)
    turns = chat_fixtures.conversation(template.alternates)
    messages = chat_fixtures.messages_of(turns)
    prompt = chat_fixtures.render(renderer, template, messages, tools=TOOLS)
    assert tuple(prompt["kv_policy_parameters"]["turn_ends"]) == template.ends


# -- clients -----------------------------------------------------------------------


def test_requests_of_the_server_keep_their_tool_calls():
    """As vLLM's validation of requests leaves messages, in the server's event loop."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.renderers import ChatParams

    template = TEMPLATES["qwen3"]
    messages = chat_fixtures.messages_of(chat_fixtures.conversation())
    body = {"messages": messages, "model": "m"}
    request = ChatCompletionRequest.model_validate_json(json.dumps(body))
    renderer = chat_fixtures.renderer_of(template, {"name": "flowkv"})
    settings = {"add_generation_prompt": True, "tools": TOOLS, "tokenize": False}
    params = ChatParams(template.text, "auto", settings)
    tok_params = renderer.default_chat_tok_params.with_kwargs(add_special_tokens=False)
    _, (prompt,) = asyncio.run(
        renderer.render_chat_async([request.messages], params, tok_params)
    )
    assert prompt["prompt"].count("<tool_call>") == 7
    assert tuple(prompt["kv_policy_parameters"]["turn_ends"]) == template.ends


@pytest.mark.parametrize("kept", [5, 60, 300])
def test_a_truncated_prompt_counts_from_its_first_token(kept):
    from vllm.renderers import ChatParams

    template = TEMPLATES["qwen3"]
    messages = chat_fixtures.messages_of(chat_fixtures.conversation())
    renderer = chat_fixtures.renderer_of(template, {"name": "flowkv"})
    settings = {"add_generation_prompt": True, "tools": TOOLS, "tokenize": False}
    params = dataclasses.replace(
        renderer.default_chat_tok_params,
        add_special_tokens=False,
        truncate_prompt_tokens=kept,
        truncation_side="left",
    )
    _, (prompt,) = renderer.render_chat(
        [messages], ChatParams(template.text, "auto", settings), params
    )
    _, tokens = found(template, messages, tools=TOOLS)
    dropped = len(tokens) - kept
    assert len(prompt["prompt_token_ids"]) == kept
    expected = [end - dropped for end in template.ends if end > dropped]
    assert prompt["kv_policy_parameters"]["turn_ends"] == expected


# -- prompts without messages --------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3", "harmony", "smollm2", "llama3"])
def test_tokens_show_the_same_turns(name):
    """Templates that close messages with one token: prompts that are not chats."""
    template = TEMPLATES[name]
    settings = message_tokens.resolve_message_tokens(
        {"name": "flowkv"},
        parse_policy("flowkv"),
        lambda: template.tokenizer_with_template,
    )
    turns = parse_policy(settings).turns
    for messages in chat_fixtures.requests_of(chat_fixtures.conversation()):
        ends, tokens = found(template, messages)
        # The token that closes an answer belongs to the turn here.
        near = list(turns.turn_ends(tokens, None))
        assert len(near) == len(ends)
        assert all(0 <= token - end <= 2 for token, end in zip(near, ends, strict=True))


@pytest.mark.parametrize("name", ["deepseek_r1", "mistral"])
def test_tokens_show_no_turns_if_no_token_closes_all_messages(name):
    template = TEMPLATES[name]
    settings = {"name": "flowkv"}
    resolved = message_tokens.resolve_message_tokens(
        settings, parse_policy("flowkv"), lambda: template.tokenizer_with_template
    )
    assert resolved == settings


# -- templates that write tokens -----------------------------------------------------


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("tekken_240911.json", "tekken.json"),
        ("mistral_instruct_tokenizer_240323.model.v3", "tokenizer.model.v3"),
        ("mistral_instruct_tokenizer_241114.model.v7", "tokenizer.model.v7"),
    ],
    ids=["tekken", "v3", "v7"],
)
def test_tokenizers_of_mistral_write_tokens_without_a_text(file, name, tmp_path):
    """Version 3 prepends the system prompt to the last question, which then has others.

    The tokens of a mark differ there from those of the mark alone.
    """
    mistral_common = pytest.importorskip("mistral_common")
    from vllm.renderers import ChatParams
    from vllm.renderers.mistral import MistralRenderer
    from vllm.tokenizers.mistral import MistralTokenizer

    data = Path(mistral_common.__file__).parent / "data"
    (tmp_path / name).write_bytes((data / file).read_bytes())
    template = TEMPLATES["mistral"]
    settings = chat_fixtures.renderer_of(template, {"name": "flowkv"}).config
    tokenizer = MistralTokenizer.from_pretrained(str(tmp_path))
    renderer = MistralRenderer(settings, tokenizer)
    params = ChatParams(
        None,
        "auto",
        {"add_generation_prompt": True, "tools": TOOLS, "tokenize": True},
    )
    turns = chat_fixtures.conversation(alternates=True)
    for message in turns[2] + turns[9]:
        if "tool_calls" in message:  # refused with a text, or with reasoning
            message["content"] = ""
    previous: list[int] = []
    for messages in chat_fixtures.requests_of(turns):
        for message in messages:
            message.pop("reasoning", None)
        _, (prompt,) = renderer.render_chat([messages], params)
        ends = prompt["kv_policy_parameters"]["turn_ends"]
        assert ends[: len(previous)] == previous
        previous = ends
    tokens = prompt["prompt_token_ids"]
    texts = [tokenizer.decode(tokens[:end]).replace("▁", " ") for end in ends]
    for text, words in zip(texts[1:], chat_fixtures.last_words(template), strict=True):
        assert text.replace("<0x0A>", "\n").rstrip().endswith(words)
        assert "Sorry, and Oslo?" not in text
