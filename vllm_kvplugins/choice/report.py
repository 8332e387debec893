"""What ``auto`` chose and why, as lines for a log."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from vllm_kvplugins.amounts import amount
from vllm_kvplugins.choice.evidence import Evidence
from vllm_kvplugins.choice.requests import Request


def lines(
    result: Mapping[str, Any],
    chosen: Mapping[str, Any] | None,
    refused: Mapping[str, str],
    evidence: Evidence,
) -> Iterator[str]:
    """The choice, its reasons, costs and limits.

    Args:
        result: of ``decide``.
        chosen: name and settings of the policy that starts; None: stock vLLM.
        refused: candidates that this engine cannot run, with the reasons.
    """
    if chosen is None:
        yield "chose no policy: stock vLLM"
    else:
        settings = {key: value for key, value in chosen.items() if key != "name"}
        yield f"chose {chosen['name']} {json.dumps(settings)}"
    for name, reason in refused.items():
        yield f"cannot run here: {name}: {reason}"
    row = row_of(result, chosen)
    if result["alternatives"] and row is None:
        yield (
            "why: no policy that fits and finds enough keys can run here; stock vLLM "
            "loses no answers, and requests that do not fit wait"
        )
    elif not refused:
        yield from (f"why: {reason}" for reason in result["reasons"])
    if row is not None:
        yield from _costs(row, result)
        yield from (f"note: {note}" for note in result["notes"])
        yield (
            f"note: measured on CPUs only, on {' and '.join(evidence.models)}; larger "
            "models and longer contexts were not"
        )
    if result["excluded"]:
        yield f"left out: {'; '.join(_by_reason(result['excluded']))}"


def row_of(
    result: Mapping[str, Any], chosen: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """The figures of the policy that starts; None if it keeps everything."""
    rows = {row["policy"]: row for row in result["alternatives"]}
    return None if chosen is None else rows.get(chosen["name"])


def _costs(row: Mapping[str, Any], result: Mapping[str, Any]) -> Iterator[str]:
    if (score := row["share_of_stock"]) is not None:
        yield (
            f"answers: finds {score:.0%} of the keys that stock vLLM finds, on the "
            f"measured model where it finds fewest; KL {row['kl'] or 0:.3f} nats"
        )
    yield (
        f"costs: up to {amount(row['host_bytes'])} of host memory per request; the "
        f"device holds {amount(row['device_bytes'])} of it instead of "
        f"{amount(result['stock_request_bytes'])}"
    )
    for model, ratios in row["speed"].items():
        if ratios:
            yield (
                f"costs: {ratios['tokens_per_s_ratio']:.2f} times the tokens/s, "
                f"{ratios['first_token_ms_ratio']:.2f} times the time to the first "
                f"token of stock vLLM ({model}, CPU, one request, median of rounds)"
            )


def _by_reason(excluded: Mapping[str, str]) -> Iterator[str]:
    """Policies that share a reason, together."""
    names: dict[str, list[str]] = {}
    for name, reason in excluded.items():
        names.setdefault(reason, []).append(name)
    return (f"{', '.join(sorted(group))}: {why}" for why, group in names.items())


def recommend_command(request: Request, workload: str, min_score: float) -> str:
    """The command that makes the same choice from the same figures."""
    parts = [
        *("kvplugins", "recommend", request.model),
        *("--context", str(request.prompt_tokens)),
        *("--answer", str(request.answer_tokens)),
        *("--concurrency", str(request.concurrency)),
        *("--memory", str(request.memory), "--workload", workload),
        *("--min-score", str(min_score)),
        *("--max-model-len", str(request.longest)),
        *("--dtype", request.dtype, "--block-size", str(request.block_size)),
    ]
    if request.host_memory is not None:
        parts += ["--host-memory", str(request.host_memory)]
    return shlex.join(parts)
