"""One prompt through a real engine: which positions each KV head keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_kvplugins.vllm_adapter.offline.engine import Engine, engine


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a policy kept of one prompt.

    Attributes:
        prompt_token_ids: as the engine saw them.
        tokens: the same, as text.
        kept_positions: per layer, per KV head: ascending prompt positions that
            are resident after prefill.
    """

    prompt_token_ids: list[int]
    tokens: list[str]
    kept_positions: list[list[list[int]]]


def explain(
    model: str,
    request: dict[str, Any],
    prompt: str,
    dtype: str = "auto",
    max_model_len: int | None = None,
    progress: Callable[[str], None] = lambda step: None,
) -> Explanation:
    """Prefill a prompt under a policy and read back what stayed.

    Args:
        model: a folder or a Hugging Face id.
        request: the policy as ``parse_policy`` takes it.
        prompt: text, tokenized as vLLM does for a completion (no chat template).
        dtype: vLLM's ``dtype``.
        max_model_len: context to run with; None = the model's, of which only
            as much as the prompt needs is set up.
        progress: told what is being done, step by step.

    Raises:
        KVPolicyError: the policy, the model or the prompt cannot be used.

    Cost: start-up of an engine, and prefill of the prompt.
    """
    with engine(model, request, prompt, 1, dtype, max_model_len, progress) as running:
        ids = running.prompt_token_ids
        progress(f"prefilling {len(ids)} tokens under {request['name']}")
        kept = _prefill(running)
        texts = readable_tokens(running.tokenizer, ids)
    return Explanation(ids, texts, kept)


def readable_tokens(tokenizer: Any, ids: list[int]) -> list[str]:
    """Each token's text by itself.

    A token that is only a part of a character reads as U+FFFD. SentencePiece
    tokenizers drop the space in front of a lone word; it is put back.
    """
    pieces = tokenizer.convert_ids_to_tokens(ids)
    texts = [tokenizer.decode([token_id]) for token_id in ids]
    return [
        f" {text}" if str(piece).startswith("▁") and text[:1] != " " else text
        for piece, text in zip(pieces, texts, strict=True)
    ]


def _prefill(running: Engine) -> list[list[list[int]]]:
    """Kept positions per layer and KV head; all of them without a compaction."""
    running.llm.collective_rpc("kv_policy_record", args=(True,))
    running.generate(running.prompt_token_ids, 1)
    (records,) = running.llm.collective_rpc("kv_policy_take_records")
    if records:  # the newest one tells what is resident now
        kept: list[list[list[int]]] = records[-1].kept_positions
        return kept
    everything = list(range(len(running.prompt_token_ids)))
    geometry = running.geometry
    return [[everything] * geometry.num_kv_heads for _ in range(geometry.num_layers)]
