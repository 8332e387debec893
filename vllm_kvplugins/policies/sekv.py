"""SeKV: spans between surprising tokens, attended as one mean or token by token."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from pydantic import BeforeValidator, Field

from vllm_kvplugins.budgets import Budget, parse_bytes
from vllm_kvplugins.budgets.base import LoadFingerprint
from vllm_kvplugins.errors import coded
from vllm_kvplugins.ops.svd import LowRank
from vllm_kvplugins.plan.geometry import Geometry, Lengths
from vllm_kvplugins.plan.prompt_cuts import prompt_compactions
from vllm_kvplugins.plan.residency_plan import ResidencyPlan
from vllm_kvplugins.policies.span_policy import SpanPolicy
from vllm_kvplugins.routers.files import read_router, shipped_router
from vllm_kvplugins.routers.router import Router
from vllm_kvplugins.spans.coarse import CoarseSpans
from vllm_kvplugins.spans.device_memory import SpanMemory
from vllm_kvplugins.spans.segmentation import Segments, cut_evenly, segment

MEAN_KEY, SHIPPED = "mean-key", "shipped"
_VARIANCE_BYTES = 2  # bfloat16
# Of a span's stored keys and values: offset, rank and length, int64 each
_INDEX_BYTES = 2 * 3 * 8


class SeKV(SpanPolicy):
    """Semantic KV cache with a zoom (SeKV, section 3).

    After the prefill, the most surprising tokens stay resident as anchors (equation 1),
    together with sinks and the newest tokens. The tokens between two anchors form a
    span. The mean key and value of a span, weighted by surprisal (equation 2),
    represent it in every softmax; the score of a mean gets log |S| added. The tokens of
    a span move to the host, as factors of rank ``rank`` (equation 6) where these are
    smaller than the tokens' keys and values, else as these. Each step attends
    to the means, and to the individual tokens of the best spans, within ``zoom_share``
    of the budget. Long spans are cut into equal parts (``cut_evenly``).

    The budget is what the prompt occupies on the device: resident tokens and their
    positions, means, zoomed tokens, and what routing and attention need with them
    (``spans/device_memory.py``). Generated tokens stay resident in addition to the
    budget, and so does the rest of the prompt's last block.

    A trained ``router`` zooms into spans whose gate (equation 5) is above the threshold
    of a query head (equation 9), best first, until the room is used up. It also decides
    how many components of a span's factors to keep (equation 7). Without a router,
    spans are ranked by the attention to their means, summed over the query heads that
    share a KV head, and there is no threshold. With a router, the attention to means
    and the router's shares are added; the router's shares alone find fewer pass keys.

    With ``second_order``, the ranking estimates the attention to the tokens of a span,
    which grows with the variance of their keys (:func:`mean_key_shares`). Only the
    ranking does: the score of a mean has one bias for all query heads, so a term that
    depends on the query does not fit into it.

    Differs from the paper:

    - Short spans are stored exactly, because factors would be no smaller.
    - The budget determines the number of anchors, the most surprising tokens first.
    - Long spans are cut without an anchor.
    - The window is at most ``window_share`` of the budget.
    - The first ``sinks`` tokens stay resident.
    - A span that is zoomed for one query head is zoomed for all query heads of its KV
      head, because they share pages.

    Cost: the model's output layer for every token of the prompt. A copy or a
    decomposition of each span per layer and KV head, in parallel with the model. Per
    step and layer, attention to the means, and reconstruction of newly zoomed spans.
    """

    name: ClassVar[str] = "sekv"
    summary: ClassVar[str] = (
        "keeps spans at two resolutions; each query zooms into the best ones"
    )

    budget: Annotated[Budget, BeforeValidator(Budget.parse)] = Field(
        default=Budget(fraction=0.1),
        description="Device memory of the prompt, means, zoomed tokens and tables "
        "included: as much as a number of tokens takes (512), or a share of the prompt "
        '(0.1), or bytes per request ("64MiB").',
    )
    sinks: int = Field(default=4, ge=0, description="First tokens; always resident.")
    local_window: int = Field(
        default=512,
        ge=1,
        description="Maximum number of newest tokens that are always resident.",
    )
    window_share: float = Field(
        default=0.1,
        gt=0,
        lt=1,
        description="Maximum share of the budget for the newest tokens.",
    )
    zoom_share: float = Field(
        default=0.4,
        ge=0,
        lt=1,
        description="Share of the budget for tokens of zoomed spans; 0: no zoom. There "
        "is no zoom either if the share cannot hold one span of mean length.",
    )
    span_share: float = Field(
        default=0.3,
        gt=0,
        lt=1,
        description="Maximum share of the budget for the means of spans.",
    )
    span_tokens: int = Field(
        default=32,
        ge=1,
        description="Minimum average length of a span in tokens. Limits the number of "
        "spans of a prompt, even if span_share allows more.",
    )
    sensitivity: float = Field(
        default=1.0,
        description="Standard deviations above the mean surprisal that make a token an "
        "anchor (alpha).",
    )
    least_span: int = Field(
        default=16,
        ge=1,
        description="Minimum length of a span (L_min). Shorter runs stay resident if "
        "there is room.",
    )
    second_order: bool = Field(
        default=False,
        description="Rank spans also by how much their keys vary in the direction of a "
        "query: a span whose mean gets little attention can contain a token that gets "
        "much. Keeps a variance per dimension and span, which the budget counts.",
    )
    rank: int = Field(
        default=32,
        ge=1,
        description="Rank of a span's factors (R). Spans whose factors would be no "
        "smaller than their keys and values are stored exactly.",
    )
    router: str = Field(
        default=MEAN_KEY,
        description='What ranks spans: "mean-key" (attention to their means), '
        '"shipped" (the router in this package, trained for SmolLM2-135M), or a file '
        "written by `kvplugins research train-router`.",
    )
    host_memory: Annotated[int | None, BeforeValidator(parse_bytes)] = Field(
        default=None,
        ge=1,
        description='Maximum host memory for spans of all ranks ("8GiB"); null: half '
        "of the free memory at start-up. Requests wait when it is full.",
    )

    # -- sizes ------------------------------------------------------------------

    def plan(self, lengths: Lengths, geometry: Geometry) -> ResidencyPlan:
        prompt_tokens, size = lengths.prompt_tokens, geometry.block_size
        budget = self._budget_tokens(prompt_tokens, geometry)
        if budget >= prompt_tokens:
            return ResidencyPlan(size)
        zoom = self._min_zoom_tokens(budget, prompt_tokens, geometry)
        room = self._room_left(budget, prompt_tokens, zoom, geometry)
        tokens = int(room / self.device_memory(geometry).token_bytes)
        # The retained region is rounded up to whole blocks within the budget.
        resident = max(tokens - size + 1, 1)
        return ResidencyPlan(size, prompt_compactions(prompt_tokens, size, resident))

    def _budget_tokens(self, prompt_tokens: int, geometry: Geometry) -> int:
        return self.budget.resolve(prompt_tokens, geometry.kv_bytes_per_token)

    def zoom_tokens(self, prompt_tokens: int, geometry: Geometry) -> int:
        """``zoom_share``, plus what rounding to whole blocks leaves of the budget."""
        budget = self._budget_tokens(prompt_tokens, geometry)
        plan = self.plan(Lengths(prompt_tokens), geometry)
        if not plan.compactions or not self._min_zoom_tokens(
            budget, prompt_tokens, geometry
        ):
            return 0
        (compaction,) = plan.compactions
        size = geometry.block_size
        resident = len(compaction.retained) * size + prompt_tokens % size
        memory = self.device_memory(geometry)
        room = self._room_left(budget, prompt_tokens, 0, geometry)
        room -= resident * memory.token_bytes
        return max(int(room / memory.entry_bytes), 0)

    def _min_zoom_tokens(
        self, budget_tokens: int, prompt_tokens: int, geometry: Geometry
    ) -> int:
        memory = self.device_memory(geometry)
        in_bytes = self.zoom_share * budget_tokens * memory.row_bytes
        room = int(in_bytes / memory.entry_bytes)
        spans = self._max_spans(budget_tokens, prompt_tokens, geometry)
        # If most spans do not fit, resident tokens use the memory better.
        return room if room * spans >= prompt_tokens else 0

    def _max_spans(
        self, budget_tokens: int, prompt_tokens: int, geometry: Geometry
    ) -> int:
        memory = self.device_memory(geometry)
        in_bytes = self.span_share * budget_tokens * memory.row_bytes
        affordable = int(in_bytes / memory.span_bytes)
        return max(min(affordable, prompt_tokens // self.span_tokens), 1)

    def _room_left(
        self, budget_tokens: int, prompt_tokens: int, zoom: int, geometry: Geometry
    ) -> float:
        """What the spans and ``zoom`` tokens leave of the budget, in bytes per layer
        and KV head."""
        spans = self._max_spans(budget_tokens, prompt_tokens, geometry)
        memory = self.device_memory(geometry)
        used = memory.outside_pages(geometry.all_rows, spans, zoom)
        total = budget_tokens * geometry.kv_bytes_per_token
        return (total - used) / geometry.all_rows

    def device_memory(self, geometry: Geometry) -> SpanMemory:
        """With a router, routing keeps a number per span and query head; with
        ``second_order`` a bfloat16 number per span and dimension."""
        routing = 0.0
        if self.trained is not None:
            routing += self.trained.threshold.nbytes / geometry.all_rows
        if self.second_order:
            assert geometry.head_dim is not None
            routing += _VARIANCE_BYTES * geometry.head_dim
        return SpanMemory(geometry.row_bytes, routing)

    @property
    def uses_key_variance(self) -> bool:
        return self.second_order

    @property
    def host_memory_bytes(self) -> int | None:
        return self.host_memory

    def host_bytes(self, tokens: int, geometry: Geometry) -> int:
        # Spans are stored as rows, or as factors that are smaller. One layer after the
        # other is decomposed; its tokens are then on the host three times.
        spans = tokens // self.span_tokens + 1
        rows = tokens * geometry.kv_bytes_per_token * (1 + 2 / geometry.num_layers)
        # Their mean keys in float32, until they are decomposed; at most this.
        means = spans * geometry.kv_bytes_per_token
        return int(rows + means + spans * geometry.all_rows * _INDEX_BYTES)

    @property
    def max_rank(self) -> int:
        return self.rank

    # -- spans ------------------------------------------------------------------

    def segment(
        self, surprisal: torch.Tensor, resident_tokens: int, geometry: Geometry
    ) -> Segments:
        tokens = surprisal.numel()
        budget = self._budget_tokens(tokens, geometry)
        tail = tokens % geometry.block_size
        window = min(self.local_window, int(self.window_share * budget))
        position = torch.arange(tokens)
        fixed = position >= tokens - max(window, tail)
        fixed |= position < self.sinks
        # If not even these fit, the newest tokens have priority.
        fixed &= fixed.flip(0).cumsum(0).flip(0) <= resident_tokens
        room = resident_tokens - int(fixed.sum())
        max_spans = self._max_spans(budget, tokens, geometry)
        # At most half of the spans, so that enough remain to cut long ones.
        cuts = max(max_spans // 2, 1)
        spans = segment(surprisal, fixed, room, self.sensitivity, self.least_span, cuts)
        return cut_evenly(spans, self.least_span, max_spans)

    def gates(
        self, layer: int, queries: torch.Tensor, spans: CoarseSpans, scale: float
    ) -> torch.Tensor:
        shares = mean_key_shares(queries, spans, scale)
        router = self._trained_on(queries.device)
        if router is None:
            return shares
        return zoom_gates(router, layer, queries, spans, shares)

    # -- the router ---------------------------------------------------------------

    @cached_property
    def trained(self) -> Router | None:
        """The router that ``router`` names; None for "mean-key".

        Raises:
            ValueError: the file cannot be read or does not contain a router.
        """
        if self.router == MEAN_KEY:
            return None
        return read_router(self._router_file)[0]

    def _trained_on(self, device: torch.device) -> Router | None:
        """The router on the device of the cache."""
        if self.trained is None or device.type == "cpu":
            return self.trained
        if device not in self._trained_by_device:
            self._trained_by_device[device] = self.trained.on(device)
        return self._trained_by_device[device]

    @cached_property
    def _trained_by_device(self) -> dict[torch.device, Router]:
        return {}

    @property
    def _router_file(self) -> Path:
        return shipped_router() if self.router == SHIPPED else Path(self.router)

    def model_post_init(self, context: Any) -> None:
        _ = self.trained  # Refuse a bad file at start-up, not at its first use.

    def summarize(self, layer: int, keys: torch.Tensor) -> torch.Tensor | None:
        router = self._trained_on(keys.device)
        return None if router is None else router.per_length(keys, layer)

    def component_gates(
        self, layer: int, factors: LowRank, spans: CoarseSpans
    ) -> torch.Tensor | None:
        if self.trained is None:
            return None
        summary = self.trained.summarize(spans.keys, layer)
        return self.trained.component_gates(factors, summary)

    def model_problems(self, model: LoadFingerprint) -> list[str]:
        if self.router == MEAN_KEY:
            return []
        facts = read_router(self._router_file)[1]
        different = facts.fingerprint.differences(model())
        if not different:
            return []
        origin = (
            f"the shipped router was trained for {facts.model}"
            if self.router == SHIPPED
            else f"{self.router} was trained for {facts.model}"
        )
        return [
            coded(
                "KVP116",
                f"{origin}, not for this model ({'; '.join(different)}); train one "
                "with `kvplugins research train-router`, or remove `router`",
            )
        ]

    @property
    def uses_query_heads(self) -> bool:
        return self.trained is not None

    @property
    def remarks(self) -> list[str]:
        if self.router != MEAN_KEY:
            return []
        return [
            "no trained router: spans are ranked by the attention to their mean keys; "
            "train a router with `kvplugins research train-router`"
        ]

    def problems(self) -> list[str]:
        shares = self.window_share + self.zoom_share + self.span_share
        problems = []
        if shares >= 1:
            problems.append(
                f"window_share {self.window_share}, zoom_share {self.zoom_share} and "
                f"span_share {self.span_share} leave nothing of the budget for "
                "anchors; their sum must stay below 1"
            )
        if self.trained is not None and self.trained.max_rank < self.rank:
            problems.append(
                f"rank {self.rank} exceeds the {self.trained.max_rank} components of "
                f"the router {self.router}; give a smaller rank"
            )
        return problems


def mean_key_shares(
    queries: torch.Tensor, spans: CoarseSpans, scale: float
) -> torch.Tensor:
    """Attention to each span as a share of the attention to all spans, by its mean.

    Normally distributed keys with mean mu and variance Sigma get the attention of
    ``|S| exp(s q.mu + s^2 q^T Sigma q / 2)``; s is the scale. The second term needs
    ``spans.key_variance``, the diagonal of Sigma.

    Args:
        queries: [num_kv_heads, group, head_dim], of one token.

    Returns:
        float32 [num_kv_heads, spans], summed over the query heads of the group.
    """
    asked = queries.float() * scale
    scores = asked @ spans.keys.float().mT + spans.log_sizes
    if spans.key_variance is not None:
        scores += 0.5 * asked.square() @ spans.key_variance.float().mT
    return scores.softmax(-1).sum(1)


def zoom_gates(
    router: Router,
    layer: int,
    queries: torch.Tensor,
    spans: CoarseSpans,
    shares: torch.Tensor,
) -> torch.Tensor:
    """Rank spans with a router, for one token's queries.

    Differs from the paper, which ranks by gates alone (section 3.3): the rank is the
    sum of two shares. One is the softmax over spans of the logits whose sigmoid is the
    gate (equation 5), which orders the spans of a head like its gates. The other is the
    attention to means.

    Args:
        queries: [num_kv_heads, group, head_dim].
        shares: result of :func:`mean_key_shares`.

    Returns:
        float32 [num_kv_heads, spans], summed over query heads; ``-inf`` where no head's
        gate is above its threshold (equation 9).
    """
    assert spans.summary is not None, "a router summarizes spans"
    logits = router.logits_of_means(
        queries, spans.keys, spans.summary, spans.log_sizes, layer
    )
    threshold = router.threshold[layer].view(*queries.shape[:2], 1)
    above_threshold = (logits > threshold).any(1)
    return (shares + logits.softmax(-1).sum(1)).masked_fill(
        ~above_threshold, -torch.inf
    )
