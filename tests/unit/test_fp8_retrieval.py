"""Retrieval over an fp8 cache: the host tier has copies of its elements.

The fake engine compares attention with that over dequantized keys and values.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_attention import attend
from fake_engine import HEAD_DIM, KV_HEADS, LAYERS, Request
from retrieving_engine import (
    RETRIEVERS,
    SINKS,
    SKIP,
    RetrievingEngine,
    answered,
    engine,
)

from vllm_kvplugins import ops
from vllm_kvplugins.engine.heap import Fp8
from vllm_kvplugins.engine.requests import Row
from vllm_kvplugins.index import BruteForceIndex, Keys
from vllm_kvplugins.index.compiled import CompiledIndex
from vllm_kvplugins.ops.hot_set import HostPages, HotSet, fill_hot
from vllm_kvplugins.ops.layout import PagedKV, PageLayout

SEED = 5
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def fp8(name: str) -> Fp8:
    """Other scales in every layer, which are no powers of two."""
    keys = tuple(0.3 + layer / 10 for layer in range(LAYERS))
    values = tuple(0.7 - layer / 10 for layer in range(LAYERS))
    return Fp8(DTYPES[name], torch.float32, keys, values)


@pytest.mark.each_value
@pytest.mark.parametrize("name", RETRIEVERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_is_over_what_was_asked_for(name, dtype):
    fake = engine(name, fp8=fp8(dtype))
    request, retrieval = answered(fake), fake.retrieval
    state = retrieval._requests["r"]
    assert retrieval.tier.pages.dtype == torch.uint8
    assert retrieval.tier.page_bytes == 2 * retrieval.tier.page_tokens * HEAD_DIM
    for layer, pages in enumerate(state.pages, state.first_layer):
        host = slice(SINKS, SINKS + state.tokens)
        read = retrieval.tier.read(pages, range(state.tokens))
        for part, exact, scale in zip(
            read,
            (request.keys, request.values),
            fake.heap.read_scales(layer),
            strict=True,
        ):
            assert (part * scale).equal(exact[layer][:, host])
        if not fake.runtime.policy.selects(layer):
            continue  # it has no index
        index = retrieval._indexer._ready(state.layers[layer])
        if isinstance(index, CompiledIndex):
            index.check_integrity(retrieval.tier.keys(pages[None]))
    fake.remove("r")
    fake.check_idle()


@pytest.mark.parametrize("name", ["exact-topk", "icecache"])
@pytest.mark.parametrize("prefill_block", [None, 16])
def test_prompt_tokens_attend_to_all_earlier_tokens(name, prefill_block):
    """Also to those in host memory, with the scales of keys and values."""
    fake = engine(name, fp8=fp8("e4m3"), prefill_block=prefill_block)
    request = fake.add("r", 97, 8)
    while not request.done:
        fake.step({"r": 10})
    assert (fake.prompt_tokens_checked > 40) == (prefill_block is not None)


class VerifyingEngine(RetrievingEngine):
    """Generated tokens are verified several at a time, as accepted drafts.

    Attributes:
        drafted: what rows with drafts attended to has been compared for so many tokens.
    """

    drafted = 0

    def step(self, chunks: dict[str, int]) -> None:
        clipped = {}
        for name, chunk in chunks.items():
            request = self.requests[name]
            if request.computed >= request.prompt:
                chunk = min(chunk, request.answer - request.generated)
                chunk = self.plan(name).clip_chunk(request.computed, chunk, 1)
                request.generated += chunk - 1
            clipped[name] = chunk
        super().step(clipped)

    def _schedule(self, chunks: dict[str, int]) -> list[Row]:
        rows = [
            replace(row, draft_tokens=row.new_tokens - 1)
            if row.computed_tokens >= row.prompt_tokens
            and self._due(row) is None
            and self._offloaded(row.request_id)
            else row
            for row in super()._schedule(chunks)
        ]
        self._rows = rows
        return rows

    def _offloaded(self, name: str) -> bool:
        state = self.retrieval._requests.get(name)
        return state is not None and state.tokens > 0

    def _check_attention(self, row: Row, pages: Any, lengths: Any) -> None:
        if not row.draft_tokens:
            super()._check_attention(row, pages, lengths)
            return
        request, retrieval = self.requests[row.request_id], self.retrieval
        retrieve, selected = retrieval.fetcher.retrieve, []

        def noting(batch: Any, layer: int, queries: torch.Tensor) -> None:
            retrieve(batch, layer, queries)
            selected.append(retrieval.hot_tokens(row.request_id, layer).clone())

        retrieval.fetcher.retrieve = noting
        attended = {layer: self._attended(layer) for layer in self._layers}
        retrieval.fetcher.retrieve = retrieve
        for number, hot in enumerate(selected):
            place, layer = number % row.new_tokens, SKIP + number // row.new_tokens
            self._check_token(request, row, layer, place, hot, attended[layer])

    def _check_token(
        self,
        request: Request,
        row: Row,
        layer: int,
        place: int,
        hot: torch.Tensor,
        attended: torch.Tensor,
    ) -> None:
        """One new token attends to its own selection, sinks and recent tokens."""
        seen = row.computed_tokens + place + 1
        offloaded = slice(SINKS, SINKS + self.retrieval._requests[request.name].tokens)
        query = request.queries[layer, seen - 1]
        keys, values = request.keys[layer, :, :seen], request.values[layer, :, :seen]
        if self.runtime.policy.name == "exact-topk":
            heads = query.view(KV_HEADS, -1, HEAD_DIM)
            logits = heads @ keys[:, offloaded].mT * HEAD_DIM**-0.5
            best = logits.softmax(-1).sum(1).topk(hot.shape[1]).indices
            assert best.sort().values.equal(hot.sort().values)
        visible = torch.ones(KV_HEADS, seen, dtype=torch.bool)
        visible[:, offloaded] = False
        visible.scatter_(1, hot + SINKS, True)
        expected = attend(
            query[None, None], keys[None], values[None], visible[None, :, None]
        )
        got = attended[row.first_query + place].double().view(expected.shape)
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
        self.drafted += 1


@pytest.mark.each_value
@pytest.mark.parametrize("name", RETRIEVERS)
@pytest.mark.parametrize("dtype", [*DTYPES, None])
def test_each_draft_attends_to_what_it_selects(name, dtype, backend):
    """Also with plain elements (None), in one cache of two requests."""
    if (name, backend) == ("icecache", "torch"):
        pytest.skip("its index is compiled")
    fake = engine(name, fp8=fp8(dtype) if dtype else None, kind=VerifyingEngine)
    requests = [fake.add(each, 43, 40) for each in ("r", "other")]
    with torch.inference_mode():
        while not all(request.done for request in requests):
            going = [request for request in requests if not request.done]
            fake.step(
                {
                    request.name: 11 if request.computed < request.prompt else 4
                    for request in going
                }
            )
    layers = len(fake._layers)
    assert fake.drafted > 2 * 20 * layers
    for request in requests:
        fake.remove(request.name)
    fake.check_idle()


def test_the_host_holds_half_of_bfloat16():
    need = {}
    for bytes_, each in ((4, None), (1, fp8("e4m3"))):
        fake = engine("exact-topk", fp8=each)
        geometry = fake.runtime.geometry
        assert geometry.element_bytes == bytes_
        need[bytes_] = fake.runtime.policy.host_bytes(96, geometry)
    assert need[4] == 4 * need[1] > 0


# -- operations -----------------------------------------------------------------------


def every_element(dtype: torch.dtype) -> torch.Tensor:
    """The finite elements of a type, each once."""
    elements = torch.arange(256, dtype=torch.uint8).view(dtype)
    return elements[elements.float().isfinite()]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("head_dim", [32, 40, 64])
def test_an_index_reads_every_element(backend, dtype, head_dim):
    """A query along one channel finds the largest of all elements there."""
    torch.manual_seed(SEED)
    elements = every_element(dtype)
    n = len(elements)
    order = torch.stack([torch.randperm(n) for _ in range(head_dim)], 1)
    keys = elements.view(torch.uint8)[order].view(1, n, head_dim).view(dtype)
    values = keys.float()
    assert Keys.dense(keys).gather()[0].equal(values)
    index = BruteForceIndex(1, head_dim)
    index.append(values, 0)
    for channel in range(0, head_dim, 7):
        query = torch.zeros(1, 1, head_dim)
        query[..., channel] = 1.0
        scale = 1.0 / values.max()
        found = index.select(query, Keys.dense(keys), float(scale), 5)[0]
        expected = values[0, :, channel].topk(5).values
        assert values[0, found, channel].equal(expected)


def test_hot_slots_get_the_elements_of_the_host(backend):
    torch.manual_seed(SEED)
    dim, block = 32, 4
    layout = PageLayout.transposed_keys(block, dim)
    kv = PagedKV(torch.zeros(6, layout.page_elems, dtype=torch.uint8), layout)
    host = torch.randint(0, 256, (5, 2, 8, dim), dtype=torch.uint8)
    table = torch.tensor([[[3, 0], [1, 4]]])
    hot = HotSet(
        torch.arange(3).repeat(1, KV_HEADS, 1),
        torch.tensor([[[0, 0, 1], [2, 3, 3]]]),
        torch.tensor([[[0, 3, 1], [1, 0, 2]]]),
        torch.tensor([3]),
    )
    wanted = torch.tensor([[[15, 7, 9], [8, 11, 2]]])
    copied = fill_hot(kv, HostPages(host, table), wanted, torch.tensor([0]), hot)
    assert copied.tolist() == [5], "token 2 of the second head is there"
    for head in range(KV_HEADS):
        for place, token in enumerate(hot.token[0, head].tolist()):
            page, slot = hot.page[0, head, place], hot.slot[0, head, place]
            here = ops.gather_tokens(kv, page[None], slot[None])
            there = host[table[0, head, token // 8], :, token % 8]
            if token != 2:
                assert torch.cat(here).equal(there)


def test_rows_of_another_size_are_refused(backend):
    layout = PageLayout.natural(4, 32)
    kv = PagedKV(torch.zeros(2, layout.page_elems, dtype=torch.uint8), layout)
    one = torch.zeros(1, 1, 1, dtype=torch.int64)
    hot = HotSet(one.clone(), one.clone(), one.clone(), torch.tensor([1]))
    host = torch.zeros(1, 2, 4, 36, dtype=torch.uint8)
    with pytest.raises((ValueError, RuntimeError)):
        fill_hot(kv, HostPages(host, one), one + 1, torch.tensor([0]), hot)
