"""Choose the threshold of each head with the best F1 after training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from vllm_kvplugins.routers.router import Router
from vllm_kvplugins.training.examples import Example

# example -> gates or scores, larger is preferred, [layers, heads, queries, spans].
Gates = Callable[[Example], torch.Tensor]


def router_logits(router: Router, example: Example) -> torch.Tensor:
    """Routing logits (equation 5 before its sigmoid) for the mined queries."""
    every = slice(None)
    summary = router.summarize(example.means[0], every)
    return router.logits(example.queries, summary, example.log_sizes, every)


@torch.no_grad()
def calibrated(router: Router, examples: Sequence[Example]) -> Router:
    """The same router with the thresholds that give the best F1 on these examples.

    Differs from the paper, which uses the trained thresholds (equations 11 and 15).
    The goal is F1 against the targets (equation 12), and the best threshold of a head
    can be computed directly.
    """
    best = best_thresholds(lambda example: router_logits(router, example), examples)
    return replace(router, threshold=best.to(router.threshold.device))


def best_thresholds(gates: Gates, examples: Sequence[Example]) -> torch.Tensor:
    """The threshold of each head with the best F1 on these examples.

    A threshold is halfway between the last gate above it and the next gate.

    Returns:
        [layers, num_q_heads].

    Cost: memory for the gates of all examples, and one sort of them.
    """
    all_gates = [gates(example).cpu() for example in examples]
    best = []
    for layer in range(all_gates[0].shape[0]):
        values = torch.cat([each[layer].flatten(1) for each in all_gates], 1)
        targets = torch.cat([e.targets[layer].flatten(1).cpu() for e in examples], 1)
        values, order = values.sort(dim=1, descending=True)
        right = targets.gather(1, order).cumsum(1)
        zoomed = torch.arange(1, values.shape[1] + 1)
        last = (2 * right / (zoomed + right[:, -1:])).argmax(1, keepdim=True)
        after = (last + 1).clamp(max=values.shape[1] - 1)
        # all gates are above it: slightly less than the smallest one
        both = values.gather(1, last) + values.gather(1, after)
        best.append(torch.where(after > last, both / 2, values[:, -1:] - 1e-3)[:, 0])
    return torch.stack(best)
