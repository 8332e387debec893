"""Surprisal of prompts, put together from steps."""

from __future__ import annotations

import torch

from vllm_kvplugins.residency.requests import Row
from vllm_kvplugins.residency.surprisal import Surprisals


def test_surprisal_is_put_together_from_chunks():
    asked: list[tuple[int, list[int]]] = []

    def losses(first: int, targets: torch.Tensor) -> torch.Tensor:
        asked.append((first, targets.tolist()))
        return targets.float() / 10

    known = Surprisals(losses)
    prompt = [7, 11, 13, 17, 19]
    known.note(Row("a", 5, 0, 2, 3), prompt)
    known.note(Row("a", 5, 2, 3, 0), prompt)
    known.note(Row("a", 5, 5, 1, 0), prompt)  # an answer's token
    # the last token of a chunk says how surprising the next chunk's first one is
    assert asked == [(3, [11, 13]), (0, [17, 19])]
    torch.testing.assert_close(known.take("a"), torch.tensor([0, 1.1, 1.3, 1.7, 1.9]))
    assert len(known) == 0


def test_impossible_tokens_and_broken_numbers_count_as_something():
    known = Surprisals(lambda first, targets: torch.tensor([torch.nan, torch.inf, -1]))
    known.note(Row("a", 4, 0, 4, 0), [1, 2, 3, 4])
    assert known.take("a").tolist() == [0, 0, 100, 0]
    known.note(Row("b", 4, 0, 4, 0), [1, 2, 3, 4])
    known.forget(["b"])
    assert len(known) == 0
