"""Parses and validates the policy configuration that a user wrote."""

from __future__ import annotations

import difflib
import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_kvplugins.errors import KVPolicyError, coded, codes_in, refuse
from vllm_kvplugins.policies.base import KVCachePolicy
from vllm_kvplugins.policies.registry import get_policy_class
from vllm_kvplugins.sessions.settings import (
    SESSION_SETTINGS,
    SessionSettings,
    session_part,
)

CONFIG_KEY = "kv_policy"  # in vLLM's additional_config


class KernelSettings(BaseModel):
    """What attends to the pages; part of ``--kv-policy-config``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kernel: Literal["auto", "flash", "flashinfer", "triton"] = Field(
        default="auto",
        description="Attention kernel: on a GPU FlashAttention or this package's own "
        "in Triton, auto: the first if it can, or FlashInfer; on a CPU vLLM's own, "
        "auto.",
    )


def parse_policy(request: Any) -> KVCachePolicy:
    """Build a policy from ``{"name": "snapkv", "budget": 512, …}``.

    A bare name works too.

    Raises:
        KVPolicyError: everything that is wrong with it, in one message.
    """
    if isinstance(request, str):
        request = {"name": request}
    if not isinstance(request, dict) or not isinstance(request.get("name"), str):
        raise KVPolicyError(
            coded(
                "KVP029",
                "kv_policy must be the name of a policy or a mapping with a 'name', "
                f'such as {{"name": "snapkv", "budget": 512}}; got {request!r}',
            )
        )
    name = request["name"]
    cls = get_policy_class(name)
    sessions, kernel = session_part(request), _kernel_part(request)
    taken = {"name", *sessions, *kernel}
    options = {k: v for k, v in request.items() if k not in taken}
    reasons: list[str] = []
    written = False
    try:
        written = SessionSettings.model_validate(sessions).session_dir is not None
    except ValidationError as error:
        reasons = [_explain(SessionSettings, item) for item in error.errors()]
    try:
        KernelSettings.model_validate(kernel)
    except ValidationError as error:
        reasons += [_explain(KernelSettings, item) for item in error.errors()]
    try:
        policy = cls.model_validate(options)
    except ValidationError as error:
        reasons = [_explain(cls, item) for item in error.errors()] + reasons
        refuse(f"KV policy {name!r} cannot be configured like this", reasons)
        raise AssertionError("unreachable") from error
    reasons = policy.problems() + reasons
    if policy.spans is not None and sessions.get("sessions", sessions):
        reasons.append(
            coded(
                "KVP034",
                f"{name} does not support sessions; remove {', '.join(sessions)}",
            )
        )
    if written and policy.retrieval is not None:
        reasons.append(
            coded(
                "KVP035",
                f"{name} does not support session_dir, because its indices are not "
                "written to files; remove it to keep sessions in memory",
            )
        )
    refuse(f"KV policy {name!r} cannot be configured like this", reasons)
    return policy


def parse_sessions(request: Any) -> SessionSettings:
    """The session settings of a request that ``parse_policy`` accepts."""
    parts = session_part(request) if isinstance(request, dict) else {}
    return SessionSettings.model_validate(parts)


def _kernel_part(request: dict[str, Any]) -> dict[str, Any]:
    return {k: request[k] for k in KernelSettings.model_fields if k in request}


def parse_kernel(request: dict[str, Any] | str) -> str:
    """The kernel that a request asks for which ``parse_policy`` accepts."""
    part = _kernel_part(request) if isinstance(request, dict) else {}
    return KernelSettings.model_validate(part).kernel


def parse_options(text: str) -> dict[str, Any]:
    """Read ``--kv-policy-config``: a JSON object.

    Raises:
        KVPolicyError: not JSON, or not an object.
    """
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise KVPolicyError(
            coded(
                "KVP028",
                f"--kv-policy-config is not JSON ({error.msg} at character "
                f"{error.pos}): {text!r}; write for example '{{\"budget\": 512}}'",
            )
        ) from error
    if not isinstance(options, dict):
        raise KVPolicyError(
            coded(
                "KVP028",
                "--kv-policy-config must be a JSON object such as "
                f"'{{\"budget\": 512}}'; got {text!r}",
            )
        )
    if "name" in options:
        raise KVPolicyError(
            coded(
                "KVP028",
                f"--kv-policy-config must not contain 'name' ({options['name']!r}); "
                "give the name with --kv-policy",
            )
        )
    return options


def describe(policy: KVCachePolicy) -> str:
    """One line with a policy's name and all its settings."""
    parts = []
    for key in type(policy).model_fields:
        value = getattr(policy, key)
        parts.append(f"{key}={getattr(value, 'name', value)}")
    return " ".join([policy.name, *parts])


def _explain(cls: type[BaseModel], item: Any) -> str:
    """One pydantic error as a sentence that says what to do."""
    where = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        known = sorted(
            {*cls.model_fields, *SESSION_SETTINGS, *KernelSettings.model_fields}
        )
        near = difflib.get_close_matches(where, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        listed = ", ".join(known) or "none"
        return coded("KVP036", f"unknown setting {where!r}: {hint}(settings: {listed})")
    message: str = item["msg"].removeprefix("Value error, ")
    if codes_in(message):
        return message
    if not where:
        return coded("KVP037", message)
    return coded("KVP037", f"{where}: {message} (got {item['input']!r})")
