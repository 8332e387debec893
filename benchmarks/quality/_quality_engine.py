"""Answers of one engine, and the device memory of each request meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from _quality_metrics import score
from _quality_samples import Sample, Setting


@dataclass
class Held:
    """Device memory of one request, sampled before each forward pass.

    Attributes:
        decode_bytes: at every decode step.
        peak_bytes: maximum over all steps.
    """

    decode_bytes: list[int] = field(default_factory=list)
    peak_bytes: int = 0


class ResidencyWatch:
    """Records the device memory of each running request after every scheduling step.

    Counts the blocks in vLLM's block tables of each request, those of windowed layers
    included; a block that two requests share counts for both. Memory outside vLLM's
    pool counts too: page lists, positions, and means and zoomed tokens of spans.

    Args:
        llm: an engine in this process.
    """

    def __init__(self, llm: Any) -> None:
        core = llm.llm_engine.engine_core.engine_core
        self._scheduler = core.scheduler
        coordinator = core.scheduler.kv_cache_manager.coordinator
        self._managers = coordinator.single_type_managers
        config = core.scheduler.kv_cache_config
        # All tensors are views of one allocation, which the groups of layers share.
        (pool_bytes,) = {tensor.size for tensor in config.kv_cache_tensors}
        self.block_bytes = pool_bytes // config.num_blocks
        worker = core.model_executor.driver_worker.worker
        self._runtime = getattr(worker, "kv_policy_runtime", None)
        self.held: dict[str, Held] = {}
        schedule = core.scheduler.schedule

        def watched(*args: Any, **kwargs: Any) -> Any:
            decided = schedule(*args, **kwargs)
            for name, tokens in decided.num_scheduled_tokens.items():
                self._note(name, tokens)
            return decided

        core.scheduler.schedule = watched

    def _note(self, name: str, new_tokens: int) -> None:
        request = self._scheduler.requests[name]
        held = sum(
            not block.is_null
            for manager in self._managers
            for block in manager.req_to_blocks.get(name, ())
        )
        now = held * self.block_bytes
        if self._runtime is not None:
            now += self._runtime.device_bytes(name)
        # vLLM appends a suffix to the request name that outputs show
        record = self.held.setdefault(name.rpartition("-")[0], Held())
        record.peak_bytes = max(record.peak_bytes, now)
        if request.num_output_tokens and new_tokens == 1:
            record.decode_bytes.append(now)


def engine_options(setting: Setting, max_model_len: int, batch: int) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` with memory for a batch and shared contexts."""
    from vllm_kvplugins.model_config import read_model_config

    shape = read_model_config(setting.model, setting.dtype).cache_shape()
    pool = shape.bytes_per_token(4) * (batch + 4) * (max_model_len + 64)
    return {
        "dtype": setting.dtype,
        "seed": setting.seed,
        "enforce_eager": True,
        "max_model_len": max_model_len,
        "block_size": setting.block_size,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": batch,
        "kv_cache_memory_bytes": max(pool, 1 << 26),
    }


def open_engine(
    setting: Setting,
    policy: Mapping[str, Any],
    max_model_len: int,
    batch: int,
    **more: Any,
) -> Any:
    """An ``LLM`` in this process, with memory for a batch and shared contexts.

    Args:
        more: arguments of ``vllm.LLM``; they override ours.
    """
    from vllm import LLM

    import vllm_kvplugins

    options = dict(policy)
    extra = vllm_kvplugins.engine_args(options.pop("name"), **options) if policy else {}
    engine = engine_options(setting, max_model_len, batch)
    return LLM(setting.model, **engine | extra | more)


def answers(
    setting: Setting,
    policy: Mapping[str, Any],
    samples: Sequence[Sample],
    max_model_len: int,
    batch: int,
) -> Iterator[dict[str, Any]]:
    """One row per sample, batch by batch, decoded greedily.

    Cost: start-up of an engine and the answers.
    """
    llm = open_engine(setting, policy, max_model_len, batch)
    watch = ResidencyWatch(llm)
    for first in range(0, len(samples), batch):
        part = samples[first : first + batch]
        began = time.perf_counter()
        outputs = ask(llm, part)
        spent = (time.perf_counter() - began) / len(part)
        for sample, output in zip(part, outputs, strict=True):
            held = watch.held.pop(output.request_id, Held())
            yield row_of(sample, output, held) | {"seconds": round(spent, 3)}


def ask(llm: Any, samples: Sequence[Sample]) -> list[Any]:
    """vLLM's outputs, in the order of the samples."""
    from vllm import SamplingParams

    outputs_by_index: dict[int, Any] = {}
    kinds: dict[tuple[bool, bool], list[int]] = {}
    for index, sample in enumerate(samples):
        kinds.setdefault((bool(sample.messages), bool(sample.opening)), []).append(
            index
        )
    for (chat, opened), indices in kinds.items():
        chosen = [samples[index] for index in indices]
        sampling = [
            SamplingParams(
                temperature=0, max_tokens=sample.max_tokens, stop=list(sample.stop)
            )
            for sample in chosen
        ]
        if chat:
            talks = [
                [
                    *map(dict, sample.messages),
                    *([_said(sample.opening)] if opened else []),
                ]
                for sample in chosen
            ]
            outputs = llm.chat(
                talks,
                sampling,
                use_tqdm=False,
                add_generation_prompt=not opened,
                continue_final_message=opened,
            )
        else:
            prompts = [sample.prompt for sample in chosen]
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
        outputs_by_index |= dict(zip(indices, outputs, strict=True))
    return [outputs_by_index[index] for index in range(len(samples))]


def _said(opening: str) -> dict[str, str]:
    return {"role": "assistant", "content": opening}


def row_of(sample: Sample, output: Any, held: Held) -> dict[str, Any]:
    """The row of an answer."""
    (completion,) = output.outputs
    steps = held.decode_bytes
    return {
        "task": sample.task,
        "sample": sample.name,
        "group": sample.group or sample.name,
        "place": dict(sample.place),
        "answer": completion.text,
        "truths": list(sample.truths),
        "score": round(score(completion.text, sample), 6),
        "prompt_tokens": len(output.prompt_token_ids),
        "answer_tokens": len(completion.token_ids),
        "cached_tokens": output.num_cached_tokens or 0,
        "resident_bytes": round(median(steps)) if steps else None,
        "peak_bytes": held.peak_bytes or None,
    }
