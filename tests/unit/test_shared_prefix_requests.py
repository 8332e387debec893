"""Which prefix a request shares: from its chat, from itself, from the server."""

from __future__ import annotations

from itertools import takewhile
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
import chat_fixtures
from chat_fixtures import SYSTEM, TEMPLATES, TOOLS, Template, answer, user

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.errors import KVPolicyError, codes_in
from vllm_kvplugins.vllm_adapter.config.request_params import (
    requested_shared_prefix,
    shared_blocks,
    shared_prefix_problem,
)
from vllm_kvplugins.vllm_adapter.config.validation import prefix_problems
from vllm_kvplugins.vllm_adapter.frontend import chat_turns, shared_prefix
from vllm_kvplugins.vllm_adapter.frontend.shared_prefix import PROMPT_KEY

EACH = pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
Policy = dict[str, Any]


# -- chats ------------------------------------------------------------------------


def rendered(
    template: Template,
    messages: list[Any],
    policy: Policy | None = None,
    tools: list[Any] | None = None,
    prefix_caching: bool = True,
) -> dict[str, Any]:
    renderer = chat_fixtures.renderer_of(
        template, policy or {"name": "snapkv"}, prefix_caching
    )
    return chat_fixtures.render(renderer, template, messages, tools=tools)


def common(first: dict[str, Any], second: dict[str, Any]) -> int:
    pairs = zip(first["prompt_token_ids"], second["prompt_token_ids"], strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def system(text: str = SYSTEM) -> dict[str, Any]:
    return {"role": "system", "content": text}


@EACH
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("parts", [False, True], ids=["text", "parts"])
def test_chats_with_one_system_prompt_share_it(template, tools, parts):
    """The prefix is what chats with other questions have in common."""
    content: Any = SYSTEM
    if parts and template.name == "qwen3":
        content = iter([{"type": "text", "text": SYSTEM}])
    first = rendered(template, [system(SYSTEM), user("Zagreb?")], tools=tools)
    second = rendered(template, [system(content), user("7 ferries.")], tools=tools)
    shared = common(first, second)
    for prompt in (first, second):
        # Text may merge into one token with the beginning of a question.
        assert shared - 1 <= prompt[PROMPT_KEY] <= shared
    before = template.tokenizer.decode(first["prompt_token_ids"][:shared])
    if (
        "Answer in one sentence."
        in template.tokenizer.decode(first["prompt_token_ids"]).partition("Zagreb")[0]
    ):
        assert "Answer in one sentence." in before


@EACH
def test_a_long_conversation_has_the_prefix_of_its_first_question(template):
    start = [system(), user("Where should I go?")]
    more = [answer("To Turku."), user("And then?")]
    short, long = (rendered(template, m) for m in (start, [*start, *more]))
    other = rendered(template, [system(), user("Zagreb?"), *more])
    assert long[PROMPT_KEY] <= common(long, other)
    assert long[PROMPT_KEY] <= common(short, long)
    assert abs(long[PROMPT_KEY] - common(long, other)) <= 1


@EACH
def test_a_tokenizer_that_reports_no_characters_gives_the_same_prefix(
    template, monkeypatch
):
    messages = [system(SYSTEM), user("Zagreb?")]
    reported = rendered(template, messages)
    # then tokens are compared instead of texts
    monkeypatch.setattr(chat_turns, "_OFFSETS", "no such key")
    prompt = rendered(template, messages)
    assert prompt["prompt_token_ids"] == reported["prompt_token_ids"]
    assert 0 <= reported[PROMPT_KEY] - prompt[PROMPT_KEY] <= 1  # see above
    assert reported[PROMPT_KEY] > 10


@EACH
def test_a_chat_without_system_prompt_and_tools_shares_nothing(template):
    prompt = rendered(template, [user("Where should I go?")])
    assert prompt[PROMPT_KEY] == 0


@pytest.mark.parametrize(
    ("policy", "prefix_caching"),
    [
        ({"name": "exact-topk"}, True),
        ({"name": "snapkv", "shared_prefix": "none"}, True),
        ({"name": "snapkv", "shared_prefix": 64}, True),
        ({"name": "snapkv"}, False),
    ],
    ids=["retrieval", "off", "number", "no prefix cache"],
)
def test_chats_are_not_searched_without_need(policy, prefix_caching):
    template = TEMPLATES["qwen3"]
    messages = [system(), user("Zagreb?")]
    prompt = rendered(template, messages, policy, prefix_caching=prefix_caching)
    assert PROMPT_KEY not in prompt


def test_a_template_that_refuses_the_system_prompt_alone_shares_nothing():
    template = TEMPLATES["qwen3"]
    renderer = chat_fixtures.renderer_of(template, {"name": "snapkv"}, True)
    render = renderer.render_messages

    def refusing(messages: Any, params: Any) -> Any:
        if "Kvpquestionmark" in str(messages):
            raise ValueError("no")
        return render(messages, params)

    renderer.render_messages = refusing
    messages = [system(), user("Zagreb?")]
    prompt = chat_fixtures.render(renderer, template, messages)
    assert prompt[PROMPT_KEY] == 0
    assert prompt["prompt_token_ids"]


# -- requests ------------------------------------------------------------------------


def config(policy: Policy, prefix_caching: bool = True) -> Any:
    return SimpleNamespace(
        additional_config={"kv_policy": policy},
        kv_transfer_config=None,
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
    )


def parameter(
    policy: Policy, named: int | None, found: int | None, prefix_caching: bool = True
) -> int | None:
    """The request's shared prefix after the front end has seen it."""
    extra = {} if named is None else {"shared_prefix": named}
    params = SimpleNamespace(extra_args=extra)
    prompt = {"prompt_token_ids": [1]} | ({} if found is None else {PROMPT_KEY: found})
    vllm_config, parsed = config(policy, prefix_caching), parse_policy(policy)
    shared_prefix.add_parameter(vllm_config, parsed, prompt, params)
    assert extra == ({} if named is None else {"shared_prefix": named}), "it is shared"
    return requested_shared_prefix(params)


SNAPKV: Policy = {"name": "snapkv"}


@pytest.mark.parametrize(
    ("policy", "named", "found", "expected"),
    [
        (SNAPKV, None, None, None),
        (SNAPKV, None, 300, 300),
        (SNAPKV, None, 5000, 4096),
        (SNAPKV, 200, 300, 200),
        (SNAPKV, 0, 300, 0),
        (SNAPKV, 9000, None, 4096),
        (SNAPKV | {"shared_prefix_limit": 100}, 9000, None, 100),
        (SNAPKV | {"shared_prefix_limit": 100}, None, 300, 100),
        (SNAPKV | {"shared_prefix": 64}, None, 300, 64),
        (SNAPKV | {"shared_prefix": 9000}, None, None, 9000),
        (SNAPKV | {"shared_prefix": 64}, 32, None, 32),
        (SNAPKV | {"shared_prefix": "none"}, None, 300, None),
        ({"name": "exact-topk"}, None, 300, None),
    ],
)
def test_the_request_comes_before_the_server_and_the_chat(
    policy, named, found, expected
):
    assert parameter(policy, named, found) == expected


def test_without_prefix_caching_nothing_is_shared():
    assert parameter(SNAPKV, None, 300, prefix_caching=False) is None


@pytest.mark.parametrize(
    ("value", "are_shared", "valid"),
    [
        (None, False, True),
        (0, False, True),
        (64, True, True),
        (64, False, False),
        (-1, True, False),
        (True, True, False),
        ("64", True, False),
        ([64], True, False),
        (1.5, True, False),
    ],
)
def test_invalid_prefixes_of_requests(value, are_shared, valid):
    params = SimpleNamespace(extra_args={"shared_prefix": value})
    problem = shared_prefix_problem(params, are_shared)
    assert (problem is None) == valid
    if problem is not None:
        assert codes_in(problem) == ("KVP513",)


@pytest.mark.parametrize(
    ("tokens", "prompt", "blocks"),
    [(0, 100, 0), (15, 100, 0), (16, 100, 1), (200, 100, 6), (96, 96, 5), (9, 1, 0)],
)
def test_whole_blocks_are_shared_and_one_token_is_left(tokens, prompt, blocks):
    params = SimpleNamespace(extra_args={"shared_prefix": tokens})
    assert shared_blocks(parse_policy("snapkv"), params, prompt, 16) == blocks
    assert shared_blocks(parse_policy("exact-topk"), params, prompt, 16) == 0
    assert shared_blocks(parse_policy("snapkv"), None, prompt, 16) == 0


# -- start-up ------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["system", 64])
def test_a_setting_that_has_no_effect_is_refused(value):
    with pytest.raises(KVPolicyError) as caught:
        parse_policy({"name": "exact-topk", "shared_prefix": value})
    assert caught.value.codes == ("KVP050",)
    request = {"name": "snapkv", "shared_prefix": value}
    (problem,) = prefix_problems(config(request, prefix_caching=False), request)
    assert codes_in(problem) == ("KVP050",)
    assert not prefix_problems(config(request), request)


def test_the_default_and_none_are_never_refused():
    parse_policy({"name": "exact-topk", "shared_prefix": "none"})
    for request in (SNAPKV, SNAPKV | {"shared_prefix": "none"}):
        assert not prefix_problems(config(request, prefix_caching=False), request)


@pytest.mark.parametrize("value", ["chat", 0, -3, 1.5])
def test_other_settings_are_invalid(value):
    with pytest.raises(KVPolicyError) as caught:
        parse_policy({"name": "snapkv", "shared_prefix": value})
    assert set(caught.value.codes) == {"KVP037"}
