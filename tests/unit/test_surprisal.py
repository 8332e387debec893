"""Surprisal of prompts, combined over the steps of a chunked prefill."""

from __future__ import annotations

import torch

from vllm_kvplugins.engine.requests import Row
from vllm_kvplugins.engine.spans.surprisal import SurprisalTracker


class Losses:
    """Hidden states are the tokens' numbers; the model records its calls."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], list[int]]] = []

    def states(self, first: int, count: int) -> torch.Tensor:
        return torch.arange(first, first + count, dtype=torch.float32)[:, None]

    def surprisal(self, states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.asked.append((states[:, 0].int().tolist(), targets.tolist()))
        return targets.float() / 10


PROMPT = [7, 11, 13, 17, 19]
SURPRISAL = torch.tensor([0, 1.1, 1.3, 1.7, 1.9])


def test_surprisal_is_put_together_from_chunks():
    losses = Losses()
    known = SurprisalTracker(losses)
    known.add(Row("a", 5, 0, 2, 3), PROMPT)
    known.add(Row("a", 5, 2, 3, 0), PROMPT)
    known.add(Row("a", 5, 5, 1, 0), PROMPT)  # an answer's token
    assert losses.asked == [], "asked before the first token has left"
    torch.testing.assert_close(known.take("a"), SURPRISAL)
    # the last token of a chunk gives the surprisal of the next chunk's first token
    assert losses.asked == [([3, 4], [11, 13]), ([0, 1], [17, 19])]
    assert len(known) == known.waiting_bytes == 0


def test_states_wait_in_bounded_memory():
    losses = Losses()
    known = SurprisalTracker(losses, max_waiting_bytes=16)
    known.add(Row("a", 5, 0, 2, 0), PROMPT)
    assert known.waiting_bytes == 8
    known.add(Row("b", 5, 0, 3, 0), PROMPT)
    assert losses.asked == [([0, 1, 2], [11, 13, 17])], "no room for these"
    known.add(Row("a", 5, 2, 3, 0), PROMPT)
    assert known.waiting_bytes == 16
    known.add(Row("b", 5, 3, 2, 0), PROMPT)
    for name in "ab":
        torch.testing.assert_close(known.take(name), SURPRISAL)
    assert len(losses.asked) == 4
    assert len(known) == known.waiting_bytes == 0


def test_requests_that_go_leave_no_states():
    known = SurprisalTracker(Losses())
    known.add(Row("a", 5, 0, 2, 0), PROMPT)
    known.add(Row("b", 5, 0, 4, 0), PROMPT)
    known.forget(["a", "c"])
    assert known.waiting_bytes == 16
    # recomputed
    known.forget(["b"])
    known.add(Row("b", 5, 0, 5, 0), PROMPT)
    torch.testing.assert_close(known.take("b"), SURPRISAL)
    assert len(known) == known.waiting_bytes == 0


def test_impossible_tokens_and_broken_numbers_count_as_something(monkeypatch):
    losses = Losses()
    broken = torch.tensor([torch.nan, torch.inf, -1])
    monkeypatch.setattr(losses, "surprisal", lambda states, targets: broken)
    known = SurprisalTracker(losses)
    known.add(Row("a", 4, 0, 4, 0), [1, 2, 3, 4])
    assert known.take("a").tolist() == [0, 0, 100, 0]
