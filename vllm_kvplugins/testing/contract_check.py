"""Checks a policy's ``score`` against the contract, on synthetic caches.

No model is needed. The caches contain what a real engine shows rarely: KV heads of
different lengths, gaps in the positions, and NaN in slots that hold no token.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from time import perf_counter

import torch

from vllm_kvplugins.engine.compactor import check_scores
from vllm_kvplugins.errors import KVPolicyError, coded
from vllm_kvplugins.policies.base import KVCachePolicy, LayerView
from vllm_kvplugins.scoring.rotary import Rotary

_OBSERVED_QUERIES = 8  # queries in the step that ``observe`` sees
_HIDDEN_SIZE = 64  # of the output projection


@dataclass(frozen=True, slots=True)
class Shape:
    """A synthetic cache of one request in one layer.

    Attributes:
        group: query heads per KV head.
        slots: slots of the longest KV head.
        uneven: the other KV heads hold fewer tokens.
        gaps: an earlier compaction removed tokens in between.
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
    Shape("head dimension 128, float16", group=1, head_dim=128, dtype=torch.float16),
    Shape("after a compaction", gaps=True),
    Shape("KV heads of different lengths", num_kv_heads=3, uneven=True, gaps=True),
)
LARGE = Shape("8 KV heads x 8192 tokens", 8, 4, 8192, 128)


@dataclass(frozen=True, slots=True)
class Finding:
    """A violation of the contract.

    Attributes:
        shape: name of the cache that shows it.
        problem: what is wrong, with its code and remedy.
    """

    shape: str
    problem: str


def unsupported(policy: KVCachePolicy) -> str | None:
    """Why a policy cannot be checked without a model; None if it can."""
    if not policy.has_score or policy.host_storage is not None:
        return coded(
            "KVP130",
            f"{policy.name} does not drop tokens by a score, so there is nothing to "
            "check; use `kvplugins explain` with a model",
        )
    if policy.probing is not None:
        return coded(
            "KVP131",
            f"{policy.name} runs probes, which need a model; use `kvplugins explain`",
        )
    return None


def check_contract(policy: KVCachePolicy, seed: int = 0) -> list[Finding]:
    """Score synthetic caches and list the violations of the contract.

    Args:
        policy: a compressor that ``unsupported`` accepts.
        seed: seed of all tensors.

    Raises:
        KVPolicyError: KVP130 or KVP131, the policy cannot be checked.
    """
    if (reason := unsupported(policy)) is not None:
        raise KVPolicyError(reason)
    return [
        Finding(shape.name, problem)
        for shape in SHAPES
        for problem in _violations(policy, _with_room(shape, policy), seed)
    ]


def score_ms(policy: KVCachePolicy, seed: int = 0, repeats: int = 5) -> float:
    """Median milliseconds of one ``score`` of ``LARGE`` on this machine's CPU."""
    view = _observed(policy, synthetic_view(policy, LARGE, seed), [])
    policy.score(view)
    times_ms = []
    for _ in range(repeats):
        start = perf_counter()
        policy.score(view)
        times_ms.append((perf_counter() - start) * 1e3)
    return median(times_ms)


def _with_room(shape: Shape, policy: KVCachePolicy) -> Shape:
    """The shape with slots for twice the smallest budget that the policy accepts."""
    slots = 2 * policy.minimum_budget_tokens + 2 * policy.queries_needed
    return replace(shape, slots=max(shape.slots, slots))


# -- caches ------------------------------------------------------------------------


def synthetic_view(
    policy: KVCachePolicy, shape: Shape, seed: int, fill: float = 0.0
) -> LayerView:
    """A view as the engine passes it to ``score``.

    Args:
        fill: content of slots that hold no token.
    """
    generator = torch.Generator().manual_seed(seed)
    heads, slots, dim = shape.num_kv_heads, shape.slots, shape.head_dim
    tokens = slots + slots // 2 if shape.gaps else slots
    num_queries = max(policy.queries_needed, 1)
    positions = torch.full((heads, slots), -1)
    for head in range(heads):
        count = slots - (slots // 3) * head // heads if shape.uneven else slots
        newest = torch.arange(tokens - num_queries, tokens)  # the queries' own slots
        older = torch.randperm(tokens - num_queries, generator=generator)
        kept = torch.cat([older[: count - num_queries], newest]).sort().values
        positions[head, slots - count :] = kept
    valid = positions >= 0

    def random_states() -> torch.Tensor:
        states = torch.randn(heads, slots, dim, generator=generator)
        return states.masked_fill(~valid[..., None], fill).to(shape.dtype)

    keys, values = random_states(), random_states()
    queries = torch.randn(heads * shape.group, num_queries, dim, generator=generator)
    frequencies = 10000.0 ** -(torch.arange(dim // 2) / (dim // 2))
    angles = torch.arange(2 * tokens)[:, None] * frequencies
    output_weights = torch.randn(
        heads * shape.group, dim, _HIDDEN_SIZE, generator=generator
    ).to(shape.dtype)
    return LayerView(
        layer=0,
        positions=positions,
        valid=None if bool(valid.all()) else valid,
        queries=queries[:, : policy.queries_needed].to(shape.dtype),
        query_positions=torch.arange(tokens - policy.queries_needed, tokens),
        scale=dim**-0.5,
        rotary=Rotary(angles.cos(), angles.sin(), is_neox=True),
        observed=None,
        budget_tokens=max(policy.minimum_budget_tokens, slots // 4),
        load_keys=lambda: keys,
        load_values=lambda: values,
        load_output_weights=(
            (lambda: output_weights) if policy.needs_output_weights else None
        ),
    )


def _observed(policy: KVCachePolicy, view: LayerView, faults: list[str]) -> LayerView:
    """The view after the policy has observed the newest queries, if it observes."""
    observation = policy.observation
    if observation is None:
        return view
    heads, _, dim = view.queries.shape
    generator = torch.Generator().manual_seed(1)
    tokens = int(view.positions.max()) + 1
    count = min(_OBSERVED_QUERIES, tokens)
    queries = torch.randn(heads, count, dim, generator=generator)
    step = replace(
        view,
        queries=queries.to(view.keys.dtype),
        query_positions=torch.arange(tokens - count, tokens),
        budget_tokens=0,
    )
    observed = observation.observe(step)
    try:
        restored = observation.unpack(observation.pack(observed))
    except Exception as error:  # code of another package may raise anything
        faults.append(
            coded(
                "KVP138",
                f"a session cannot store what observe returned ({_describe(error)}); "
                "override pack and unpack",
            )
        )
        restored = observed
    return replace(view, observed=restored)


# -- rules -------------------------------------------------------------------------


def _violations(policy: KVCachePolicy, shape: Shape, seed: int) -> Iterator[str]:
    faults: list[str] = []

    def score_with(fill: float) -> torch.Tensor:
        view = synthetic_view(policy, shape, seed, fill)
        return policy.score(_observed(policy, view, faults))

    try:
        view = _observed(policy, synthetic_view(policy, shape, seed), faults)
        before = [tensor.clone() for tensor in _tensors(view)]
        score = policy.score(view)
        check_scores(policy, 0, score, view)
        repeated, with_nan = policy.score(view), score_with(torch.nan)
    except KVPolicyError as error:
        yield str(error)
        return
    except Exception as error:  # code of another package may raise anything
        yield coded("KVP132", f"score raised {_describe(error)}")
        return
    yield from dict.fromkeys(faults)
    if not all(map(torch.equal, before, _tensors(view))):
        yield coded(
            "KVP133",
            "score() changed keys, values, queries or positions; they belong to the "
            "cache, so copy them before changing them",
        )
    valid = view.positions >= 0
    if bool(torch.isnan(score[valid]).any()):
        yield coded("KVP134", "score() returned NaN for a slot that holds a token")
        return
    if not torch.equal(score[valid], repeated[valid]):
        yield coded(
            "KVP135",
            "score() is not deterministic: two calls with the same view differ; seed "
            "its random numbers",
        )
    if not torch.equal(score[valid], with_nan[valid]):
        yield coded(
            "KVP136",
            "scores depend on slots that hold no token; mask them with view.valid",
        )
    if policy.scores_heads_separately and policy.observation is None:
        yield from _shared_heads(policy, view, score)
    yield from _budget_violations(score, valid, view.budget_tokens)


def _shared_heads(
    policy: KVCachePolicy, view: LayerView, score: torch.Tensor
) -> Iterator[str]:
    """A fault if the scores of a KV head change when the others are missing."""
    for head, alone in enumerate(map(policy.score, _heads_alone(view))):
        valid = view.positions[head] >= 0
        own, together = alone[0][valid], score[head][valid]
        # Shapes change the last bits of products.
        finite = together[together.isfinite()].abs()
        tolerance = 1e-3 * float(finite.max()) if len(finite) else 0.0
        if not torch.allclose(own, together, rtol=0.02, atol=tolerance):
            yield coded(
                "KVP129",
                "scores of a KV head depend on other heads, although "
                "scores_heads_separately is True; ranks with other heads would keep "
                "other tokens; return False",
            )
            return


def _heads_alone(view: LayerView) -> Iterator[LayerView]:
    """Views of one KV head each, with its query heads."""
    heads = len(view.positions)
    group = len(view.queries) // heads
    for head in range(heads):
        own, asking = slice(head, head + 1), slice(head * group, (head + 1) * group)
        weights = None
        if view.load_output_weights is not None:
            weights = partial(_part, view.output_weights, asking)
        yield replace(
            view,
            positions=view.positions[own],
            valid=None if view.valid is None else view.valid[own],
            queries=view.queries[asking],
            load_keys=partial(_part, view.keys, own),
            load_values=partial(_part, view.values, own),
            load_output_weights=weights,
        )


def _part(tensor: torch.Tensor, rows: slice) -> torch.Tensor:
    return tensor[rows]


def _budget_violations(
    score: torch.Tensor, valid: torch.Tensor, budget: int
) -> Iterator[str]:
    must_stay = int(((score == torch.inf) & valid).sum(1).max())
    if must_stay > budget:
        yield coded(
            "KVP137",
            f"{must_stay} tokens of a KV head must stay (inf), more than the budget of "
            f"{budget}; return the smallest budget with room for them as "
            "minimum_budget_tokens",
        )
    may_stay = int(((score > -torch.inf) & valid).sum(1).min())
    if may_stay < min(budget, int(valid.sum(1).min())):
        yield coded(
            "KVP137",
            f"only {may_stay} tokens of a KV head may stay (not -inf), fewer than the "
            f"budget of {budget}; use finite scores for the others",
        )
    finite = score[valid & score.isfinite()]
    if len(finite) > 1 and bool((finite == finite[0]).all()):
        yield coded(
            "KVP139",
            "all tokens with a finite score have the same score, so the oldest stay; "
            "return different scores",
        )


def _tensors(view: LayerView) -> tuple[torch.Tensor, ...]:
    return view.keys, view.values, view.queries, view.positions


def _describe(error: Exception) -> str:
    """An error and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    at = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error}{at}"
