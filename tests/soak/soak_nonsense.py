"""Malformed requests, the same for every server.

Each has a name. The reference is the answer of stock vLLM without a policy: a policy
must not change it. Known 5xx answers of stock vLLM are listed below with their reason;
any other 5xx is a finding.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from soak_model import NAME
from soak_server import MAX_TOKENS

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

_BASE: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": NAME, "prompt": [11, 12, 13], "max_tokens": 2},
    CHAT: {
        "model": NAME,
        "messages": [{"role": "user", "content": "w11 w12"}],
        "max_tokens": 2,
    },
}

_DEEP: Any = 1
for _ in range(60):
    _DEEP = [_DEEP]

# Every field gets each of these values; most have the wrong type for most fields.
_VALUES: dict[str, Any] = {
    "null": None,
    "true": True,
    "minus one": -1,
    "huge": 2**70,
    "minus huge": -(2**70),
    "fraction": 0.5,
    "infinity": float("inf"),
    "nan": float("nan"),
    "text": "nonsense",
    "empty list": [],
    "mixed list": [1, "a", None],
    "deep list": _DEEP,
    "empty object": {},
    "object": {"a": {"b": [-1, 1e300]}},
}
# `n` and `best_of` get no large numbers: every server accepts and executes those.
_FIELDS = {
    COMPLETIONS: ("prompt", "echo", "suffix", "logprobs", "allowed_token_ids"),
    CHAT: ("messages", "tools", "tool_choice", "chat_template_kwargs", "top_logprobs"),
}
_SHARED_FIELDS = (
    "model",
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "stop",
    "stop_token_ids",
    "stream",
    "stream_options",
    "logit_bias",
    "repetition_penalty",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "response_format",
    "priority",
    "cache_salt",
    "vllm_xargs",
    "kv_transfer_params",
    "no_such_field",
)

# Fields for which stock vLLM answers invalid values with 500, and why.
KNOWN_5XX = {
    "top_k: huge": "msgpack cannot send integers of more than 64 bits to the engine",
    "xargs kv_transfer_params text": "taken for the field of that name, unchecked",
    "xargs kv_transfer_params number": "the same",
    "xargs kv_transfer_params list": "the same",
}

_HUGE_PROMPT = [11] * (MAX_TOKENS + 1)
_REMOTE = {"do_remote_prefill": True}
# Bodies with a fault of their own: field -> name -> value.
_SPECIAL: dict[str, dict[str, dict[str, Any]]] = {
    COMPLETIONS: {
        "prompt too long": {"prompt": _HUGE_PROMPT},
        "prompt fills the context": {"prompt": _HUGE_PROMPT[1:]},
        "prompt and answer too long": {"prompt": [11] * 700, "max_tokens": 101},
        "token out of vocabulary": {"prompt": [10**9]},
        "negative token": {"prompt": [-5]},
        "empty text": {"prompt": ""},
        "prompts of two kinds": {"prompt": [[11], "w11"]},
        "a million in the stop list": {"stop": ["x"] * 10**6},
    },
    CHAT: {
        "no such role": {"messages": [{"role": "ghost", "content": "w11"}]},
        "no role": {"messages": [{"content": "w11"}]},
        "no content": {"messages": [{"role": "user"}]},
        "content of numbers": {"messages": [{"role": "user", "content": [1, 2]}]},
        "empty content": {"messages": [{"role": "user", "content": ""}]},
        "an image": {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": "data:,x"}},
                    ],
                }
            ]
        },
        "too many words": {"messages": [{"role": "user", "content": "w11 " * 5000}]},
        "a template of its own": {"chat_template": "{{ 1 / 0 }}"},
        "tool without a name": {"tools": [{"type": "function", "function": {}}]},
    },
}
_SHARED_SPECIAL: dict[str, dict[str, Any]] = {
    "max_tokens 0": {"max_tokens": 0},
    "max_tokens of the context": {"max_tokens": MAX_TOKENS},
    "temperature 3": {"temperature": 3},
    "min_tokens above max_tokens": {"min_tokens": 5, "max_tokens": 2},
    "n 0": {"n": 0},
    "n -1": {"n": -1},
    "greedy n 2": {"n": 2, "temperature": 0},
    "bias on no token": {"logit_bias": {"999999": 1}},
    "beam search": {"use_beam_search": True, "n": 2},
    "options without stream": {"stream_options": {"include_usage": True}},
    "remote prefill": {"kv_transfer_params": _REMOTE},
    "remote decode": {"kv_transfer_params": {"do_remote_decode": True}},
    "remote blocks": {
        "kv_transfer_params": _REMOTE
        | {
            "remote_block_ids": [-1, 10**12, [[]]],
            "remote_engine_id": -(2**70),
            "remote_host": ["nowhere"],
            "remote_port": "x",
        }
    },
    "remote prefill of a list": {"kv_transfer_params": {"do_remote_prefill": [[1]]}},
    "remote tokens a text": {
        "kv_transfer_params": _REMOTE | {"remote_prefill_cached_tokens": "many"}
    },
    "remote tokens huge": {
        "kv_transfer_params": _REMOTE | {"remote_prefill_cached_tokens": 2**62}
    },
    "remote tokens negative": {
        "kv_transfer_params": _REMOTE | {"remote_prefill_cached_tokens": -5}
    },
    "ec_transfer_params": {"ec_transfer_params": {"a": [-1]}},
    "xargs negative": {"vllm_xargs": {"budget": -1, "kv_policy": -0.5}},
    "xargs huge": {"vllm_xargs": {"budget": 2**70, "kv_policy": -(10**30)}},
    "xargs in 63 bits": {"vllm_xargs": {"budget": 2**62, "kv_policy": -(2**62)}},
    "xargs of lists": {"vllm_xargs": {"kv_policy": [1, "a", -0.5]}},
    "xargs nested": {"vllm_xargs": {"kv_policy": [[1], {"a": 1}]}},
    "xargs kv_transfer_params text": {"vllm_xargs": {"kv_transfer_params": "x"}},
    "xargs kv_transfer_params number": {"vllm_xargs": {"kv_transfer_params": -7}},
    "xargs kv_transfer_params list": {"vllm_xargs": {"kv_transfer_params": [1]}},
}
# Invalid values of the conversation fields. Stock vLLM ignores these fields.
_BAD_TURNS: dict[str, Any] = {
    "text": "x",
    "a number": 3,
    "descending": [2, 1],
    "twice": [1, 1],
    "zero": [0],
    "negative": [-1],
    "fraction": [0.5],
    "of texts": ["1"],
    "beyond the prompt": [10**6],
    "in 63 bits": [2**62],
}
_BAD_PATCHES: dict[str, Any] = {
    "text": "x",
    "a number": 7,
    "negative": [-1],
    "beyond the vocabulary": [10**6],
    "in 63 bits": [2**62],
    "of texts": ["1"],
    "too long": [11] * 500,
}
_SAID: dict[str, dict[str, Any]] = {
    f"turn_ends {name}": {"turn_ends": value} for name, value in _BAD_TURNS.items()
} | {
    f"patched_prompt {name}": {"turn_ends": [1], "patched_prompt": value}
    for name, value in (_BAD_PATCHES | {"alone": [11]}).items()
}
_SAID["patched_prompt alone"].pop("turn_ends")
_SHARED_SPECIAL |= {name: {"vllm_xargs": value} for name, value in _SAID.items()}
_RAW: dict[str, bytes] = {
    "no body": b"",
    "not JSON": b"{nonsense",
    "cut off": b'{"model": "soak", "prompt": [1, 2',
    "null": b"null",
    "a list": b"[]",
    "a number": b"7",
    "not UTF-8": b'{"model": "\xff\xfe"}',
    "zero bytes": b"\0" * 1000,
    "deep": b"[" * 100_000,
    "an empty object": b"{}",
    "two megabytes": b'{"model": "' + b"x" * (2 << 20) + b'"}',
}


def refused_by_policy(needs_turns: bool) -> set[str]:
    """Names of the cases that stock vLLM accepts and a policy refuses.

    Args:
        needs_turns: whether it reads turn_ends. A patched prompt is refused by all:
            by most because they take none.
    """
    names = [name for name in _SAID if needs_turns or name.startswith("patched")]
    return {f"{_kind(path)} {name}" for path in _BASE for name in names}


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    path: str
    body: bytes
    method: str = "POST"
    content_type: str = "application/json"


def all_cases() -> list[Case]:
    """All cases, always in the same order."""
    cases = []
    for path, base in _BASE.items():
        bodies: dict[str, dict[str, Any]] = {}
        for field in (*_SHARED_FIELDS, *_FIELDS[path]):
            for name, value in _VALUES.items():
                bodies[f"{field}: {name}"] = {field: value}
        bodies |= _SHARED_SPECIAL | _SPECIAL[path]
        for name, changes in bodies.items():
            cases.append(_case(path, name, json.dumps(base | changes).encode()))
        for field in base:
            without = {k: v for k, v in base.items() if k != field}
            body = json.dumps(without).encode()
            cases.append(_case(path, f"without {field}", body))
        cases += [_case(path, name, body) for name, body in _RAW.items()]
        whole = json.dumps(base).encode()
        cases.append(_case(path, "as text", whole, content_type="text/plain"))
        for method in ("GET", "PUT", "DELETE"):
            cases.append(_case(path, method, whole, method=method))
    return cases


def _case(path: str, name: str, body: bytes, **more: str) -> Case:
    return Case(f"{_kind(path)} {name}", path, body, **more)


def _kind(path: str) -> str:
    return "chat" if path == CHAT else "completions"
