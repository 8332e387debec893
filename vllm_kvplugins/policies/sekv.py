"""SeKV: spans cut at surprising tokens, seen as a whole or token by token."""

from __future__ import annotations

import math
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
from vllm_kvplugins.spans.segmentation import Segments, cut_evenly, segment

MEAN_KEY, SHIPPED = "mean-key", "shipped"


class SeKV(SpanPolicy):
    """Semantic KV cache with a zoom (SeKV, section 3).

    When the prompt is in, its most surprising tokens stay as anchors (equation 1),
    with sinks and the newest tokens. The tokens between two anchors are a span: its
    mean key and value, weighted by surprisal (equation 2), stand for it in every
    softmax, with log |S| on top of their score; its tokens go to the host as factors
    of rank ``rank`` (equation 6). Each step looks at the means, and sees the spans
    that promise most token by token, as far as ``zoom_share`` of the budget goes.
    Spans that surprise leaves long are cut into equal parts (``cut_evenly``).

    Budgets count what is on the device for the prompt, per KV head: resident tokens,
    a mean per span (one token each), and zoomed tokens. Generated tokens stay whole
    on top of it.

    A trained ``router`` zooms into spans whose gate (equation 5) is above the
    threshold of a query head (equation 9), best first, as far as there is room, and
    says how many components a span's factors keep (equation 7). Without one spans are
    ranked by the attention that their means get, summed over the query heads that
    share a KV head; there is no threshold, the room decides. With one both count: the
    attention to means and the router's shares, which alone find fewer pass keys.

    Differs from the paper: anchors are as many as the budget has room for, the most
    surprising first; long spans are cut without an anchor; the window is at most
    ``window_share`` of the budget; the first ``sinks`` tokens stay; a span that is
    zoomed for one query head is zoomed for all that share its KV head, as they share
    pages.

    Cost: the model's output layer for every token of the prompt; a decomposition of
    each span, per layer and KV head, while the model goes on; per step and layer, a
    look at the means and the reconstruction of spans that were not zoomed before.
    """

    name: ClassVar[str] = "sekv"
    summary: ClassVar[str] = "spans at two resolutions, a zoom for what a query wants"

    budget: Annotated[Budget, BeforeValidator(Budget.parse)] = Field(
        default=Budget(fraction=0.1),
        description="Tokens on the device per KV head, for the prompt: a number of "
        'tokens (512), a share of the prompt (0.1), or bytes per request ("64MiB").',
    )
    sinks: int = Field(default=4, ge=0, description="First tokens, always resident.")
    local_window: int = Field(
        default=512, ge=1, description="Newest tokens, always resident, at most."
    )
    window_share: float = Field(
        default=0.1, gt=0, lt=1, description="Share of the budget for them, at most."
    )
    zoom_share: float = Field(
        default=0.4,
        ge=0,
        lt=1,
        description="Share of the budget for tokens of zoomed spans; 0: no zoom. There "
        "is none, either, where the share holds no span of the mean length.",
    )
    span_share: float = Field(
        default=0.3,
        gt=0,
        lt=1,
        description="Share of the budget for the means of spans, at most.",
    )
    span_tokens: int = Field(
        default=32,
        ge=1,
        description="Tokens of a span on average, at least: a prompt has no more "
        "spans than that, whatever their share.",
    )
    sensitivity: float = Field(
        default=1.0,
        description="Deviations above the mean surprisal that make an anchor (alpha).",
    )
    least_span: int = Field(
        default=16, ge=1, description="Shorter spans stay whole if they can (L_min)."
    )
    rank: int = Field(default=32, ge=1, description="Rank of a span's factors (R).")
    router: str = Field(
        default=MEAN_KEY,
        description='What chooses spans: "mean-key", attention to their means; '
        '"shipped", the router that comes with this package, for SmolLM2-135M; or a '
        "file of `kvplugins train-router`.",
    )
    host_memory: Annotated[int | None, BeforeValidator(parse_bytes)] = Field(
        default=None,
        ge=1,
        description='Most host memory for spans ("8GiB"), all ranks together; null: '
        "half of the free memory at start-up. Requests wait for it.",
    )

    # -- sizes ------------------------------------------------------------------

    def plan(self, lengths: Lengths, geometry: Geometry) -> ResidencyPlan:
        prompt_tokens, size = lengths.prompt_tokens, geometry.block_size
        budget = self._budget_tokens(prompt_tokens, geometry)
        if budget >= prompt_tokens:
            return ResidencyPlan(size)
        spans = self._span_room(budget, prompt_tokens, geometry)
        reserved = self._least_zoom(budget, prompt_tokens, geometry) + spans
        # the zone is rounded up to whole blocks; the budget holds all the same
        resident = max(budget - reserved - size + 1, 1)
        return ResidencyPlan(size, prompt_compactions(prompt_tokens, size, resident))

    def _budget_tokens(self, prompt_tokens: int, geometry: Geometry) -> int:
        return self.budget.resolve(prompt_tokens, geometry.kv_bytes_per_token)

    def zoom_tokens(self, prompt_tokens: int, geometry: Geometry) -> int:
        """``zoom_share``, and what the whole blocks of resident tokens leave."""
        budget = self._budget_tokens(prompt_tokens, geometry)
        plan = self.plan(Lengths(prompt_tokens), geometry)
        if not plan.compactions or not self._least_zoom(
            budget, prompt_tokens, geometry
        ):
            return 0
        (compaction,) = plan.compactions
        size = geometry.block_size
        resident = len(compaction.retained) * size + prompt_tokens % size
        spans = self._span_room(budget, prompt_tokens, geometry)
        return max(budget - resident - spans, 0)

    def _least_zoom(
        self, budget_tokens: int, prompt_tokens: int, geometry: Geometry
    ) -> int:
        room = int(self.zoom_share * budget_tokens)
        spans = self._most_spans(budget_tokens, prompt_tokens, geometry)
        # where most spans do not fit, tokens that stay are worth more
        return room if room * spans >= prompt_tokens else 0

    def _most_spans(
        self, budget_tokens: int, prompt_tokens: int, geometry: Geometry
    ) -> int:
        affordable = int(self.span_share * budget_tokens / self._tokens_each(geometry))
        return max(min(affordable, prompt_tokens // self.span_tokens), 1)

    def _span_room(
        self, budget_tokens: int, prompt_tokens: int, geometry: Geometry
    ) -> int:
        """Tokens whose place spans take on the device."""
        spans = self._most_spans(budget_tokens, prompt_tokens, geometry)
        return math.ceil(spans * self._tokens_each(geometry))

    def _tokens_each(self, geometry: Geometry) -> float:
        """Device memory of a span, in tokens: one for its mean key and value, plus the
        router's number per query head."""
        if self.trained is None:
            return 1.0
        lengths = self.trained.threshold
        num_bytes = int(lengths.numel() * lengths.itemsize)
        return 1.0 + num_bytes / geometry.kv_bytes_per_token

    @property
    def host_memory_bytes(self) -> int | None:
        return self.host_memory

    def host_bytes(self, tokens: int, geometry: Geometry) -> int:
        # until they are decomposed, tokens are stored whole; factors of short
        # spans take more (equation 18)
        per_token = 1 + self.rank / self.least_span
        return int(tokens * geometry.kv_bytes_per_token * (1 + per_token))

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
        # the newest come first where not even these fit
        fixed &= fixed.flip(0).cumsum(0).flip(0) <= resident_tokens
        room = resident_tokens - int(fixed.sum())
        most_spans = self._most_spans(budget, tokens, geometry)
        # half of the spans at most, so that there are enough to cut what is long
        cuts = max(most_spans // 2, 1)
        spans = segment(surprisal, fixed, room, self.sensitivity, self.least_span, cuts)
        return cut_evenly(spans, self.least_span, most_spans)

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
        """The router of the file that ``router`` names, if it does.

        Raises:
            ValueError: the file cannot be read or is no router.
        """
        if self.router == MEAN_KEY:
            return None
        return read_router(self._router_file)[0]

    def _trained_on(self, device: torch.device) -> Router | None:
        """The router, where the cache is."""
        if self.trained is None or device.type == "cpu":
            return self.trained
        if device not in self._trained_there:
            self._trained_there[device] = self.trained.on(device)
        return self._trained_there[device]

    @cached_property
    def _trained_there(self) -> dict[torch.device, Router]:
        return {}

    @property
    def _router_file(self) -> Path:
        return shipped_router() if self.router == SHIPPED else Path(self.router)

    def model_post_init(self, context: Any) -> None:
        _ = self.trained  # a bad file is refused when it is named, not used

    def summarize(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        router = self._trained_on(keys.device)
        return keys if router is None else router.per_length(keys, layer)

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
        is_what = (
            f"the shipped router is one of {facts.model}"
            if self.router == SHIPPED
            else f"{self.router} is a router of {facts.model}"
        )
        return [
            coded(
                "KVP116",
                f"{is_what}, another model than this one ({'; '.join(different)}); "
                "make one with `kvplugins train-router`, or remove `router`",
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
            "`kvplugins train-router` makes a router"
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
                f"rank {self.rank}, and {self.router} is a router that knows "
                f"{self.trained.max_rank} components; give a smaller rank"
            )
        return problems


def mean_key_shares(
    queries: torch.Tensor, spans: CoarseSpans, scale: float
) -> torch.Tensor:
    """Attention to means as a share of that to all, summed over query heads: float32
    [num_kv_heads, spans]; of one token's queries, [num_kv_heads, group, head_dim]."""
    scores = queries.float() @ spans.keys.mT * scale + spans.log_sizes
    return scores.softmax(-1).sum(1)


def zoom_gates(
    router: Router,
    layer: int,
    queries: torch.Tensor,
    spans: CoarseSpans,
    shares: torch.Tensor,
) -> torch.Tensor:
    """What a router says of one token's queries.

    Differs from the paper, which ranks by gates alone (section 3.3): the order is that
    of shares among all spans (a softmax of what the sigmoid of equation 5 is taken of,
    so that each head's is that of its gates), with those of the means on top.

    Args:
        queries: [num_kv_heads, group, head_dim].
        shares: of :func:`mean_key_shares`.

    Returns:
        float32 [num_kv_heads, spans]: both, summed over query heads; ``-inf`` where no
        head's gate is above its threshold (equation 9).
    """
    logits = router.logits_of_means(
        queries, spans.keys, spans.summary, spans.log_sizes, layer
    )
    threshold = router.threshold[layer].view(*queries.shape[:2], 1)
    above_threshold = (logits > threshold).any(1)
    return (shares + logits.softmax(-1).sum(1)).masked_fill(
        ~above_threshold, -torch.inf
    )
