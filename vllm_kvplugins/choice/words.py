"""Why a policy was chosen, and what limits the choice, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vllm_kvplugins.amounts import amount
from vllm_kvplugins.choice.candidates import TASKS, Option, fitting_share, host_bytes
from vllm_kvplugins.choice.evidence import KL, MULTIKEY, PASSKEY, Evidence, Measured
from vllm_kvplugins.choice.requests import Request, Workload


def stock_fits(request: Request) -> str:
    """Why no policy is needed."""
    return (
        f"stock vLLM fits: {count(request.concurrency)} of "
        f"{amount(request.stock_request)} each; a policy would only cost answers"
    )


def no_policy(
    others: Sequence[Option], evidence: Evidence, request: Request, min_score: float
) -> Iterator[str]:
    """Why no policy was chosen.

    Args:
        others: policies that fit and lose more than ``min_score`` allows, best first.
    """
    if others:
        cell = others[0].cell
        yield (
            f"no policy that fits finds {min_score:.0%} of the keys that stock vLLM "
            f"finds: {cell.policy} at {cell.share:.0%} of the context finds "
            f"{cell.share_of(evidence.stock) or 0:.0%}"
        )
    else:
        yield "no policy fits at a share of the context that was measured"
    if request.longest_request <= request.usable:
        held = request.usable // request.stock_request
        yield (
            f"stock vLLM loses no answers: the pool holds {count(held)} of "
            f"{amount(request.stock_request)} at a time, and others wait"
        )
    else:
        yield (
            f"nor does stock vLLM: {amount(request.memory)} do not hold one request of "
            f"{amount(request.longest_request)}"
        )


def reasons(
    options: Sequence[Option],
    evidence: Evidence,
    request: Request,
    workload: Workload,
) -> Iterator[str]:
    """Why the first option was chosen, next to stock vLLM and to the second one.

    Args:
        options: policies that fit, best first.
    """
    best, share = options[0], fitting_share(request)
    yield (
        f"stock vLLM needs {amount(request.concurrency * request.stock_request)} for "
        f"{count(request.concurrency)}; {amount(request.memory)} hold {share:.0%} of "
        "each prompt next to its answer"
    )
    fitting = len(options)
    policies = "1 policy that fits" if fitting == 1 else f"{fitting} policies that fit"
    yield (
        f"of {policies}, {best.cell.policy} at {best.cell.share:.0%} of "
        f"the context {_best_at(best.cell, evidence, workload)}"
    )
    if len(options) > 1:
        second = options[1].cell
        yield (
            f"next, {second.policy} at {second.share:.0%}: "
            f"{_scores_text(second, workload)}"
        )


def _best_at(cell: Measured, evidence: Evidence, workload: Workload) -> str:
    what = {
        Workload.DOCUMENT: "finds the most keys",
        Workload.CHAT: "is closest to full KV",
        Workload.AGENT: "is best in keys found and closeness to full KV together",
    }[workload]
    stock = _scores_text(evidence.stock, Workload.DOCUMENT)
    text = f"{what}: {_scores_text(cell, workload)}"
    return text if workload is Workload.CHAT else f"{text} (stock: {stock})"


def _scores_text(cell: Measured, workload: Workload) -> str:
    names = {PASSKEY: "pass keys", MULTIKEY: "keys among sixteen"}
    parts = []
    for task in TASKS[workload]:
        if task == KL:
            parts.append(f"KL {cell.mean(KL):.3f} nats")
        elif (found := cell.found(task)) is not None:
            parts.append(f"{found[0]} of {found[1]} {names[task]}")
    return ", ".join(parts)


def notes(
    best: Option, evidence: Evidence, request: Request, workload: Workload
) -> Iterator[str]:
    """What the choice extrapolates, and what it needs besides device memory."""
    tokens = " and ".join(f"{count:,}" for count in evidence.tokens)
    yield (
        f"extrapolated: measured on {' and '.join(evidence.models)}, with {tokens} "
        f"tokens, not on your model or texts; your prompts are "
        f"{request.prompt_tokens / evidence.tokens[-1]:.1f} times as long. Measure "
        "them: benchmarks/quality/quality.py"
    )
    samples = best.cell.found(PASSKEY) or best.cell.found(MULTIKEY)
    if samples:
        yield (
            f"{samples[1]} questions per task: differences of a few keys may be "
            "chance; the policies' pages test them"
        )
    keeps_all = evidence.contracts[best.cell.policy].keeps_all
    if best.prefill_block is not None and keeps_all:
        yield (
            "the prompt does not fit the pool, so it moves to host memory while it is "
            "read (prefill_block); its tokens still attend to all of it. What "
            "generated tokens find was measured without prefill_block"
        )
    elif best.prefill_block is not None:
        yield (
            "the prompt does not fit the pool, so the policy compresses while it reads "
            "it (prefill_block). Quality was measured without prefill_block"
        )
    host = host_bytes(best.cell, request)
    if host:
        total = amount(host * request.concurrency)
        yield f"needs up to {total} of host memory in addition"
    if workload is Workload.CHAT:
        yield "sessions keep caches between turns and take host memory in addition"
    if not any(best.cell.speed.values()):
        yield "the speed of these settings was not measured"


def count(requests: int) -> str:
    """``1 request``, ``2 requests``."""
    return "1 request" if requests == 1 else f"{requests:,} requests"
