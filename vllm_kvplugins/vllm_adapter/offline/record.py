"""One prompt through a real engine: what every decode step fetched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_kvplugins.engine.recorded_run import Fetch, Header, RecordedRun
from vllm_kvplugins.errors import KVPolicyError
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
    """Generate under a policy that retrieves, and take down its fetches.

    Args:
        model: a folder or a Hugging Face id.
        request: the policy as ``parse_policy`` takes it.
        config: all of its settings, for the run's header.
        prompt: text, tokenized as vLLM does for a completion (no chat template).
        max_tokens: to generate, greedily; the model's end of text ends it early.
        dtype: vLLM's ``dtype``.
        max_model_len: see ``offline.engine``.
        progress: told what is being done, step by step.

    Raises:
        KVPolicyError: the policy, the model or the prompt cannot be used, or
            nothing was fetched.

    Cost: start-up of an engine, the generation, and a ``RetrievalLog``.
    """
    arguments = (model, request, prompt, max_tokens, dtype, max_model_len, progress)
    with engine(*arguments) as running:
        ids, name = running.prompt_token_ids, request["name"]
        progress(f"generating up to {max_tokens} tokens after {len(ids)} under {name}")
        answer, fetches = _generate(running, max_tokens)
    if not fetches:
        raise KVPolicyError(
            f"{name} fetched nothing: after {len(ids)} tokens of the prompt and "
            f"{len(answer)} of the answer all is still resident; lower the budget, "
            "give a longer prompt or raise --max-tokens"
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
    """The answer's tokens, and the fetches."""
    # the worker learns with its first step where the cache lies
    running.generate(running.prompt_token_ids[:1], 1)
    running.llm.collective_rpc("kv_policy_log_retrieval")
    answer = running.generate(running.prompt_token_ids, max_tokens)
    (fetches,) = running.llm.collective_rpc("kv_policy_take_fetches")
    return answer, fetches
