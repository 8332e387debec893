"""Scenarios on the real model."""

from __future__ import annotations

import time
from typing import Any

from driver import Driver, make_llm
from texts import english_tokens


def greedy(
    model: str,
    policy: dict[str, Any] | None,
    seed: int,
    lengths: list[int],
    max_tokens: int,
    one_by_one: list[int],
    **settings: Any,
) -> dict[str, Any]:
    """Greedy tokens of English-like prompts, six at once, then one by one.

    Args:
        lengths: tokens of each prompt.
        one_by_one: lengths that are also run alone, from an empty cache.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = {n: english_tokens(tokenizer, seed + n, n) for n in lengths}
    llm = make_llm(
        model, policy, max_num_seqs=6, max_num_batched_tokens=1024, **settings
    )
    driver = Driver(llm)
    began = time.monotonic()
    names = {f"{n}-together": prompt for n, prompt in prompts.items()}
    driver.generate(names, max_tokens)
    for n in one_by_one:
        llm.reset_prefix_cache()
        driver.generate({f"{n}-alone": prompts[n]}, max_tokens)
        assert driver.cached[f"{n}-alone"] == 0
    driver.step()
    driver.check_blocks()
    return {
        "together": {str(n): driver.tokens[f"{n}-together"] for n in lengths},
        "alone": {str(n): driver.tokens[f"{n}-alone"] for n in one_by_one},
        "compactions": getattr(driver.manager, "compactions", 0),
        "text": {
            str(n): tokenizer.decode(driver.tokens[f"{n}-together"]) for n in lengths
        },
        "seconds": time.monotonic() - began,
    }
