"""Scenarios of policies that fetch from host memory."""

from __future__ import annotations

from typing import Any

from driver import Driver, make_llm
from texts import random_tokens
from tiny_model import VOCABULARY


def held_while_generating(
    model: str, policy: dict[str, Any], prompt: int, max_tokens: int
) -> list[list[int]]:
    """(tokens computed, blocks held) after every step of one long answer."""
    driver = Driver(
        make_llm(model, policy, num_gpu_blocks_override=200, max_model_len=4096)
    )
    driver.add("long", random_tokens(1, prompt, VOCABULARY), max_tokens)
    seen = []
    while driver.busy:
        driver.step()
        driver.check_blocks()
        computed = [r.num_computed_tokens for r in driver.scheduler.running]
        if computed and computed[0] > prompt:
            seen.append([computed[0], len(driver.held_blocks())])
    driver.step()
    assert driver.check_policy_state() == 0
    return seen
