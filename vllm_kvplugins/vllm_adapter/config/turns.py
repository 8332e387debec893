"""Where the turns of a conversation end: from the request, or from the template."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from vllm_kvplugins.errors import coded
from vllm_kvplugins.policies.base import KVCachePolicy

logger = logging.getLogger("vllm.kv_policy")

# In SamplingParams.extra_args; over HTTP it goes into "vllm_xargs".
TURN_ENDS = "turn_ends"
PATCHED_PROMPT = "patched_prompt"

# What the messages of a made-up dialogue say: words that no template writes itself.
_SAID = ("Kvpfirstq", "Kvpfirsta", "Kvpsecondq")
# How many of the last tokens of messages may merge with the opening of the next one.
_SEAM_TOKENS = 2


def asked_turn_ends(sampling_params: Any) -> list[int] | None:
    """What a request says about its turns; None if nothing."""
    extra = getattr(sampling_params, "extra_args", None) or {}
    asked: list[int] | None = extra.get(TURN_ENDS)
    return asked


def turn_ends_problem(sampling_params: Any, prompt_tokens: int) -> str | None:
    """What is wrong with the turn ends of a request, if anything."""
    asked = asked_turn_ends(sampling_params)
    if asked is None:
        return None
    whole = isinstance(asked, list) and all(type(end) is int for end in asked)
    if (
        not whole
        or asked != sorted(set(asked))
        or any(not 0 < end <= prompt_tokens for end in asked)
    ):
        return coded(
            "KVP504",
            f"turn_ends must be ascending token counts from 1 to {prompt_tokens}, the "
            f"length of the prompt; got {str(asked)[:100]}",
        )
    return None


def asked_patched_prompt(sampling_params: Any) -> list[int]:
    """The token ids that a request brings for the policy to ask; none: empty."""
    extra = getattr(sampling_params, "extra_args", None) or {}
    asked: list[int] = extra.get(PATCHED_PROMPT) or []
    return asked


def patched_prompt_problem(
    sampling_params: Any, policy: KVCachePolicy, vocabulary: int
) -> str | None:
    """What is wrong with the patched prompt of a request, if anything."""
    asked = asked_patched_prompt(sampling_params)
    most = policy.max_patched_prompt_tokens
    if not asked:
        return None
    if not most:
        return coded(
            "KVP505",
            f"KV policy {policy.name!r} does not use patched_prompt; remove it",
        )
    if (
        not isinstance(asked, list)
        or not all(type(token) is int and 0 <= token < vocabulary for token in asked)
        or len(asked) > most
    ):
        return coded(
            "KVP505",
            f"patched_prompt must be a list of up to {most} token IDs below "
            f"{vocabulary}; got {str(asked)[:100]}",
        )
    if not asked_turn_ends(sampling_params):
        return coded(
            "KVP505",
            "patched_prompt needs turn_ends, which state where the history ends",
        )
    return None


# -- the token that ends a message ---------------------------------------------


def settled(
    request: dict[str, Any], policy: KVCachePolicy, load_tokenizer: Callable[[], Any]
) -> dict[str, Any]:
    """The policy's settings with the token that ends a message, so that all
    processes know the same.

    It is the one that the tokenizer's chat template puts behind messages. A template
    without such a token leaves it open: ``chat_turns`` then renders the messages of
    each request. Without a template, prompts are taken to use the end of text.

    Args:
        load_tokenizer: the model's; gives None if the engine has none.
    """
    finds_turns = policy.turns is not None and policy.turns.finds_in_prompt
    if not finds_turns or request.get("turn_end_token") is not None:
        return request
    tokenizer = load_tokenizer()
    if tokenizer is None:
        return request
    if getattr(tokenizer, "chat_template", "its own") is None:
        logger.info(
            "KV policy %s: the tokenizer has no chat template; messages end with its "
            "end of text, token %s, unless turn_end_token or turn_ends say otherwise",
            policy.name,
            tokenizer.eos_token_id,
        )
        return request | {"turn_end_token": tokenizer.eos_token_id}
    token = message_end_token(tokenizer)
    if token is None:
        logger.info(
            "KV policy %s: no one token ends the messages of this chat template; the "
            "turns of chat requests are found by rendering their messages, those of "
            "other prompts only from turn_end_token or turn_ends",
            policy.name,
        )
        return request
    return request | {"turn_end_token": token}


def message_end_token(tokenizer: Any) -> int | None:
    """The token that a chat template puts behind the text of every message.

    Only tokens with a name of their own (special and other added ones) count: any
    other may stand inside of a message, too.

    Returns:
        None if the template cannot be rendered, or the messages of a user and of an
        assistant do not end with the same such token.
    """
    roles = ("user", "assistant", "user")
    dialogue = [
        {"role": role, "content": text} for role, text in zip(roles, _SAID, strict=True)
    ]
    try:
        text = tokenizer.apply_chat_template(dialogue, tokenize=False)
    except Exception as error:  # templates raise what they like
        logger.warning("the chat template fails on a plain dialogue: %s", error)
        return None
    after = [text.partition(said)[2].lstrip() for said in _SAID]
    names = sorted(tokenizer.get_added_vocab().items(), key=lambda item: -len(item[0]))
    ends = {
        next((token for name, token in names if rest.startswith(name)), None)
        for rest in after
    }
    if len(ends) > 1:
        return None
    (end,) = ends
    written = tokenizer.encode(text, add_special_tokens=False)
    return end if end is not None and written.count(end) >= len(_SAID) else None


# -- messages that were rendered -----------------------------------------------


def closed_turns(messages: Sequence[Any]) -> list[int]:
    """How many messages the conversation had at the end of each turn.

    A turn ends where a user speaks after somebody else. A system prompt belongs to
    the first turn, as many templates cannot render it alone.
    """
    roles = [message["role"] for message in messages]
    return [
        count
        for count in range(1, len(roles))
        if roles[count] == "user" != roles[count - 1] and "user" in roles[:count]
    ]


def ends_of(
    prompt: Sequence[int], beginnings: Sequence[Sequence[int] | None]
) -> list[int]:
    """Token counts that the whole prompt has in common with each rendering.

    At the seam the last tokens of a rendering may merge with what follows: so many,
    white space mostly, go to the next turn. A rendering that differs earlier tells no
    turn end: the template writes old messages otherwise than new ones (without what
    was thought, say).

    Args:
        beginnings: the first messages alone, rendered; None where that failed.
    """
    counts = set()
    for part in beginnings:
        if not part:
            continue
        pairs = enumerate(zip(part, prompt, strict=False))
        shortest = min(len(part), len(prompt))
        same = next((i for i, (ours, its) in pairs if ours != its), shortest)
        if same and same >= len(part) - _SEAM_TOKENS:
            counts.add(same)
    return sorted(counts)
