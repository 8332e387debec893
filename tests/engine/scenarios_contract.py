"""Traffic under one policy after the other, with NaN in all free blocks."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
from driver import Driver, make_llm
from scenarios_fuzz import Fuzzer
from texts import random_tokens
from tiny_model import VOCABULARY


class PoisoningDriver(Driver):
    """Fills free blocks with NaN after every step, and refuses NaN in logits.

    vLLM's kernel for the CPU multiplies what lies behind a request's last token in
    its last block with a weight of 0. So a block that is handed out is filled with
    the largest numbers instead: a read of those shows as well, but times 0 is 0.
    Needs an engine without prefix caching: cached blocks are free, and read.
    """

    def __init__(self, llm: Any) -> None:
        super().__init__(llm)
        assert not self.pool.enable_caching
        self.poisoned = 0
        self._is_nan: set[int] = set()
        self._handed_out: list[int] = []
        runner = self.core.model_executor.driver_worker.worker.model_runner
        model = runner.model
        compute = model.compute_logits

        def checked(*args: Any, **kwargs: Any) -> torch.Tensor:
            logits: torch.Tensor = compute(*args, **kwargs)
            assert logits.isfinite().all(), "a layer read memory that no request owns"
            return logits

        model.compute_logits = checked
        hand_out = self.pool.get_new_blocks

        def filled(*args: Any, **kwargs: Any) -> list[Any]:
            blocks: list[Any] = hand_out(*args, **kwargs)
            self._handed_out += [block.block_id for block in blocks]
            return blocks

        self.pool.get_new_blocks = filled
        execute = runner.execute_model

        def executed(*args: Any, **kwargs: Any) -> Any:
            # not earlier: a worker may still read what compactions have freed
            _fill(self.runtime.heap, self._handed_out, torch.finfo(torch.float32).max)
            self._is_nan -= set(self._handed_out)
            self._handed_out = []
            return execute(*args, **kwargs)

        runner.execute_model = executed

    def step(self) -> None:
        super().step()
        self.poison()

    def poison(self) -> None:
        if self.runtime.heap is None:  # the cache is known from the first step on
            return
        free = self.pool.free_block_queue.get_all_free_blocks()
        fresh = {block.block_id for block in free} - self._is_nan
        _fill(self.runtime.heap, list(fresh), torch.nan)
        self._is_nan |= fresh
        self.poisoned += len(fresh)


def _fill(heap: Any, block_ids: list[int], number: float) -> None:
    """All keys and values of these blocks."""
    if block_ids and heap is not None:
        heap.pages[heap.page_ids(torch.tensor(block_ids)).reshape(-1)] = number


def traffic(
    model: str,
    policies: dict[str, dict[str, Any]],
    seed: int,
    rounds: int,
    blocks: int,
    samples: int,
) -> dict[str, dict[str, Any]]:
    """Run ``rounds`` rounds of arrivals, aborts and preemptions under each policy.

    Args:
        samples: requests that are compared with a run of their own.

    Returns:
        Per policy what happened, or ``error`` if a check raised.
    """
    report: dict[str, dict[str, Any]] = {}
    for name, policy in policies.items():
        began = time.monotonic()
        try:
            report[name] = _traffic(model, policy, seed, rounds, blocks, samples)
        except Exception as error:
            report[name] = {"error": f"{type(error).__name__}: {error}"}
        report[name]["seconds"] = time.monotonic() - began
        gc.collect()  # an engine without references ends here
    return report


def _traffic(
    model: str,
    policy: dict[str, Any],
    seed: int,
    rounds: int,
    blocks: int,
    samples: int,
) -> dict[str, Any]:
    llm = make_llm(
        model,
        policy,
        num_gpu_blocks_override=blocks,
        max_model_len=800,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        enable_prefix_caching=False,
        skip_tokenizer_init=False,  # for policies that encode text
    )
    driver = PoisoningDriver(llm)
    fuzzer = Fuzzer(driver, seed, samples)
    for _ in range(rounds):
        fuzzer.round()
    fuzzer.drain()
    return fuzzer.counts | {
        "preemptions": driver.preemptions,
        "preempted_compacted": driver.preempted_compacted,
        "compactions": getattr(driver.manager, "compactions", 0),
        "poisoned": driver.poisoned,
        "unscored": driver.runtime.unscored_compactions,
    }


def long_generation(
    model: str,
    policy: dict[str, Any],
    prompt_tokens: int,
    max_tokens: int,
    blocks: int,
) -> dict[str, Any]:
    """One request that generates many more tokens than it may hold.

    Returns:
        ``held`` blocks after each step, ``tokens``.
    """
    llm = make_llm(
        model,
        policy,
        num_gpu_blocks_override=blocks,
        max_num_seqs=1,
        enable_prefix_caching=False,
    )
    driver = PoisoningDriver(llm)
    prompt = random_tokens(prompt_tokens, prompt_tokens, VOCABULARY)
    driver.add("long", prompt, max_tokens)
    held = []
    while driver.busy:
        driver.step()
        held.append(len(driver.held_blocks()))
    driver.step()
    driver.check_blocks()
    return {
        "held": held[:-1],  # the last token frees all blocks
        "tokens": driver.tokens["long"],
        "preemptions": driver.preemptions,
        "tracked": driver.check_policy_state(),
        "compactions": driver.manager.compactions,
    }
