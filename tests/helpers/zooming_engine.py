"""A fake engine that checks attention to spans against attention to all tokens."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from fake_engine import GROUP, HEAD_DIM, KV_HEADS, LAYERS, SCALE, FakeEngine, Request

from vllm_kvplugins.engine.requests import Row
from vllm_kvplugins.scoring.logits import LogitRules
from vllm_kvplugins.spans.segmentation import Segments

BLOCK, BLOCKS = 4, 120

# (layer, KV head, queries [GROUP, HEAD_DIM], mean keys [spans, HEAD_DIM], attention
# scores of the means [GROUP, spans], variance of keys [spans, HEAD_DIM]) -> [spans]
Promise = Callable[
    [int, int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
]


def attention_to_means(
    layer: int,
    head: int,
    query_rows: torch.Tensor,
    keys: torch.Tensor,
    scores: torch.Tensor,
    variance: torch.Tensor,
) -> torch.Tensor:
    """The ranking of ``router: mean-key``."""
    return scores.softmax(1).sum(0)


def attention_to_spans(
    layer: int,
    head: int,
    query_rows: torch.Tensor,
    keys: torch.Tensor,
    scores: torch.Tensor,
    variance: torch.Tensor,
) -> torch.Tensor:
    """The ranking of ``second_order``."""
    spread = (SCALE * query_rows).square() @ variance.T / 2
    return (scores + spread).softmax(1).sum(0)


class ZoomingEngine(FakeEngine):
    """Checks attention over pages, means and zoomed tokens against attention over all
    tokens.

    Args:
        promise: what spans are ranked by; ``-inf`` = not at all.
        sinks: float32 [LAYERS, KV_HEADS * GROUP], learned sinks.

    Attributes:
        seen: (request, position) -> bool [LAYERS, KV_HEADS, spans], what was zoomed.
        worst: largest difference to the oracle so far.
    """

    def __init__(
        self,
        policy: Any,
        promise: Promise = attention_to_means,
        sinks: torch.Tensor | None = None,
    ) -> None:
        rules = [] if sinks is None else [LogitRules(each) for each in sinks]
        super().__init__(policy, BLOCK, BLOCKS, rules=rules)
        self.promise, self.sinks = promise, sinks
        self.seen: dict[tuple[str, int], torch.Tensor] = {}
        self.worst = 0.0

    def step(self, chunks: dict[str, int]) -> None:
        super().step(chunks)
        zooming = self.spans
        spanned = [row for _, row in zooming._rows]
        if not spanned:
            return
        total = max(row.first_query + row.new_tokens for row in spanned)
        shape = (total, KV_HEADS * GROUP, HEAD_DIM)
        for layer in range(LAYERS):
            queries = torch.zeros(shape)
            for row in spanned:
                request = self.requests[row.request_id]
                at = slice(row.first_query, row.first_query + row.new_tokens)
                own = request.queries[layer, row.computed_tokens : row.after_tokens]
                queries[at] = own
            output = torch.full((total, KV_HEADS * GROUP * HEAD_DIM), torch.nan)
            pages, lengths = self.table.pages[0], self.table.lengths[0]
            kv = zooming._heap.layers[layer]
            zooming.attend(layer, queries, kv, pages, lengths, output)
            for row in spanned:
                self._check_row(row, layer, output.view(shape))
        zooming.check_integrity()

    def _check_row(self, row: Row, layer: int, output: torch.Tensor) -> None:
        state = self.spans._requests[row.request_id]
        request = self.requests[row.request_id]
        for turn in range(row.new_tokens):
            position = row.computed_tokens + turn
            query = request.queries[layer, position].view(KV_HEADS, GROUP, HEAD_DIM)
            for head in range(KV_HEADS):
                predicted, zoomed = see(
                    request,
                    state.segments,
                    state.room,
                    layer,
                    head,
                    position,
                    query,
                    self.promise,
                    None if self.sinks is None else self.sinks[layer],
                )
                key = (row.request_id, position)
                shape = (LAYERS, KV_HEADS, state.segments.num_spans)
                marks = self.seen.setdefault(key, torch.zeros(shape, dtype=torch.bool))
                marks[layer, head, zoomed] = True
                actual = output[row.first_query + turn].view(KV_HEADS, GROUP, HEAD_DIM)
                off = float((actual[head].double() - predicted).abs().max())
                self.worst = max(self.worst, off)
                assert off < 1e-4, (row, layer, head, turn, off)


def see(
    request: Request,
    segments: Segments,
    room: int,
    layer: int,
    head: int,
    position: int,
    query: torch.Tensor,
    promise: Promise,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, list[int]]:
    """Expected output [GROUP, HEAD_DIM] in float64, and the spans that are zoomed."""
    keys = request.keys[layer, head, : position + 1].double()
    values = request.values[layer, head, : position + 1].double()
    query_rows = query[head].double()
    tokens = segments.positions.split(segments.sizes.tolist())
    worth = segments.weights.double().split(segments.sizes.tolist())
    means = [
        ((w[:, None] * keys[t]).sum(0), (w[:, None] * values[t]).sum(0))
        for w, t in zip(worth, tokens, strict=True)
    ]
    scores = torch.stack([query_rows @ key * SCALE for key, _ in means], 1)
    scores += torch.tensor([math.log(len(t)) for t in tokens])
    mean_keys = torch.stack([key for key, _ in means])
    variance = torch.stack(
        [
            (w[:, None] * (keys[t] - mean).square()).sum(0)
            for w, t, mean in zip(worth, tokens, mean_keys, strict=True)
        ]
    )
    # the engine's precision, so that the order of similar spans is the same
    variance = variance.bfloat16().double()
    predicted = promise(layer, head, query_rows, mean_keys, scores, variance)
    zoomed, remaining = [], room
    for span in predicted.argsort(descending=True).tolist():
        if len(tokens[span]) > room or predicted[span] == -math.inf:
            continue
        remaining -= len(tokens[span])
        if remaining < 0:
            break
        zoomed.append(span)
    stays = torch.ones(position + 1, dtype=torch.bool)
    stays[segments.positions] = False
    for span in zoomed:
        stays[tokens[span]] = True
    whole = [s for s in range(len(tokens)) if s not in zoomed]
    logits = torch.cat([query_rows @ keys[stays].T * SCALE, scores[:, whole]], 1)
    visible_values = torch.cat([values[stays], *(means[s][1][None] for s in whole)])
    if sinks is not None:  # a token with a value of 0
        own = sinks.view(KV_HEADS, GROUP, 1)[head].double()
        logits = torch.cat([logits, own], 1)
        nothing = visible_values.new_zeros(1, HEAD_DIM)
        visible_values = torch.cat([visible_values, nothing])
    return logits.softmax(1) @ visible_values, zoomed


def run(
    engine: FakeEngine, prompts: dict[str, int], answer: int, chunk: int, seed: int
) -> None:
    """Run all requests together, in chunks of at most ``chunk`` tokens."""
    print("seed", seed)
    rng = random.Random(seed)
    for name, prompt in prompts.items():
        engine.add(name, prompt, answer)
    while engine.requests:
        engine.step({name: rng.randint(1, chunk) for name in engine.requests})
        for name in [n for n, r in engine.requests.items() if r.done]:
            engine.remove(name)
    engine.check_idle()
