"""Finds the tokens with which a chat template opens and closes messages.

With them, FlowKV finds the turns of prompts whose messages nobody knows: completions,
chats with images, and chats that vLLM renders without a template (gpt-oss). The turns
of other chats come from their messages (``turn_search``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from vllm_kvplugins.policies.base import KVCachePolicy

logger = logging.getLogger("vllm.kv_policy")

# Contents of the messages in a test conversation. No template contains these words.
_PROBE_CONTENTS = ("Kvpfirstq", "Kvpfirsta", "Kvpsecondq")
_PROBE_ROLES = ("user", "assistant", "user")
_OTHER_CONTENT = "Jotherwords"
_TOOL_CALL = {
    "id": "kvpcall00",
    "type": "function",
    "function": {"name": "kvp", "arguments": {}},
}


def resolve_message_tokens(
    request: dict[str, Any], policy: KVCachePolicy, load_tokenizer: Callable[[], Any]
) -> dict[str, Any]:
    """Set ``turn_end_token`` and the openings, so that all processes agree.

    The settings stay open if the template ends messages with no common token; only
    turns of chats are found then. If the tokenizer has no template, prompts are
    expected to separate messages with the end-of-text token.

    Args:
        request: the policy's settings, with its name.
        load_tokenizer: returns the model's tokenizer, or None if the engine has none.

    Returns:
        The settings; unchanged if the policy does not look for turns or the user has
        set the token.
    """
    finds_turns = policy.turns is not None and policy.turns.finds_in_prompt
    if not finds_turns or request.get("turn_end_token") is not None:
        return request
    tokenizer = load_tokenizer()
    if tokenizer is None:
        return request
    # A tokenizer class without this attribute may format chats in its own way.
    if getattr(tokenizer, "chat_template", "unknown") is None:
        logger.info(
            "KV policy %s: the tokenizer has no chat template; assuming that messages "
            "end with its end-of-text token, %s (override with turn_end_token or "
            "turn_ends)",
            policy.name,
            tokenizer.eos_token_id,
        )
        return request | {"turn_end_token": tokenizer.eos_token_id}
    token = message_end_token(tokenizer)
    user = user_opening(tokenizer, token) if token is not None else []
    if not user:
        logger.info(
            "KV policy %s: no single token ends the messages of this chat template; "
            "turns of chats are found from their messages, turns of other prompts only "
            "from turn_end_token or turn_ends",
            policy.name,
        )
        return request
    tool = tool_opening(tokenizer, token)
    openings = {"user_opening": user, "tool_opening": tool}
    return request | {"turn_end_token": token} | openings


def message_end_token(tokenizer: Any) -> int | None:
    """The token that the chat template writes after the text of every message.

    Only special and other added tokens count. Other tokens can occur inside messages.

    Returns:
        None if the template cannot be rendered, or if messages of users and assistants
        do not end with the same added token.
    """
    messages = [
        {"role": role, "content": content}
        for role, content in zip(_PROBE_ROLES, _PROBE_CONTENTS, strict=True)
    ]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception as error:  # templates can raise any exception
        logger.warning("the chat template cannot render a test conversation: %s", error)
        return None
    tails = [text.partition(content)[2].lstrip() for content in _PROBE_CONTENTS]
    # Longest names first, because one name can be the beginning of another.
    added = sorted(tokenizer.get_added_vocab().items(), key=lambda item: -len(item[0]))
    end_tokens = {
        next((token for name, token in added if tail.startswith(name)), None)
        for tail in tails
    }
    if len(end_tokens) > 1:
        return None
    (end_token,) = end_tokens
    # The tokenizer may split the name instead of reading it as one token.
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    is_written = token_ids.count(end_token) >= len(_PROBE_CONTENTS)
    return end_token if end_token is not None and is_written else None


def user_opening(tokenizer: Any, end_token: int | None) -> list[int]:
    """Tokens from the end of an answer to the text of the next question.

    Without white space at their ends, which may merge with other text.

    Returns:
        Empty if the template writes no token there.
    """
    *before, question = (
        {"role": role, "content": content}
        for role, content in zip(_PROBE_ROLES, _PROBE_CONTENTS, strict=True)
    )
    return _opening(tokenizer, before, question, end_token)


def tool_opening(tokenizer: Any, end_token: int | None) -> list[int]:
    """Tokens from the end of a tool call to the text of the tool's result.

    Templates may write results as messages of users, with a token of their own.

    Returns:
        Empty if the template cannot render tools.
    """
    before: list[dict[str, Any]] = [
        {"role": "user", "content": _PROBE_CONTENTS[0]},
        {"role": "assistant", "content": "", "tool_calls": [_TOOL_CALL]},
    ]
    result = {
        "role": "tool",
        "content": _PROBE_CONTENTS[2],
        "name": "kvp",
        "tool_call_id": _TOOL_CALL["id"],
    }
    try:
        return _opening(tokenizer, before, result, end_token)
    except Exception:  # templates can raise any exception
        return []


def _opening(
    tokenizer: Any,
    before: Sequence[dict[str, Any]],
    message: dict[str, Any],
    end_token: int | None,
) -> list[int]:
    """Tokens between the last end token and the content of the last message."""
    renderings = []
    for content in (message["content"], _OTHER_CONTENT):
        messages = [*before, message | {"content": content}]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        renderings.append(tokenizer.encode(text, add_special_tokens=False))
    one, other = renderings
    pairs = enumerate(zip(one, other, strict=False))
    stop = next((index for index, (left, right) in pairs if left != right), 0)
    ends = [index for index in range(stop) if one[index] == end_token]
    opening = one[ends[-1] + 1 : stop] if ends else []
    while opening and not tokenizer.decode(opening[-1:]).strip():
        del opening[-1]
    while opening and not tokenizer.decode(opening[:1]).strip():
        del opening[0]
    return opening
