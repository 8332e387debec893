"""KVzip: keeps tokens that the model attends to when it repeats its prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import BeforeValidator, Field

from vllm_kvplugins.budgets import CrossLayer, PageAllocator, parse_allocator
from vllm_kvplugins.policies.base import LayerView
from vllm_kvplugins.policies.capabilities import (
    Encode,
    Probe,
    ProbeOccasion,
    Probing,
)
from vllm_kvplugins.policies.compressor import Compressor
from vllm_kvplugins.scoring.attention_votes import attention_peak

_ALL = "\n\nRepeat the previous context exactly."
_PART = "\n\nRepeat the part of the previous context exactly, starting with"
# Between the request and the repeated tokens.
_NEWLINE = "\n"
# Number of tokens before a part that announce it.
_LEAD_TOKENS = 8
# Minimum part of a prompt to repeat; each part costs a forward pass.
_LEAST_CHUNK = 64


@dataclass(frozen=True, slots=True)
class Repetition(Probing):
    """Runs chunks of the prompt, each after a request to repeat it.

    Attributes:
        chunk: maximum tokens of the prompt in one probe.
        sinks: first tokens, which every probe's softmax contains.
    """

    chunk: int
    sinks: int
    min_new_tokens: ClassVar[int] = _LEAST_CHUNK

    def room(self, encode: Encode) -> int:
        return self._max_request(encode) + _LEAST_CHUNK

    def _max_request(self, encode: Encode) -> int:
        """Maximum number of tokens before the repeated ones."""
        longest = max(len(encode(_ALL)), len(encode(_PART)) + _LEAD_TOKENS)
        return longest + len(encode(_NEWLINE))

    def probes(self, occasion: ProbeOccasion) -> list[Probe]:
        prompt, encode = occasion.prompt, occasion.encode
        whole, part, newline = encode(_ALL), encode(_PART), encode(_NEWLINE)
        size = min(self.chunk, occasion.room - self._max_request(encode))
        probes = []
        first = max(occasion.since, occasion.shared)
        survivors = range(min(occasion.shared, occasion.since), occasion.since)
        for start in range(first, occasion.tokens, size):
            stop = min(start + size, occasion.tokens)
            lead = [*part, *prompt[start - _LEAD_TOKENS : start]] if start else whole
            again = [*lead, *newline, *prompt[start:stop]]
            probes.append(Probe(again, range(start, stop), survivors))
        return probes

    def observe(self, view: LayerView) -> torch.Tensor:
        """float32 [num_kv_heads, tokens in the cache], by position."""
        assert view.probe is not None
        about, positions = view.probe.about, view.positions
        tokens = int(view.query_positions[0])
        scored = (positions >= about.start) & (positions < about.stop)
        kept = view.probe.survivors
        scored |= (positions >= kept.start) & (positions < kept.stop)
        scored |= (positions >= 0) & (positions < self.sinks)
        scored |= positions >= tokens
        columns = scored.any(0).nonzero().squeeze(1)
        scored_positions = positions.masked_fill(~scored, -1)[:, columns]
        peak = attention_peak(
            view.queries,
            view.keys[:, columns],
            view.scale,
            view.query_positions,
            scored_positions,
            view.rules,
        )
        scores = view.observed
        if scores is None:
            scores = peak.new_zeros(positions.shape[0], tokens)
        own = scored_positions >= tokens
        peak = peak.masked_fill(own, 0)
        scored_positions = scored_positions.masked_fill(own, 0).clamp(min=0)
        return scores.scatter_reduce(1, scored_positions, peak, "amax")


class KVzip(Compressor):
    """Context reconstruction (Kim et al., arXiv:2505.23416, section 3).

    The prompt runs through the model a second time, in chunks, each after a request to
    repeat it. The score of a token is the maximum attention that it gets from any query
    of the repeated chunk, in any head of its group. The softmax runs over the sinks,
    the chunk in the cache and the repetition (section 3.4). A newline stands before the
    repeated tokens, as in kvpress for models without a chat template. The closing words
    of the template are omitted there, because a served prompt already ends with them.

    As in the paper, one ranking over all layers and KV heads determines how many tokens
    each head keeps (``allocator: cross-layer``, the default here).

    Differs from the paper: each head keeps at least ``safeguard`` of the average, which
    brings the answers nearer to those of full KV. The paper has no minimum. It also
    compresses a context before the question is known. Here the prompt ends with the
    question, so the ``recent`` newest tokens stay.

    With ``prefill_block``, the model repeats the block that it has just read (EpiCache,
    appendix A.2). Tokens kept from earlier blocks compete by the attention that they
    get from this repetition (equation 3 of that paper); they are in the same softmax.

    Cost: one to two additional prefills of the prompt, and the same again for the
    attention weights, which the kernel does not return.
    """

    name: ClassVar[str] = "kvzip"
    summary: ClassVar[str] = "keeps tokens that repeating the prompt attends to"

    allocator: Annotated[PageAllocator, BeforeValidator(parse_allocator)] = Field(
        default=CrossLayer(),
        description="How pages are shared between layers and KV heads.",
    )
    chunk: int = Field(
        default=2048,
        ge=_LEAST_CHUNK,
        description="Maximum number of tokens to repeat at a time.",
    )
    sinks: int = Field(default=4, ge=0, description="First tokens; they always stay.")
    recent: int = Field(
        default=32, ge=0, description="Newest tokens; they always stay."
    )

    @property
    def minimum_budget_tokens(self) -> int:
        return self.sinks + self.recent + 1

    @property
    def probing(self) -> Repetition:
        return Repetition(self.chunk, self.sinks)

    @property
    def scores_heads_separately(self) -> bool:
        return True

    def score(self, view: LayerView) -> torch.Tensor:
        positions = view.positions
        scores: torch.Tensor = view.observed.gather(1, positions.clamp(min=0))
        stays = (positions < self.sinks) | (positions > positions.max() - self.recent)
        return scores.masked_fill(stays & (positions >= 0), torch.inf)

    def problems(self) -> list[str]:
        reasons = super().problems()
        if self.decode_budget is not None:
            reasons.append(
                "kvzip repeats the prompt, which says nothing about generated tokens; "
                "remove decode_budget or use another policy with it"
            )
        return reasons
