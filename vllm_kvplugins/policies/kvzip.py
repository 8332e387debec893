"""KVzip: what the model looks at when it has to repeat its prompt."""

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
# The part to repeat is announced by so many tokens before it.
_LEAD_TOKENS = 8
# A prompt is not repeated in smaller parts, which would cost a pass each.
_LEAST_CHUNK = 64


@dataclass(frozen=True, slots=True)
class Repetition(Probing):
    """Chunks of the prompt, each after the request to repeat it.

    Attributes:
        chunk: maximum tokens of the prompt in one probe.
        sinks: first tokens, which every probe's softmax contains.
    """

    chunk: int
    sinks: int
    min_new_tokens: ClassVar[int] = _LEAST_CHUNK

    def room(self, encode: Encode) -> int:
        longest = max(len(encode(_ALL)), len(encode(_PART)) + _LEAD_TOKENS)
        return longest + _LEAST_CHUNK

    def probes(self, occasion: ProbeOccasion) -> list[Probe]:
        prompt, whole = occasion.prompt, occasion.encode(_ALL)
        part = occasion.encode(_PART)
        announced = max(len(whole), len(part) + _LEAD_TOKENS)
        size = min(self.chunk, occasion.room - announced)
        probes = []
        survivors = range(occasion.since)
        for start in range(occasion.since, occasion.tokens, size):
            stop = min(start + size, occasion.tokens)
            lead = [*part, *prompt[start - _LEAD_TOKENS : start]] if start else whole
            again = [*lead, *prompt[start:stop]]
            probes.append(Probe(again, range(start, stop), survivors))
        return probes

    def observe(self, view: LayerView) -> torch.Tensor:
        """float32 [num_kv_heads, tokens in the cache], by position."""
        assert view.probe is not None
        about, positions = view.probe.about, view.positions
        tokens = int(view.query_positions[0])
        scored = (positions >= about.start) & (positions < about.stop)
        always = max(self.sinks, view.probe.survivors.stop)
        scored |= (positions >= 0) & (positions < always)
        scored |= positions >= tokens
        columns = scored.any(0).nonzero().squeeze(1)
        scored_positions = positions.masked_fill(~scored, -1)[:, columns]
        peak = attention_peak(
            view.queries,
            view.keys[:, columns],
            view.scale,
            view.query_positions,
            scored_positions,
        )
        worth = view.observed
        if worth is None:
            worth = peak.new_zeros(positions.shape[0], tokens)
        own = scored_positions >= tokens
        peak = peak.masked_fill(own, 0)
        scored_positions = scored_positions.masked_fill(own, 0).clamp(min=0)
        return worth.scatter_reduce(1, scored_positions, peak, "amax")


class KVzip(Compressor):
    """Context reconstruction (Kim et al., arXiv:2505.23416, section 3).

    The prompt runs through the model a second time, in chunks, each behind the
    request to repeat it. A token is worth the most attention that any query of
    the repeated chunk, in any head of its group, pays it; the softmax runs over
    the sinks, the chunk in the cache and the repetition (section 3.4). Instead of
    the chat template's closing words, which a served prompt already ends with,
    nothing stands between request and chunk.

    As in the paper one ranking over all layers and KV heads decides who keeps how
    many (``allocator: cross-layer``, the default here).

    Differs from the paper in when it runs: there the context is compressed before
    a question is known, here the prompt ends with one, so ``recent`` tokens stay
    as they are.

    With ``prefill_block`` what is repeated is the block just read, as in the EpiCache
    paper, appendix A.2; what earlier blocks left competes by the attention that this
    repetition pays it (equation 3 there), next to the block in the softmax.

    Cost: one to two more prefills of the prompt, and as much again for the weights
    that the kernel does not hand out.
    """

    name: ClassVar[str] = "kvzip"
    summary: ClassVar[str] = "tokens that repeating the prompt looks back at"

    allocator: Annotated[PageAllocator, BeforeValidator(parse_allocator)] = Field(
        default=CrossLayer(),
        description="How pages are shared between layers and KV heads.",
    )
    chunk: int = Field(
        default=2048, ge=_LEAST_CHUNK, description="Tokens repeated at a time, at most."
    )
    sinks: int = Field(default=4, ge=0, description="First tokens, which stay.")
    recent: int = Field(default=32, ge=0, description="Newest tokens, which stay.")

    @property
    def minimum_budget_tokens(self) -> int:
        return self.sinks + self.recent + 1

    @property
    def probing(self) -> Repetition:
        return Repetition(self.chunk, self.sinks)

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
