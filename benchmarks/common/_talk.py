"""Generating prescribed tokens: a long answer, then a question, in one request.

vLLM has no other way to ask about a context after so many decode steps: a second
request would read everything anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class Prescribed(AdapterLogitsProcessor):
    """Lets a request say ``extra_args["prescribed"]`` before anything else."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(
        self, params: SamplingParams
    ) -> Callable[[list[int], torch.Tensor], torch.Tensor] | None:
        tokens = (params.extra_args or {}).get("prescribed")
        if not tokens:
            return None

        def force(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            if len(output_ids) < len(tokens):
                forced = torch.full_like(logits, -torch.inf)
                forced[tokens[len(output_ids)]] = 0.0
                return forced
            return logits

        return force


class Recorded(Prescribed):
    """As ``Prescribed``; keeps what the model said in front of each prescribed token.

    Attributes:
        seen: logits, float32 [vocabulary], in order; of one request at a time.
    """

    seen: ClassVar[list[torch.Tensor]] = []

    def new_req_logits_processor(
        self, params: SamplingParams
    ) -> Callable[[list[int], torch.Tensor], torch.Tensor] | None:
        force = super().new_req_logits_processor(params)
        if force is None:
            return None

        def record(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            # chunks of the prompt that come before its last one also have logits
            self.seen[len(output_ids) :] = [logits.float().clone()]
            return force(output_ids, logits)

        return record


def render(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of a conversation, with the opening words of the next answer."""
    return list(
        tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
    )


def conversation(
    tokenizer: Any, prompt: str, question: str, talk: list[int]
) -> tuple[list[int], list[int]]:
    """A prompt, and what is then generated up to the answer.

    Args:
        prompt: what the user says first.
        question: what the user asks after the first answer.
        talk: tokens of the first answer.

    Returns:
        Token ids of the prompt, and of the first answer with the question behind it.

    Raises:
        ValueError: the chat template does not write conversations one after another.
    """
    first = {"role": "user", "content": prompt}
    opening = render(tokenizer, [first])
    mark = "One moment."  # stands for the talk, whose tokens must stay as they are
    answer = {"role": "assistant", "content": mark}
    whole = render(tokenizer, [first, answer, {"role": "user", "content": question}])
    marked = tokenizer.encode(mark, add_special_tokens=False)
    start = len(opening)
    if whole[:start] != opening or whole[start : start + len(marked)] != marked:
        raise ValueError("this chat template changes earlier messages; use another")
    return opening, talk + whole[start + len(marked) :]
