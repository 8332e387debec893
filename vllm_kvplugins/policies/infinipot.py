"""InfiniPot: keeps tokens that a request for a summary attends to."""

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
    """Runs an instruction, or the request's patched prompt if it has one.

    Attributes:
        instruction: text of the probe.
        aggregate: "max" or "avg", over the tokens of the probe and the heads of a
            group.
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
        received = attention(view)
        scores = received.new_zeros(received.shape[0], tokens)
        cached = (view.positions >= 0) & (view.positions < tokens)
        places = view.positions.masked_fill(~cached, 0)
        received = received.masked_fill(~cached, 0)
        return scores.scatter_reduce(1, places, received, "amax")


class InfiniPot(Compressor):
    """Attention of a catalyst prompt (Kim et al., arXiv:2410.01518, section 3.2).

    Follows appendix A.2 and equation 3 of the EpiCache paper: a general instruction
    runs after the prompt. The score of a token is the maximum attention that it gets
    from the tokens of the instruction and the heads of a group (``aggregate: max``), or
    the average (``avg``).

    Differs from InfiniPot's own paper, as EpiCache's comparison does: it omits the
    second criterion, the surprisal of a token, and does not renumber positions.
    Compactions while generating (``decode_budget``) use the same instruction, which
    runs after the tokens in the cache. If the request has a patched prompt (EpiCache),
    it replaces the instruction.

    Cost: one forward pass of the instruction per compaction, and a dense copy of the
    keys and values of one layer at a time.
    """

    name: ClassVar[str] = "infinipot"
    summary: ClassVar[str] = "keeps tokens that a request for a summary attends to"

    instruction: str = Field(
        default="Summarize the previous context highlighting the most important parts.",
        min_length=1,
        description="Text of the probe that runs after the prompt.",
    )
    aggregate: Literal["max", "avg"] = Field(
        default="max",
        description="How to combine the tokens of the instruction and the heads of a "
        "group.",
    )
    sinks: int = Field(default=4, ge=0, description="First tokens; they always stay.")
    recent: int = Field(
        default=32, ge=0, description="Newest tokens; they always stay."
    )

    @property
    def probing(self) -> Instruction:
        return Instruction(self.instruction, self.aggregate)

    @property
    def minimum_budget_tokens(self) -> int:
        return self.sinks + self.recent + 1

    @property
    def scores_heads_separately(self) -> bool:
        return True

    def score(self, view: LayerView) -> torch.Tensor:
        positions = view.positions
        scores: torch.Tensor = view.observed.gather(1, positions.clamp(min=0))
        stays = (positions < self.sinks) | (positions > positions.max() - self.recent)
        return scores.masked_fill(stays & (positions >= 0), torch.inf)
