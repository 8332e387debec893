"""Reports of the policy in streamed chats.

vLLM returns the ``kv_transfer_params`` of a request in responses that are not streamed.
For a streamed chat that asks for a report (``kv_report``), this module sends them as
one more event, in front of the end of the stream.
"""

from __future__ import annotations

import functools
import inspect
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat

from vllm_kvplugins.vllm_adapter.config.request_params import KV_REPORT

_INSTALLED = "_kvplugins_installed"
_END = "data: [DONE]\n\n"
_FIELD = "kv_transfer_params"  # vLLM's, of responses that are not streamed

_Chunks = Callable[[AsyncIterator[Any]], AsyncGenerator[str, None]]


def install() -> None:
    """Wrap vLLM's generator of chat streams; idempotent."""
    if getattr(OpenAIServingChat, _INSTALLED, False):
        return
    setattr(OpenAIServingChat, _INSTALLED, True)
    original = OpenAIServingChat.chat_completion_stream_generator
    signature = inspect.signature(original)

    @functools.wraps(original)
    def generator(self: OpenAIServingChat, *args: Any, **kwargs: Any) -> Any:
        call = signature.bind(self, *args, **kwargs)
        if not (call.arguments["request"].vllm_xargs or {}).get(KV_REPORT):
            return original(self, *args, **kwargs)

        def chunks(results: AsyncIterator[Any]) -> AsyncGenerator[str, None]:
            call.arguments["result_generator"] = results
            stream: AsyncGenerator[str, None] = original(*call.args, **call.kwargs)
            return stream

        arguments = call.arguments
        ids = {"id": arguments["request_id"], "model": arguments["model_name"]}
        return with_report(chunks, arguments["result_generator"], ids)

    OpenAIServingChat.chat_completion_stream_generator = generator


async def with_report(
    chunks: _Chunks, results: AsyncIterator[Any], ids: dict[str, str]
) -> AsyncGenerator[str, None]:
    """The events of a chat stream, with the request's report in front of the last one.

    Args:
        chunks: vLLM's generator of events, given the outputs of the engine.
        results: the outputs of the engine; the last one has the report.
        ids: ``id`` and ``model`` of the stream's events.
    """
    returned: dict[str, Any] = {}

    async def watched() -> AsyncGenerator[Any, None]:
        async for result in results:
            returned.update(result.kv_transfer_params or {})
            yield result

    async with aclosing(watched()) as outputs, aclosing(chunks(outputs)) as events:
        async for event in events:
            if event == _END and returned:
                yield f"data: {json.dumps(_event(ids, returned))}\n\n"
            yield event


def _event(ids: dict[str, str], returned: dict[str, Any]) -> dict[str, Any]:
    """An event without a choice, as vLLM's event with the usage."""
    return {
        **ids,
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "choices": [],
        _FIELD: returned,
    }
