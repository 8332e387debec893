"""Prefills a prompt and reads which positions each KV head keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_kvplugins.vllm_adapter.offline.engine import Engine, Prompt, engine


@dataclass(frozen=True, slots=True)
class Explanation:
    """The positions of a prompt that a policy kept.

    Attributes:
        prompt_token_ids: token IDs of the prompt.
        tokens: text of each token.
        kept_positions: [num_layers][num_kv_heads]; ascending prompt positions that are
            resident after prefill.
    """

    prompt_token_ids: list[int]
    tokens: list[str]
    kept_positions: list[list[list[int]]]


def explain(
    model: str,
    request: dict[str, Any],
    prompt: Prompt,
    dtype: str = "auto",
    max_model_len: int | None = None,
    progress: Callable[[str], None] = lambda step: None,
) -> Explanation:
    """Prefill a prompt under a policy and read which positions are resident.

    Args:
        model: a folder or a Hugging Face ID.
        request: the policy, in the form that ``parse_policy`` takes.
        prompt: a text, tokenized as for a completion (no chat template); or messages
            of a chat, which pass vLLM's front end like a request to a server.
        dtype: vLLM's ``dtype``.
        max_model_len: maximum context; None: the model's. The engine allocates only
            as much as the prompt needs.
        progress: called with a description of each step.

    Raises:
        KVPolicyError: the policy, the model or the prompt cannot be used.

    Cost: starts an engine and prefills the prompt.
    """
    with engine(model, request, prompt, 1, dtype, max_model_len, progress) as running:
        ids = running.prompt_token_ids
        progress(f"prefilling {len(ids)} tokens under {request['name']}")
        kept = _prefill(running, prompt)
        texts = readable_tokens(running.tokenizer, ids)
    return Explanation(ids, texts, kept)


def readable_tokens(tokenizer: Any, ids: list[int]) -> list[str]:
    """Text of each token.

    A token that is a part of a character becomes U+FFFD. SentencePiece tokenizers drop
    the space before a single word; this function restores it.
    """
    token_texts = tokenizer.convert_ids_to_tokens(ids)
    texts = [tokenizer.decode([token_id]) for token_id in ids]
    return [
        f" {text}" if str(token_text).startswith("▁") and text[:1] != " " else text
        for token_text, text in zip(token_texts, texts, strict=True)
    ]


def _prefill(running: Engine, prompt: Prompt) -> list[list[list[int]]]:
    """Positions per layer and KV head that are resident after the prompt.

    The newest compaction and the tokens after it; all positions without a compaction.
    """
    running.llm.collective_rpc("kv_policy_record", args=(True,))
    if isinstance(prompt, str):
        running.generate(running.prompt_token_ids, 1)
    else:
        running.chat(prompt, 1)
    (records,) = running.llm.collective_rpc("kv_policy_take_records")
    tokens = len(running.prompt_token_ids)
    if records:
        newer = list(range(records[-1].computed_tokens, tokens))
        return [
            [kept + newer for kept in heads] for heads in records[-1].kept_positions
        ]
    everything = list(range(tokens))
    geometry = running.geometry
    return [[everything] * geometry.num_kv_heads for _ in range(geometry.num_layers)]
