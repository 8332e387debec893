"""Surprisal of prompt tokens, from the steps that compute them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_kvplugins.engine.requests import Row

# Nats of a token that was impossible.
_MOST = 100.0

# Of hidden states of all requests that wait for their prompts to be in: 100K tokens of
# a model with 1280 numbers each in bfloat16.
MOST_WAITING_BYTES = 256 << 20


class SurprisalModel(Protocol):
    """Asks the model's output layer about the step that has just run."""

    def states(self, first: int, count: int) -> torch.Tensor:
        """A copy of the hidden states [count, width] of the step's tokens from
        ``first`` on."""

    def surprisal(self, states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Surprisal in nats, float32 [n], of the tokens int64 [n] as the ones that
        follow these hidden states."""


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """What one step has computed of a prompt: token ``first`` on comes next."""

    first: int
    states: torch.Tensor
    targets: torch.Tensor

    @property
    def nbytes(self) -> int:
        return int(self.states.numel() * self.states.itemsize)


class SurprisalTracker:
    """Surprisal of the prompts of all live requests (SeKV, equation 1).

    A token's is known when the token before it has been computed, so the last token
    of a chunk gives that of the next chunk's first. A prompt's first token has none
    and counts 0.

    The output layer is asked when the whole prompt's are wanted, after the first
    token has left; until then the hidden states wait.

    Args:
        most_waiting_bytes: of hidden states, over all requests. What comes on top is
            asked about at once.

    Cost: the model's output layer for every prompt token, which vLLM's own prefill
        leaves out.
    """

    def __init__(
        self, model: SurprisalModel, most_waiting_bytes: int = MOST_WAITING_BYTES
    ) -> None:
        self._model = model
        self._most_waiting_bytes = most_waiting_bytes
        self._known: dict[str, torch.Tensor] = {}
        self._waiting: dict[str, list[_Piece]] = {}
        self.waiting_bytes = 0

    def note(self, row: Row, prompt: Sequence[int]) -> None:
        """Take in what a step has computed of a request's prompt."""
        stop = min(row.after_tokens, row.prompt_tokens - 1)
        if row.computed_tokens >= stop:
            return
        if row.request_id not in self._known:
            self._known[row.request_id] = torch.zeros(row.prompt_tokens)
        first = row.computed_tokens + 1
        states = self._model.states(row.first_query, stop + 1 - first)
        piece = _Piece(first, states, torch.as_tensor(prompt[first : stop + 1]))
        if self.waiting_bytes + piece.nbytes > self._most_waiting_bytes:
            self._ask(row.request_id, piece)
            return
        self.waiting_bytes += piece.nbytes
        self._waiting.setdefault(row.request_id, []).append(piece)

    def _ask(self, request_id: str, piece: _Piece) -> None:
        found = self._model.surprisal(piece.states, piece.targets).float()
        # of a token that the model cannot say, or of numbers that are none: requests
        # of others go on
        found = torch.nan_to_num(found, nan=0.0, posinf=_MOST).clamp(0.0, _MOST)
        self._known[request_id][piece.first : piece.first + len(found)] = found

    def take(self, request_id: str) -> torch.Tensor:
        """float32 [prompt tokens], all of which have been computed; forgets it."""
        for piece in self._waiting.get(request_id, ()):
            self._ask(request_id, piece)
        known = self._known[request_id]
        self.forget([request_id])
        return known

    def forget(self, request_ids: Iterable[str]) -> None:
        """Requests that have gone, or will be computed anew."""
        for request_id in request_ids:
            self._known.pop(request_id, None)
            for piece in self._waiting.pop(request_id, ()):
                self.waiting_bytes -= piece.nbytes

    def __len__(self) -> int:
        return len(self._known)
