"""The engine of the quality benchmark, answering generated samples."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.extend(map(str, (Path(__file__).parents[2] / "benchmarks").glob("*/")))


def answer_samples(
    model: str, policy: dict[str, Any], prompts: list[str]
) -> dict[str, Any]:
    """Answer raw prompts in pairs; then read vLLM's gauges while one runs alone."""
    import _quality_engine as engine
    from _quality_samples import Sample, Setting
    from vllm import SamplingParams

    opened = []
    open_engine = engine.open_engine

    def kept(*arguments: Any) -> Any:
        opened.append(open_engine(*arguments, disable_log_stats=False))
        return opened[0]

    engine.open_engine = kept
    setting = Setting(model, "float32", 0, 4, 9, (9,), 1, 1, 1, 1, 1, 1000)
    samples = [
        Sample("t", str(i), "contains", ("x",), prompt=text, max_tokens=12)
        for i, text in enumerate(prompts)
    ]
    rows = list(engine.answers(setting, policy, samples, 1024, 2))
    (llm,) = opened
    core = llm.llm_engine.engine_core.engine_core
    runtime = core.model_executor.driver_worker.worker.kv_policy_runtime
    ids = llm.get_tokenizer().encode(prompts[0])
    alone = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    llm.llm_engine.add_request("alone", {"prompt_token_ids": ids}, alone)
    gauges, outside = [], []
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
        report = {
            metric.name: metric.value
            for metric in llm.get_metrics()
            if metric.name
            in ("vllm:kv_policy_resident_tokens", "vllm:kv_cache_usage_perc")
        }
        gauges.append(report)
        outside += [runtime.device_bytes(name) for name in core.scheduler.requests]
    blocks = core.scheduler.kv_cache_config.num_blocks
    return {"rows": rows, "gauges": gauges, "blocks": blocks, "outside": outside}
