"""What a chat chose about sessions, while vLLM renders it.

A request's parameters reach the engine after its chat was rendered. But rendering may
look up the clustering of a conversation, and a request without a session must not.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from vllm.entrypoints.common.offline import OfflineInferenceMixin
from vllm.renderers.online_renderer import OnlineRenderer

from vllm_kvplugins.vllm_adapter.config.request_params import KV_SESSION, uses_sessions

_INSTALLED = "_kvplugins_session_choice"
_may_read: ContextVar[bool] = ContextVar("kvp_may_read_sessions", default=True)


def may_read() -> bool:
    """Whether the chat that is being rendered may use what sessions have stored.

    True where nothing is known about the request, as for a program that renders chats
    itself.
    """
    return _may_read.get()


def install() -> None:
    """Wrap vLLM's functions that know both a chat and its parameters; idempotent."""
    if getattr(OnlineRenderer, _INSTALLED, False):
        return
    setattr(OnlineRenderer, _INSTALLED, True)
    preprocess = OnlineRenderer.preprocess_chat
    add_requests = OfflineInferenceMixin._add_chat_requests
    of_preprocess = inspect.signature(preprocess)
    of_add_requests = inspect.signature(add_requests)

    @functools.wraps(preprocess)
    async def preprocess_chat(self: OnlineRenderer, *args: Any, **kwargs: Any) -> Any:
        call = of_preprocess.bind(self, *args, **kwargs)
        extra = getattr(call.arguments["request"], "vllm_xargs", None) or {}
        with _reading(bool(extra.get(KV_SESSION, True))):
            return await preprocess(self, *args, **kwargs)

    @functools.wraps(add_requests)
    def add_chat_requests(
        self: OfflineInferenceMixin, *args: Any, **kwargs: Any
    ) -> Any:
        call = of_add_requests.bind(self, *args, **kwargs)
        params = call.arguments["params"]
        # Chats of one call are rendered together: one that may not decides for all.
        all_params = params if isinstance(params, Sequence) else [params]
        with _reading(all(map(uses_sessions, all_params))):
            return add_requests(self, *args, **kwargs)

    OnlineRenderer.preprocess_chat = preprocess_chat
    OfflineInferenceMixin._add_chat_requests = add_chat_requests


@contextmanager
def _reading(may: bool) -> Iterator[None]:
    """Say what chats that are rendered in the block may read."""
    token = _may_read.set(may)
    try:
        yield
    finally:
        _may_read.reset(token)
