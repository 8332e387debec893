"""What a policy may need besides scores: one class per optional capability.

Most policies need none of these. A policy that needs one returns an object of the class
from the property of the same name in ``KVCachePolicy``; ``None`` (the default) means
that the policy does not use it, and the engine then does no work for it.

===================  ================================================================
``observation``      look at every step of a request, not only at the newest queries
``probing``          run extra tokens through the model before a compaction
``turns``            compress by turns of a conversation
``episode_routing``  route each query of a conversation to an episode's cache
``retrieval``        keep all tokens in host memory and fetch some for each query
                     (``policies.retrieval.Retriever``)
``spans``            keep spans of tokens at two resolutions
                     (``policies.span_policy.SpanPolicy``)
===================  ================================================================

Objects of these classes hold settings and no state of a request, as policies do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

if TYPE_CHECKING:
    from vllm_kvplugins.episodes.settings import EpisodeSettings
    from vllm_kvplugins.plan.geometry import Geometry, ToolLoop
    from vllm_kvplugins.policies.base import LayerView

# Text to token ids, without special tokens.
Encode = Callable[[str], list[int]]


# -- observation of steps ----------------------------------------------------------


class Trigger(Flag):
    """Steps after which the engine calls ``Observation.observe``."""

    PREFILL_CHUNK = auto()
    DECODE_STEP = auto()


class Observation(ABC):
    """Collects what a policy needs from every step of a request.

    ``score`` receives the result as ``view.observed``. Cost: ``observe`` runs in every
    layer of every step named by ``triggers``. With ``PREFILL_CHUNK`` prompts are read
    without the prefix cache, because cached tokens have no queries to observe.

    Attributes:
        triggers: the steps to observe.
    """

    triggers: Trigger

    @abstractmethod
    def observe(self, view: LayerView) -> Any:
        """Look at one layer of a step. Must not change the view's tensors.

        The engine calls it once per layer, after the step's tokens have attended.

        Args:
            view: all slots up to now and the step's queries; ``view.observed`` is
                what this method returned last for this request and layer, or None.

        Returns:
            The new ``view.observed``. The engine drops it with the request.
        """

    def pack(self, observed: Any) -> dict[str, torch.Tensor]:
        """Turn what ``observe`` returned into tensors that a session can store.

        The tensors must not share memory with ``observed``. Override it, and
        ``unpack``, if ``observe`` does not return a tensor.
        """
        return {"observed": observed.clone()}

    def unpack(self, packed: dict[str, torch.Tensor]) -> Any:
        """Undo ``pack``. Must not change the tensors in ``packed``, now or later."""
        return packed["observed"].clone()


# -- probes ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Probe:
    """Tokens that run through the model behind a request's cache.

    They attend to the cache and to each other. Their keys and values are not stored.

    Attributes:
        token_ids: the tokens to run.
        about: positions that the probe is meant to score; the engine ignores it.
        survivors: positions that an earlier compaction kept and that the probe is
            meant to score too; the engine ignores it.
    """

    token_ids: Sequence[int]
    about: range
    survivors: range = range(0)


@dataclass(frozen=True, slots=True)
class ProbeOccasion:
    """What a policy knows when it writes probes, just before a compaction.

    Attributes:
        prompt: token ids of the request's prompt.
        since: token count at the previous compaction, 0 if there was none. The cache
            holds only some of the tokens before it.
        tokens: current token count, which is the position of a probe's first token.
        room: maximum number of tokens of one probe.
        encode: the model's tokenizer.
        patched_prompt: token ids that the request asks to run as its probe; empty if
            it asks for none.
        shared: number of first tokens that stay in any case, a shared prefix. Probes
            need not score them.
    """

    prompt: Sequence[int]
    since: int
    tokens: int
    room: int
    encode: Encode
    patched_prompt: Sequence[int] = ()
    shared: int = 0


class Probing(ABC):
    """Runs extra tokens before each compaction to see what they attend to.

    Cost: a forward pass for each probe, and a dense copy of one layer's keys and values
    at a time. The time counts as part of the compaction.

    Attributes:
        needs_tokenizer: ``room`` and ``probes`` call ``encode``.
        uses_patched_prompt: ``probes`` reads ``ProbeOccasion.patched_prompt``.
        min_new_tokens: fewest new tokens of a prompt that one probe can score.
    """

    needs_tokenizer: ClassVar[bool] = True
    uses_patched_prompt: ClassVar[bool] = False
    min_new_tokens: ClassVar[int] = 1

    @abstractmethod
    def room(self, encode: Encode) -> int:
        """Fewest tokens that a probe needs.

        The engine keeps this many of the model's positions free.
        """

    @abstractmethod
    def probes(self, occasion: ProbeOccasion) -> Sequence[Probe]:
        """The probes to run before a compaction, in order."""

    @abstractmethod
    def observe(self, view: LayerView) -> Any:
        """Look at one layer of a probe. Must not change the view's tensors.

        Args:
            view: the slots of the cache, then those of the probe. ``view.probe`` is
                the probe, ``view.queries`` are its queries, and ``view.observed`` is
                what the previous probe of this compaction returned, or None.

        Returns:
            The new ``view.observed``, which ``score`` receives.
        """


# -- turns and episodes ------------------------------------------------------------


class Turns(ABC):
    """Where turns of a conversation end; ``plan`` gets it as ``lengths.turn_ends``.

    Attributes:
        finds_in_prompt: ``turn_ends`` can find turns without the request's help, by
            the tokens that close and open messages (the settings ``turn_end_token``,
            ``user_opening`` and ``tool_opening``). Chat requests send turn ends.
        history_only: the only turn that counts is the history before the live turn;
            chat requests send where it ends, or all turn ends if there are loops.
        loop_tokens: the policy also compresses parts of tool loops with more tokens
            than these; chat requests send where their parts end. None: it does not.
    """

    finds_in_prompt: ClassVar[bool] = False
    history_only: ClassVar[bool] = False
    loop_tokens: int | None = None

    @abstractmethod
    def turn_ends(
        self, prompt: Sequence[int], requested: Sequence[int] | None
    ) -> tuple[int, ...]:
        """Where turns of a prompt end. Pure, like ``plan``.

        Args:
            prompt: token ids.
            requested: turn ends that the request names, already validated; None if
                it names none.

        Returns:
            Token counts in ascending order, none larger than the prompt.
        """

    def tool_loops(
        self,
        prompt: Sequence[int],
        turn_ends: Sequence[int],
        requested: Sequence[int] | None,
    ) -> tuple[ToolLoop, ...]:
        """The tool loops of a prompt; ``plan`` gets them as ``lengths.loops``. Pure.

        Args:
            prompt: token ids.
            turn_ends: what the method of this name returned.
            requested: ends of questions and of finished rounds that the request names,
                already validated (``ToolLoop.of_ends``); None if it names none.
        """
        return ()


@dataclass(frozen=True, slots=True)
class EpisodeRouting:
    """Histories are divided into episodes; the frontend routes each query to one.

    Attributes:
        settings: how histories are divided.
        patched_prompt_tokens: maximum length of a request's patched prompt, which
            probes run (``Probing.uses_patched_prompt``).
    """

    settings: EpisodeSettings
    patched_prompt_tokens: int


# -- host memory -------------------------------------------------------------------


class HostStorage(Protocol):
    """What a policy keeps in host memory; ``Retriever`` and ``SpanPolicy`` have it."""

    @property
    def host_memory_bytes(self) -> int | None:
        """Maximum host memory of all requests; None: the engine decides."""

    def host_bytes(self, tokens: int, geometry: Geometry) -> int:
        """Maximum host memory of a request that ends with this many tokens."""
