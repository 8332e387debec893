"""Finds where the turns of a conversation end, from the model's chat template.

There are two ways. Most templates end every message with the same special token;
``message_end_token`` finds that token once, at start-up. For other templates,
``chat_turns`` renders the first messages of each request again, and ``common_prefixes``
compares them with the whole prompt.
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
# Up to this many of a message's last tokens may merge with the next message's first.
_SEAM_TOKENS = 2


def resolve_turn_end_token(
    request: dict[str, Any], policy: KVCachePolicy, load_tokenizer: Callable[[], Any]
) -> dict[str, Any]:
    """Set ``turn_end_token`` in the policy's settings, so that all processes agree.

    The setting stays open if the template ends messages with no common token;
    ``chat_turns`` then finds turns by rendering. If the tokenizer has no template,
    prompts are expected to separate messages with the end-of-text token.

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
    if token is None:
        logger.info(
            "KV policy %s: no single token ends the messages of this chat template; "
            "turns of chat requests are found by rendering their messages, turns of "
            "other prompts only from turn_end_token or turn_ends",
            policy.name,
        )
        return request
    return request | {"turn_end_token": token}


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


def messages_per_turn_end(messages: Sequence[Any]) -> list[int]:
    """Number of messages before each turn end.

    A turn ends where a user message follows a message of another role. A system prompt
    belongs to the first turn, because many templates cannot render it alone.
    """
    roles = [message["role"] for message in messages]
    return [
        count
        for count in range(1, len(roles))
        if roles[count] == "user" != roles[count - 1] and "user" in roles[:count]
    ]


def common_prefixes(
    prompt: Sequence[int], renderings: Sequence[Sequence[int] | None]
) -> list[int]:
    """Number of tokens that each partial rendering has in common with the prompt.

    The last tokens of a rendering (mostly white space) may merge with the text that
    follows; they then count towards the next turn. A rendering that differs earlier
    gives no turn end: the template renders old messages differently from new ones, for
    example without their reasoning.

    Args:
        prompt: token IDs of all messages.
        renderings: token IDs of the first messages alone; None if rendering failed.

    Returns:
        Distinct token counts, ascending.
    """
    counts = set()
    for tokens in renderings:
        if not tokens:
            continue
        pairs = enumerate(zip(tokens, prompt, strict=False))
        shorter = min(len(tokens), len(prompt))
        common = next((i for i, (left, right) in pairs if left != right), shorter)
        if common and common >= len(tokens) - _SEAM_TOKENS:
            counts.add(common)
    return sorted(counts)
