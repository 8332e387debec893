"""Parameters of a request: turns, tool loops, patched prompt, sessions, report.

They are in ``SamplingParams.extra_args``; over HTTP, clients send them in
``vllm_xargs``.
"""

from __future__ import annotations

from typing import Any

from vllm_kvplugins.errors import coded
from vllm_kvplugins.policies.base import KVCachePolicy

TURN_ENDS = "turn_ends"
LOOP_ENDS = "loop_ends"
PATCHED_PROMPT = "patched_prompt"
KV_SESSION = "kv_session"
# Of the session that the request leaves; the name of vLLM's proposal (RFC #52113).
TTL = "ttl"
MAX_TTL_S = 3600  # as there
SHARED_PREFIX = "shared_prefix"
KV_REPORT = "kv_report"
# Written by our front end: index of the request's episode, and number of episodes.
KV_EPISODE = "kv_episode"
_TRANSFER = "kv_transfer_params"  # vLLM's
_SHOWN_CHARACTERS = 100  # of an invalid value, in the error message


def requested_turn_ends(sampling_params: Any) -> list[int] | None:
    """The request's turn ends, as token counts; None if it has none."""
    turn_ends: list[int] | None = _extra_args(sampling_params).get(TURN_ENDS)
    return turn_ends


def requested_loop_ends(sampling_params: Any) -> list[int] | None:
    """Where parts of the request's tool loops end; None if it names no turns either.

    A request that names only turns has no loops.
    """
    loop_ends: list[int] | None = _extra_args(sampling_params).get(LOOP_ENDS)
    if loop_ends is None and requested_turn_ends(sampling_params) is not None:
        return []
    return loop_ends


def requested_patched_prompt(sampling_params: Any) -> list[int]:
    """Token IDs of the request's patched prompt; empty if it has none."""
    patched: list[int] = _extra_args(sampling_params).get(PATCHED_PROMPT) or []
    return patched


def uses_sessions(sampling_params: Any) -> bool:
    """Whether the request continues a session and leaves one, where sessions are on."""
    return bool(_extra_args(sampling_params).get(KV_SESSION, True))


def requested_ttl_s(sampling_params: Any) -> float | None:
    """How long the session that the request leaves is retained; None: no matter."""
    ttl_s: float | None = _extra_args(sampling_params).get(TTL)
    return ttl_s


def wants_report(sampling_params: Any) -> bool:
    """Whether the response is to say what the policy did to the request."""
    return bool(_extra_args(sampling_params).get(KV_REPORT))


def requested_episode(sampling_params: Any) -> tuple[int, int] | None:
    """The request's episode and the number of episodes; None without episodes.

    A client can write it, too. That changes nothing but its own report.
    """
    match _extra_args(sampling_params).get(KV_EPISODE):
        case [int(episode), int(episodes)]:
            return episode, episodes
    return None


def shared_blocks(
    policy: KVCachePolicy, sampling_params: Any, prompt_tokens: int, block_size: int
) -> int:
    """Blocks of a request's shared prefix; 0 without one.

    Scheduler and workers compute the same. Depends on the request alone and not on the
    prefix cache, so that an answer does not depend on other requests.
    """
    tokens = requested_shared_prefix(sampling_params)
    if not tokens or not policy.keeps_shared_prefix:
        return 0
    # The last token of a prompt is always computed.
    return max(min(tokens, prompt_tokens - 1), 0) // block_size


def requested_shared_prefix(sampling_params: Any) -> int | None:
    """Tokens of the request's shared prefix; None if it names none."""
    tokens: int | None = _extra_args(sampling_params).get(SHARED_PREFIX)
    return tokens


def shared_prefix_problem(sampling_params: Any, are_shared: bool) -> str | None:
    """Why the request's shared prefix is invalid; None if it is valid.

    Args:
        are_shared: whether the server shares prefixes.
    """
    tokens = requested_shared_prefix(sampling_params)
    if tokens is None:
        return None
    if type(tokens) is not int or tokens < 0:
        return coded(
            "KVP513",
            f"shared_prefix must be a number of tokens, 0 or more, got {shown(tokens)}",
        )
    if tokens and not are_shared:
        return coded(
            "KVP513",
            f"shared_prefix is {tokens}, but this server shares no prefixes: its KV "
            "policy keeps tokens on the host or as spans, prefix caching is off, or "
            '"shared_prefix" is "none"; remove shared_prefix',
        )
    return None


def kv_session_problem(sampling_params: Any, sessions_on: bool) -> str | None:
    """Why the request's choice about sessions is invalid; None if it is valid.

    Args:
        sessions_on: whether the engine has sessions.
    """
    choice = _extra_args(sampling_params).get(KV_SESSION, False)
    # vLLM turns false and true of vllm_xargs into 0 and 1.
    if type(choice) not in (bool, int) or choice not in (0, 1):
        return coded(
            "KVP512",
            f"kv_session must be true or false, got {shown(choice)}; false: the "
            "request neither continues a session nor leaves one",
        )
    if choice and not sessions_on:
        return coded(
            "KVP512",
            "kv_session is true, but this server keeps no sessions; remove kv_session, "
            'or start the server with "sessions": true in --kv-policy-config',
        )
    return None


def ttl_problem(sampling_params: Any, sessions_on: bool) -> str | None:
    """Why the request's time to live is invalid; None if it is valid.

    Args:
        sessions_on: whether the engine has sessions.
    """
    ttl_s = _extra_args(sampling_params).get(TTL)
    if ttl_s is None:
        return None
    if type(ttl_s) not in (int, float) or not 0 < ttl_s <= MAX_TTL_S:
        return coded(
            "KVP516",
            f"ttl must be a number of seconds, above 0 and at most {MAX_TTL_S}, got "
            f"{shown(ttl_s)}; the session of the request is dropped when it was not "
            "used for so long, and evicted last until then",
        )
    if not sessions_on:
        return coded(
            "KVP516",
            f"ttl is {ttl_s}, but this server keeps no sessions; remove ttl, or start "
            'the server with "sessions": true in --kv-policy-config',
        )
    return None


def kv_report_problem(sampling_params: Any) -> str | None:
    """Why the request's choice of a report is invalid; None if it is valid."""
    choice = _extra_args(sampling_params).get(KV_REPORT, False)
    # vLLM turns false and true of vllm_xargs into 0 and 1.
    if type(choice) in (bool, int) and choice in (0, 1):
        return None
    return coded(
        "KVP515",
        f"kv_report must be true or false, got {shown(choice)}; true: the response "
        "says what the KV policy did to the request",
    )


def turn_ends_problem(sampling_params: Any, prompt_tokens: int) -> str | None:
    """Why the turn ends of a request are invalid; None if they are valid."""
    turn_ends = requested_turn_ends(sampling_params)
    if turn_ends is None:
        return None
    if not _are_ends(turn_ends, prompt_tokens):
        return coded(
            "KVP504",
            f"turn_ends must be ascending token counts from 1 to {prompt_tokens}, the "
            f"length of the prompt; got {shown(turn_ends)}",
        )
    return None


def loop_ends_problem(sampling_params: Any, prompt_tokens: int) -> str | None:
    """Why the loop ends of a request are invalid; None if they are valid."""
    loop_ends = requested_loop_ends(sampling_params)
    if loop_ends is None:
        return None
    if not _are_ends(loop_ends, prompt_tokens):
        return coded(
            "KVP514",
            f"loop_ends must be ascending token counts from 1 to {prompt_tokens}, the "
            f"length of the prompt; got {shown(loop_ends)}",
        )
    if requested_turn_ends(sampling_params) is None:
        return coded(
            "KVP514",
            "loop_ends needs turn_ends, which state to which turns they belong; add "
            "turn_ends ([] if no turn has ended), or remove loop_ends",
        )
    return None


def _are_ends(ends: Any, prompt_tokens: int) -> bool:
    """Whether a value from a request is a list of ascending counts of its tokens."""
    return (
        isinstance(ends, list)
        and all(type(end) is int for end in ends)
        and ends == sorted(set(ends))
        and all(0 < end <= prompt_tokens for end in ends)
    )


def patched_prompt_problem(
    sampling_params: Any, policy: KVCachePolicy, vocab_size: int
) -> str | None:
    """Why the patched prompt of a request is invalid; None if it is valid."""
    patched = requested_patched_prompt(sampling_params)
    max_tokens = policy.max_patched_prompt_tokens
    if not patched:
        return None
    if not max_tokens:
        return coded(
            "KVP505",
            f"KV policy {policy.name!r} does not use patched_prompt; remove it",
        )
    if (
        not isinstance(patched, list)
        or not all(type(token) is int and 0 <= token < vocab_size for token in patched)
        or len(patched) > max_tokens
    ):
        return coded(
            "KVP505",
            f"patched_prompt must be a list of up to {max_tokens} token IDs below "
            f"{vocab_size}; got {shown(patched)}",
        )
    if not requested_turn_ends(sampling_params):
        return coded(
            "KVP505",
            "patched_prompt needs turn_ends, which state where the history ends; add "
            "turn_ends or remove patched_prompt",
        )
    return None


def transfer_problem(sampling_params: Any) -> str | None:
    """Why vLLM would fail on the request's ``kv_transfer_params``; None if it does not.

    The field of this name is checked by vLLM; it is not if ``vllm_xargs`` contains it.
    """
    transfer = _extra_args(sampling_params).get(_TRANSFER)
    if not transfer or isinstance(transfer, dict):
        return None
    return coded(
        "KVP511",
        f"kv_transfer_params must be an object, got {shown(transfer)}; remove it from "
        "vllm_xargs",
    )


def _extra_args(sampling_params: Any) -> dict[str, Any]:
    return getattr(sampling_params, "extra_args", None) or {}


def shown(value: Any) -> str:
    """The beginning of a value, for error messages: clients choose how long it is."""
    text = str(value)
    rest = len(text) - _SHOWN_CHARACTERS
    return (
        text if rest <= 0 else f"{text[:_SHOWN_CHARACTERS]}… ({rest} more characters)"
    )
