"""A fake engine that checks attention to means of tokens that are not selected."""

from __future__ import annotations

from dataclasses import replace

import torch
from fake_engine import HEAD_DIM, KV_HEADS, SCALE, Request
from retrieving_engine import RetrievingEngine

from vllm_kvplugins.engine.requests import Row


class MeanEngine(RetrievingEngine):
    """Computes the attention of generated tokens anew, with a mean per chunk.

    Rows with several tokens need ``exact-topk``: the oracle knows the selection of the
    last token only, and that of each token by itself.

    Attributes:
        with_means: rows that were checked, with at least one mean.
    """

    with_means = 0

    def _check_attention(
        self, row: Row, pages: torch.Tensor, lengths: torch.Tensor
    ) -> None:
        state = self.retrieval._requests.get(row.request_id)
        if row.computed_tokens < row.prompt_tokens or not state or not state.tokens:
            super()._check_attention(row, pages, lengths)
            return
        request, tokens = self.requests[row.request_id], state.tokens
        own = slice(row.first_query, row.first_query + row.new_tokens)
        attended = torch.stack([self._attended(layer)[own] for layer in self._layers])
        for at in range(row.new_tokens):
            one = replace(row, computed_tokens=row.computed_tokens + at, new_tokens=1)
            selects = self._wanted(request, one)
            expected = torch.stack(
                [
                    self._expected(request, one, layer, selects[layer], tokens)
                    for layer in self._layers
                ]
            )
            torch.testing.assert_close(
                attended[:, at], expected.float(), atol=1e-5, rtol=1e-4
            )

    def _expected(
        self, request: Request, row: Row, layer: int, attended: torch.Tensor, host: int
    ) -> torch.Tensor:
        """Attention of one token in float64, [query heads, HEAD_DIM].

        Args:
            attended: bool [KV_HEADS, tokens], the tokens that are resident.
            host: number of host tokens.
        """
        policy = self.runtime.policy
        size, sinks = policy.mean_tokens, policy.sinks
        keys, values = (
            part[layer, :, : row.after_tokens].double()
            for part in (request.keys, request.values)
        )
        starts = range(sinks, sinks + host - size + 1, size)
        self.with_means += bool(starts)
        outputs = []
        queries = request.queries[layer, row.computed_tokens].double()
        for head, grouped in enumerate(queries.view(KV_HEADS, -1, HEAD_DIM)):
            own = attended[head]
            rows = [(keys[head][own], values[head][own], torch.zeros(int(own.sum())))]
            for start in starts:
                chunk = slice(start, start + size)
                left = torch.tensor([size - float(own[chunk].sum())])
                mean = (part[head, chunk].mean(0)[None] for part in (keys, values))
                rows.append((*mean, left.log()))
            k, v, bias = (torch.cat(parts) for parts in zip(*rows, strict=True))
            outputs.append((grouped @ k.T * SCALE + bias).softmax(-1) @ v)
        return torch.stack(outputs).flatten(0, 1)
