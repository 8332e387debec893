"""The same requests on several ranks of tensor parallelism."""

from __future__ import annotations

from typing import Any

from driver import Driver, make_llm
from texts import random_tokens

# Padded to whole 64s, as vLLM does, it divides by 2 and 3.
VOCABULARY = 960
LENGTHS = {"short": 40, "long": 192, "odd": 211}
MAX_TOKENS = 12


def on_ranks(model: str, ranks: int, policies: list[dict[str, Any] | None]) -> Any:
    """What happened under each policy."""
    rows = []
    for policy in policies:
        llm = make_llm(
            model,
            policy,
            enable_prefix_caching=False,
            max_model_len=1024,
            tensor_parallel_size=ranks,
            distributed_executor_backend="mp" if ranks > 1 else None,
            num_gpu_blocks_override=64,
            skip_tokenizer_init=False,
        )
        driver = Driver(llm)
        prompts = {
            name: random_tokens(seed, length, VOCABULARY)
            for seed, (name, length) in enumerate(LENGTHS.items())
        }
        result: dict[str, Any] = {"tokens": driver.generate(prompts, MAX_TOKENS)}
        if policy is not None:
            for _ in range(4):  # the workers hear that requests are gone
                driver.step()
            held = llm.collective_rpc("kv_policy_check_integrity")
            result |= {"compactions": driver.manager.compactions, "held": held}
        result["left"] = driver.total_blocks - driver.free_blocks
        rows.append(result)
        driver.core.model_executor.shutdown()
    return rows
