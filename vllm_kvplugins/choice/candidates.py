"""Measured policies that suit a workload and fit the memory, best first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from vllm_kvplugins.amounts import amount
from vllm_kvplugins.choice.evidence import KL, MULTIKEY, PASSKEY, Evidence, Measured
from vllm_kvplugins.choice.requests import Request, Workload

# Granularity and limits of a recommended prefill_block, in tokens.
_BLOCK_STEP, _LARGEST_BLOCK = 256, 2048
# Shares of keys found that differ by less count as equal: about the standard error of a
# share of 0.8 of 80 questions.
_EQUAL_SCORE = 0.04
# Divergences that differ by less count as equal; means of 20 samples vary by more.
_EQUAL_KL_NATS = 0.01
# Speeds, as shares of stock's, that differ by less count as equal; medians of three
# rounds vary by more.
_EQUAL_SPEED = 0.05
TASKS = {
    Workload.DOCUMENT: (PASSKEY, MULTIKEY),
    Workload.CHAT: (KL,),
    Workload.AGENT: (PASSKEY, MULTIKEY, KL),
}


@dataclass(frozen=True, slots=True)
class Option:
    """A measured policy that fits.

    Attributes:
        prefill_block: tokens of a prompt between two compactions, without which the
            prompt does not fit; None: it fits as measured.
    """

    cell: Measured
    prefill_block: int | None


def options_for(
    evidence: Evidence, request: Request, workload: Workload, min_score: float
) -> tuple[list[Option], dict[str, str]]:
    """The best option of each policy, best first; and why others are left out."""
    excluded = dict.fromkeys(evidence.partly, "not measured on all models at any share")
    found: list[Option] = []
    # The largest share last: its reason is the one that is kept.
    for cell in sorted(evidence.cells, key=lambda cell: cell.share):
        reason = unsuitable(cell, evidence, workload, min_score)
        option = reason or fitting(cell, evidence, request)
        if isinstance(option, Option):
            found.append(option)
        else:
            excluded[cell.policy] = option
    best: dict[str, Option] = {}
    for option in _ranked(found, evidence, workload):
        best.setdefault(option.cell.policy, option)
    excluded = {p: reason for p, reason in excluded.items() if p not in best}
    return list(best.values()), excluded


def unsuitable(
    cell: Measured, evidence: Evidence, workload: Workload, min_score: float
) -> str:
    """Why a cell does not suit a workload, or loses too much; "" if it suits."""
    contract = evidence.contracts[cell.policy]
    if cell.mean(*TASKS[workload]) is None:
        return "a task of this workload is not measured"
    if workload is Workload.CHAT:
        if not contract.sessions:
            return "no sessions: every turn computes the whole history again"
        if not (contract.turns or contract.keeps_all):
            return "compresses the whole history again at every turn"
    if workload is Workload.AGENT and not contract.prefix_cache:
        return "reads no prompt through the prefix cache"
    if not min_score:
        return ""
    score = cell.share_of(evidence.stock)
    if score is None:
        return "the keys that it finds are not measured"
    if score < min_score:
        return f"at {cell.share:.0%} it finds {score:.0%} of the keys that stock finds"
    return ""


def fitting(cell: Measured, evidence: Evidence, request: Request) -> Option | str:
    """The option, or why the policy does not fit the memory.

    A prompt is held completely until it is read, next to the requests that decode, and
    vLLM starts only if the longest request fits. With ``prefill_block`` only the kept
    tokens and one block must fit.
    """
    if request.host_memory is not None:
        host = host_bytes(cell, request) * request.concurrency
        if host > request.host_memory:
            return f"needs {amount(host)} of host memory"
    held = request.decoding(cell.device_share)
    others = (request.concurrency - 1) * held
    prompt = request.bytes_of(request.prompt_tokens) + request.other_bytes
    whole = max(others + prompt, others + held, request.longest_request)
    if whole <= request.usable:
        return Option(cell, None)
    if others + held > request.usable:
        return f"needs {amount(others + held)} at the smallest measured share"
    if not evidence.contracts[cell.policy].prefill_block:
        return f"holds a whole prompt while it reads it: {amount(whole)}"
    room = (request.usable - others - held) // request.token_bytes
    block = min(room // _BLOCK_STEP * _BLOCK_STEP, _LARGEST_BLOCK)
    if block < _BLOCK_STEP:
        return f"no room for a prefill_block of {_BLOCK_STEP} tokens"
    return Option(cell, block)


def _ranked(
    options: Sequence[Option], evidence: Evidence, workload: Workload
) -> list[Option]:
    """Best first; equal scores: less divergence from full KV, less device memory, more
    tokens/s, less host memory.

    ``agent`` adds the ranks in keys found and in divergence. Policies that fit as they
    were measured come before those that need a ``prefill_block``, with which nothing
    was measured.
    """

    def keys(option: Option) -> float:
        return -(option.cell.mean(PASSKEY, MULTIKEY) or 0.0)

    def divergence(option: Option) -> float:
        mean = option.cell.mean(KL)
        return math.inf if mean is None else mean

    def slowness(option: Option) -> float:
        return -evidence.speed_of(option.cell.policy)

    found = _ranks(map(keys, options), _EQUAL_SCORE)
    far = _ranks(map(divergence, options), _EQUAL_KL_NATS)
    slow = _ranks(map(slowness, options), _EQUAL_SPEED)
    score: dict[Workload, Callable[[Option], float]] = {
        Workload.DOCUMENT: lambda o: found[keys(o)],
        Workload.CHAT: lambda o: far[divergence(o)],
        Workload.AGENT: lambda o: found[keys(o)] + far[divergence(o)],
    }
    return sorted(
        options,
        key=lambda o: (
            o.prefill_block is not None,
            score[workload](o),
            far[divergence(o)],
            o.cell.device_share,
            slow[slowness(o)],
            o.cell.host_share,
            o.cell.policy,
        ),
    )


def _ranks(values: Iterable[float], tolerance: float) -> dict[float, int]:
    """The rank of each value, smallest first. Values at most ``tolerance`` above the
    smallest one of a rank share it."""
    ranks: dict[float, int] = {}
    rank, first = -1, float("-inf")
    for value in sorted(set(values)):
        if value - first > tolerance:
            rank, first = rank + 1, value
        ranks[value] = rank
    return ranks


def host_bytes(cell: Measured, request: Request) -> int:
    """Host memory of one request."""
    return round(cell.host_share * request.stock_request)


def fitting_share(request: Request) -> float:
    """Share of each prompt that the memory can hold, next to the answers."""
    per_request = request.usable / request.concurrency
    left = per_request - request.bytes_of(request.answer_tokens) - request.bytes_of(1)
    return max(0.0, min(1.0, left / request.bytes_of(request.prompt_tokens)))
