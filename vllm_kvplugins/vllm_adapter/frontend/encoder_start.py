"""Loads the encoder for episodes when a server starts, before the first chat."""

from __future__ import annotations

import functools
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM

from vllm_kvplugins.vllm_adapter.config.engine_config import policy_of
from vllm_kvplugins.vllm_adapter.frontend.chat_episodes import load_encoder_ahead

_INSTALLED = "_kvplugins_loads_encoder"


def install() -> None:
    """Wrap the start of a server's engine; idempotent."""
    if getattr(AsyncLLM, _INSTALLED, False):
        return
    setattr(AsyncLLM, _INSTALLED, True)
    init = AsyncLLM.__init__

    @functools.wraps(init)
    def loads_encoder(self: AsyncLLM, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        policy = policy_of(self.vllm_config)
        routing = policy.episode_routing if policy is not None else None
        if routing is not None:
            load_encoder_ahead(self.renderer, routing.settings)

    AsyncLLM.__init__ = loads_encoder
