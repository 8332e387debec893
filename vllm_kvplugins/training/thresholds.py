"""Thresholds that decide as often rightly as any, chosen after training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from vllm_kvplugins.routers.router import Router
from vllm_kvplugins.training.examples import Example

# example -> gates or ranks, larger = sooner, [layers, heads, queries, spans].
Gates = Callable[[Example], torch.Tensor]


def router_logits(router: Router, example: Example) -> torch.Tensor:
    """What the sigmoid of equation 5 is taken of, for the queries that were mined."""
    every = slice(None)
    summary = router.summarize(example.means[0], every)
    return router.logits(example.queries, summary, example.log_sizes, every)


@torch.no_grad()
def calibrated(router: Router, examples: Sequence[Example]) -> Router:
    """The same router with the thresholds that decide best on these examples.

    Differs from the paper, whose thresholds are what training makes of them
    (equations 11 and 15): F1 against the targets (equation 12) is what is asked for,
    and a head's best threshold can be looked up.
    """
    found = best_thresholds(lambda example: router_logits(router, example), examples)
    return replace(router, threshold=found.to(router.threshold.device))


def best_thresholds(gates: Gates, examples: Sequence[Example]) -> torch.Tensor:
    """The threshold of each head with the best F1 on these examples, half way between
    the last gate that is to be above it and the next: [layers, num_q_heads].

    Cost: memory for the gates of all examples; a sort of them.
    """
    found = [gates(example).cpu() for example in examples]
    best = []
    for layer in range(found[0].shape[0]):
        values = torch.cat([each[layer].flatten(1) for each in found], 1)
        wanted = torch.cat([e.targets[layer].flatten(1).cpu() for e in examples], 1)
        values, order = values.sort(dim=1, descending=True)
        right = wanted.gather(1, order).cumsum(1)
        zoomed = torch.arange(1, values.shape[1] + 1)
        last = (2 * right / (zoomed + right[:, -1:])).argmax(1, keepdim=True)
        after = (last + 1).clamp(max=values.shape[1] - 1)
        # all above: a little below the least
        both = values.gather(1, last) + values.gather(1, after)
        best.append(torch.where(after > last, both / 2, values[:, -1:] - 1e-3)[:, 0])
    return torch.stack(best)
