"""The contract between a KV-cache policy and the engine.

A policy is a frozen pydantic model: its fields are its hyperparameters, and all
state is passed in. The engine asks it three questions:

* ``plan``: which blocks are resident after which token count (scheduler AND
  worker ask; pure and tensor-free);
* ``score``: how much each slot is worth (worker; torch);
* ``allocator``: how many pages each (layer, KV head) may keep.

Everything else (moving pages, freeing blocks, page tables) is the engine's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, Flag, auto
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict

from vllm_kvplugins.budgets import PageAllocator, Uniform
from vllm_kvplugins.budgets.base import LoadFingerprint
from vllm_kvplugins.plan.geometry import Geometry, Lengths
from vllm_kvplugins.plan.residency_plan import ResidencyPlan
from vllm_kvplugins.scoring.rotary import Rotary

if TYPE_CHECKING:
    from vllm_kvplugins.episodes.settings import EpisodeSettings


class Trigger(Flag):
    """Steps after which the engine calls ``observe``."""

    NEVER = 0
    PREFILL_CHUNK = auto()
    DECODE_STEP = auto()
    PROBE = auto()


class Retention(Enum):
    """What becomes of slots that are not resident."""

    DROP = "drop"
    # They stay in host memory and come back when a query asks for them; such a
    # policy is a ``Retriever``.
    OFFLOAD = "offload"
    # They lie in host memory as factors, from which some are made again when a query
    # asks for them; such a policy is a ``Resolver``.
    RECONSTRUCT = "reconstruct"


# Text to token ids, without special tokens.
Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Probe:
    """Tokens that run through the model behind a request's cache, to be looked at.

    They attend to the cache and to each other and leave nothing behind.

    Attributes:
        token_ids: what runs.
        about: positions that the policy asks about; the engine ignores it.
        also: more of them, which an earlier compaction left.
    """

    token_ids: Sequence[int]
    about: range
    also: range = range(0)


@dataclass(frozen=True, slots=True)
class ProbeOccasion:
    """What a policy knows when it writes its probes, just before a compaction.

    Attributes:
        prompt: the request's prompt.
        since: token count at the compaction before, 0 if there was none; of the
            tokens before it only survivors are in the cache.
        tokens: token count now, the position of a probe's first token.
        room: most tokens that one probe may have.
        encode: the model's tokenizer.
        patched_prompt: token ids that the request wants to be asked; empty = none.
    """

    prompt: Sequence[int]
    since: int
    tokens: int
    room: int
    encode: Encode
    patched_prompt: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class LayerView:
    """One request, one layer, read-only, all slots up to now.

    In ``score`` slots are in order of position, newest last; KV heads with fewer
    slots than others start with invalid ones. In ``observe`` they are as they
    lie in the cache; a probe's own come last.

    Attributes:
        layer: index of the layer, 0 first.
        keys: [num_kv_heads, num_slots, head_dim], after RoPE, cache dtype.
        positions: int64 [num_kv_heads, num_slots], RoPE position of each slot,
            -1 where there is none.
        valid: bool [num_kv_heads, num_slots], whether there is a token; None
            when all are. Invalid keys and values hold anything.
        queries: [num_q_heads, num_queries, head_dim], after RoPE, newest last;
            in ``score`` as many as ``queries_needed`` asks for (fewer when the
            compaction before was closer), in ``observe`` those of the step.
            They belong to the newest slots.
        query_positions: int64 [num_queries].
        scale: softmax scale of the layer.
        rotary: the model's RoPE; None if it has none that policies can undo.
        observed: what ``observe`` last returned for this layer, or None; a
            compaction's first probe starts from None.
        budget_tokens: in ``score``, tokens that stay per KV head on average; 0
            in ``observe``.
        load_values: reads the values when first asked; see ``values``.
        probe: in ``observe``, the probe whose tokens the queries are; else None.
        page_votes: what ``policies.votes`` asks, if the pages can say it: whether the
            largest weight is wanted instead of their sum -> float32 [num_kv_heads,
            group, num_slots].
    """

    layer: int
    keys: torch.Tensor
    positions: torch.Tensor
    valid: torch.Tensor | None
    queries: torch.Tensor
    query_positions: torch.Tensor
    scale: float
    rotary: Rotary | None
    observed: Any
    budget_tokens: int
    load_values: Callable[[], torch.Tensor] = field(repr=False)
    probe: Probe | None = None
    page_votes: Callable[[bool], torch.Tensor] | None = field(default=None, repr=False)

    @property
    def values(self) -> torch.Tensor:
        """[num_kv_heads, num_slots, head_dim]; gathered from the pages anew at
        each access, so that policies that never look at values pay nothing."""
        return self.load_values()


class KVCachePolicy(BaseModel, ABC):
    """Base of all policies. Subclasses declare fields, a plan and a score."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    name: ClassVar[str]
    summary: ClassVar[str]
    retention: ClassVar[Retention] = Retention.DROP
    # Whether it keeps the best-scoring tokens of a budget, which others may set.
    compresses: ClassVar[bool] = False
    # Whether ``view.rotary`` must be there; the engine refuses other models.
    needs_rotary: ClassVar[bool] = False
    # Whether its probes ask what the request wants, ``ProbeOccasion.patched_prompt``.
    asks_patched_prompt: ClassVar[bool] = False

    @property
    def knows_query_heads(self) -> bool:
        """Whether it has numbers of its own for each of the model's query heads."""
        return False

    @property
    def queries_needed(self) -> int:
        """Newest queries that ``score`` wants; 0 = none."""
        return 0

    @property
    def observes(self) -> Trigger:
        """Steps after which the engine calls ``observe``."""
        return Trigger.NEVER

    @property
    def observes_steps(self) -> bool:
        """Whether what it observed depends on every token so far."""
        return bool(self.observes & (Trigger.PREFILL_CHUNK | Trigger.DECODE_STEP))

    @property
    def needs_surprisal(self) -> bool:
        """Whether it wants to know how surprising each token of the prompt is."""
        return False

    @property
    def compacts_late(self) -> bool:
        """Whether a compaction takes so long that the step's tokens leave before: it
        runs when the next step begins, before anything is written."""
        return self.needs_surprisal

    @property
    def needs_tokenizer(self) -> bool:
        """Whether ``probe_room`` and ``probes`` encode text."""
        return False

    @property
    def minimum_budget_tokens(self) -> int:
        """Smallest budget that leaves this policy anything to choose."""
        return 1

    @property
    def least_new_tokens(self) -> int:
        """Fewest new tokens with which it can score what a prompt holds."""
        return max(self.queries_needed, 1)

    @property
    def needs_turns(self) -> bool:
        """Whether ``turn_ends`` has anything to say."""
        return False

    @property
    def finds_turns(self) -> bool:
        """Whether it finds them in a prompt by the token that ends its messages, the
        setting ``turn_end_token``; else only requests say them."""
        return False

    def turn_ends(
        self, prompt: Sequence[int], asked: Sequence[int] | None
    ) -> tuple[int, ...]:
        """Where turns of a prompt end, for ``plan``. Pure, like ``plan``.

        Args:
            prompt: token ids.
            asked: what the request says about it, if anything; checked.

        Returns:
            Token counts, ascending, none beyond the prompt.
        """
        return ()

    @property
    def wants_history(self) -> bool:
        """Whether chat requests are told where their history ends, which is before
        the query: the only one of their turn ends."""
        return False

    @property
    def episode_settings(self) -> EpisodeSettings | None:
        """How histories are cut into episodes; None = they are not."""
        return None

    @property
    def patched_prompt_tokens(self) -> int:
        """Most tokens of a request's patched prompt; 0 = requests bring none."""
        return 0

    @abstractmethod
    def plan(self, lengths: Lengths, geometry: Geometry) -> ResidencyPlan:
        """Which blocks are resident when. Pure: same arguments, same plan."""

    def prompt_blocks(self, tokens: int, geometry: Geometry) -> int | None:
        """Most blocks that a prompt of up to so many tokens holds while it is read;
        None: the policy sets no bound, it may hold all of them."""
        return None

    @property
    def has_score(self) -> bool:
        """Whether a class derived from this one says what slots are worth."""
        return type(self).score.__module__ != __name__

    def score(self, view: LayerView) -> torch.Tensor:
        """Worth of each slot of one layer; larger means keep.

        Returns:
            float32 [num_kv_heads, num_slots]. ``inf`` marks slots that must
            stay (a window, sinks), ``-inf`` slots that must go.
        """
        raise AssertionError(f"{self.name} has no compaction, so nothing to score")

    def observe(self, view: LayerView) -> Any:
        """Look at a step without changing anything; see ``observes``.

        Called once per layer when the step's tokens have attended.

        Returns:
            The new ``view.observed``, for ``score`` and the next ``observe``;
            dropped with the request.
        """
        raise AssertionError(f"{self.name} observes nothing")

    def pack_observed(self, observed: Any) -> dict[str, torch.Tensor]:
        """What ``observe`` returned, as tensors of its own, to be stored."""
        return {"observed": observed.clone()}

    def unpack_observed(self, packed: dict[str, torch.Tensor]) -> Any:
        """The same as ``observe`` returned it; may not change ``packed`` later."""
        return packed["observed"].clone()

    def probe_room(self, encode: Encode) -> int:
        """Fewest tokens that a probe must have; the engine keeps so many
        positions of the model free. Asked if ``observes`` has PROBE."""
        raise AssertionError(f"{self.name} does not probe")

    def probes(self, occasion: ProbeOccasion) -> Sequence[Probe]:
        """What to run before a compaction, if ``observes`` has PROBE.

        Each probe is a forward pass of its own, after which ``observe`` has
        been called for every layer. Their time is part of the compaction's.
        """
        raise AssertionError(f"{self.name} does not probe")

    def model_problems(self, model: LoadFingerprint) -> list[str]:
        """Why this policy, as it is set, cannot run on this model; for start-up."""
        return []

    @property
    def remarks(self) -> list[str]:
        """What a user should know about these settings; logged at start-up."""
        return []

    @property
    def host_memory_bytes(self) -> int | None:
        """Most host memory for what is offloaded; None: the engine decides."""
        return None

    def host_bytes(self, tokens: int, geometry: Geometry) -> int:
        """Most host memory of a request that ends with so many tokens."""
        return 0

    def page_allocator(self) -> PageAllocator:
        """How a compaction shares pages between layers and KV heads."""
        return Uniform()

    def with_allocator(
        self, request: dict[str, Any], allocator: dict[str, Any]
    ) -> dict[str, Any]:
        """The request for this policy, asking for another allocator.

        Args:
            request: what this policy was parsed from.
            allocator: as ``parse_allocator`` takes it.
        """
        return request | {"allocator": allocator}

    def problems(self) -> list[str]:
        """Contradictions between this policy's own settings, for the user."""
        return []
