"""Computes the KV of each prompt once, and loads it in the engines of all policies.

Until the first compaction every policy computes the same keys, values and queries. One
engine without a policy records them; engines with a policy then skip the linear layers
and the attention of the first chunk of a prompt. Everything else runs as usual: the
cache write, the policy's view of queries, compactions, probes, and all later steps.

A step is replayed only if all of its rows are first chunks of recorded prompts.
Otherwise the model computes it. Timings of a replayed prefill mean nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from _prefill_store import Prefill, PrefillStore
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention

from vllm_kvplugins.policies.base import KVCachePolicy
from vllm_kvplugins.vllm_adapter.attention.cpu import PagedPolicyImpl

Rows = list[tuple[int, int]]
Chunks = list[tuple[int, int, Sequence[int]]]


def record_prefills(
    llm: Any, store: PrefillStore, prompts: Iterable[Sequence[int]]
) -> None:
    """Write the prompts that this engine computes in one chunk, unless they exist.

    Args:
        llm: an engine in this process, without a policy.
    """
    missing = {tuple(each) for each in prompts if not store.path(each).exists()}
    model, layers = _parts(llm)
    compute = model.forward

    def forward(input_ids: torch.Tensor, positions: torch.Tensor, *args: Any) -> Any:
        chunks = _first_chunks(input_ids, positions) or []
        new = [chunk for chunk in chunks if tuple(chunk[2]) in missing]
        if not new:
            return compute(input_ids, positions, *args)
        inputs, restore = _watch(layers)
        try:
            hidden = compute(input_ids, positions, *args)
        finally:
            restore()
        for start, stop, tokens in new:
            part = [[each[start:stop] for each in layer] for layer in inputs]
            prefill = Prefill(
                torch.stack([query for query, _, _ in part]),
                torch.stack([torch.stack([key, value]) for _, key, value in part]),
                hidden[start:stop].clone(),
            )
            store.save(tokens, prefill)
            missing.discard(tuple(tokens))
        return hidden

    model.forward = _with_keywords(forward)


def replay_prefills(
    llm: Any, store: PrefillStore, prompts: Iterable[Sequence[int]], policy: Any
) -> None:
    """Load recorded prompts instead of computing them.

    Args:
        llm: an engine in this process, with the policy, on a CPU.
    """
    prefills = store.recorded(prompts)
    model, layers = _parts(llm)
    compute, attend = model.forward, PagedPolicyImpl.attend
    num_queries = _queries_of(policy)

    def forward(input_ids: torch.Tensor, positions: torch.Tensor, *args: Any) -> Any:
        chunks = _first_chunks(input_ids, positions)
        found = chunks and _lookup(chunks, prefills)
        if not found:
            return compute(input_ids, positions, *args)
        PagedPolicyImpl.attend = _attend_not  # type: ignore[method-assign]
        try:
            return _replayed(layers, found, num_queries)
        finally:
            PagedPolicyImpl.attend = attend  # type: ignore[method-assign]

    model.forward = _with_keywords(forward)


def _queries_of(policy: KVCachePolicy) -> int | None:
    """How many of a chunk's newest queries the policy reads; None = all."""
    return None if policy.observation is not None else policy.queries_needed


def _attend_not(*unused: Any) -> None:
    """Leave the output as it is; the next layer takes its input from the record."""


def _with_keywords(forward: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM passes everything by name."""

    def called(
        input_ids: Any,
        positions: Any,
        intermediate_tensors: Any = None,
        inputs_embeds: Any = None,
        **more: Any,
    ) -> Any:
        assert not more, f"the model takes {sorted(more)} too"
        return forward(input_ids, positions, intermediate_tensors, inputs_embeds)

    return called


def _parts(llm: Any) -> tuple[Any, list[Any]]:
    """The model, and its attention layers in order."""
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    context = runner.compilation_config.static_forward_context
    layers = [each for each in context.values() if isinstance(each, Attention)]
    return runner.model, layers


def _watch(
    layers: Sequence[Any],
) -> tuple[list[list[torch.Tensor]], Callable[[], None]]:
    """Collect what each layer gets until the second result is called."""
    inputs: list[list[torch.Tensor]] = []
    handles = [
        layer.register_forward_pre_hook(
            lambda _, given: inputs.append([each.clone() for each in given[:3]])
        )
        for layer in layers
    ]

    def restore() -> None:
        for handle in handles:
            handle.remove()
        assert len(inputs) == len(layers), "a layer took its input by name"

    return inputs, restore


def _first_chunks(input_ids: torch.Tensor, positions: torch.Tensor) -> Chunks | None:
    """Start, stop and tokens of each row; None unless all rows begin at position 0."""
    metadata = get_forward_context().attn_metadata
    if not isinstance(metadata, dict) or not metadata:
        return None  # a dummy run
    bounds = getattr(next(iter(metadata.values())), "query_start_loc", None)
    if bounds is None:
        return None  # a probe, which belongs to no row
    bounds = bounds.tolist()
    rows: Rows = list(itertools.pairwise(bounds))
    if bounds[-1] != len(input_ids) or any(int(positions[start]) for start, _ in rows):
        return None
    return [(start, stop, input_ids[start:stop].tolist()) for start, stop in rows]


def _lookup(
    chunks: Chunks, prefills: dict[tuple[int, ...], Prefill]
) -> list[tuple[int, Prefill]] | None:
    """Tokens and record of each chunk; None unless all are recorded."""
    found = []
    for start, stop, tokens in chunks:
        num_tokens = stop - start
        match = next(
            (
                prefill
                for prompt, prefill in prefills.items()
                if list(prompt[:num_tokens]) == tokens
            ),
            None,
        )
        if match is None:
            return None
        found.append((num_tokens, match))
    return found


def _replayed(
    layers: Sequence[Any], found: list[tuple[int, Prefill]], num_queries: int | None
) -> torch.Tensor:
    for index, layer in enumerate(layers):
        queries = []
        for num_tokens, prefill in found:
            first = 0 if num_queries is None else max(num_tokens - num_queries, 0)
            query = torch.zeros_like(prefill.queries[index, :num_tokens])
            query[first:] = prefill.queries[index, first:num_tokens]
            queries.append(query)
        keys, values = (
            torch.cat([prefill.kv[index, part, :n] for n, prefill in found])
            for part in (0, 1)
        )
        layer(torch.cat(queries), keys, values)
    return torch.cat([prefill.hidden[:n] for n, prefill in found])
