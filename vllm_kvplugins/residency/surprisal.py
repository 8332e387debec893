"""Surprisal of prompt tokens, from the steps that compute them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from vllm_kvplugins.residency.requests import Row

# Surprisal in nats, float32 [n], of the tokens int64 [n] as the ones that follow
# the step's tokens from this one on; asks the model's output layer.
TokenLosses = Callable[[int, torch.Tensor], torch.Tensor]

# Nats of a token that was impossible.
_MOST = 100.0


class Surprisals:
    """Surprisal of the prompts of all live requests (SeKV, equation 1).

    A token's is known when the token before it has been computed, so the last token
    of a chunk gives that of the next chunk's first. A prompt's first token has none
    and counts 0.

    Args:
        losses: of the step that has just run.

    Cost: the model's output layer for every prompt token, which vLLM's own prefill
        leaves out.
    """

    def __init__(self, losses: TokenLosses) -> None:
        self._losses = losses
        self._known: dict[str, torch.Tensor] = {}

    def note(self, row: Row, prompt: Sequence[int]) -> None:
        """Take in what a step has computed of a request's prompt."""
        stop = min(row.after_tokens, row.prompt_tokens - 1)
        if row.computed_tokens >= stop:
            return
        known = self._known.get(row.request_id)
        if known is None:
            known = self._known[row.request_id] = torch.zeros(row.prompt_tokens)
        targets = torch.as_tensor(prompt[row.computed_tokens + 1 : stop + 1])
        found = self._losses(row.first_query, targets).float()
        # of a token that the model cannot say, or of numbers that are none: requests
        # of others go on
        found = torch.nan_to_num(found, nan=0.0, posinf=_MOST).clamp(0.0, _MOST)
        known[row.computed_tokens + 1 : stop + 1] = found

    def take(self, request_id: str) -> torch.Tensor:
        """float32 [prompt tokens], which is known by now; forgets it."""
        return self._known.pop(request_id)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Requests that have gone, or will be computed anew."""
        for request_id in request_ids:
            self._known.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._known)
