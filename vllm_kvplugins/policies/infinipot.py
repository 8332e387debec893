"""InfiniPot: what the model looks at when it is asked to summarise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field

from vllm_kvplugins.policies.base import LayerView
from vllm_kvplugins.policies.capabilities import (
    Encode,
    Probe,
    ProbeOccasion,
    Probing,
)
from vllm_kvplugins.policies.compressor import Compressor
from vllm_kvplugins.policies.votes import attention_mass, attention_peak


@dataclass(frozen=True, slots=True)
class Instruction(Probing):
    """An instruction, or the request's patched prompt in its place.

    Attributes:
        instruction: the text to run.
        aggregate: "max" or "avg", over the tokens of the probe and a group's heads.
    """

    instruction: str
    aggregate: str
    uses_patched_prompt: ClassVar[bool] = True

    def room(self, encode: Encode) -> int:
        return len(encode(self.instruction))

    def probes(self, occasion: ProbeOccasion) -> list[Probe]:
        tokens = occasion.patched_prompt or occasion.encode(self.instruction)
        return [Probe(tokens, range(occasion.tokens))]

    def observe(self, view: LayerView) -> torch.Tensor:
        """float32 [num_kv_heads, tokens in the cache], by position."""
        tokens = int(view.query_positions[0])
        attention = attention_peak if self.aggregate == "max" else attention_mass
        paid = attention(view)
        worth = paid.new_zeros(paid.shape[0], tokens)
        cached = (view.positions >= 0) & (view.positions < tokens)
        places = view.positions.masked_fill(~cached, 0)
        return worth.scatter_reduce(1, places, paid.masked_fill(~cached, 0), "amax")


class InfiniPot(Compressor):
    """A catalyst prompt's attention (Kim et al., arXiv:2410.01518, section 3.2).

    In the form of the EpiCache paper, appendix A.2 and equation 3: a general
    instruction is run behind the prompt, and a token is worth the attention that
    the instruction's tokens pay it, at most (``aggregate: max``, also over the
    heads of a group) or on average.

    Differs from InfiniPot's own paper: the second criterion there, how surprising
    a token was, and its renumbered positions are left out, as in EpiCache's
    comparison. What folds while generating (``decode_budget``) is scored by the
    same instruction, run behind what is in the cache by then. A request that brings a
    patched prompt of its own (EpiCache) is asked that instead of the instruction.

    Cost: one forward pass of the instruction per compaction, and a dense copy of
    one layer's keys and values at a time.
    """

    name: ClassVar[str] = "infinipot"
    summary: ClassVar[str] = "tokens that a request to summarise looks back at"

    instruction: str = Field(
        default="Summarize the previous context highlighting the most important parts.",
        min_length=1,
        description="Text of the probe that runs after the prompt.",
    )
    aggregate: Literal["max", "avg"] = Field(
        default="max", description="Over the instruction's tokens and a group's heads."
    )
    sinks: int = Field(default=4, ge=0, description="First tokens, which stay.")
    recent: int = Field(default=32, ge=0, description="Newest tokens, which stay.")

    @property
    def probing(self) -> Instruction:
        return Instruction(self.instruction, self.aggregate)

    @property
    def minimum_budget_tokens(self) -> int:
        return self.sinks + self.recent + 1

    def score(self, view: LayerView) -> torch.Tensor:
        positions = view.positions
        scores: torch.Tensor = view.observed.gather(1, positions.clamp(min=0))
        stays = (positions < self.sinks) | (positions > positions.max() - self.recent)
        return scores.masked_fill(stays & (positions >= 0), torch.inf)
