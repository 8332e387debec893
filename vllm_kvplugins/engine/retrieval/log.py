"""What every fetch of a step brought, and how much of the attention it covers."""

from __future__ import annotations

import torch

from vllm_kvplugins.engine.recorded_run import Fetch


class RetrievalLog:
    """Collects one :class:`Fetch` per step, layer and request.

    All steps that fetch are logged: those that decode, those that compute a preempted
    request anew, and those in which a request that continues a session reads its
    prompt. Other prompts fetch nothing. What was fetched
    ahead counts for the step that it was fetched for.

    The mass covered is measured, not estimated: per query, a softmax over *all*
    offloaded keys of its KV head, in float32; of this the share that falls on the
    tokens that are hot after the fetch. Averaged over the queries of a KV head's
    group, then over KV heads. Sinks, window and tail are always resident and are
    left out.

    Cost: a scan of all offloaded keys per step, layer and request, and their copy in
    float32, of one request at a time; only while a log is attached.
    """

    def __init__(self) -> None:
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
        """Note what a request fetched in a layer, before this layer attends.

        Args:
            request: its id.
            queries: [num_kv_heads, group * new tokens, head_dim], after RoPE.
            group: query heads per KV head.
            keys: [num_kv_heads, tokens, head_dim], all that are offloaded.
            hot: int64 [num_kv_heads, count], numbers of those that are resident now.
            scale: softmax scale.
            fetched: tokens copied for it, over all KV heads; None if they were
                fetched during the step before.
        """
        # taken in any case: what a preempted request had fetched is gone
        ahead = self._ahead.pop((request, layer), 0)
        fetched = ahead if fetched is None else fetched
        # a request fetches once per layer and step, whatever others do
        step = self._steps.get((request, layer), 0)
        self._steps[request, layer] = step + 1
        token_bytes = 2 * keys.shape[2] * keys.element_size()  # key and value
        self._fetches.append(
            Fetch(
                request=request,
                step=step,
                layer=layer,
                new_tokens=queries.shape[1] // group,
                offloaded_tokens=keys.shape[0] * keys.shape[1],
                hot_tokens=hot.numel(),
                fetched_tokens=fetched,
                copied_bytes=fetched * token_bytes,
                mass_covered_share=covered(queries, keys, hot, scale),
            )
        )

    def add_ahead(self, request: str, layer: int, fetched: int) -> None:
        """Note what was fetched for a request's next step."""
        self._ahead[request, layer] = fetched

    def take(self) -> list[Fetch]:
        """The fetches since the last call, oldest first; steps go on counting."""
        taken, self._fetches = self._fetches, []
        return taken


def covered(
    queries: torch.Tensor,
    keys: torch.Tensor,
    hot: torch.Tensor,
    scale: float,
) -> float:
    """Share of the attention over keys that falls on some of them.

    Args:
        queries: [heads, group, head_dim].
        keys: [heads, tokens, head_dim].
        hot: int64 [heads, count], distinct.
        scale: softmax scale.

    Returns:
        Mean over queries and heads, from 0 to 1.
    """
    logits = queries.float() @ keys.float().transpose(1, 2) * scale
    weights = logits.softmax(-1).sum(1)  # of a head's queries together
    share = weights.gather(1, hot).sum(1) / queries.shape[1]
    # rounding may add up to a little more than everything
    return min(float(share.mean()), 1.0)
