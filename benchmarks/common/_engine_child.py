"""The child process of ``EngineProcess`` (``_engine.py``).

Each line on standard input is a JSON object: ``do`` names the command, the other keys
are its arguments. The child answers with one JSON line.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from typing import Any

import torch


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


# Operator names, by their part of a decode step.
PARTS = {
    "select": ("kvp::index_select",),
    "gather": ("kvp::fill_hot",),
    "attention": ("_C::cpu_attention_with_kv_cache",),
    "matrix products": ("_C::onednn_mm", "aten::mm", "aten::addmm"),
}


class _Child:
    def do_open(self, policy: dict[str, Any] | None, engine: dict[str, Any]) -> Any:
        from vllm import LLM

        from vllm_kvplugins.plugin import register

        register()  # vLLM calls it by itself only if the package is installed
        self.compression_cpu, self.compactions = 0.0, 0
        self._time_compactions()
        self.decomposed: list[float] = []
        self._time_decompositions()
        extra = {"additional_config": {"kv_policy": policy}} if policy else {}
        self.llm = LLM(**engine, **extra, disable_log_stats=False)
        self.core = self.llm.llm_engine.engine_core.engine_core
        config = self.llm.llm_engine.vllm_config
        if policy and "kvplugins" not in str(config.parallel_config.worker_cls):
            raise RuntimeError(
                f"{policy['name']} was requested, but vLLM runs without a policy"
            )
        kept = (config.additional_config or {}).get("kv_policy", {})
        return {
            "vocab": self.llm.get_tokenizer().vocab_size,
            "graphs": config.compilation_config.cudagraph_mode.name,
            "kernel": kept.get("kernel", "vLLM's"),
        }

    def do_add(self, prompts: list[list[int]], max_tokens: int) -> Any:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        for i, ids in enumerate(prompts):
            request_id = f"r{time.monotonic_ns()}-{i}"
            self.llm.llm_engine.add_request(
                request_id, {"prompt_token_ids": ids}, params
            )
        return {}

    def do_turn(self, prompt: list[int], turn_ends: list[int], max_tokens: int) -> Any:
        """Run one request alone; measure the time to its first token."""
        from vllm import SamplingParams

        extra = {"turn_ends": turn_ends} if turn_ends else None
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra
        )
        name, engine = f"t{time.monotonic_ns()}", self.llm.llm_engine
        began, cpu = time.perf_counter(), _cpu_seconds()
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
        times: list[list[float]] = []  # [wall, CPU] seconds after the start, per token
        output = None
        while engine.has_unfinished_requests():
            for output in engine.step():
                if len(output.outputs[0].token_ids) > len(times):
                    times.append([time.perf_counter() - began, _cpu_seconds() - cpu])
        # the worker saves a finished request's session in the next step
        for _ in range(2):
            engine.step()
        assert output is not None, "no answer"
        return {
            "first_ms": 1e3 * times[0][0],
            "first_cpu_ms": 1e3 * times[0][1],
            "token_ms": [1e3 * wall for wall, _ in times],
            "token_cpu_ms": [1e3 * cpu for _, cpu in times],
            "decompose_cpu_ms": 1e3 * self._take_decomposed(),
            "computed": len(prompt) - (output.num_cached_tokens or 0),
            "answer": list(output.outputs[0].token_ids),
        }

    def do_metric(self, name: str) -> Any:
        """The value of a gauge or counter."""
        (value,) = (m.value for m in self.llm.get_metrics() if m.name == name)
        return {"value": value}

    def do_prefill(self) -> Any:
        """Step until every request has its first token.

        With asynchronous scheduling a prompt can leave the waiting queue before its
        last chunk has finished.
        """
        steps = []
        scheduler = self.core.scheduler
        while scheduler.waiting or any(
            r.num_output_tokens == 0 for r in scheduler.running
        ):
            steps.append(self._step())
        return {"steps": steps} | self._pool()

    def do_steps(self, count: int) -> Any:
        return {"steps": [self._step() for _ in range(count)]} | self._pool()

    def do_run(self) -> Any:
        """Step until every request has finished."""
        scheduler = self.core.scheduler
        began, cpu = time.perf_counter(), _cpu_seconds()
        running: list[int] = []
        finished: list[float] = []
        while self.llm.llm_engine.has_unfinished_requests():
            done = sum(output.finished for output in self.llm.llm_engine.step())
            finished += [time.perf_counter() - began] * done
            running.append(len(scheduler.running))
        (preempted,) = (
            m.value for m in self.llm.get_metrics() if m.name == "vllm:num_preemptions"
        )
        return {
            "wall_s": time.perf_counter() - began,
            "cpu_s": _cpu_seconds() - cpu,
            "finished_s": finished,
            "mean_running": sum(running) / len(running),
            "most_running": max(running),
            "steps": len(running),
            "preemptions": preempted,
        }

    def do_profile(self, count: int) -> Any:
        """Milliseconds per step by part, over ``count`` steps under the profiler."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            wall = sum(self._step()[0] for _ in range(count)) / count
        parts: dict[str, float] = {}
        for event in profiler.key_averages():
            for part, names in PARTS.items():
                if event.key.startswith(names):
                    spent = event.self_cpu_time_total / 1e3 / count
                    parts[part] = parts.get(part, 0.0) + spent
        return parts | {"rest": wall - sum(parts.values())}

    def do_drain(self) -> Any:
        while self.llm.llm_engine.has_unfinished_requests():
            self.llm.llm_engine.step()
        seconds = [m for m in self.llm.get_metrics() if "compression_seconds" in m.name]
        return {
            "compressions": seconds[0].count if seconds else 0,
            "compression_s": seconds[0].sum if seconds else 0.0,
            "compression_cpu_s": self.compression_cpu,
        }

    def _time_decompositions(self) -> None:
        """Record CPU seconds of the thread that decomposes spans."""
        from vllm_kvplugins.engine.spans.controller import SpanController

        decompose = SpanController._decompose

        def timed(*arguments: Any) -> Any:
            began = time.thread_time()
            factors = decompose(*arguments)
            self.decomposed.append(time.thread_time() - began)
            return factors

        SpanController._decompose = timed

    def _take_decomposed(self) -> float:
        recorded, self.decomposed = self.decomposed, []
        return sum(recorded)

    def _time_compactions(self) -> None:
        """Count compactions, and record their CPU seconds; the plugin's metric has wall
        time only."""
        from vllm_kvplugins.engine.runtime import PolicyRuntime

        end_step = PolicyRuntime.end_step

        def timed(runtime: PolicyRuntime) -> None:
            began = _cpu_seconds()
            self.compactions += len(runtime._due)
            end_step(runtime)
            self.compression_cpu += _cpu_seconds() - began

        PolicyRuntime.end_step = timed

    def _step(self) -> list[float]:
        """Wall and CPU milliseconds of a step, and its number of compactions."""
        wall, cpu, before = time.perf_counter(), _cpu_seconds(), self.compactions
        self.llm.llm_engine.step()
        return [
            1e3 * (time.perf_counter() - wall),
            1e3 * (_cpu_seconds() - cpu),
            self.compactions - before,
        ]

    def _pool(self) -> dict[str, int]:
        pool = self.core.scheduler.kv_cache_manager.block_pool
        free = pool.get_num_free_blocks()
        state = {"free_blocks": free, "held_blocks": pool.num_gpu_blocks - 1 - free}
        if torch.cuda.is_available():
            state["gpu_mib"] = torch.cuda.max_memory_reserved() >> 20
        return state


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # standard output carries answers only; other prints go to the log
    child = _Child()
    for line in sys.stdin:
        request = json.loads(line)
        answer = getattr(child, f"do_{request.pop('do')}")(**request)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
