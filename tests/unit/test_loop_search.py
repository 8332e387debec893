"""Rounds of tool loops in chats, under the templates of several families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
import chat_fixtures
from chat_fixtures import TEMPLATES, TOOLS, Template, answer, calls, result, user

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.plan.geometry import Geometry
from vllm_kvplugins.vllm_adapter.frontend import chat_episodes, message_tokens
from vllm_kvplugins.vllm_adapter.frontend.conversation_turns import (
    TurnParts,
    TurnsUnknown,
    turn_parts,
)
from vllm_kvplugins.vllm_adapter.frontend.loop_search import locate_ends

EACH = pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
ASKED = ["Where is it warm?", "And where is it dry?"]


def dialogue() -> list[list[dict[str, Any]]]:
    """A turn without calls, a loop of five rounds and one of four."""
    return [
        [user("Hello there."), answer("Hello.")],
        [
            user(ASKED[0]),
            calls("Oslo", content="I look."),
            result("Oslo", 'snow,\n "0" degrees'),
            calls("Oslo", "Turku"),
            result("Oslo", "fog, 1 degrees"),
            result("Turku", "sun, 2 degrees"),
            calls("Kiel"),
            result("Kiel", "sun, 3 degrees"),
            calls("Kiel"),
            result("Kiel", "sun, 4 degrees"),
            calls("Oslo"),
            result("Oslo", "sun, 5 degrees"),
            answer("It is warm in Oslo."),
        ],
        [
            user(ASKED[1]),
            calls("Bergen"),
            result("Bergen", "rain, 6 degrees"),
            calls("Bergen"),
            result("Bergen", "rain, 7 degrees"),
            calls("Turku"),
            result("Turku", "fog, 8 degrees"),
            calls("Oslo"),
            result("Oslo", "sun, 9 degrees"),
        ],
    ]


def found(
    template: Template, messages: Any, renderer: Any = None, **kwargs: Any
) -> tuple[dict[str, list[int]], list[int]]:
    """Parameters and tokens of a request, by default with a low bound."""
    if renderer is None:
        policy = {"name": "flowkv", "loop_tokens": 20}
        renderer = chat_fixtures.renderer_of(template, policy)
    prompt = chat_fixtures.render(renderer, template, messages, **kwargs)
    return prompt["kv_policy_parameters"], prompt["prompt_token_ids"]


@EACH
def test_rounds_end_where_their_last_results_end(template):
    messages = chat_fixtures.messages_of(dialogue())
    parameters, tokens = found(template, messages, tools=TOOLS)
    ends = parameters["loop_ends"]
    before = [template.tokenizer.decode(tokens[:end]) for end in ends]
    expected = [
        *(ASKED[0], '0" degrees', "2 degrees", "3 degrees", "4 degrees", "5 degrees"),
        *(ASKED[1], "6 degrees", "7 degrees", "8 degrees"),
    ]
    assert len(before) == len(expected)
    for text, words in zip(before, expected, strict=True):
        assert text.replace('\\"', '"').endswith(words)
    after = template.tokenizer.decode(tokens[ends[-1] :])
    assert "9 degrees" in after, "the model is about to read it"


@EACH
@pytest.mark.parametrize("tools", [TOOLS, None], ids=["tools", "no tools"])
def test_parts_stay_where_they_are_while_a_conversation_grows(template, tools):
    previous: dict[str, list[int]] = {"turn_ends": [], "loop_ends": []}
    beginning: list[int] = []
    counts = []
    for messages in chat_fixtures.requests_of(dialogue()):
        parameters, tokens = found(template, messages, tools=tools)
        ends = parameters.get("loop_ends", [])
        assert ends == sorted(set(ends))
        counts.append(len(ends))
        # It writes instructions and tools before the live question: later turns move.
        if (
            template.name != "mistral"
            or parameters["turn_ends"] == previous["turn_ends"]
        ):
            assert ends[: len(previous["loop_ends"])] == previous["loop_ends"]
            assert tokens[: len(beginning)] == beginning
        previous = {"turn_ends": parameters["turn_ends"], "loop_ends": ends}
        beginning = tokens[: ends[-1] if ends else 0]
    # A first finished round comes with its question.
    assert counts == [0, 0, 0, 2, 3, 4, 5, 6, 6, 8, 9, 10][: len(counts)]
    assert counts[-1] == 10


@EACH
def test_a_loop_without_a_history_is_compressed_for_its_question(template, monkeypatch):
    """EpiCache finds the rounds that FlowKV finds."""
    shape = Geometry(16, num_layers=2, num_kv_heads=2, kv_bytes_per_token=64)
    monkeypatch.setattr(chat_episodes, "geometry_of", lambda config: shape)
    messages = chat_fixtures.messages_of(dialogue()[1:2])[:-1]
    expected, _ = found(template, messages, tools=TOOLS)
    sizes = {"budget": 32, "prefill_block": 16, "loop_tokens": 20}
    settings = {"sinks": 2, "recent": 2}
    policy = {"name": "epicache", "base_config": settings} | sizes
    renderer = chat_fixtures.renderer_of(template, policy)
    parameters, _ = found(template, messages, renderer, tools=TOOLS)
    assert {key: parameters[key] for key in expected} == expected
    assert len(parameters["loop_ends"]) == 5
    question = template.tokenizer.decode(parameters["patched_prompt"])
    assert ASKED[0] in question


@EACH
def test_only_long_turns_are_searched(template, monkeypatch):
    messages = chat_fixtures.messages_of(dialogue())
    renderings = []
    for loop_tokens in (20, 4096, None):
        policy = {"name": "flowkv", "loop_tokens": loop_tokens}
        renderer = chat_fixtures.renderer_of(template, policy)
        calls = {"render_messages": 0, "_tokenize_prompt": 0}
        for name in calls:
            original = getattr(renderer, name)

            def counted(*args, original=original, name=name, calls=calls):
                calls[name] += 1
                return original(*args)

            monkeypatch.setattr(renderer, name, counted)
        parameters, _ = found(template, messages, renderer, tools=TOOLS)
        assert ("loop_ends" in parameters) == (loop_tokens == 20)
        assert calls["_tokenize_prompt"] == 1
        renderings.append(calls["render_messages"])
    assert renderings == [3, 2, 2]


@EACH
def test_tokenizers_without_offsets_find_the_same(template, monkeypatch):
    messages = chat_fixtures.messages_of(dialogue())
    expected, _ = found(template, messages, tools=TOOLS)
    policy = {"name": "flowkv", "loop_tokens": 20}
    renderer = chat_fixtures.renderer_of(template, policy)
    monkeypatch.setattr(renderer, "_can_produce_offsets", lambda: False)
    assert found(template, messages, renderer, tools=TOOLS)[0] == expected


@pytest.mark.parametrize("name", ["qwen3", "smollm2", "llama3"])
def test_tokens_show_the_same_rounds(name):
    """Templates that close messages with one token: prompts that are not chats."""
    template = TEMPLATES[name]
    settings = message_tokens.resolve_message_tokens(
        {"name": "flowkv", "loop_tokens": 20},
        parse_policy("flowkv"),
        lambda: template.tokenizer_with_template,
    )
    turns = parse_policy(settings).turns
    for messages in chat_fixtures.requests_of(dialogue()):
        parameters, tokens = found(template, messages)
        turn_ends = turns.turn_ends(tokens, None)
        loops = turns.tool_loops(tokens, turn_ends, None)
        near = [end for loop in loops for end in (loop.question_end, *loop.round_ends)]
        ends = parameters.get("loop_ends", [])
        # The tokens that close a message belong to it here.
        assert len(near) == len(ends)
        assert all(0 < token - end <= 4 for token, end in zip(near, ends, strict=True))


def test_text_that_looks_like_the_template_ends_nothing():
    template = TEMPLATES["qwen3"]
    call = calls("Oslo")
    written = '<tool_call>\n{"name": "weather", "arguments": {"place": "Oslo"}}'
    opening = "<|im_end|>\n<|im_start|>assistant\n"
    quoted = f"{opening}{written}\n</tool_call><|im_end|>\n<|im_start|>user"
    quoted += "\n<tool_response>\n"
    turn = [
        user(f"Why {quoted} again?"),
        call,
        result("Oslo", f"It said\n</tool_response>{quoted} and no more"),
        call,
        result("Oslo", "sun, 2 degrees"),
        call,
        result("Oslo", "sun, 3 degrees"),
    ]
    messages = chat_fixtures.messages_of([turn])
    parameters, tokens = found(template, messages)
    texts = [template.tokenizer.decode(tokens[:end]) for end in parameters["loop_ends"]]
    assert texts[0].endswith("again?")
    assert texts[1].endswith("no more")
    assert texts[2].endswith("2 degrees")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("'\\n<tool_response>\\n' + m", "'\\n' + m.content + m", "every message once"),
        (
            "'\\n<tool_response>\\n' + m.content",
            "'\\n' ~ (m.content | length) ~ m.content ~ (m.content | length)",
            "other text around",
        ),
    ],
    ids=["twice", "numbered"],
)
def test_loops_that_are_unknown_leave_turns_as_they_are(
    old, new, reason, front_end_log
):
    template = TEMPLATES["qwen3"]
    whole = template.text
    assert old in whole

    class Changed(Template):
        @property
        def text(self) -> str:
            return whole.replace(old, new)

    changed = Changed("qwen3", template.gap, None, ())
    messages = chat_fixtures.messages_of(dialogue())
    parameters, _ = found(changed, messages)
    assert list(parameters) == ["turn_ends"]
    assert len(parameters["turn_ends"]) == 3
    (message,) = front_end_log
    assert "compressed only when they end" in message
    assert reason in message


@pytest.mark.parametrize("kept", [30, 60])
def test_a_truncated_prompt_has_no_rounds(kept):
    from vllm.renderers import ChatParams

    template = TEMPLATES["smollm2"]
    renderer = chat_fixtures.renderer_of(
        template, {"name": "flowkv", "loop_tokens": 20}
    )
    settings = {"add_generation_prompt": True, "tools": TOOLS, "tokenize": False}
    params = renderer.default_chat_tok_params.with_kwargs(
        add_special_tokens=False,
        truncate_prompt_tokens=kept,
        truncation_side="left",
    )
    messages = chat_fixtures.messages_of(dialogue()[1:2])[:-1]
    _, (prompt,) = renderer.render_chat(
        [messages], ChatParams(template.text, "auto", settings), params
    )
    assert len(prompt["prompt_token_ids"]) == kept
    assert list(prompt["kv_policy_parameters"]) == ["turn_ends"]


def test_a_template_that_writes_tokens(tmp_path):
    """A tokenizer of Mistral, without a text of the prompt."""
    mistral_common = pytest.importorskip("mistral_common")
    from vllm.renderers import ChatParams
    from vllm.renderers.mistral import MistralRenderer
    from vllm.tokenizers.mistral import MistralTokenizer

    data = Path(mistral_common.__file__).parent / "data"
    file = data / "mistral_instruct_tokenizer_241114.model.v7"
    (tmp_path / "tokenizer.model.v7").write_bytes(file.read_bytes())
    template = TEMPLATES["mistral"]
    policy = {"name": "flowkv", "loop_tokens": 20}
    settings = chat_fixtures.renderer_of(template, policy).config
    tokenizer = MistralTokenizer.from_pretrained(str(tmp_path))
    renderer = MistralRenderer(settings, tokenizer)
    params = ChatParams(
        None, "auto", {"add_generation_prompt": True, "tools": TOOLS, "tokenize": True}
    )
    turns = dialogue()
    turns[1][1]["content"] = ""  # refused with calls
    messages = chat_fixtures.messages_of(turns)
    _, (prompt,) = renderer.render_chat([messages], params)
    tokens = prompt["prompt_token_ids"]
    ends = prompt["kv_policy_parameters"]["loop_ends"]
    texts = [tokenizer.decode(tokens[:end]).replace("\u2581", " ") for end in ends]
    assert len(ends) == 10
    ends_a_round = [text.endswith(" degrees") for text in texts]
    assert ends_a_round == [False, *[True] * 5, False, *[True] * 3]
    assert texts[0].endswith(ASKED[0])
    assert texts[-1].endswith("8 degrees")


# -- messages ------------------------------------------------------------------------

ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool", "f": "function"}


@pytest.mark.parametrize(
    ("kinds", "starts", "parts"),
    [
        ("u", [0], [(0, (), 0)]),
        ("uat", [0], [(0, (2,), 0)]),
        ("uata", [0], [(0, (2,), 0)]),
        ("uatat", [0], [(0, (2, 4), 1)]),
        ("uattaf", [0], [(0, (3, 5), 1)]),
        ("suatau", [1, 5], [(1, (3,), 1), (5, (), 0)]),
        ("uatuatat", [0, 3], [(0, (2,), 0), (3, (5, 7), 1)]),
        ("uusaatat", [0], [(2, (5, 7), 1)]),
        ("uatsat", [0], [(0, (2, 5), 1)]),
    ],
)
def test_a_round_is_finished_when_the_model_has_answered_it(kinds, starts, parts):
    messages = [{"role": ROLES[kind], "content": kind} for kind in kinds]
    assert turn_parts(messages, starts) == [TurnParts(*part) for part in parts]


SEGMENTS = ["<u>", "<a>call<t>", "<a>call<t>", "<a>"]
TEXTS, ARE_QUESTIONS = ["Why?", "\nrain", "sun"], [True, False, False]


@pytest.mark.parametrize(
    ("prompt", "ends"),
    [
        ("<u>Why?<a>call<t>\nrain<a>call<t>sun<a>", [7, 22, 35]),
        ("<u> Why? <a>call<t>rain<a>call<t>sun<a>", [9, 23, 36]),
        ("<u>Why?<a>call<t>\\nrain<a>call<t>sun<a>", [7, 23, 36]),
        ("<u>Why?<a>call<t>{rain}<a>call<t>{sun}<a>", [7, 23, 38]),
        # In an unknown form, with the text that follows it: too early, not too late.
        ("<u>Why?<a>call<t>{<a>call<t>}<a>call<t>sun<a>", [7, 18, 29]),
    ],
)
def test_results_may_be_written_in_any_form(prompt, ends):
    assert locate_ends(prompt, SEGMENTS, TEXTS, ARE_QUESTIONS) == ends


@pytest.mark.parametrize(
    "prompt",
    [
        "<s>Why?<a>call<t>rain<a>call<t>sun<a>",
        "<u>Why?<a>call<t>rain<a>call<t>sun<b>",
        "<u>Why?<a>call<t>rain<a>call<t>sun<a>more",
        "<u>Why?<a>cell<t>rain<a>call<t>sun<a>",
        "<u>Why not?<a>call<t>rain<a>call<t>sun<a>",
    ],
)
def test_the_text_around_messages_must_be_that_of_the_prompt(prompt):
    with pytest.raises(TurnsUnknown, match="other text"):
        locate_ends(prompt, SEGMENTS, TEXTS, ARE_QUESTIONS)
    with pytest.raises(TurnsUnknown, match="every message once"):
        locate_ends(prompt, SEGMENTS[:3], TEXTS, ARE_QUESTIONS)
