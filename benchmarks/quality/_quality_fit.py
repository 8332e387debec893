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


def held_tokens(policy: dict[str, Any], prompt_tokens: int, geometry: Geometry) -> int:
    """Resident slots per KV head after prefill, on average.

    Raises:
        KVPolicyError: the policy's settings are invalid.
    """
    plan = parse_policy(dict(policy)).plan(Lengths(prompt_tokens), geometry)
    return plan.resident_blocks(prompt_tokens) * geometry.block_size


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

    def held(budget: float) -> int:
        return held_tokens(policy | {"budget": budget}, prompt_tokens, geometry)

    if held(share) <= max_held:
        return policy | {"budget": share}
    low, high = 1, round(share * prompt_tokens)  # invariant: low fits, high does not
    least = held(low / prompt_tokens)
    if least > max_held:
        raise KVPolicyError(
            f"holds {least} of {prompt_tokens} tokens however small its budget, more "
            f"than {max_held}"
        )
    while high - low > 1:
        middle = (low + high) // 2
        fits = held(middle / prompt_tokens) <= max_held
        low, high = (middle, high) if fits else (low, middle)
    return policy | {"budget": round(low / prompt_tokens, 5)}


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
        parsed = parse_policy(dict(policy))
        if "budget" in policy or not hasattr(parsed, "budget"):
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
