"""Finds turn ends and system prompts of chat requests while vLLM renders them.

Only the front end has the messages and the chat template. ``turn_search`` renders each
chat once more and compares. Request parameters that are found in this way travel with
the rendered prompt, until ``request_validation`` copies them into the request.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import math
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from vllm.renderers.base import BaseRenderer

from vllm_kvplugins.policies.base import KVCachePolicy
from vllm_kvplugins.vllm_adapter.config.engine_config import policy_of
from vllm_kvplugins.vllm_adapter.config.request_params import (
    LOOP_ENDS,
    TURN_ENDS,
    requested_loop_ends,
    requested_turn_ends,
)
from vllm_kvplugins.vllm_adapter.frontend import (
    chat_episodes,
    loop_search,
    shared_prefix,
)
from vllm_kvplugins.vllm_adapter.frontend.conversation_turns import turn_starts
from vllm_kvplugins.vllm_adapter.frontend.turn_search import (
    RenderedChat,
    Steps,
    log,
    turn_ends,
)

# Key in a rendered prompt, next to its tokens: parameters for the request.
REQUEST_PARAMETERS = "kv_policy_parameters"
_INSTALLED = "_kvplugins_installed"
_OFFSETS = "prompt_token_offsets"  # vLLM's key: the characters of each token
_Result = TypeVar("_Result")


def install() -> None:
    """Wrap vLLM's rendering of chats; idempotent."""
    if getattr(BaseRenderer, _INSTALLED, False):
        return
    setattr(BaseRenderer, _INSTALLED, True)
    render, render_async = BaseRenderer.render_chat, BaseRenderer.render_chat_async
    signature = inspect.signature(render)

    @functools.wraps(render)
    def render_chat(self: BaseRenderer, *args: Any, **kwargs: Any) -> Any:
        call = _Call(self, signature.bind(self, *args, **kwargs))
        conversations, prompts = render(**call.arguments)
        _result_of(call.add_parameters(prompts, _synchronous(self)))
        return conversations, prompts

    @functools.wraps(render_async)
    async def render_chat_async(self: BaseRenderer, *args: Any, **kwargs: Any) -> Any:
        call = _Call(self, signature.bind(self, *args, **kwargs))
        conversations, prompts = await render_async(**call.arguments)
        await call.add_parameters(prompts, _asynchronous(self))
        return conversations, prompts

    BaseRenderer.render_chat = render_chat
    BaseRenderer.render_chat_async = render_chat_async


def add_parameters(policy: KVCachePolicy, prompt: Any, sampling_params: Any) -> None:
    """Copy the parameters found for a rendered prompt into its request.

    A request that brings its own turn ends, or loop ends, stays unchanged.
    """
    parameters = prompt.get(REQUEST_PARAMETERS) if isinstance(prompt, dict) else None
    if policy.turns is None or parameters is None or sampling_params is None:
        return
    if (
        requested_turn_ends(sampling_params) is None
        and requested_loop_ends(sampling_params) is None
    ):
        # A new dictionary: other requests may share the old one.
        sampling_params.extra_args = (sampling_params.extra_args or {}) | parameters


def parameters_of_episodes(prompt: Any) -> list[dict[str, Any]]:
    """Request parameters for each episode of a rendered chat; its own come first.

    Empty if the chat is not compressed.
    """
    others = prompt.get(chat_episodes.OTHER_EPISODES)
    return [] if others is None else [prompt[REQUEST_PARAMETERS], *others]


class _Call:
    """One call of vLLM's ``render_chat``, under a policy that may need turns.

    Attributes:
        arguments: arguments of the call. If turns or system prompts are searched, the
            tokenizer is to report the characters of each token, and contents are no
            iterators.
    """

    def __init__(self, renderer: BaseRenderer, bound: inspect.BoundArguments) -> None:
        self._renderer = renderer
        self.arguments = dict(bound.arguments)
        self.arguments |= self.arguments.pop("kwargs", {})
        policy = policy_of(renderer.config)
        turns = policy.turns if policy is not None else None
        needs_turns = turns and (turns.finds_in_prompt or turns.history_only)
        self._policy = policy if needs_turns else None
        self._finds_prefix = policy is not None and shared_prefix.are_found_in_chats(
            renderer.config, policy
        )
        self._history_only = bool(turns and turns.history_only)
        self._loop_tokens = turns.loop_tokens if turns else None
        if self._policy is not None:
            chat_episodes.prepare(renderer, self._policy)
        if self._policy is None and not self._finds_prefix:
            return
        params = self.arguments.get("tok_params") or renderer.default_chat_tok_params
        self._wants_offsets = params.return_token_offsets
        params = dataclasses.replace(params, return_token_offsets=True)
        self.arguments["tok_params"] = params
        materialize(self.arguments["conversations"])

    async def add_parameters(self, prompts: Sequence[Any], steps: Steps) -> None:
        """Add the parameters of its request to each prompt."""
        if self._policy is None and not self._finds_prefix:
            return
        conversations = self.arguments["conversations"]
        for messages, prompt in zip(conversations, prompts, strict=True):
            offsets = prompt.get(_OFFSETS)
            if not self._wants_offsets:
                prompt.pop(_OFFSETS, None)
            if self._finds_prefix and "prompt_token_ids" in prompt:
                chat = self._rendered(messages, [], prompt, offsets)
                found = await shared_prefix.system_prompt_tokens(chat, steps)
                prompt[shared_prefix.PROMPT_KEY] = found
            if self._policy is None:
                continue
            # Images and other media change the length of the prompt; a policy may
            # still find turns in its tokens.
            if prompt["type"] == "token":
                parameters = await self._parameters(messages, prompt, offsets, steps)
            elif self._history_only:
                log("a chat is not compressed: it has parts that are not text")
                parameters = {}
            else:
                continue
            if self._history_only:
                # Without turn ends, the policy would take the chat for a plain text.
                parameters = {TURN_ENDS: []} | parameters
            prompt[REQUEST_PARAMETERS] = parameters

    def _rendered(
        self, messages: Any, starts: list[int], prompt: Any, offsets: Any
    ) -> RenderedChat:
        return RenderedChat(
            messages,
            starts,
            self.arguments["chat_params"],
            self.arguments["tok_params"],
            prompt["prompt_token_ids"],
            prompt.get("prompt"),
            offsets,
        )

    async def _parameters(
        self, messages: Any, prompt: Any, offsets: Any, steps: Steps
    ) -> dict[str, Any]:
        """Request parameters for a chat: its turns and, with EpiCache, its episode."""
        starts = turn_starts(messages)
        may_have_a_long_loop = len(prompt["prompt_token_ids"]) > (
            self._loop_tokens or math.inf
        )
        if self._history_only and not any(starts) and not may_have_a_long_loop:
            return {}  # There is no history, and no loop to compress.
        chat = self._rendered(messages, starts, prompt, offsets)
        tokenizer = self._renderer.get_tokenizer()
        ends = await turn_ends(chat, tokenizer, steps)
        of_loops = await loop_search.loop_ends(
            chat, ends, self._loop_tokens, tokenizer, steps
        )
        found = {TURN_ENDS: ends} | ({LOOP_ENDS: of_loops} if of_loops else {})
        if not self._history_only:
            return found
        if not of_loops:
            found[TURN_ENDS] = ends[-1:]  # No other turn counts.
        # In a thread, because the encoder would block the event loop.
        parameters: dict[str, Any] = await steps.in_thread(
            chat_episodes.request_parameters,
            self._renderer,
            self._policy,
            messages,
            starts[-1],
            prompt,
            found,
        )
        return parameters


def materialize(conversations: Sequence[Sequence[Any]]) -> None:
    """Turn message contents that are iterators into lists, because we read them again.

    vLLM's request validation can produce iterators for contents with several parts. It
    turns iterators of tool calls into lists itself.
    """
    for messages in conversations:
        for message in messages:
            content = message.get("content")
            if isinstance(content, Iterator):
                message["content"] = list(content)


def _synchronous(renderer: BaseRenderer) -> Steps:
    async def render(messages: Any, params: Any) -> Any:
        return renderer.render_messages(messages, params)[1]

    async def tokenize(texts: Sequence[str], params: Any) -> list[list[int]]:
        prompts: list[Any] = [{"prompt": text} for text in texts]
        tokenized: Any = renderer.tokenize_prompts(prompts, params)
        return [prompt["prompt_token_ids"] for prompt in tokenized]

    async def call(function: Any, *args: Any) -> Any:
        return function(*args)

    return Steps(render, tokenize, call)


def _asynchronous(renderer: BaseRenderer) -> Steps:
    async def render(messages: Any, params: Any) -> Any:
        return (await renderer.render_messages_async(messages, params))[1]

    async def tokenize(texts: Sequence[str], params: Any) -> list[list[int]]:
        prompts: list[Any] = [{"prompt": text} for text in texts]
        tokenized: Any = await renderer.tokenize_prompts_async(prompts, params)
        return [prompt["prompt_token_ids"] for prompt in tokenized]

    return Steps(render, tokenize, asyncio.to_thread)


def _result_of(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Result of a coroutine whose steps are all synchronous."""
    try:
        coroutine.send(None)
    except StopIteration as finished:
        result: _Result = finished.value
        return result
    raise AssertionError("a synchronous step waited")
