"""Prompts that are compacted block by block, on the tiny random model."""

from __future__ import annotations

import gc
from typing import Any

from driver import Driver, make_llm
from scenarios_tiny import recorded
from texts import random_tokens
from tiny_model import VOCABULARY

Policy = dict[str, Any]
ANSWER = 40  # tokens


def _prompt(count: int) -> list[int]:
    return random_tokens(count, count, VOCABULARY)


class _Watching(Driver):
    """Records how many blocks are in use after every allocation."""

    def __init__(self, llm: Any) -> None:
        super().__init__(llm)
        self.in_use: list[int] = []
        hand_out = self.pool.get_new_blocks

        def watched(*args: Any, **kwargs: Any) -> Any:
            blocks = hand_out(*args, **kwargs)
            self.in_use.append(self.total_blocks - self.free_blocks)
            return blocks

        self.pool.get_new_blocks = watched

    def answer(self, lengths: list[int], max_tokens: int) -> dict[str, Any]:
        """Run all prompts together to their end; returns answers and the blocks
        used.
        """
        self.in_use, self.preemptions = [], 0
        before = self.manager.compactions
        tokens = self.generate({str(n): _prompt(n) for n in lengths}, max_tokens)
        for _ in range(3):
            self.step()
        self.check_blocks()
        assert self.check_policy_state() == 0, "state was left behind"
        return {
            "tokens": tokens,
            "in_use": self.in_use,
            "preemptions": self.preemptions,
            "compactions": self.manager.compactions - before,
        }

    def refusal(self, length: int, max_tokens: int) -> str:
        """The front end's message when it refuses a request."""
        from vllm.exceptions import VLLMValidationError

        try:
            self.add("refused", _prompt(length), max_tokens)
        except VLLMValidationError as error:
            return str(error)
        raise AssertionError("it was taken")


def pools(
    model: str,
    policy: Policy,
    small: int,
    groups: list[list[int]],
    refused: tuple[int, int],
    fits: tuple[int, int] | None = None,
    large: int | None = None,
    settings: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Groups of prompts in a small pool, and in a large one if given.

    Args:
        small, large: blocks of the pools, the null block included.
        groups: prompt lengths that run at once.
        refused, fits: prompt and answer of requests that do not fit the small pool
            and that fill it.
        settings: more arguments of the engine.
    """
    report: dict[str, Any] = {}
    for name, blocks in (("small", small), ("large", large)):
        if blocks is None:
            continue
        # several prompts share each step, so that some are between two compactions
        # when another one is admitted
        driver = _Watching(
            make_llm(
                model,
                policy,
                num_gpu_blocks_override=blocks,
                long_prefill_token_threshold=128,
                **(settings or {}),
            )
        )
        if name == "small":
            report["scheduler"] = type(driver.scheduler).__name__
            report["steps_in_flight"] = driver.core.batch_queue_size
            report["refusal"] = driver.refusal(*refused)
            report["full"] = driver.answer([fits[0]], fits[1]) if fits else None
        report[name] = [driver.answer(lengths, ANSWER) for lengths in groups]
        del driver
        gc.collect()
    return report


def refused_elsewhere(model: str, policy: Policy, small: int) -> dict[str, Any]:
    """The same check with the engine in its own process."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    llm = make_llm(model, policy, num_gpu_blocks_override=small)
    core = type(llm.llm_engine.engine_core).__name__
    prompt, message = {"prompt_token_ids": _prompt(3000)}, ""

    def ask(max_tokens: int) -> int:
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        (done,) = llm.generate([prompt], params, use_tqdm=False)
        return len(done.outputs[0].token_ids)

    try:
        ask(5000)
    except VLLMValidationError as error:
        message = str(error)
    return {"client": core, "refusal": message, "generated": ask(8)}


def recorded_each(
    model: str, policies: dict[str, Policy], lengths: list[int], max_tokens: int
) -> dict[str, Any]:
    """``scenarios_tiny.recorded`` per policy, with a tokenizer."""
    report = {}
    for name, policy in policies.items():
        report[name] = recorded(
            model,
            policy,
            lengths,
            max_tokens,
            skip_tokenizer_init=False,
            max_model_len=4096,
        )
        gc.collect()
    return report
