"""Retrieval against a torch oracle: what attends is what the queries ask for.

The fake engine poisons all that is not resident, so attention over the right
tokens is only possible if each step fetched them to the right places.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_engine import GROUP, KV_HEADS, LAYERS, SCALE, FakeEngine, Request, attend

from vllm_kvplugins.errors import KVPolicyError
from vllm_kvplugins.ops import gather_keys, gather_values
from vllm_kvplugins.policies import registry
from vllm_kvplugins.policies.retrieval import WholeFirstLayers
from vllm_kvplugins.residency.requests import Row

BLOCK, BLOCKS, SINKS, WINDOW, SKIP = 4, 120, 2, 5, 1


class RetrievingEngine(FakeEngine):
    """Checks a retriever's attention against the tokens that an oracle picks."""

    def _check_attention(
        self, row: Row, pages: torch.Tensor, lengths: torch.Tensor
    ) -> None:
        request, after = self.requests[row.request_id], row.after_tokens
        span = slice(row.computed_tokens, after)
        retrieval = self.runtime.retrieval
        for layer in range(LAYERS):
            if retrieval.retrieves(row.request_id):
                queries = request.queries[layer][span].transpose(0, 1)
                retrieval.fetch(row.request_id, layer, queries)
        flat = pages.reshape(LAYERS * KV_HEADS, -1)
        keys = gather_keys(self.heap.pages, flat, self.heap.layout)
        values = gather_values(self.heap.pages, flat, self.heap.layout)
        order = torch.arange(keys.shape[1])
        last = lengths[..., None] - row.new_tokens + torch.arange(row.new_tokens)
        paged = attend(
            request.queries[:, span],
            keys.unflatten(0, (LAYERS, -1)),
            values.unflatten(0, (LAYERS, -1)),
            order <= last[..., None],
        )
        at = torch.arange(after)
        causal = at <= at[row.computed_tokens :, None]
        seen = self._wanted(request, row)[:, :, None] & causal
        dense = attend(
            request.queries[:, span],
            request.keys[:, :, :after],
            request.values[:, :, :after],
            seen,
        )
        assert paged.isfinite().all(), "attention over what nobody owns"
        torch.testing.assert_close(paged, dense, atol=1e-5, rtol=1e-4)

    def _wanted(self, request: Request, row: Row) -> torch.Tensor:
        """bool [LAYERS, KV_HEADS, tokens]: resident for this step's queries."""
        after = row.after_tokens
        seen = torch.ones(LAYERS, KV_HEADS, after, dtype=torch.bool)
        plan = self.runtime.plan(request.prompt)
        done = plan.num_done(row.computed_tokens)
        if not done:
            return seen
        last = plan.compaction(done - 1)
        stop = min(last.at_tokens - WINDOW, last.zone.stop * BLOCK)
        total = len(last.zone) * LAYERS - SKIP * last.zone.stop
        each, more = divmod(total, LAYERS - SKIP)
        for layer in range(SKIP, LAYERS):
            kept = each + (layer - SKIP < more)
            hot = kept * BLOCK - SINKS - (last.zone.stop * BLOCK - stop)
            queries = request.queries[layer, row.computed_tokens : after]
            for head in range(KV_HEADS):
                group = queries[:, head * GROUP : (head + 1) * GROUP].flatten(0, 1)
                logits = group @ request.keys[layer, head, SINKS:stop].T * SCALE
                worth = logits.softmax(-1).sum(0)
                seen[layer, head, SINKS:stop] = False
                seen[layer, head, worth.topk(hot).indices + SINKS] = True
        return seen

    def _check_kept(self, request: Request, kept: Any, zone_blocks: int) -> None:
        request.visible[:] = True  # nothing is ever dropped
        super()._check_kept(request, kept, zone_blocks)
        request.visible[:] = True


def engine(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> RetrievingEngine:
    policies = registry._POLICIES | {
        "exact-topk": "vllm_kvplugins.policies.exact_topk:ExactTopK"
    }
    monkeypatch.setattr(registry, "_POLICIES", policies)
    base = {"sinks": SINKS, "window": WINDOW, "skip_layers": SKIP}
    return RetrievingEngine(
        {"name": "exact-topk", "budget": 9, **base, **settings}, BLOCK, BLOCKS
    )


@pytest.mark.parametrize("age_blocks", [1, 3])
@pytest.mark.parametrize("prompt", [6, 40, 43])
def test_attention_is_over_what_the_queries_ask_for(monkeypatch, prompt, age_blocks):
    fake = engine(monkeypatch, age_blocks=age_blocks)
    request = fake.add("r", prompt, 60)
    while not request.done:
        fake.step({"r": 11})
    traffic = fake.runtime.retrieval.traffic
    assert traffic.selected > traffic.fetched > 0
    assert fake.runtime.retrieval.host_bytes > 0
    fake.remove("r")
    fake.check_idle()
    assert fake.runtime.retrieval.host_bytes == 0


def test_requests_do_not_share_what_they_fetch(monkeypatch):
    fake = engine(monkeypatch)
    for name, prompt in (("a", 40), ("b", 21), ("c", 33)):
        fake.add(name, prompt, 30)
    for step in range(34):
        fake.step(dict.fromkeys(fake.requests, 9))
        if step == 12:
            fake.remove("b")
        if step == 20:
            fake.preempt("c")
    fake.remove("a")
    while not fake.requests["c"].done:
        fake.step({"c": 9})
    fake.remove("c")
    fake.check_idle()


def test_whole_layers_leave_the_rest_to_the_others():
    allocator = WholeFirstLayers(whole_layers=2)
    available = torch.full((5, 3), 20)
    counts = allocator.allocate(torch.zeros(5, 3, 80), 11, 4, available)
    assert counts[:2].eq(20).all()
    assert counts.sum() == 11 * 5 * 3
    assert counts[2:].max() - counts[2:].min() <= 1
    assert counts.eq(counts[:, :1]).all(), "heads of a layer are alike"
    assert "skip_layers 2" in allocator.problems(2, 3)[0]
    assert not allocator.problems(3, 3)


def test_bad_settings(monkeypatch):
    for bad in ({"window": 0}, {"budget": 0}, {"reuse_every": 0}):
        with pytest.raises(KVPolicyError, match=next(iter(bad))):
            engine(monkeypatch, **bad)
