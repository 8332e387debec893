"""Generates an answer and records what every decode step fetches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_kvplugins.engine.recorded_run import Fetch, Header, RecordedRun
from vllm_kvplugins.errors import KVPolicyError, coded
from vllm_kvplugins.vllm_adapter.offline.engine import Engine, engine


def record(
    model: str,
    request: dict[str, Any],
    config: dict[str, Any],
    prompt: str,
    max_tokens: int,
    dtype: str = "auto",
    max_model_len: int | None = None,
    progress: Callable[[str], None] = lambda step: None,
) -> RecordedRun:
    """Generate under a retrieval policy and record its fetches.

    Args:
        model: a folder or a Hugging Face ID.
        request: the policy, in the form that ``parse_policy`` takes.
        config: all settings of the policy, for the header of the recording.
        prompt: text, tokenized as vLLM does for a completion (no chat template).
        max_tokens: maximum number of tokens to generate, greedily.
        dtype: vLLM's ``dtype``.
        max_model_len: see ``offline.engine``.
        progress: called with a description of each step.

    Raises:
        KVPolicyError: the policy, the model or the prompt cannot be used, or no step
            fetched anything.

    Cost: starts an engine, generates the answer and keeps a ``RetrievalLog``.
    """
    arguments = (model, request, prompt, max_tokens, dtype, max_model_len, progress)
    with engine(*arguments) as running:
        ids, name = running.prompt_token_ids, request["name"]
        progress(f"generating up to {max_tokens} tokens after {len(ids)} under {name}")
        answer, fetches = _generate(running, max_tokens)
    if not fetches:
        raise KVPolicyError(
            coded(
                "KVP510",
                f"{name} fetched nothing, because all {len(ids)} tokens of the prompt "
                f"and {len(answer)} of the answer are resident; lower the budget, give "
                "a longer prompt or raise --max-tokens",
            )
        )
    geometry = running.geometry
    rows = geometry.num_layers * geometry.num_kv_heads
    header = Header(
        model=model,
        policy=name,
        config=config,
        prompt_tokens=len(ids),
        generated_tokens=len(answer),
        block_size=geometry.block_size,
        head_dim=running.head_dim,
        num_layers=geometry.num_layers,
        num_kv_heads=geometry.num_kv_heads,
        token_bytes=geometry.kv_bytes_per_token // rows,
    )
    return RecordedRun(header, fetches)


def _generate(running: Engine, max_tokens: int) -> tuple[list[int], list[Fetch]]:
    """Tokens of the answer, and the fetches."""
    # The worker finds the KV cache in its first step; logging needs it.
    running.generate(running.prompt_token_ids[:1], 1)
    running.llm.collective_rpc("kv_policy_log_retrieval")
    answer = running.generate(running.prompt_token_ids, max_tokens)
    (fetches,) = running.llm.collective_rpc("kv_policy_take_fetches")
    return answer, fetches
