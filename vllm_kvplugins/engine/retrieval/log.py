"""Log of fetches: the tokens copied, and the share of attention they cover."""

from __future__ import annotations

import torch

from vllm_kvplugins.engine.recorded_run import Fetch


class RetrievalLog:
    """Collects one :class:`Fetch` per step, layer and request.

    It logs all steps that fetch: decode steps, steps that recompute a preempted
    request, and prefill steps of a request that continues a session. Other prefill
    steps fetch nothing. A fetch made ahead counts for the step that it serves.

    The covered mass is measured, not estimated: a float32 softmax of each query over
    *all* offloaded keys of its KV head, and the share of it on the tokens that are hot
    after the fetch. The mean is over the queries of a KV head's group, then over KV
    heads. Sinks, window and tail are always resident and are left out.

    Cost: a scan of all offloaded keys per step, layer and request, and a float32 copy
    of one request's keys at a time; only while a log is attached.

    Args:
        token_bytes: key and value of one token in the cache.
    """

    def __init__(self, token_bytes: int) -> None:
        self._token_bytes = token_bytes
        self._fetches: list[Fetch] = []
        self._steps: dict[tuple[str, int], int] = {}
        self._ahead: dict[tuple[str, int], int] = {}

    def add(
        self,
        request: str,
        layer: int,
        queries: torch.Tensor,
        group: int,
        keys: torch.Tensor,
        hot: torch.Tensor,
        scale: float,
        fetched: int | None,
    ) -> None:
        """Log the fetch of a request in a layer, before this layer attends.

        Args:
            request: its id.
            queries: [num_kv_heads, group * new tokens, head_dim], after RoPE.
            group: query heads per KV head.
            keys: [num_kv_heads, tokens, head_dim], all offloaded keys, as the host
                has them.
            hot: int64 [num_kv_heads, count], indices of the keys in hot slots.
            scale: softmax scale.
            fetched: number of tokens copied, over all KV heads; None if the previous
                step fetched them.
        """
        # Removed in any case: a preempted request has lost what was fetched ahead.
        ahead = self._ahead.pop((request, layer), 0)
        fetched = ahead if fetched is None else fetched
        # A request fetches once per layer and step.
        step = self._steps.get((request, layer), 0)
        self._steps[request, layer] = step + 1
        self._fetches.append(
            Fetch(
                request=request,
                step=step,
                layer=layer,
                new_tokens=queries.shape[1] // group,
                offloaded_tokens=keys.shape[0] * keys.shape[1],
                hot_tokens=hot.numel(),
                fetched_tokens=fetched,
                copied_bytes=fetched * self._token_bytes,
                mass_covered_share=covered(queries, keys, hot, scale),
            )
        )

    def add_ahead(self, request: str, layer: int, fetched: int) -> None:
        """Log a fetch for a request's next step."""
        self._ahead[request, layer] = fetched

    def take(self) -> list[Fetch]:
        """The fetches since the last call, oldest first. Step numbers continue."""
        taken, self._fetches = self._fetches, []
        return taken


def covered(
    queries: torch.Tensor,
    keys: torch.Tensor,
    hot: torch.Tensor,
    scale: float,
) -> float:
    """Share of the attention over all keys that falls on the hot ones.

    Args:
        queries: [heads, group, head_dim].
        keys: [heads, tokens, head_dim].
        hot: int64 [heads, count], distinct.
        scale: softmax scale.

    Returns:
        Mean over queries and heads, from 0 to 1.
    """
    logits = queries.float() @ keys.float().transpose(1, 2) * scale
    weights = logits.softmax(-1).sum(1)  # summed over the queries of a head
    share = weights.gather(1, hot).sum(1) / queries.shape[1]
    # rounding may add up to slightly more than 1
    return min(float(share.mean()), 1.0)
