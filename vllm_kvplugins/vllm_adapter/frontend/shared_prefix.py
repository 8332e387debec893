"""Finds the prefix that a request shares with others.

A prefix comes from, in this order:

1. the request: ``shared_prefix`` in its parameters, a number of tokens;
2. the setting ``shared_prefix``, if it is a number;
3. the chat: its system prompt with the definitions of tools.

It depends on the request alone. What the prefix cache holds decides only whether the
prefix is computed again, so an answer never depends on other requests.

A chat's system prompt ends where two chats differ that ask different questions. The
template is rendered once more with the system prompt and a mark as question, and what
is before the mark is compared with the prompt::

    marked   system prompt, tools <user>MARK
    prompt   system prompt, tools <user>Why? <assistant> ...
             |<-- shared prefix -->|

Cost per chat with a system prompt or tools: a rendering of these. The texts are
compared, and the characters of each token tell which tokens are equal. If the tokenizer
does not report them, the text before the mark is tokenized, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from vllm_kvplugins.config import PrefixSettings, parse_prefix
from vllm_kvplugins.policies.base import KVCachePolicy
from vllm_kvplugins.vllm_adapter.config.engine_config import request_of
from vllm_kvplugins.vllm_adapter.config.request_params import (
    SHARED_PREFIX,
    requested_shared_prefix,
)
from vllm_kvplugins.vllm_adapter.frontend.conversation_turns import TurnsUnknown
from vllm_kvplugins.vllm_adapter.frontend.turn_search import (
    RenderedChat,
    Steps,
    log,
    of_history,
    render,
    unused_word,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Key in a rendered prompt, next to its tokens: tokens of its system prompt.
PROMPT_KEY = "kv_policy_shared_prefix"
_MARK = "Kvpquestionmark"
_SYSTEM_ROLES = ("system", "developer")


# -- what the server does -----------------------------------------------------------


def settings_of(
    vllm_config: VllmConfig, policy: KVCachePolicy
) -> PrefixSettings | None:
    """The server's settings of shared prefixes; None if its requests share none.

    Without vLLM's prefix cache nothing is shared, and a prefix would only cost memory.
    """
    if not policy.keeps_shared_prefix:
        return None
    if not vllm_config.cache_config.enable_prefix_caching:
        return None
    settings = parse_prefix(request_of(vllm_config))
    return None if settings.shared_prefix == "none" else settings


def are_found_in_chats(vllm_config: VllmConfig, policy: KVCachePolicy) -> bool:
    """Whether chats are searched for their system prompt."""
    settings = settings_of(vllm_config, policy)
    return settings is not None and settings.shared_prefix == "system"


# -- requests -------------------------------------------------------------------------


def add_parameter(
    vllm_config: VllmConfig, policy: KVCachePolicy, prompt: Any, sampling_params: Any
) -> None:
    """Write the shared prefix of a request into its parameters, if it has one.

    A request that names one keeps it, up to the limit.
    """
    settings = settings_of(vllm_config, policy)
    if sampling_params is None or settings is None:
        return
    tokens = requested_shared_prefix(sampling_params)
    if tokens is not None:
        tokens = min(tokens, settings.shared_prefix_limit)
    else:
        tokens = _tokens_of(settings, prompt)
    if tokens:
        # A new dictionary: other requests may share the old one.
        own = sampling_params.extra_args or {}
        sampling_params.extra_args = own | {SHARED_PREFIX: tokens}


def tokens_of(vllm_config: VllmConfig, policy: KVCachePolicy, prompt: Any) -> int:
    """Tokens of the shared prefix of a prompt whose request names none."""
    settings = settings_of(vllm_config, policy)
    return 0 if settings is None else _tokens_of(settings, prompt)


def _tokens_of(settings: PrefixSettings, prompt: Any) -> int:
    if isinstance(settings.shared_prefix, int):
        return settings.shared_prefix
    found: int = prompt.get(PROMPT_KEY, 0) if isinstance(prompt, dict) else 0
    limit = settings.shared_prefix_limit
    if found > limit:
        log(
            f"the first {limit} tokens of a system prompt stay exact and are shared, "
            "and the rest is compressed; shared_prefix_limit sets this number"
        )
    return min(found, limit)


# -- chats ----------------------------------------------------------------------------


async def system_prompt_tokens(chat: RenderedChat, steps: Steps) -> int:
    """Number of first tokens that a chat shares with chats that ask something else.

    0 if it has neither a system prompt nor tools.
    """
    roles = (message.get("role") for message in chat.messages)
    num_system = sum(1 for _ in takewhile(_SYSTEM_ROLES.__contains__, roles))
    if not num_system and not chat.chat_params.chat_template_kwargs.get("tools"):
        return 0
    mark = unused_word(_MARK, chat.text)
    question = {"role": "user", "content": mark}
    marked = [*map(dict, chat.messages[:num_system]), question]
    try:
        rendered = await render(marked, of_history(chat.chat_params), steps)
    except TurnsUnknown as unknown:
        log("a system prompt is not shared: the template refuses it", unknown.__cause__)
        return 0
    tokens = rendered.get("prompt_token_ids")
    if tokens is None:
        before, is_written, _ = rendered["prompt"].partition(mark)
        if not is_written:
            return 0
        if chat.offsets is not None and chat.text is not None:
            same = len(before)
            if not chat.text.startswith(before):
                same = _common_length(before, chat.text)
            return sum(1 for _ in takewhile(lambda span: span[1] <= same, chat.offsets))
        params = dataclasses.replace(
            chat.tok_params,
            max_total_tokens=None,
            max_output_tokens=0,
            pad_prompt_tokens=None,
            truncate_prompt_tokens=None,
            return_token_offsets=False,
        )
        (tokens,) = await steps.tokenize([before], params)
    return _common_length(tokens, chat.tokens)


def _common_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Number of first tokens or characters that are equal."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
