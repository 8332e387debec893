"""Parses and validates the policy configuration that a user wrote."""

from __future__ import annotations

import difflib
import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_kvplugins.choice import AUTO
from vllm_kvplugins.choice.settings import AutoSettings
from vllm_kvplugins.errors import KVPolicyError, coded, codes_in, refuse
from vllm_kvplugins.policies.base import KVCachePolicy
from vllm_kvplugins.policies.registry import get_policy_class
from vllm_kvplugins.sessions.settings import (
    SESSION_SETTINGS,
    SessionSettings,
    session_part,
)

CONFIG_KEY = "kv_policy"  # in vLLM's additional_config

Model = TypeVar("Model", bound=BaseModel)


class KernelSettings(BaseModel):
    """Choice of the attention kernel; part of ``--kv-policy-config``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kernel: Literal["auto", "flash", "flashinfer", "triton"] = Field(
        default="auto",
        description="Attention kernel. On a GPU: FlashAttention (flash), FlashInfer, "
        "or this package's Triton kernel; auto: FlashAttention where it can run, else "
        "Triton. On a CPU: auto, vLLM's kernel.",
    )


class PrefixSettings(BaseModel):
    """Prefixes that requests share; part of ``--kv-policy-config``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shared_prefix: Annotated[int, Field(ge=1)] | Literal["system", "none"] = Field(
        default="system",
        description="First tokens that stay exact and that requests share through the "
        "prefix cache: those of a chat's system prompt and tools (system), this many "
        "tokens of every prompt, or none. The budget counts the tokens behind them.",
    )
    shared_prefix_limit: int = Field(
        default=4096,
        ge=0,
        description="Maximum number of such tokens of a system prompt, or of a request "
        "that names its shared_prefix.",
    )


def parse_policy(request: Any) -> KVCachePolicy:
    """Build a policy from ``{"name": "snapkv", "budget": 512, …}``, or from its name.

    Raises:
        KVPolicyError: the policy cannot be configured in this way; lists all reasons.
    """
    request = named(request)
    cls = get_policy_class(request["name"])
    sessions, kernel = session_part(request), _kernel_part(request)
    prefix = _prefix_part(request)
    others = {"name", *sessions, *kernel, *prefix}
    options = {key: value for key, value in request.items() if key not in others}
    policy, reasons = _validated(cls, options)
    if policy is not None:
        # Policies write most reasons without a code; they are about settings.
        reasons += [
            reason if codes_in(reason) else coded("KVP037", reason)
            for reason in policy.problems()
        ]
    session_settings, session_reasons = _validated(SessionSettings, sessions)
    reasons += session_reasons + _validated(KernelSettings, kernel)[1]
    reasons += _validated(PrefixSettings, prefix)[1]
    if policy is not None:
        reasons += _prefix_problems(policy, prefix)
        reasons += _session_problems(policy, sessions, session_settings)
    refuse(f"KV policy {cls.name!r} cannot be configured like this", reasons)
    assert policy is not None, "a policy that was not built has reasons"
    return policy


def named(request: Any) -> dict[str, Any]:
    """The request as a mapping with a name.

    Raises:
        KVPolicyError: KVP029, it is neither a name nor a mapping with one.
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
    return request


def is_auto(request: Any) -> bool:
    """Whether the user asked for ``auto``, which stands for a policy."""
    return bool(named(request)["name"] == AUTO)


def check_request(request: Any) -> None:
    """Raise if no engine can be configured like this.

    Raises:
        KVPolicyError: see ``parse_policy`` and ``parse_auto``.
    """
    if is_auto(request):
        parse_auto(request)
    else:
        parse_policy(request)


def parse_auto(request: Any) -> tuple[AutoSettings, dict[str, Any]]:
    """Read ``{"name": "auto", "workload": "chat", …}``.

    Returns:
        ``auto``'s own settings; those of sessions, kernel and shared prefix, for
        whichever policy is chosen.

    Raises:
        KVPolicyError: KVP051, a setting belongs to a policy; or a value is invalid.
    """
    request = named(request)
    parts: dict[type[BaseModel], dict[str, Any]] = {
        SessionSettings: session_part(request),
        KernelSettings: _kernel_part(request),
        PrefixSettings: _prefix_part(request),
    }
    passed = {key: value for part in parts.values() for key, value in part.items()}
    own = {k: v for k, v in request.items() if k != "name" and k not in passed}
    unknown = sorted(own.keys() - AutoSettings.model_fields)
    known = {k: v for k, v in own.items() if k not in unknown}
    settings, reasons = _validated(AutoSettings, known)
    reasons += [_not_of_auto(name) for name in unknown]
    for cls, part in parts.items():
        reasons += _validated(cls, part)[1]
    refuse(f"KV policy {AUTO!r} cannot be configured like this", reasons)
    assert settings is not None, "settings that were not built have reasons"
    return settings, passed


def _not_of_auto(name: str) -> str:
    taken = [*AutoSettings.model_fields, *KernelSettings.model_fields]
    taken += [*PrefixSettings.model_fields, *SESSION_SETTINGS]
    return coded(
        "KVP051",
        f"{AUTO} does not take {name!r}: it chooses the policy and its settings; "
        f"remove it, or name a policy instead of {AUTO} (settings: "
        f"{', '.join(taken)})",
    )


def _validated(
    cls: type[Model], settings: dict[str, Any]
) -> tuple[Model | None, list[str]]:
    """The settings as a model, or None and the reasons why they are invalid."""
    try:
        return cls.model_validate(settings), []
    except ValidationError as error:
        return None, [_explain(cls, item) for item in error.errors()]


def _prefix_problems(policy: KVCachePolicy, given: dict[str, Any]) -> list[str]:
    """Settings of shared prefixes that the policy does not support.

    Args:
        given: settings that the user has set.
    """
    if policy.keeps_shared_prefix or given.get("shared_prefix", "none") == "none":
        return []
    return [
        coded(
            "KVP050",
            f"{policy.name} keeps the tokens of each request in host memory or as "
            "spans, where requests share no prefix; remove shared_prefix",
        )
    ]


def _session_problems(
    policy: KVCachePolicy, given: dict[str, Any], settings: SessionSettings | None
) -> list[str]:
    """Session settings that the policy does not support.

    Args:
        given: settings that the user has set.
        settings: the same, validated; None: they are invalid.
    """
    problems = []
    if policy.spans is not None and given.get("sessions", given):
        problems.append(
            coded(
                "KVP034",
                f"{policy.name} does not support sessions; remove {', '.join(given)}",
            )
        )
    has_files = settings is not None and (settings.session_dir or settings.session_url)
    if has_files and policy.retrieval is not None:
        problems.append(
            coded(
                "KVP035",
                f"{policy.name} does not support session_dir and session_url, because "
                "its indices are not written to files; remove them to keep sessions in "
                "memory",
            )
        )
    return problems


def parse_sessions(request: Any) -> SessionSettings:
    """The session settings of a request that ``parse_policy`` accepts."""
    part = session_part(request) if isinstance(request, dict) else {}
    return SessionSettings.model_validate(part)


def parse_kernel(request: dict[str, Any] | str) -> str:
    """The kernel setting of a request that ``parse_policy`` accepts."""
    part = _kernel_part(request) if isinstance(request, dict) else {}
    return KernelSettings.model_validate(part).kernel


def parse_prefix(request: Any) -> PrefixSettings:
    """The prefix settings of a request that ``parse_policy`` accepts."""
    part = _prefix_part(request) if isinstance(request, dict) else {}
    return PrefixSettings.model_validate(part)


def _prefix_part(request: dict[str, Any]) -> dict[str, Any]:
    return {k: request[k] for k in PrefixSettings.model_fields if k in request}


def _kernel_part(request: dict[str, Any]) -> dict[str, Any]:
    return {k: request[k] for k in KernelSettings.model_fields if k in request}


def parse_options(text: str) -> dict[str, Any]:
    """Read ``--kv-policy-config``: a JSON object.

    Raises:
        KVPolicyError: the text is not a JSON object, or contains a name.
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
    """A pydantic error as a sentence with its remedy."""
    where = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        names = sorted(
            {
                *cls.model_fields,
                *SESSION_SETTINGS,
                *KernelSettings.model_fields,
                *PrefixSettings.model_fields,
            }
        )
        near = difflib.get_close_matches(where, names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        listed = ", ".join(names)
        return coded("KVP036", f"unknown setting {where!r}: {hint}(settings: {listed})")
    message: str = item["msg"].removeprefix("Value error, ")
    if codes_in(message):
        return message
    if not where:
        return coded("KVP037", message)
    return coded("KVP037", f"{where}: {message} (got {item['input']!r})")
