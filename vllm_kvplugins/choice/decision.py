"""Which policy, with which settings, serves these requests best by the measurements.

Candidates are the measured cells, a policy at a share of the context. Those that do not
suit the workload, do not fit the memory or lose more answers than ``min_score`` allows
are left out, each with its reason. The others are ranked by the workload's scores.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vllm_kvplugins.choice import words
from vllm_kvplugins.choice.candidates import (
    Option,
    fitting,
    fitting_share,
    host_bytes,
    options_for,
    unsuitable,
)
from vllm_kvplugins.choice.evidence import KL, MULTIKEY, PASSKEY, Evidence, Measured
from vllm_kvplugins.choice.requests import Request, Workload

STOCK = "stock"
# Answers as stock vLLM does, with the plugin's sessions and kernels.
STOCK_WITH_PLUGIN = "full"
# ``served`` goes below this share of the context only if one request needs it.
_LEAST_SHARE = 0.1


def decide(
    evidence: Evidence, request: Request, workload: Workload, min_score: float = 0.0
) -> dict[str, Any]:
    """The choice as plain data.

    Args:
        min_score: smallest share of the keys that stock vLLM finds, see
            ``Measured.share_of``. If no policy that fits reaches it, stock vLLM is
            chosen, which then holds fewer requests at a time.

    Returns:
        ``policy``: a name; ``stock``; or None if not even one request fits;
        ``settings`` and
        ``command`` to serve it; ``reasons``, ``notes``; ``alternatives``: the best
        cell of each policy that fits, the chosen one first; ``excluded``: why other
        policies are not among them.
    """
    stock_bytes = request.concurrency * request.stock_request
    result: dict[str, Any] = {
        "model": request.model,
        "workload": workload.value,
        "prompt_tokens": request.prompt_tokens,
        "answer_tokens": request.answer_tokens,
        "concurrency": request.concurrency,
        "memory": request.memory,
        "min_score": min_score,
        "stock_request_bytes": request.stock_request,
        "stock_bytes": stock_bytes,
        "fitting_share": round(fitting_share(request), 4),
        "policy": None,
        "settings": {},
        "command": "",
        "reasons": [],
        "notes": list(request.notes),
        "alternatives": [],
        "excluded": {},
    }
    if stock_bytes <= request.usable:
        result["policy"], result["command"] = STOCK, _command(request, None, {})
        result["reasons"] = [words.stock_fits(request)]
        return result
    options, result["excluded"] = options_for(evidence, request, workload, min_score)
    if options:
        settings = _settings(options[0], evidence, request, workload)
        result["policy"], result["settings"] = options[0].cell.policy, settings
        result["command"] = _command(request, options[0].cell.policy, settings)
        result["reasons"] = list(words.reasons(options, evidence, request, workload))
        result["notes"] += words.notes(options[0], evidence, request, workload)
        result["alternatives"] = [
            _figures(option, evidence, request, workload) for option in options
        ]
        return result
    others = options_for(evidence, request, workload, 0.0)[0] if min_score else []
    if request.longest_request <= request.usable:
        result["policy"], result["command"] = STOCK, _command(request, None, {})
    result["reasons"] = list(words.no_policy(others, evidence, request, min_score))
    return result


def served(
    evidence: Evidence, request: Request, workload: Workload, min_score: float = 0.0
) -> int:
    """How many of ``request.concurrency`` requests to choose a policy for.

    vLLM queues requests that do not fit, so a limit such as ``--max-num-seqs`` is no
    reason to keep less of each. The policy that is best for one request decides: as
    many as fit with it as measured, at a tenth of the context or more. If stock vLLM
    holds as many, and the policy keeps all tokens, then also with a ``prefill_block``,
    which changes where the tokens of a prompt lie and not what they attend to.
    """
    one = replace(request, concurrency=1)
    options, _ = options_for(evidence, one, workload, min_score)
    if not options:
        return request.concurrency
    best = options[0]
    least = min(best.cell.share, _LEAST_SHARE)
    cells = [
        cell
        for cell in evidence.cells
        if cell.policy == best.cell.policy
        and cell.share >= least
        and not unsuitable(cell, evidence, workload, min_score)
    ]
    number = _most(cells, evidence, request, best.prefill_block is not None)
    held_by_stock = request.usable // request.stock_request
    if number <= held_by_stock and evidence.contracts[best.cell.policy].keeps_all:
        number = _most(cells, evidence, request, with_prefill_block=True)
    return number


def _most(
    cells: Sequence[Measured],
    evidence: Evidence,
    request: Request,
    with_prefill_block: bool,
) -> int:
    """The largest number of requests that fit with one of the cells; at least 1."""

    def fit(number: int) -> bool:
        several = replace(request, concurrency=number)
        found = [fitting(cell, evidence, several) for cell in cells]
        return any(
            isinstance(option, Option)
            and (option.prefill_block is None or with_prefill_block)
            for option in found
        )

    low, high = 1, request.concurrency
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fit(middle) else (low, middle - 1)
    return low


def _settings(
    option: Option, evidence: Evidence, request: Request, workload: Workload
) -> dict[str, Any]:
    """Settings as measured, with the budget for this prompt length."""
    settings = dict(next(iter(option.cell.settings.values())))
    name = option.cell.budget_setting
    budgets = [each[name] for each in option.cell.settings.values()]
    if isinstance(budgets[0], int):
        share = min(budgets) / evidence.tokens[0]
        settings[name] = max(int(share * request.prompt_tokens), 1)
    else:
        settings[name] = min(budgets)
    if option.prefill_block is not None:
        settings["prefill_block"] = option.prefill_block
    if workload is Workload.CHAT and not evidence.contracts[option.cell.policy].turns:
        settings["sessions"] = True
    return settings


def _command(request: Request, policy: str | None, settings: dict[str, Any]) -> str:
    tokens = max(request.longest, request.prompt_tokens + request.answer_tokens)
    parts = [
        *("vllm", "serve", request.model),
        *("--max-model-len", str(tokens)),
        *("--max-num-seqs", str(request.concurrency)),
        *("--kv-cache-memory-bytes", str(request.memory)),
        *("--dtype", request.dtype, "--block-size", str(request.block_size)),
    ]
    if policy is not None:
        parts += ["--kv-policy", policy, "--kv-policy-config", json.dumps(settings)]
    return shlex.join(parts)


def _figures(
    option: Option, evidence: Evidence, request: Request, workload: Workload
) -> dict[str, Any]:
    cell = option.cell
    return {
        "policy": cell.policy,
        "share": cell.share,
        "settings": _settings(option, evidence, request, workload),
        "device_bytes": request.decoding(cell.device_share),
        "host_bytes": host_bytes(cell, request),
        "measured_with_these_settings": option.prefill_block is None,
        "scores": {model: dict(scores) for model, scores in cell.scores.items()},
        "speed": {model: dict(ratios) for model, ratios in cell.speed.items()},
        "share_of_stock": cell.share_of(evidence.stock),
        "pass_keys": cell.found(PASSKEY),
        "keys_of_sixteen": cell.found(MULTIKEY),
        "kl": cell.mean(KL),
    }
