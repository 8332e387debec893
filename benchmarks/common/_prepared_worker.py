"""A policy runtime whose requests have finished prefill, without a model."""

from __future__ import annotations

from typing import Any

import torch

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.engine.heap import Heap
from vllm_kvplugins.engine.requests import Row
from vllm_kvplugins.engine.runtime import PolicyRuntime
from vllm_kvplugins.engine.spans.surprisal import SurprisalModel
from vllm_kvplugins.ops.layout import PageLayout
from vllm_kvplugins.plan.geometry import Geometry

BLOCK, GROUP = 32, 3


def prepare(
    config: dict[str, Any],
    requests: int,
    tokens: int,
    layers: int,
    heads: int,
    dim: int,
    surprisal: SurprisalModel | None = None,
) -> tuple[PolicyRuntime, list[Row], torch.Tensor, torch.Tensor]:
    """Prefill requests of equal length with bfloat16 keys and values around 200
    centres.

    Args:
        surprisal: of the prompts' tokens, for policies that need it.

    Returns:
        The runtime, the rows of a decode step, their lengths, and the block table.
    """
    per_request = tokens // BLOCK + 2
    blocks = requests * per_request
    layout = PageLayout.transposed_keys(BLOCK, dim)
    generator = torch.Generator().manual_seed(0)
    pages = torch.empty(layers * blocks * heads, layout.page_elems).to(torch.bfloat16)
    centres = torch.randn(200, dim, generator=generator)
    for page in pages:  # page by page, to limit temporary memory
        which = torch.randint(200, (2 * BLOCK,), generator=generator)
        rows = centres[which] + 0.5 * torch.randn(2 * BLOCK, dim, generator=generator)
        page.copy_(rows.flatten())
    geometry = Geometry(BLOCK, layers, heads, 2 * layers * heads * dim * 2)
    runtime = PolicyRuntime(parse_policy(config), geometry)
    heap = Heap(pages, layout, layers, blocks, heads)
    runtime.bind_heap(heap, [dim**-0.5] * layers, None, surprisal=surprisal)
    table = torch.arange(blocks, dtype=torch.int32).view(requests, per_request)
    for i in range(requests):
        row = Row(str(i), tokens, 0, tokens, 0)
        runtime.add_request(row.request_id, [0] * tokens)
        runtime.begin_step([row], torch.tensor([tokens]), table[i : i + 1])
        queries = torch.randn(tokens, heads * GROUP, dim).to(torch.bfloat16)
        for layer in range(layers):
            runtime.after_layer(layer, queries)
        runtime.end_step()
    rows = [Row(str(i), tokens, tokens, 1, i) for i in range(requests)]
    return runtime, rows, torch.full((requests,), tokens + 1), table
