"""What only the front end knows of a chat: where its turns end, and its episodes.

It has the messages and the template, so it renders the first ones again: as many
tokens as they have, the whole prompt has had when they were all. What comes of it goes
with the rendered prompt to where the request is made, and into its parameters.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from typing import Any

from vllm.logger import init_logger
from vllm.renderers.base import BaseRenderer

from vllm_kvplugins.policies.base import KVCachePolicy
from vllm_kvplugins.vllm_adapter.config.engine_config import policy_of
from vllm_kvplugins.vllm_adapter.config.turns import (
    TURN_ENDS,
    asked_turn_ends,
    closed_turns,
    ends_of,
)
from vllm_kvplugins.vllm_adapter.frontend import chat_episodes

logger = init_logger("vllm.kv_policy")

# Beside the tokens in a rendered prompt: parameters of the request.
_FOUND = "kv_policy_found"
_INSTALLED = "_kvplugins_installed"


def install() -> None:
    """Wrap the rendering of chats; does nothing the second time."""
    if getattr(BaseRenderer, _INSTALLED, False):
        return
    setattr(BaseRenderer, _INSTALLED, True)
    render, render_async = BaseRenderer.render_chat, BaseRenderer.render_chat_async

    @functools.wraps(render)
    def render_chat(
        self: BaseRenderer, conversations: Any, *args: Any, **kwargs: Any
    ) -> Any:
        _prepare(self, conversations)
        said, prompts = render(self, conversations, *args, **kwargs)
        for messages, prompt in zip(conversations, prompts, strict=True):
            turns = _unseen_turns(self, messages, prompt)
            if turns:
                cut = [_beginning(self, messages[:n], *args, **kwargs) for n in turns]
                ends = ends_of(prompt["prompt_token_ids"], cut)
                prompt[_FOUND] = _parameters(self, messages, prompt, ends)
        return said, prompts

    @functools.wraps(render_async)
    async def render_chat_async(
        self: BaseRenderer, conversations: Any, *args: Any, **kwargs: Any
    ) -> Any:
        _prepare(self, conversations)
        said, prompts = await render_async(self, conversations, *args, **kwargs)
        for messages, prompt in zip(conversations, prompts, strict=True):
            turns = _unseen_turns(self, messages, prompt)
            if turns:
                parts = (
                    _beginning_async(self, messages[:n], *args, **kwargs) for n in turns
                )
                ends = ends_of(prompt["prompt_token_ids"], await asyncio.gather(*parts))
                # encoders take their time, and other requests wait for this thread
                prompt[_FOUND] = await asyncio.to_thread(
                    _parameters, self, messages, prompt, ends
                )
        return said, prompts

    BaseRenderer.render_chat = render_chat
    BaseRenderer.render_chat_async = render_chat_async


def pass_on(policy: KVCachePolicy, prompt: Any, sampling_params: Any) -> None:
    """Put what was found of a rendered prompt into the request's own parameters,
    unless they say something already."""
    found = prompt.get(_FOUND) if isinstance(prompt, dict) else None
    if policy.turns is None or found is None or sampling_params is None:
        return
    if asked_turn_ends(sampling_params) is None:
        sampling_params.extra_args = (sampling_params.extra_args or {}) | found


def requests_of_episodes(prompt: Any) -> list[dict[str, Any]]:
    """What requests to the episodes of a rendered chat are told, its own first."""
    others = prompt.get(chat_episodes.OTHERS)
    return [] if others is None else [prompt[_FOUND], *others]


def _prepare(renderer: BaseRenderer, conversations: Any) -> None:
    policy = policy_of(renderer.config)
    turns = policy.turns if policy is not None else None
    if turns is not None and (turns.finds_in_prompt or turns.history_only):
        chat_episodes.keep_parts(conversations)


def _unseen_turns(renderer: BaseRenderer, messages: Any, prompt: Any) -> list[int]:
    """How many messages close a turn each, where the prompt's tokens do not show it."""
    policy, tokens = policy_of(renderer.config), prompt.get("prompt_token_ids")
    turns = policy.turns if policy is not None else None
    if turns is None or not tokens:
        return []
    if turns.history_only:
        return chat_episodes.history_of(messages)
    # where it is known which token ends a message, and there is one, it says more
    if not turns.finds_in_prompt or turns.turn_ends(tokens, None):
        return []
    return closed_turns(messages)


def _parameters(
    renderer: BaseRenderer, messages: Any, prompt: Any, ends: list[int]
) -> dict[str, Any]:
    """What a request is told of its turns, and of its episode."""
    policy = policy_of(renderer.config)
    assert policy is not None, "nothing was looked for"
    if policy.turns is not None and policy.turns.history_only:
        return chat_episodes.parameters(renderer, policy, messages, prompt, ends)
    return {TURN_ENDS: ends}


def _as_history(chat_params: Any) -> Any:
    """The same template and settings, without the opening of an answer."""
    history = {"add_generation_prompt": False, "continue_final_message": False}
    kwargs = chat_params.chat_template_kwargs | history
    return dataclasses.replace(chat_params, chat_template_kwargs=kwargs)


def _beginning(
    renderer: BaseRenderer,
    messages: Any,
    chat_params: Any,
    tok_params: Any = None,
    **_: Any,
) -> list[int] | None:
    """Tokens of the first messages; None if the template refuses them alone."""
    tok_params = tok_params or renderer.default_chat_tok_params
    try:
        _, text = renderer.render_messages(messages, _as_history(chat_params))
        (prompt,) = renderer.tokenize_prompts([text], tok_params)
    except Exception as error:  # the request itself is sound: it was rendered
        _say(error)
        return None
    token_ids: list[int] | None = prompt.get("prompt_token_ids")
    return token_ids


async def _beginning_async(
    renderer: BaseRenderer,
    messages: Any,
    chat_params: Any,
    tok_params: Any = None,
    **_: Any,
) -> list[int] | None:
    """The same in the front end's threads."""
    tok_params = tok_params or renderer.default_chat_tok_params
    try:
        _, text = await renderer.render_messages_async(
            messages, _as_history(chat_params)
        )
        (prompt,) = await renderer.tokenize_prompts_async([text], tok_params)
    except Exception as error:  # the request itself is sound: it was rendered
        _say(error)
        return None
    token_ids: list[int] | None = prompt.get("prompt_token_ids")
    return token_ids


def _say(error: Exception) -> None:
    logger.warning_once(
        "a turn's end stays unknown, as the chat template cannot render the messages "
        "up to it: %s",
        str(error),
    )
