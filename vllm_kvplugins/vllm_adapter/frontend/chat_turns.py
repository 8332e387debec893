"""Finds the turn ends of chat requests while vLLM renders them.

Only the front end has the messages and the chat template. To find a turn end, it
renders the messages before it alone; their tokens are the beginning of the whole
prompt. Request parameters that are found in this way travel with the rendered prompt,
until ``request_validation`` copies them into the request.
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
from vllm_kvplugins.vllm_adapter.config.request_params import (
    TURN_ENDS,
    requested_turn_ends,
)
from vllm_kvplugins.vllm_adapter.frontend import chat_episodes
from vllm_kvplugins.vllm_adapter.frontend.turn_ends import (
    common_prefixes,
    messages_per_turn_end,
)

logger = init_logger("vllm.kv_policy")

# Key in a rendered prompt, next to its tokens: parameters for the request.
REQUEST_PARAMETERS = "kv_policy_parameters"
_INSTALLED = "_kvplugins_installed"


def install() -> None:
    """Wrap vLLM's rendering of chats; idempotent."""
    if getattr(BaseRenderer, _INSTALLED, False):
        return
    setattr(BaseRenderer, _INSTALLED, True)
    render, render_async = BaseRenderer.render_chat, BaseRenderer.render_chat_async

    @functools.wraps(render)
    def render_chat(
        self: BaseRenderer, conversations: Any, *args: Any, **kwargs: Any
    ) -> Any:
        _prepare(self, conversations)
        rendered_conversations, prompts = render(self, conversations, *args, **kwargs)
        for messages, prompt in zip(conversations, prompts, strict=True):
            counts = _messages_to_render(self, messages, prompt)
            if counts:
                renderings = [
                    _render_beginning(self, messages[:count], *args, **kwargs)
                    for count in counts
                ]
                ends = common_prefixes(prompt["prompt_token_ids"], renderings)
                prompt[REQUEST_PARAMETERS] = _parameters(self, messages, prompt, ends)
        return rendered_conversations, prompts

    @functools.wraps(render_async)
    async def render_chat_async(
        self: BaseRenderer, conversations: Any, *args: Any, **kwargs: Any
    ) -> Any:
        _prepare(self, conversations)
        rendered_conversations, prompts = await render_async(
            self, conversations, *args, **kwargs
        )
        for messages, prompt in zip(conversations, prompts, strict=True):
            counts = _messages_to_render(self, messages, prompt)
            if counts:
                renderings = await asyncio.gather(
                    *(
                        _render_beginning_async(self, messages[:count], *args, **kwargs)
                        for count in counts
                    )
                )
                ends = common_prefixes(prompt["prompt_token_ids"], renderings)
                # In a thread, because the encoder would block the event loop.
                prompt[REQUEST_PARAMETERS] = await asyncio.to_thread(
                    _parameters, self, messages, prompt, ends
                )
        return rendered_conversations, prompts

    BaseRenderer.render_chat = render_chat
    BaseRenderer.render_chat_async = render_chat_async


def add_parameters(policy: KVCachePolicy, prompt: Any, sampling_params: Any) -> None:
    """Copy the parameters found for a rendered prompt into its request.

    A request that brings its own turn ends stays unchanged.
    """
    parameters = prompt.get(REQUEST_PARAMETERS) if isinstance(prompt, dict) else None
    if policy.turns is None or parameters is None or sampling_params is None:
        return
    if requested_turn_ends(sampling_params) is None:
        # A new dictionary: other requests may share the old one.
        sampling_params.extra_args = (sampling_params.extra_args or {}) | parameters


def parameters_of_episodes(prompt: Any) -> list[dict[str, Any]]:
    """Request parameters for each episode of a rendered chat; its own come first.

    Empty if the chat is not compressed.
    """
    others = prompt.get(chat_episodes.OTHER_EPISODES)
    return [] if others is None else [prompt[REQUEST_PARAMETERS], *others]


def _prepare(renderer: BaseRenderer, conversations: Any) -> None:
    policy = policy_of(renderer.config)
    turns = policy.turns if policy is not None else None
    if turns is not None and (turns.finds_in_prompt or turns.history_only):
        chat_episodes.materialize_contents(conversations)


def _messages_to_render(
    renderer: BaseRenderer, messages: Any, prompt: Any
) -> list[int]:
    """Numbers of first messages whose renderings show turn ends.

    Empty if the policy needs no turns or finds them in the prompt's tokens.
    """
    policy, tokens = policy_of(renderer.config), prompt.get("prompt_token_ids")
    turns = policy.turns if policy is not None else None
    if turns is None or not tokens:
        return []
    if turns.history_only:
        return chat_episodes.history_length(messages)
    # Tokens that end messages show turns more reliably than renderings.
    if not turns.finds_in_prompt or turns.turn_ends(tokens, None):
        return []
    return messages_per_turn_end(messages)


def _parameters(
    renderer: BaseRenderer, messages: Any, prompt: Any, turn_ends: list[int]
) -> dict[str, Any]:
    """Request parameters for a chat: its turn ends and, with EpiCache, its episode."""
    policy = policy_of(renderer.config)
    assert policy is not None, "messages are rendered again for a policy only"
    if policy.turns is not None and policy.turns.history_only:
        return chat_episodes.request_parameters(
            renderer, policy, messages, prompt, turn_ends
        )
    return {TURN_ENDS: turn_ends}


def _without_answer_prompt(chat_params: Any) -> Any:
    """The same template settings, without the tokens that open an answer."""
    history = {"add_generation_prompt": False, "continue_final_message": False}
    kwargs = chat_params.chat_template_kwargs | history
    return dataclasses.replace(chat_params, chat_template_kwargs=kwargs)


def _render_beginning(
    renderer: BaseRenderer,
    messages: Any,
    chat_params: Any,
    tok_params: Any = None,
    **_: Any,
) -> list[int] | None:
    """Tokens of the first messages; None if the template cannot render them alone."""
    tok_params = tok_params or renderer.default_chat_tok_params
    try:
        _, text = renderer.render_messages(
            messages, _without_answer_prompt(chat_params)
        )
        (prompt,) = renderer.tokenize_prompts([text], tok_params)
    except Exception as error:  # the request is valid: all its messages were rendered
        _log_failure(error)
        return None
    token_ids: list[int] | None = prompt.get("prompt_token_ids")
    return token_ids


async def _render_beginning_async(
    renderer: BaseRenderer,
    messages: Any,
    chat_params: Any,
    tok_params: Any = None,
    **_: Any,
) -> list[int] | None:
    """``_render_beginning`` in the renderer's threads."""
    tok_params = tok_params or renderer.default_chat_tok_params
    try:
        _, text = await renderer.render_messages_async(
            messages, _without_answer_prompt(chat_params)
        )
        (prompt,) = await renderer.tokenize_prompts_async([text], tok_params)
    except Exception as error:  # the request is valid: all its messages were rendered
        _log_failure(error)
        return None
    token_ids: list[int] | None = prompt.get("prompt_token_ids")
    return token_ids


def _log_failure(error: Exception) -> None:
    logger.warning_once(
        "a turn end is unknown, because the chat template cannot render the messages "
        "before it alone: %s",
        str(error),
    )
