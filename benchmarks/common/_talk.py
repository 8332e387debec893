"""Forces the tokens of a long answer and a question within one request.

This measures an answer after many decode steps in the same cache. A second request
would prefill everything again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class Prescribed(AdapterLogitsProcessor):
    """Logits processor: generate ``extra_args["prescribed"]`` first, then freely."""

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
    """Like ``Prescribed``, and records the logits before each token of a request that
    has prescribed ones or ``extra_args["recorded"]``.

    Attributes:
        seen: logits, float32 [vocabulary], in order; of one request at a time.
    """

    seen: ClassVar[list[torch.Tensor]] = []

    def new_req_logits_processor(
        self, params: SamplingParams
    ) -> Callable[[list[int], torch.Tensor], torch.Tensor] | None:
        force = super().new_req_logits_processor(params)
        if force is None and not (params.extra_args or {}).get("recorded"):
            return None

        def record(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            # earlier chunks of the prompt also produce logits
            self.seen[len(output_ids) :] = [logits.float().clone()]
            return logits if force is None else force(output_ids, logits)

        return record


def render(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of a conversation, including the start of the next answer."""
    return list(
        tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
    )


def conversation(
    tokenizer: Any, prompt: str, question: str, talk: list[int]
) -> tuple[list[int], list[int]]:
    """Token ids of a first message, and of the prescribed text that follows it.

    Args:
        prompt: the user's first message.
        question: the user's second message.
        talk: token ids of the first answer.

    Returns:
        Token ids of the prompt, and of the first answer followed by the question.

    Raises:
        ValueError: the chat template rewrites earlier messages.
    """
    first = {"role": "user", "content": prompt}
    opening = render(tokenizer, [first])
    mark = "One moment."  # placeholder for the talk, whose tokens must not change
    answer = {"role": "assistant", "content": mark}
    whole = render(tokenizer, [first, answer, {"role": "user", "content": question}])
    marked = tokenizer.encode(mark, add_special_tokens=False)
    start = len(opening)
    if whole[:start] != opening or whole[start : start + len(marked)] != marked:
        raise ValueError("this chat template changes earlier messages; use another")
    return opening, talk + whole[start + len(marked) :]
