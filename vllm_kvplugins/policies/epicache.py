"""EpiCache: one compressed cache per episode of a conversation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from vllm_kvplugins.budgets import (
    ALLOCATORS,
    Budget,
    PageAllocator,
    Sensitivity,
    parse_allocator,
)
from vllm_kvplugins.episodes.settings import DEFAULT_ENCODER, Build, EpisodeSettings
from vllm_kvplugins.plan.geometry import Geometry, Lengths, ToolLoop
from vllm_kvplugins.plan.prompt_cuts import Blockwise, WholeQuestion
from vllm_kvplugins.plan.residency_plan import ResidencyPlan
from vllm_kvplugins.policies.capabilities import EpisodeRouting, Turns
from vllm_kvplugins.policies.wrapper import Wrapper


@dataclass(frozen=True, slots=True)
class HistoryEnd(Turns):
    """The history ends where the last finished turn does. The request names the ends.

    Attributes:
        query_tokens: of a prompt that names none, such as a text to complete, this many
            last tokens are the query, and all before them the history.
        loop_tokens: see ``Turns``.
    """

    query_tokens: int
    loop_tokens: int | None = None
    history_only: ClassVar[bool] = True

    def turn_ends(
        self, prompt: Sequence[int], requested: Sequence[int] | None
    ) -> tuple[int, ...]:
        """The ends of finished turns; the last one ends the history. None without."""
        if requested is not None:
            return tuple(requested)
        history_tokens = len(prompt) - self.query_tokens
        return (history_tokens,) if history_tokens > 0 else ()

    def tool_loops(
        self,
        prompt: Sequence[int],
        turn_ends: Sequence[int],
        requested: Sequence[int] | None,
    ) -> tuple[ToolLoop, ...]:
        """The loops that the request names."""
        if self.loop_tokens is None or requested is None:
            return ()
        return ToolLoop.of_ends(turn_ends, requested)


class EpiCache(Wrapper):
    """Episodic caches under a fixed budget (EpiCache, section 3, algorithm 1).

    The engine reads the history of a conversation in blocks. After each block it
    compresses the cache to the budget: the patched prompt, a segment of the episode
    that the query belongs to, runs after the block, and the score of a token is the
    attention that it gets from the patched prompt (equation 3, computed by ``base:
    infinipot``). Each episode therefore has its own cache, which a session keeps
    between queries.

    The request contains the end of its history (``turn_ends``) and the tokens of the
    patched prompt (``patched_prompt``). For chat requests the front end sets both: it
    divides the conversation into episodes and routes the query to one of them. Tokens
    after the history, the query and its answer, are not compressed. Neither is a chat
    that begins. Of a prompt that is no chat and names no history, the last
    ``prefill_block`` tokens are the query, and the base policy scores without a patched
    prompt.

    A round of a tool loop is a message of the model and the results of its calls. It is
    finished when the model has answered the results. Where more than ``loop_tokens``
    tokens of finished rounds have come since the question, or since the last time,
    these rounds join the history before their turn ends. The question stays whole until
    then, beside the budget, and the newest round is not compressed. If a chat begins
    with such a loop, its question is the patched prompt.

    Differs from the paper: block boundaries are counted from the start of the
    conversation instead of its end. When the history grows, the engine need not read
    the earlier part again. While a query is answered, the cache can hold up to one
    block more than the budget. Every layer gets half of the average before the layer
    budgets of section 3.2 divide the rest. The paper has no tool loops.

    Cost: a forward pass of the patched prompt per block and episode.
    """

    name: ClassVar[str] = "epicache"
    summary: ClassVar[str] = (
        "compresses a conversation to one cache per episode; routes each query"
    )
    taken_settings: ClassVar[tuple[str, ...]] = (*Wrapper.taken_settings, "allocator")
    instead: ClassVar[str] = (
        "epicache sets the budget; use its own budget, prefill_block and allocator"
    )

    base: str = Field(
        default="infinipot",
        description="Compressor that scores tokens. With a compressor that takes no "
        "patched prompt, all queries share one cache (for comparison).",
    )
    budget: Annotated[Budget, BeforeValidator(Budget.parse)] = Field(
        default=Budget(tokens=1024),
        description="Tokens of the history kept per KV head (M): a number of tokens, "
        'or bytes per request ("64MiB").',
    )
    prefill_block: int = Field(
        default=512,
        ge=1,
        description="Tokens between two compactions (M_block), held in addition to the "
        "budget.",
    )
    loop_tokens: int | None = Field(
        default=4096,
        ge=1,
        description="Compress the finished rounds of a tool loop, before its turn "
        "ends, when they have more tokens than this; null: only when the turn ends.",
    )
    allocator: Annotated[PageAllocator, BeforeValidator(parse_allocator)] = Field(
        default=Sensitivity(floor=0.5),
        description="How pages are shared between layers and KV heads: "
        + ", ".join(sorted(ALLOCATORS))
        + ".",
    )
    longest_patched_prompt: int = Field(
        default=512,
        ge=8,
        description="Maximum number of tokens of a patched prompt; a longer one is cut "
        "to its middle. The engine reserves as many positions of the model.",
    )
    episodes: int | Literal["auto"] = Field(
        default=4,
        description="Episodes per conversation (E); auto: 2 to 8, by silhouette score.",
    )
    segment_utterances: int = Field(
        default=4,
        ge=1,
        description="Number of utterances that are embedded together (w_embed).",
    )
    patched_utterances: int = Field(
        default=8, ge=1, description="Number of utterances in a patched prompt."
    )
    encoder: str = Field(
        default=DEFAULT_ENCODER,
        description="Sentence encoder: a model ID or path for sentence-transformers, "
        'or an endpoint for embeddings ("http://host:8001/v1#model").',
    )
    recluster_growth: float = Field(
        default=0.5,
        gt=0,
        description="Growth of a conversation, as a share of its length, after which "
        "its episodes are recomputed.",
    )
    episode_seed: int = Field(
        default=0, ge=0, description="Random seed of the clustering."
    )
    build: Build = Field(
        default="lazy",
        description="When a server builds the caches of episodes that no query has "
        "used yet: while it is idle (lazy), at once (eager), or with the first query "
        "(never).",
    )

    def plan(self, lengths: Lengths, geometry: Geometry) -> ResidencyPlan:
        size, restored = geometry.block_size, lengths.restored
        budget_tokens = self._budget_tokens(geometry)
        questions = tuple(self._questions(lengths))
        history = max(
            (*lengths.turn_ends[-1:], *(each.turn_end for each in questions)), default=0
        )
        cuts = self._blockwise.grid(history, size, budget_tokens, restored, questions)
        compactions = (*([restored] if restored else []), *cuts)
        notes: tuple[str, ...] = ()
        if not history and lengths.prompt_tokens > budget_tokens + self.prefill_block:
            notes = (
                f"epicache: a conversation of {lengths.prompt_tokens} tokens has no "
                "history yet; it is not compressed",
            )
        return ResidencyPlan(size, compactions, notes=notes)

    def _questions(self, lengths: Lengths) -> Iterator[WholeQuestion]:
        """The questions of tool loops that are compressed before their turn ends."""
        for loop in lengths.loops:
            rounds = loop.cuts(self.loop_tokens)
            if not rounds:
                continue
            before = [end for end in lengths.turn_ends if end < loop.question_end]
            after = [end for end in lengths.turn_ends if end >= loop.question_end]
            # The live turn has no end: its last rounds are not compressed yet.
            yield WholeQuestion(
                start=before[-1] if before else 0,
                stop=loop.question_end,
                turn_end=after[0] if after else rounds[-1],
            )

    def max_prompt_blocks(self, tokens: int, geometry: Geometry) -> int | None:
        max_blocks = self._blockwise.max_blocks(
            self._budget_tokens(geometry), geometry.block_size
        )
        return min(max_blocks, -(-tokens // geometry.block_size))

    @property
    def _blockwise(self) -> Blockwise:
        return Blockwise(self.prefill_block)

    def _budget_tokens(self, geometry: Geometry) -> int:
        budget_tokens = self.budget.resolve(0, geometry.kv_bytes_per_token)
        return max(budget_tokens, self.minimum_budget_tokens)

    def page_allocator(self) -> PageAllocator:
        return self.allocator

    # -- episodes ---------------------------------------------------------------

    @property
    def turns(self) -> HistoryEnd:
        return HistoryEnd(self.prefill_block, self.loop_tokens)

    @property
    def episode_routing(self) -> EpisodeRouting | None:
        """None if the compressor takes no patched prompt; all caches are equal then."""
        probing = self._base.probing
        if probing is None or not probing.uses_patched_prompt:
            return None
        settings = EpisodeSettings(
            episodes=self.episodes,
            segment_utterances=self.segment_utterances,
            guide_utterances=self.patched_utterances,
            encoder=self.encoder,
            recluster_growth=self.recluster_growth,
            seed=self.episode_seed,
            build=self.build,
        )
        return EpisodeRouting(settings, self.longest_patched_prompt)

    def problems(self) -> list[str]:
        reasons = super().problems()
        if self.budget.fraction is not None:
            reasons.append(
                f"budget {self.budget.fraction} is a share, but histories grow; give a "
                "number of tokens, or bytes"
            )
        if isinstance(self.episodes, int) and self.episodes < 1:
            reasons.append(f"episodes must be 1 or more, or auto, got {self.episodes}")
        minimum = self._base.min_new_tokens
        if self.prefill_block < minimum:
            reasons.append(
                f"prefill_block {self.prefill_block} is below the {minimum} new tokens "
                f"that {self.base} needs to compute scores; raise it"
            )
        return reasons
