"""Where the turns of a conversation end: from the request, or from the template."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_kvplugins.policies.base import KVCachePolicy

# In SamplingParams.extra_args; over HTTP it goes into "vllm_xargs".
TURN_ENDS = "turn_ends"


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
        return (
            f"turn_ends must be ascending token counts from 1 to {prompt_tokens}, the "
            f"length of the prompt, got {asked!r}"
        )
    return None


def settled(
    request: dict[str, Any], policy: KVCachePolicy, load_tokenizer: Callable[[], Any]
) -> dict[str, Any]:
    """The policy's settings with the token that ends a turn, so that all processes
    know the same.

    Args:
        load_tokenizer: the model's; gives None if the engine has none.
    """
    if not policy.needs_turns or request.get("turn_end_token") is not None:
        return request
    tokenizer = load_tokenizer()
    if tokenizer is None:
        return request
    return request | {"turn_end_token": tokenizer.eos_token_id}
