"""A fake engine that checks the tokens that a retriever attends to."""

from __future__ import annotations

from typing import Any

import torch
from fake_engine import (
    GROUP,
    HEAD_DIM,
    KV_HEADS,
    LAYERS,
    SCALE,
    FakeEngine,
    Request,
    attend,
)
from policy_settings import only_fetch, policies_that

from vllm_kvplugins.engine.heap import Fp8
from vllm_kvplugins.engine.requests import Row
from vllm_kvplugins.ops import gather_tokens
from vllm_kvplugins.policies import get_policy_class

BLOCK, BLOCKS, SINKS, WINDOW, SKIP = 4, 120, 2, 5, 1
MOST_ASKING = 32
RETRIEVERS = list(policies_that(only_fetch))


class RetrievingEngine(FakeEngine):
    """Checks a retriever's attention against the tokens that an oracle picks.

    Attributes:
        served: requests whose tokens were fetched during the step before.
        last_step: the positions whose queries they were fetched for.
    """

    def step(self, chunks: dict[str, int]) -> None:
        held = self.retrieval._requests
        self.served = {name for name, state in held.items() if state.prefetched}
        first = {name: self.requests[name].computed for name in chunks}
        super().step(chunks)
        self.last_step = {
            name: slice(start, self.requests[name].computed)
            for name, start in first.items()
        }
        self.times_served += len(self.served)

    times_served = 0
    # prompt tokens that attended to tokens in host memory
    prompt_tokens_checked = 0

    def _schedule(self, chunks: dict[str, int]) -> list[Row]:
        self._rows = super()._schedule(chunks)
        return self._rows

    def _check_prompt(self, row: Row) -> None:
        """Tokens of a prompt attend to every earlier token."""
        request, span = (
            self.requests[row.request_id],
            slice(row.computed_tokens, row.after_tokens),
        )
        own = slice(row.first_query, row.first_query + row.new_tokens)
        attended = torch.stack([self._attended(layer)[own] for layer in self._layers])
        at = torch.arange(row.after_tokens)
        causal = at <= at[row.computed_tokens :, None]
        sinks = self.runtime.policy.sinks
        host = slice(sinks, sinks + self.retrieval._requests[request.name].tokens)
        cached = []
        for part in (request.keys, request.values):
            dense = part[self._layers, :, : row.after_tokens].clone()
            dense[:, :, host] = self._on_host(dense[:, :, host])
            cached.append(dense)
        visible = causal.expand(len(self._layers), KV_HEADS, -1, -1)
        expected = attend(request.queries[self._layers, span], *cached, visible)
        expected = expected.permute(0, 3, 1, 2, 4).flatten(2, 3).float()
        assert attended.isfinite().all(), "attention read memory that no request owns"
        torch.testing.assert_close(attended, expected, atol=1e-5, rtol=1e-4)
        self.prompt_tokens_checked += row.new_tokens

    _layers = range(SKIP, LAYERS)

    def _attended(self, layer: int) -> torch.Tensor:
        """What the controller's rows attend to, [step tokens, query heads, dim]."""
        flat = self.table
        queries = self._queries(self._rows, layer)
        scope = layer if len(flat.pages) > 1 else 0
        pages = flat.pages[scope]
        if len(flat.pages) == 1:
            pages = pages + layer * self.blocks * KV_HEADS
        output = torch.full_like(queries, torch.nan)
        assert self.runtime.attending is self.retrieval
        self.retrieval.attend(
            layer, queries, self.heap.kv, pages, flat.lengths[scope], output
        )
        return output

    def _check_attention(
        self, row: Row, pages: torch.Tensor, lengths: torch.Tensor
    ) -> None:
        state = self.retrieval._requests.get(row.request_id)
        if row.computed_tokens < row.prompt_tokens and state and state.tokens:
            self._check_prompt(row)
            return
        request, after = self.requests[row.request_id], row.after_tokens
        span = slice(row.computed_tokens, after)
        keys, values = self.gathered(pages)
        order = torch.arange(keys.shape[2])
        last = lengths[..., None] - row.new_tokens + torch.arange(row.new_tokens)
        paged = attend(request.queries[:, span], keys, values, order <= last[..., None])
        at = torch.arange(after)
        causal = at <= at[row.computed_tokens :, None]
        visible = self._wanted(request, row)[:, :, None] & causal
        cached = self._cached(request)
        dense = attend(
            request.queries[:, span], *(part[:, :, :after] for part in cached), visible
        )
        assert paged.isfinite().all(), "attention read memory that no request owns"
        torch.testing.assert_close(paged, dense, atol=1e-5, rtol=1e-4)

    def _wanted(self, request: Request, row: Row) -> torch.Tensor:
        """bool [LAYERS, KV_HEADS, tokens]: resident for this step's queries."""
        after = row.after_tokens
        visible = torch.ones(LAYERS, KV_HEADS, after, dtype=torch.bool)
        plan = self.plan(row.request_id)
        done = plan.num_done(row.computed_tokens)
        if not done:
            return visible
        last = plan.compaction(done - 1)
        size, sinks = self.heap.layout.block_size, self.runtime.policy.sinks
        stop = min(last.at_tokens - WINDOW, last.retained.stop * size)
        if (pages := self.runtime.policy.page_selection) is not None:
            stop -= (stop - sinks) % pages.page_tokens
        total = len(last.retained) * LAYERS - SKIP * last.retained.stop
        each, more = divmod(total, LAYERS - SKIP)
        for layer in range(SKIP, LAYERS):
            kept = each + (layer - SKIP < more)
            hot = kept * size - sinks - (last.retained.stop * size - stop)
            queries = self._asking(request, row, layer)
            visible[layer, :, sinks:stop] = False
            if self.runtime.policy.name != "exact-topk":
                token = self.retrieval.hot_tokens(request.name, layer)
                assert token.shape[1] == hot
                assert all(len(set(head)) == hot for head in token.tolist())
                visible[layer].scatter_(1, token + sinks, True)
                continue
            for head in range(KV_HEADS):
                group = queries[:, head * GROUP : (head + 1) * GROUP].flatten(0, 1)
                keys = self._on_host(request.keys[layer, head, sinks:stop])
                logits = group @ keys.T * SCALE
                worth = logits.softmax(-1).sum(0)
                visible[layer, head, worth.topk(hot).indices + sinks] = True
        return visible

    def _cached(self, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
        """Dense keys and values as the cache has them.

        Hot tokens are exact until they are fetched from quantized host memory.
        """
        exact = request.keys, request.values
        state = self.retrieval._requests.get(request.name)
        if self.retrieval.tier.quantized is None or state is None:
            return exact
        cached = exact[0].clone(), exact[1].clone()
        sinks = self.runtime.policy.sinks
        for layer, count in state.hot.items():
            slots = self.retrieval._hot_slots.hot_set(layer)
            hot = (state.slot_index, slice(None), slice(0, count))
            token = self.retrieval.hot_tokens(request.name, layer) + sinks
            token = token[..., None].expand(-1, -1, HEAD_DIM)
            places = slots.page[hot].flatten(), slots.slot[hot].flatten()
            rows = gather_tokens(self.heap.kv, *places)
            for part, row in zip(cached, rows, strict=True):
                row = row.view(token.shape)
                kept = part[layer].gather(1, token)
                fetched = self._on_host(part[layer]).gather(1, token)
                assert (row.eq(kept).all(-1) | row.eq(fetched).all(-1)).all()
                part[layer].scatter_(1, token, row)
        return cached

    def _on_host(self, keys: torch.Tensor) -> torch.Tensor:
        """Keys or values as the host tier has them."""
        rows = self.retrieval.tier.quantized
        return keys if rows is None else rows.dequantize(rows.quantize(keys))

    def _asking(self, request: Request, row: Row, layer: int) -> torch.Tensor:
        """The queries that selected the tokens which are resident now."""
        step = slice(row.computed_tokens, row.after_tokens)
        if self.runtime.policy.prefetch == "layer":
            layer -= 1
        elif request.name in self.served:
            step = self.last_step[request.name]
        tokens = step.stop - step.start
        asking = torch.linspace(0, tokens - 1, min(tokens, MOST_ASKING)).long()
        return request.queries[layer, step.start + asking]

    def _check_kept(self, request: Request, kept: Any, retained_blocks: int) -> None:
        request.visible[:] = True  # retrievers never drop tokens
        super()._check_kept(request, kept, retained_blocks)
        request.visible[:] = True


def answered(fake: RetrievingEngine) -> Request:
    """A request that has generated all of its tokens and fetched some."""
    request = fake.add("r", 43, 60)
    while not request.done:
        fake.step({"r": 11})
    traffic = fake.retrieval.traffic
    assert traffic.selected > traffic.fetched > 0
    assert traffic.failed == 0
    return request


def engine(
    name: str,
    fp8: Fp8 | None = None,
    kind: type[RetrievingEngine] = RetrievingEngine,
    block: int = BLOCK,
    **settings: Any,
) -> Any:
    """An engine of a kind under a retriever with small budgets."""
    base = {"sinks": SINKS, "window": WINDOW, "skip_layers": SKIP}
    if "page_tokens" in get_policy_class(name).model_fields:
        base["page_tokens"] = 3
    config = {"name": name, "budget": 9, **base, **settings}
    return kind(config, block, BLOCKS, fp8=fp8)
