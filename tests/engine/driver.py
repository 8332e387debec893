"""Steps an in-process engine and reads its internal state."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


def make_llm(model: str, policy: dict[str, Any] | None = None, **settings: Any) -> Any:
    """An fp32 engine without CUDA graphs or a tokenizer; blocks of 32 tokens."""
    from vllm import LLM

    arguments: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "block_size": 32,
        "max_model_len": 8192,
        "max_num_batched_tokens": 1024,
        "max_num_seqs": 8,
        # An engine fills its whole pool with zeros: 3 seconds for 1 GiB.
        "num_gpu_blocks_override": 700,
        "seed": 0,
        "disable_log_stats": True,
    }
    if policy is not None:
        if kernel := os.environ.get("KVP_TEST_KERNEL"):
            policy = {"kernel": kernel} | policy
        arguments["additional_config"] = {"kv_policy": policy}
    return LLM(model, **(arguments | settings))


class Driver:
    """One engine, stepped by hand.

    Attributes:
        managers: block managers of all groups of layers.
        manager: the one of the full-attention layers, which a policy manages.
        tokens: generated token ids per request, as far as they got.
        cached: prompt tokens per request that came from the prefix cache.
        margins: per request, per token, how far the best logprob led (only
            for requests added with ``margins=True``).
        finished: requests that ended by themselves.
        preemptions, preempted_compacted: how often the scheduler took a
            request's blocks away; how many of those had been compacted.
        preempted: names of the requests.
    """

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.engine = llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        coordinator = self.scheduler.kv_cache_manager.coordinator
        self.managers = coordinator.single_type_managers
        (self.manager,) = filter(_has_full_attention, self.managers)
        self.block_size = self.manager.block_size
        self.tokens: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        self.margins: dict[str, list[float]] = {}
        self.finished: set[str] = set()
        self.preemptions = 0
        self.preempted_compacted = 0
        self.preempted: set[str] = set()
        self._count_preemptions()

    def _count_preemptions(self) -> None:
        preempt = self.scheduler._preempt_request

        def counted(request: Any, *args: Any, **kwargs: Any) -> Any:
            self.preemptions += 1
            self.preempted.add(request.request_id)
            freed = getattr(self.manager, "freed_compactions", {})
            self.preempted_compacted += request.request_id in freed
            return preempt(request, *args, **kwargs)

        self.scheduler._preempt_request = counted

    # -- requests -----------------------------------------------------------

    def add(
        self,
        name: str,
        prompt: list[int] | dict[str, Any],
        max_tokens: int,
        margins: bool = False,
        turn_ends: Any = None,
        salt: str | None = None,
        patched: list[int] | None = None,
        lora: Any = None,
        kv_session: bool | None = None,
        shared_prefix: Any = None,
        loop_ends: Any = None,
    ) -> None:
        from vllm import SamplingParams

        extra = {
            "turn_ends": turn_ends,
            "patched_prompt": patched,
            "kv_session": kv_session,
            "shared_prefix": shared_prefix,
            "loop_ends": loop_ends,
        }
        extra = {name: value for name, value in extra.items() if value is not None}

        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=2 if margins else None,
            extra_args=extra or None,
        )
        request: dict[str, Any] = (
            dict(prompt) if isinstance(prompt, dict) else {"prompt_token_ids": prompt}
        )
        if salt is not None:
            request["cache_salt"] = salt
        self.tokens[name] = []
        self.engine.add_request(name, request, params, lora_request=lora)

    def abort(self, names: list[str]) -> None:
        self.engine.abort_request(names)

    def step(self) -> None:
        for output in self.engine.step():
            name, best = output.request_id, output.outputs[0]
            self.tokens[name] = list(best.token_ids)
            if output.num_cached_tokens is not None:
                self.cached[name] = output.num_cached_tokens
            if best.logprobs:
                self.margins[name] = [_margin(entry) for entry in best.logprobs]
            if output.finished:
                self.finished.add(name)

    @property
    def busy(self) -> bool:
        return bool(self.engine.has_unfinished_requests())

    def step_until(self, reached: Callable[[], bool], max_steps: int = 5000) -> None:
        """Step until ``reached()`` is true; it is checked after every step."""
        for _ in range(max_steps):
            if reached():
                return
            self.step()
        raise AssertionError(f"not reached within {max_steps} steps")

    def run(self) -> None:
        """Step until no request is left."""
        self.step_until(lambda: not self.busy)

    def generate(
        self, prompts: dict[str, Any], max_tokens: int, margins: bool = False
    ) -> dict[str, list[int]]:
        """Run all prompts together to their end."""
        for name, prompt in prompts.items():
            self.add(name, prompt, max_tokens, margins)
        self.run()
        return {name: self.tokens[name] for name in prompts}

    # -- what it looks like inside ---------------------------------------------

    @property
    def worker(self) -> Any:
        """The engine's worker."""
        return worker_of(self.llm)

    @property
    def runtime(self) -> Any:
        """The policy runtime of the worker."""
        return self.worker.kv_policy.runtime

    @property
    def free_blocks(self) -> int:
        return int(self.pool.get_num_free_blocks())

    @property
    def total_blocks(self) -> int:
        """Blocks that requests can use: all but the null block."""
        return int(self.pool.num_gpu_blocks) - 1

    @property
    def lookahead_tokens(self) -> int:
        """Slots that a drafter has beyond the tokens of a step."""
        return int(self.scheduler.num_lookahead_tokens)

    def held_blocks(self) -> set[int]:
        """Ids of the blocks that requests hold in all groups, without duplicates."""
        return {
            block.block_id
            for manager in self.managers
            for blocks in manager.req_to_blocks.values()
            for block in blocks
            if not block.is_null
        }

    def decoding(self) -> int:
        """Running requests whose prompt is fully computed."""
        return sum(
            request.num_computed_tokens >= request.num_prompt_tokens
            for request in self.scheduler.running
        )

    def check_blocks(self) -> None:
        """Check that every block is either free or held by a request."""
        used = len(self.held_blocks())
        assert self.free_blocks + used == self.total_blocks, (
            f"{self.free_blocks} free + {used} held != {self.total_blocks} blocks"
        )

    def check_policy_state(self) -> int:
        """Number of requests that the worker tracks; raises if its state is
        inconsistent.
        """
        self.manager.check_integrity()
        (tracked,) = self.llm.collective_rpc("kv_policy_check_integrity")
        return int(tracked)


def _has_full_attention(manager: Any) -> bool:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return isinstance(manager.kv_cache_spec, FullAttentionSpec)


def worker_of(llm: Any) -> Any:
    """The only worker of an engine in this process."""
    core = llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker


def _margin(entry: dict[int, Any]) -> float:
    """Log-probability of the best token minus that of the second."""
    best, second = sorted((item.logprob for item in entry.values()), reverse=True)[:2]
    return float(best - second)
