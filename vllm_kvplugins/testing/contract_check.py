"""Does a policy's score keep the contract? Asked on made-up caches, without a model.

What a model would show late and one request at a time is asked of a few small tensors:
unlike lengths per KV head, positions with gaps, memory that holds NaN where there is no
token.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter

import torch

from vllm_kvplugins.engine.scores import check_scores
from vllm_kvplugins.errors import KVPolicyError
from vllm_kvplugins.policies.base import KVCachePolicy, LayerView, Retention, Trigger
from vllm_kvplugins.scoring.rotary import Rotary

_STEPS = 8  # queries that ``observe`` is shown


@dataclass(frozen=True, slots=True)
class Shape:
    """A made-up cache of one request and layer.

    Attributes:
        group: query heads per KV head.
        slots: of the longest KV head.
        uneven: other KV heads have fewer tokens.
        gaps: tokens in between are gone already.
    """

    name: str
    num_kv_heads: int = 2
    group: int = 3
    slots: int = 256
    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    uneven: bool = False
    gaps: bool = False


SHAPES = (
    Shape("a prompt"),
    Shape("one KV head, float32", num_kv_heads=1, group=1, dtype=torch.float32),
    Shape("heads of 128, float16", group=1, head_dim=128, dtype=torch.float16),
    Shape("after a compaction", gaps=True),
    Shape("KV heads of unlike length", num_kv_heads=3, uneven=True, gaps=True),
)
LARGE = Shape("8 KV heads x 8192 tokens", 8, 4, 8192, 128)


@dataclass(frozen=True, slots=True)
class Finding:
    """What a policy does on one cache that the contract does not allow."""

    shape: str
    problem: str


def untried(policy: KVCachePolicy) -> str | None:
    """Why a policy cannot be tried without a model; None if it can."""
    if not policy.has_score or policy.retention is not Retention.DROP:
        return f"{policy.name} drops no tokens by a score, so there is nothing to try"
    if policy.observes & Trigger.PROBE:
        return f"{policy.name} probes the model; `kvplugins explain` runs it with one"
    return None


def try_policy(policy: KVCachePolicy, seed: int = 0) -> list[Finding]:
    """Score made-up caches, and list what breaks the contract.

    Args:
        policy: a compressor that can be tried; see ``untried``.
        seed: of all tensors.

    Raises:
        KVPolicyError: it cannot be tried.
    """
    if (why := untried(policy)) is not None:
        raise KVPolicyError(why)
    return [
        Finding(shape.name, problem)
        for shape in SHAPES
        for problem in _problems(policy, grown(shape, policy), seed)
    ]


def score_ms(policy: KVCachePolicy, seed: int = 0, repeats: int = 5) -> float:
    """Median milliseconds of one ``score`` of ``LARGE`` on this machine."""
    view = observed(policy, made_view(policy, LARGE, seed), [])
    policy.score(view)
    taken = []
    for _ in range(repeats):
        started = perf_counter()
        policy.score(view)
        taken.append((perf_counter() - started) * 1e3)
    return median(taken)


def grown(shape: Shape, policy: KVCachePolicy) -> Shape:
    """With room for twice the smallest budget that the policy takes."""
    least = 2 * policy.minimum_budget_tokens + 2 * policy.queries_needed
    return replace(shape, slots=max(shape.slots, least))


# -- caches ------------------------------------------------------------------------


def made_view(
    policy: KVCachePolicy, shape: Shape, seed: int, empty: float = 0.0
) -> LayerView:
    """A view as the engine shows it to ``score``.

    Args:
        empty: what lies in slots without a token.
    """
    generator = torch.Generator().manual_seed(seed)
    heads, slots, dim = shape.num_kv_heads, shape.slots, shape.head_dim
    tokens = slots + slots // 2 if shape.gaps else slots
    wanted = max(policy.queries_needed, 1)
    positions = torch.full((heads, slots), -1)
    for head in range(heads):
        count = slots - (slots // 3) * head // heads if shape.uneven else slots
        newest = torch.arange(tokens - wanted, tokens)  # queries belong to these
        older = torch.randperm(tokens - wanted, generator=generator)
        kept = torch.cat([older[: count - wanted], newest]).sort().values
        positions[head, slots - count :] = kept
    valid = positions >= 0

    def states() -> torch.Tensor:
        found = torch.randn(heads, slots, dim, generator=generator)
        return found.masked_fill(~valid[..., None], empty).to(shape.dtype)

    keys, values = states(), states()
    queries = torch.randn(heads * shape.group, wanted, dim, generator=generator)
    frequencies = 10000.0 ** -(torch.arange(dim // 2) / (dim // 2))
    angles = torch.arange(2 * tokens)[:, None] * frequencies
    return LayerView(
        layer=0,
        keys=keys,
        positions=positions,
        valid=None if bool(valid.all()) else valid,
        queries=queries[:, : policy.queries_needed].to(shape.dtype),
        query_positions=torch.arange(tokens - policy.queries_needed, tokens),
        scale=dim**-0.5,
        rotary=Rotary(angles.cos(), angles.sin(), is_neox=True),
        observed=None,
        budget_tokens=max(policy.minimum_budget_tokens, slots // 4),
        load_values=lambda: values,
    )


def observed(policy: KVCachePolicy, view: LayerView, faults: list[str]) -> LayerView:
    """With what the policy makes of the newest queries, if it observes steps."""
    if not policy.observes_steps:
        return view
    heads, _, dim = view.queries.shape
    generator = torch.Generator().manual_seed(1)
    newest = int(view.positions.max()) + 1
    count = min(_STEPS, newest)
    asked = torch.randn(heads, count, dim, generator=generator)
    step = replace(
        view,
        queries=asked.to(view.keys.dtype),
        query_positions=torch.arange(newest - count, newest),
        budget_tokens=0,
    )
    found = policy.observe(step)
    try:
        again = policy.unpack_observed(policy.pack_observed(found))
    except Exception as error:  # a policy's own code, which may raise anything
        faults.append(
            f"what observe returned cannot be kept with a session ({_said(error)}); "
            "write pack_observed and unpack_observed"
        )
        again = found
    return replace(view, observed=again)


# -- rules -------------------------------------------------------------------------


def _problems(policy: KVCachePolicy, shape: Shape, seed: int) -> Iterator[str]:
    faults: list[str] = []

    def scored(empty: float) -> torch.Tensor:
        view = observed(policy, made_view(policy, shape, seed, empty), faults)
        return policy.score(view)

    try:
        view = observed(policy, made_view(policy, shape, seed), faults)
        before = [part.clone() for part in _parts(view)]
        score = policy.score(view)
        check_scores(policy, 0, score, view)
        again, other = policy.score(view), scored(torch.nan)
    except KVPolicyError as error:
        yield str(error)
        return
    except Exception as error:  # a policy's own code, which may raise anything
        yield _said(error)
        return
    yield from dict.fromkeys(faults)
    if not all(map(torch.equal, before, _parts(view))):
        yield "score changed keys, values, queries or positions; they are the cache's"
    valid = view.positions >= 0
    if bool(torch.isnan(score[valid]).any()):
        yield "score is NaN for a token"
        return
    if not torch.equal(score[valid], again[valid]):
        yield "score is another one when asked again"
    if not torch.equal(score[valid], other[valid]):
        yield "what lies in slots without a token changes scores; see view.valid"
    yield from _room(score, valid, view.budget_tokens)


def _room(score: torch.Tensor, valid: torch.Tensor, budget: int) -> Iterator[str]:
    stay = ((score == torch.inf) & valid).sum(1)
    if int(stay.max()) > budget:
        yield (
            f"{int(stay.max())} tokens of a KV head must stay (inf) at a budget of "
            f"{budget}; minimum_budget_tokens says the smallest one that has room"
        )
    left = ((score > -torch.inf) & valid).sum(1)
    if int(left.min()) < min(budget, int(valid.sum(1).min())):
        yield (
            f"only {int(left.min())} tokens of a KV head may stay (not -inf), fewer "
            f"than the budget of {budget}"
        )
    free = score[valid & score.isfinite()]
    if len(free) > 1 and bool((free == free[0]).all()):
        yield "all tokens that may stay or go have one score: the oldest would stay"


def _parts(view: LayerView) -> tuple[torch.Tensor, ...]:
    return view.keys, view.values, view.queries, view.positions


def _said(error: Exception) -> str:
    """An error of a policy's code, and the line that it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    at = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error}{at}"
