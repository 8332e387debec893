"""Budgets at which every policy holds the same number of tokens on the device.

``budget`` has a different meaning in each policy: all resident tokens, or tokens
fetched in addition to sinks, window and first layers. A policy's residency plan says
how many tokens it holds. We choose the largest budget whose plan holds no more than a
share of the context.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from _quality_rows import Job
from _serving_rows import label_of

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.errors import KVPolicyError
from vllm_kvplugins.plan.geometry import Geometry, Lengths


def read_policies(policies: list[dict[str, Any]]) -> None:
    """Parse policies, including those of other packages, before any work starts.

    Raises:
        KVPolicyError: a policy is unknown, or its settings are wrong.
    """
    for policy in policies:
        if policy:
            parse_policy(dict(policy))


# Policies for conversations compress finished turns only. The budget is fitted to a
# conversation whose last turn has this many tokens.
LAST_TURN_TOKENS = 64


def held_tokens(policy: dict[str, Any], prompt_tokens: int, geometry: Geometry) -> int:
    """Tokens per KV head that the device holds after prefill, on average.

    What a retriever holds next to its pages, such as means and codes, counts as the
    tokens that would take as many bytes.

    Raises:
        KVPolicyError: the policy's settings are invalid.
    """
    parsed = parse_policy(dict(policy))
    finished = max(prompt_tokens - LAST_TURN_TOKENS, 1)
    turn_ends = (finished,) if parsed.turns is not None else ()
    plan = parsed.plan(Lengths(prompt_tokens, turn_ends), geometry)
    held = plan.resident_blocks(prompt_tokens) * geometry.block_size
    if parsed.retrieval is None:
        return held
    outside = parsed.retrieval.device_bytes(prompt_tokens, geometry)
    return held + -(-outside // geometry.kv_bytes_per_token)


def most_held(share: float, prompt_tokens: int, geometry: Geometry) -> int:
    """Slots that a share of the prompt may occupy.

    Counts whole pages, plus the newest, partly filled block, which no policy frees.
    """
    size = geometry.block_size
    full = prompt_tokens // size * size
    pages = -(-max(round(share * prompt_tokens) - (prompt_tokens - full), 1) // size)
    return (pages + (full < prompt_tokens)) * size


def fit(
    policy: dict[str, Any], share: float, prompt_tokens: int, geometry: Geometry
) -> dict[str, Any]:
    """The policy with the largest budget that holds no more than a share.

    Args:
        policy: settings without a budget.
        share: maximum resident share of the prompt.
        prompt_tokens: length of a typical prompt.
        geometry: of the model's cache.

    Returns:
        The policy with a relative budget, so that it fits other prompt lengths too.

    Raises:
        KVPolicyError: the smallest budget holds more, or the settings are wrong.
    """
    max_held = most_held(share, prompt_tokens, geometry)
    setting = budget_setting(policy)
    assert setting is not None, f"{policy} has no budget"
    as_share = _takes_shares(policy, setting)

    def at(tokens: int) -> dict[str, Any]:
        budget = round(tokens / prompt_tokens, 5) if as_share else tokens
        return policy | {setting: budget}

    def held(tokens: int) -> int:
        return held_tokens(at(tokens), prompt_tokens, geometry)

    high = round(share * prompt_tokens)
    if held(high) <= max_held:
        return policy | {setting: share} if as_share else at(high)
    low = 1  # invariant: low fits, high does not
    least = held(low)
    if least > max_held:
        raise KVPolicyError(
            f"holds {least} of {prompt_tokens} tokens however small its budget, more "
            f"than {max_held}"
        )
    while high - low > 1:
        middle = (low + high) // 2
        fits = held(middle) <= max_held
        low, high = (middle, high) if fits else (low, middle)
    return at(low)


def budget_setting(policy: dict[str, Any]) -> str | None:
    """Name of the setting that limits what a policy holds; None if it has none."""
    parsed = parse_policy(dict(policy))
    names = ("budget", "ratio")
    return next((name for name in names if hasattr(parsed, name)), None)


def _takes_shares(policy: dict[str, Any], setting: str) -> bool:
    """Whether the budget may be a share of the prompt."""
    try:
        parse_policy(policy | {setting: 0.5})
    except KVPolicyError:
        return False
    return True


def jobs_of(
    policies: list[dict[str, Any]],
    shares: list[float],
    prompt_tokens: int,
    geometry: Geometry,
) -> Iterator[Job]:
    """Stock first, then every policy at every budget; once if it has its own budget.

    Raises:
        KVPolicyError: a policy's settings are wrong.
    """
    yield Job({}, None, "stock")
    for policy in policies:
        if not policy:
            continue
        setting = budget_setting(policy)
        if setting is None or setting in policy:
            yield Job(policy, None, label_of(policy))
            continue
        yield from (job_at(policy, share, prompt_tokens, geometry) for share in shares)


def job_at(
    policy: dict[str, Any], share: float, prompt_tokens: int, geometry: Geometry
) -> Job:
    """The job of one policy and share; ``problem`` is set if no budget fits."""
    label = label_of(policy)
    try:
        return Job(fit(policy, share, prompt_tokens, geometry), share, label)
    except KVPolicyError as error:
        return Job(policy, share, label, str(error))
