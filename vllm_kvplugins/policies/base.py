"""The contract between a KV-cache policy and the engine.

A policy is a frozen pydantic model. Its fields are its settings; it holds no state.
Most policies derive from ``Compressor`` and write one method, ``score``. The whole
contract:

* ``plan``: which blocks are resident after how many tokens. The scheduler and the
  worker both call it, so it is pure and uses no tensors.
* ``score``: the worth of each slot of a layer.
* ``page_allocator``: how many pages each (layer, KV head) keeps.
* ``problems``, ``model_problems``, ``remarks``: what to tell the user at start-up.
* optional capabilities, each a property that returns an object or ``None``; see
  ``policies.capabilities``.

The engine does the rest: it moves and frees pages and builds page tables.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from pydantic import BaseModel, ConfigDict

from vllm_kvplugins.budgets import PageAllocator, Uniform
from vllm_kvplugins.budgets.base import LoadFingerprint
from vllm_kvplugins.plan.geometry import Geometry, Lengths, ToolLoop
from vllm_kvplugins.plan.residency_plan import ResidencyPlan
from vllm_kvplugins.policies.hook_names import refuse_hook_names
from vllm_kvplugins.scoring.logits import PLAIN, LogitRules
from vllm_kvplugins.scoring.rotary import Rotary

if TYPE_CHECKING:
    from vllm_kvplugins.policies.capabilities import (
        EpisodeRouting,
        HostStorage,
        Observation,
        Probe,
        Probing,
        Turns,
    )
    from vllm_kvplugins.policies.retrieval import Retriever
    from vllm_kvplugins.policies.span_policy import SpanPolicy


@dataclass(frozen=True, slots=True)
class LayerView:
    """The cache of one request in one layer. Read-only.

    In ``score``, slots are sorted by position, newest last. KV heads that hold fewer
    tokens than others start with invalid slots. In ``observe``, slots come in the order
    of the cache, and those of a probe come last.

    Attributes:
        layer: index of the layer, from 0.
        positions: int64 [num_kv_heads, num_slots], RoPE position of each slot; -1
            where there is no token.
        valid: bool [num_kv_heads, num_slots], whether the slot holds a token; None if
            all do. Keys and values of invalid slots are undefined and may be NaN.
        queries: [num_q_heads, num_queries, head_dim], after RoPE, newest last. In
            ``score``: the number that ``queries_needed`` names, or fewer if the
            previous compaction was closer. In ``observe``: the step's queries. They
            belong to the newest slots.
        query_positions: int64 [num_queries].
        scale: softmax scale of the layer.
        rotary: the model's RoPE; None if the model has none that can be undone.
        rules: what else the layer does to logits. ``policies.votes`` applies them.
        observed: what ``Observation.observe`` or ``Probing.observe`` last returned
            for this layer; None if neither has run.
        budget_tokens: in ``score``, tokens to keep per KV head on average; 0 in
            ``observe``.
        load_keys, load_values: read the keys and the values; use ``keys`` and
            ``values``.
        probe: the probe in ``Probing.observe``, else None.
        load_output_weights: reads the layer's output projection; use
            ``output_weights``. None unless the policy needs it.
        page_votes: reads attention from the pages without a copy of the keys; use
            ``policies.votes``. Takes whether to return the largest weight instead of
            the sum, returns float32 [num_kv_heads, group, num_slots]. None if the
            device has no kernel for it.
    """

    layer: int
    positions: torch.Tensor
    valid: torch.Tensor | None
    queries: torch.Tensor
    query_positions: torch.Tensor
    scale: float
    rotary: Rotary | None
    observed: Any
    budget_tokens: int
    load_keys: Callable[[], torch.Tensor] = field(repr=False)
    load_values: Callable[[], torch.Tensor] = field(repr=False)
    probe: Probe | None = None
    page_votes: Callable[[bool], torch.Tensor] | None = field(default=None, repr=False)
    rules: LogitRules = PLAIN
    load_output_weights: Callable[[], torch.Tensor] | None = field(
        default=None, repr=False
    )

    @property
    def keys(self) -> torch.Tensor:
        """[num_kv_heads, num_slots, head_dim], after RoPE, dtype of the cache.

        The first access gathers them from the pages, so policies that do not read keys
        do not pay for them.
        """
        return self.load_keys()

    @property
    def values(self) -> torch.Tensor:
        """[num_kv_heads, num_slots, head_dim].

        Each access gathers them from the pages, so policies that do not read values
        do not pay for them.
        """
        return self.load_values()

    @property
    def output_weights(self) -> torch.Tensor:
        """[num_q_heads, head_dim, hidden size], the layer's output projection.

        Only for policies with ``needs_output_weights``. A value of a query head's KV
        head adds ``value @ output_weights[head]``, times its attention, to the output
        of the layer. Each access projects as many tokens as all heads have elements.
        """
        assert self.load_output_weights is not None, "the policy did not ask for it"
        return self.load_output_weights()


class KVCachePolicy(BaseModel, ABC):
    """Base class of all policies.

    Subclasses set ``name`` and ``summary``, declare their settings as fields, and
    override hooks. Every public property and method of this class is a hook, except
    those marked ``@final``; only ``plan`` has no default.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    name: ClassVar[str]
    summary: ClassVar[str]
    # Whether it keeps the best-scoring tokens of a budget. Wrappers take such a policy
    # as their base.
    compresses: ClassVar[bool] = False

    # -- what stays --------------------------------------------------------------

    @abstractmethod
    def plan(self, lengths: Lengths, geometry: Geometry) -> ResidencyPlan:
        """Which blocks are resident when. Pure: same arguments, same plan."""

    def max_prompt_blocks(self, tokens: int, geometry: Geometry) -> int | None:
        """Maximum number of blocks held while a prompt of ``tokens`` tokens is read.

        None: no limit; the request may hold the whole prompt.
        """
        return None

    def page_allocator(self) -> PageAllocator:
        """How a compaction divides pages among layers and KV heads."""
        return Uniform()

    def with_allocator(
        self, request: dict[str, Any], allocator: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the policy's configuration with another allocator.

        Args:
            request: the configuration from which this policy was parsed.
            allocator: as ``parse_allocator`` takes it.
        """
        return request | {"allocator": allocator}

    # -- scores ------------------------------------------------------------------

    def score(self, view: LayerView) -> torch.Tensor:
        """Worth of each slot of one layer; larger means keep.

        The engine calls it at each compaction, once per layer.

        Returns:
            float32 [num_kv_heads, num_slots]. ``inf`` marks slots that must stay (a
            window, sinks), ``-inf`` slots that must go. Scores of invalid slots are
            ignored.
        """
        raise AssertionError(f"{self.name} has no compaction, so nothing to score")

    @property
    def queries_needed(self) -> int:
        """Number of newest queries that ``score`` reads; 0 = none."""
        return 0

    @property
    def applies_softcap(self) -> bool:
        """Whether scores model capped attention logits, see ``view.rules``.

        True if attention in ``score`` comes from ``policies.votes``, or if ``score``
        uses none. Models that cap logits are refused otherwise.
        """
        return self.retrieval is None

    @property
    def scores_heads_separately(self) -> bool:
        """Whether nothing of one KV head decides what another one keeps.

        Engines of another tensor-parallel size, whose ranks have other heads, then
        load the same sessions. An ``Observation`` that packs tensors must have KV heads
        or query heads, in their order, in the first dimension of each tensor; tensors
        without dimensions count for all heads.
        """
        return False

    @property
    def needs_rotary(self) -> bool:
        """Whether ``score`` needs ``view.rotary``; other models are refused then."""
        return False

    @property
    def needs_output_weights(self) -> bool:
        """Whether ``score`` needs ``view.output_weights``.

        Models that do not show their output projections are refused then.
        """
        return False

    @property
    def minimum_budget_tokens(self) -> int:
        """Smallest budget that leaves the policy a choice.

        For example its sinks and its window, plus one.
        """
        return 1

    # -- what to tell the user -----------------------------------------------------

    def problems(self) -> list[str]:
        """Contradictions between the settings, each a sentence with a remedy."""
        return []

    def model_problems(self, model: LoadFingerprint) -> list[str]:
        """Why the policy cannot run on a model with these settings.

        Args:
            model: reads the model's fingerprint when called.
        """
        return []

    @property
    def remarks(self) -> list[str]:
        """What a user should know about these settings; logged at start-up."""
        return []

    # -- optional capabilities: None = not used ------------------------------------

    @property
    def observation(self) -> Observation | None:
        """Looks at every step of a request."""
        return None

    @property
    def probing(self) -> Probing | None:
        """Runs extra tokens through the model before a compaction."""
        return None

    @property
    def turns(self) -> Turns | None:
        """Says where turns of a conversation end."""
        return None

    @property
    def episode_routing(self) -> EpisodeRouting | None:
        """Divides histories into episodes and routes queries to them."""
        return None

    @property
    def retrieval(self) -> Retriever | None:
        """Fetches offloaded tokens for each query."""
        return None

    @property
    def spans(self) -> SpanPolicy | None:
        """Keeps spans of tokens at two resolutions."""
        return None

    # -- derived; not hooks --------------------------------------------------------

    @final
    def plan_request(self, lengths: Lengths, geometry: Geometry) -> ResidencyPlan:
        """The plan of a request: ``plan`` of the tokens behind its shared prefix.

        The policy's budget is therefore what the request holds beyond the prefix.
        """
        if not lengths.shared_blocks:
            return self.plan(lengths, geometry)
        behind = lengths.behind_prefix(geometry.block_size)
        return self.plan(behind, geometry).behind(lengths.shared_blocks)

    @property
    @final
    def keeps_shared_prefix(self) -> bool:
        """Whether requests can hold a shared prefix on the device.

        Policies with ``retrieval`` or ``spans`` keep all tokens of a request on the
        host or as spans, where requests share nothing.
        """
        return self.host_storage is None

    @property
    @final
    def host_storage(self) -> HostStorage | None:
        """The retrieval capability; None: tokens that are not resident are lost."""
        return self.retrieval if self.retrieval is not None else self.spans

    @property
    @final
    def min_new_tokens(self) -> int:
        """Fewest new tokens of a prompt with which a compaction can score."""
        probing = self.probing
        return max(self.queries_needed, probing.min_new_tokens if probing else 1, 1)

    @property
    @final
    def max_patched_prompt_tokens(self) -> int:
        """Maximum length of a request's patched prompt; 0: none is accepted."""
        routing = self.episode_routing
        return routing.patched_prompt_tokens if routing else 0

    @final
    def find_turn_ends(
        self, prompt: Sequence[int], requested: Sequence[int] | None
    ) -> tuple[int, ...]:
        """``Turns.turn_ends``; none if the policy does not use turns."""
        turns = self.turns
        return turns.turn_ends(prompt, requested) if turns else ()

    @final
    def find_tool_loops(
        self,
        prompt: Sequence[int],
        turn_ends: Sequence[int],
        requested: Sequence[int] | None,
    ) -> tuple[ToolLoop, ...]:
        """``Turns.tool_loops``; none if the policy does not use turns."""
        turns = self.turns
        return turns.tool_loops(prompt, turn_ends, requested) if turns else ()

    @property
    @final
    def has_score(self) -> bool:
        """Whether the class of this policy defines ``score``."""
        return type(self).score.__module__ != __name__

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        refuse_hook_names(cls, contract_hooks(), cls.model_fields)


def contract_hooks() -> tuple[str, ...]:
    """Names of all hooks: the public properties and methods that are not final."""
    return tuple(
        name
        for name, hook in vars(KVCachePolicy).items()
        if not name.startswith("_")
        and isinstance(hook, property | FunctionType)
        and not getattr(getattr(hook, "fget", hook), "__final__", False)
    )
