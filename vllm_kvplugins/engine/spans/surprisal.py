"""Surprisal of prompt tokens, from the steps that compute them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_kvplugins.engine.requests import Row

# Surprisal in nats of a token with probability 0.
_MAX_NATS = 100.0

# Limit for the hidden states of all unfinished prompts: about 100K tokens of a model of
# width 1280 in bfloat16.
MAX_WAITING_BYTES = 256 << 20


class SurprisalModel(Protocol):
    """Access to the hidden states of the last step and to the model's output layer."""

    def states(self, first: int, count: int) -> torch.Tensor:
        """A copy of the hidden states [count, width] of the step's tokens from
        ``first`` on."""

    def surprisal(self, states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Surprisal in nats, float32 [n], of the tokens int64 [n] that follow these
        hidden states."""


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """Hidden states of one step, and their next tokens, from token ``first`` on."""

    first: int
    states: torch.Tensor
    targets: torch.Tensor

    @property
    def nbytes(self) -> int:
        return int(self.states.numel() * self.states.itemsize)


class SurprisalTracker:
    """Surprisal of the prompts of all live requests (SeKV, equation 1).

    The hidden state of a token gives the surprisal of the next token, so the last token
    of a chunk gives that of the next chunk's first. The first token of a prompt has the
    surprisal 0.

    The output layer runs when ``take`` needs the whole prompt's surprisal, after the
    first token is sent. Hidden states are kept until then.

    Args:
        max_waiting_bytes: limit of the kept hidden states, over all requests. The
            output layer runs at once for hidden states above the limit.

    Cost: the model's output layer for every prompt token. Prefill without a policy
        computes it for the last one only.
    """

    def __init__(
        self, model: SurprisalModel, max_waiting_bytes: int = MAX_WAITING_BYTES
    ) -> None:
        self._model = model
        self._max_waiting_bytes = max_waiting_bytes
        self._surprisal: dict[str, torch.Tensor] = {}
        self._waiting: dict[str, list[_Piece]] = {}
        self.waiting_bytes = 0

    def add(self, row: Row, prompt: Sequence[int]) -> None:
        """Record the hidden states of a step for a request's prompt."""
        stop = min(row.after_tokens, row.prompt_tokens - 1)
        if row.computed_tokens >= stop:
            return
        if row.request_id not in self._surprisal:
            self._surprisal[row.request_id] = torch.zeros(row.prompt_tokens)
        first = row.computed_tokens + 1
        states = self._model.states(row.first_query, stop + 1 - first)
        piece = _Piece(first, states, torch.as_tensor(prompt[first : stop + 1]))
        if self.waiting_bytes + piece.nbytes > self._max_waiting_bytes:
            self._compute(row.request_id, piece)
            return
        self.waiting_bytes += piece.nbytes
        self._waiting.setdefault(row.request_id, []).append(piece)

    def _compute(self, request_id: str, piece: _Piece) -> None:
        surprisal = self._model.surprisal(piece.states, piece.targets).float()
        # A NaN or infinite logit must not fail other requests.
        nats = torch.nan_to_num(surprisal, nan=0.0, posinf=_MAX_NATS)
        part = self._surprisal[request_id][piece.first : piece.first + len(nats)]
        part.copy_(nats.clamp_(0.0, _MAX_NATS))

    def take(self, request_id: str) -> torch.Tensor:
        """float32 [prompt tokens], after the whole prompt is computed; drops it."""
        for piece in self._waiting.get(request_id, ()):
            self._compute(request_id, piece)
        surprisal = self._surprisal[request_id]
        self.forget([request_id])
        return surprisal

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop requests that ended or will be recomputed."""
        for request_id in request_ids:
            self._surprisal.pop(request_id, None)
            for piece in self._waiting.pop(request_id, ()):
                self.waiting_bytes -= piece.nbytes

    def __len__(self) -> int:
        return len(self._surprisal)
