"""Stages of ``gpu_smoke.py`` that run engines, each in a child process with a
deadline."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from _engine import EngineProcess, synthetic_prompt

from vllm_kvplugins.policies.registry import available_policies, get_policy_class

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    # smaller than Llama's 128256, so that SmolLM2's tokenizer fits
    "vocab_size": 49152,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072 + 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
MIB = 1 << 20
BOX_S = 150.0  # seconds of one engine
AT_ONCE = 6  # engines of a small model on one GPU at a time
Row = dict[str, Any]

# no model compilation; CUDA graphs for decode steps only
GRAPHS = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
EAGER = {"compilation_config": {"mode": 0, "cudagraph_mode": "NONE"}}
PIECES = {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}
SNAPKV = {"name": "snapkv", "budget": 2048}
ICECACHE = {"name": "icecache", "budget": 2048, "host_memory": 24 << 30}
# All of its host memory is pinned at start-up, and the GPU holds a quarter of it more.
ON_DEVICE = ICECACHE | {"index": "device", "host_memory": 8 << 30}


@dataclass(frozen=True, slots=True)
class Machine:
    """Resources of the stages: model, device, and deadline.

    Args:
        model: folder of a small model with weights and a tokenizer.
        folder: for generated models.
        device: "cuda" or "cpu".
        end: ``time.monotonic()`` at which all stages must be finished.
    """

    model: str
    folder: Path
    device: str
    end: float

    def engine(self, policy: Row | None, **engine: Any) -> EngineProcess:
        """Start an engine with a deadline.

        Raises:
            RuntimeError: the engine did not start, or no time is left.
        """
        now = time.monotonic()
        if self.end - now < 20:
            raise RuntimeError("not run: no time left; run this stage alone")
        return EngineProcess(policy, min(self.end, now + BOX_S), **engine)

    def rows(
        self,
        about: Row,
        policy: Row | None,
        settings: Row,
        ask: Callable[[EngineProcess], Iterator[Row]],
    ) -> Iterator[Row]:
        """Start an engine and make its rows; a failure becomes the last row.

        Args:
            about: columns that every row starts with.
            settings: of the engine.
            ask: makes the rows.
        """
        each = None
        try:
            each = self.engine(policy, **settings)
            for row in ask(each):
                yield about | row
        except Exception as error:
            yield about | {"problem": f"{type(error).__name__}: {error}"}
        finally:
            if each is not None:
                each.close()

    def all_of(self, engines: list[Iterator[Row]]) -> Iterator[Row]:
        """Rows of small engines, in order; a GPU runs several engines at a time."""
        with ThreadPoolExecutor(AT_ONCE if self.device == "cuda" else 1) as pool:
            for rows in pool.map(list, engines):
                yield from rows

    def small(self, **more: Any) -> dict[str, Any]:
        """Settings of an engine that leaves memory for other engines."""
        arguments: dict[str, Any] = {
            "model": self.model,
            "max_model_len": 2048,
            "kv_cache_memory_bytes": 512 * MIB,
            "enable_prefix_caching": False,
        }
        if self.device == "cuda":
            arguments["gpu_memory_utilization"] = 0.9 / AT_ONCE
        return arguments | more


def policies(machine: Machine, expected: Path | None = None) -> Iterator[Row]:
    """One float32 engine per policy; each answers the same 900-token prompt.

    Args:
        expected: ``gpu_smoke.json`` of another machine (for example a CPU), to compare
            answers with.
    """
    configs: list[Row | None] = [None]
    configs += [_settings(name, machine.model) for name in available_policies()]
    right = _answers(expected)
    stock: list[int] = []
    settings = machine.small(dtype="float32", enforce_eager=True)
    engines = [
        machine.rows(_about(policy), policy, settings, _answered) for policy in configs
    ]
    for row in machine.all_of(engines):
        answer = row.get("answer", [])
        if row["policy"] == "stock":
            stock = answer
        elif stock and answer:
            row["as_stock"] = agreement(answer, stock)
        if answer and row["policy"] in right:
            row["as_expected"] = agreement(answer, right[row["policy"]])
        yield row


def _settings(name: str, model: str) -> Row:
    cls = get_policy_class(name)
    settings: Row = {"name": name}
    if "budget" in cls.model_fields:
        settings["budget"] = 256
    if "encoder" in cls.model_fields:
        # this stage has no routing, and the default encoder is a download
        settings["encoder"] = model
    if "host_memory" in cls.model_fields:
        settings["host_memory"] = 1 << 30
    return settings


def _about(policy: Row | None) -> Row:
    if policy is None:
        return {"policy": "stock"}
    index = {"index": policy["index"]} if "index" in policy else {}
    return {"policy": policy["name"]} | index


def _answered(each: EngineProcess) -> Iterator[Row]:
    prompt, began = synthetic_prompt(40000, 900, 0), time.monotonic()
    reply = each.ask("turn", prompt=prompt, turn_ends=[600], max_tokens=24)
    seconds = round(time.monotonic() - began, 2)
    left = each.ask("steps", count=0)["held_blocks"]
    yield {"answer": reply["answer"], "blocks_left": left, "seconds": seconds}


def _answers(report: Path | None) -> dict[str, list[int]]:
    if report is None:
        return {}
    rows = json.loads(report.read_text())["stages"]["policies"]["rows"]
    return {row["policy"]: row["answer"] for row in rows if "answer" in row}


def agreement(answer: list[int], right: list[int]) -> str:
    """Length of the common prefix; after a difference, equal tokens mean nothing."""
    pairs = zip(answer, right, strict=False)
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    return "all" if same == len(right) == len(answer) else f"first {same}"


def graphs(machine: Machine) -> Iterator[Row]:
    """Compare tokens with and without CUDA graphs, in bfloat16, by kernel and mode.

    FlashAttention may split sequences differently in a graph, and so round differently.
    """
    engines = []
    for kernel in ("triton", "flash"):
        policy = {"name": "snapkv", "budget": 256, "kernel": kernel}
        for mode, settings in (("none", EAGER), ("full", GRAPHS), ("pieces", PIECES)):
            small = machine.small(dtype="bfloat16", max_num_seqs=4, **settings)
            about = {"kernel": kernel, "asked": mode}
            engines.append(machine.rows(about, policy, small, _graphed))
    none: dict[str, list[int]] = {}
    for row in machine.all_of(engines):
        answer = row.get("answer", [])
        kernel = row["kernel"]
        if row["asked"] == "none":
            none[kernel] = answer
        elif answer and none[kernel]:
            row["as_without"] = agreement(answer, none[kernel])
        yield row


def _graphed(each: EngineProcess) -> Iterator[Row]:
    prompt = synthetic_prompt(40000, 900, 0)
    reply = each.ask("turn", prompt=prompt, turn_ends=[], max_tokens=48)
    yield {"mode": each.facts["graphs"], "answer": reply["answer"]}


def llama(machine: Machine, layers: int, longest: int, kv_bytes: int) -> Row:
    """Settings of an engine with Llama-3.1-8B's shape and random weights."""
    folder = machine.folder / "decoded-model"
    folder.mkdir(exist_ok=True)
    config = LLAMA_8B | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    return {
        "model": str(folder),
        "tokenizer": machine.model,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": longest,
        "kv_cache_memory_bytes": kv_bytes,
        "enable_prefix_caching": False,
    }


def decode(
    machine: Machine, lengths: list[int], layers: int, kv_bytes: int
) -> Iterator[Row]:
    """Prefill and decode times of one request, per engine and prompt length."""
    engine = llama(machine, layers, max(lengths) + 512, kv_bytes)
    engine["max_num_seqs"] = 4
    # (policy, settings, number of lengths); some are slow at the longest length
    few, two = lengths[:1], lengths[:2]
    plans: list[tuple[Row | None, Row, list[int]]] = [
        (None, GRAPHS, lengths),
        (SNAPKV, GRAPHS, lengths),
        (ICECACHE, GRAPHS, two),
        (ON_DEVICE, GRAPHS, two),
        (SNAPKV | {"kernel": "triton"}, GRAPHS, two),
        (SNAPKV, EAGER, few),
    ]
    for policy, settings, some in plans:
        ask = partial(_decoded, some)
        yield from machine.rows(_about(policy), policy, engine | settings, ask)


def _decoded(lengths: list[int], each: EngineProcess) -> Iterator[Row]:
    used = {"graphs": each.facts["graphs"], "kernel": each.facts["kernel"]}
    for tokens in lengths:
        prompt = synthetic_prompt(40000, tokens, tokens)
        before = each.ask("drain")["compression_s"]
        each.ask("add", prompts=[prompt], max_tokens=80)
        prefill = sum(wall for wall, *_ in each.ask("prefill")["steps"])
        each.ask("steps", count=8)
        steps = each.ask("steps", count=48)
        compressed = each.ask("drain")["compression_s"] - before
        walls = [wall for wall, *_ in steps["steps"]]
        yield used | {
            "prompt_tokens": tokens,
            "prefill_ms": round(prefill),
            "compression_of_prefill": round(1e3 * compressed / prefill, 4),
            "step_ms": round(statistics.median(walls), 3),
            "step_ms_range": [round(min(walls), 3), round(max(walls), 3)],
            "held_blocks": steps["held_blocks"],
            "gpu_mib": steps.get("gpu_mib", ""),
        }


def serving(
    machine: Machine,
    layers: int,
    requests: int = 32,
    prompt_tokens: int = 4096,
    answer_tokens: int = 512,
) -> Iterator[Row]:
    """Concurrent requests in a quarter of the memory that they need: stock, SnapKV."""
    longest = prompt_tokens + answer_tokens
    token_bytes = layers * 8 * 2 * 128 * 2
    pool_bytes = requests * longest * token_bytes // 4
    engine = llama(machine, layers, longest + 64, pool_bytes)
    engine |= {"max_num_seqs": requests, **GRAPHS}
    prompts = [synthetic_prompt(40000, prompt_tokens, i) for i in range(requests)]
    stock = 0.0

    def served(each: EngineProcess) -> Iterator[Row]:
        each.ask("add", prompts=prompts[:2], max_tokens=16)
        each.ask("drain")  # absorbs late compilation and graph capture
        each.ask("add", prompts=prompts, max_tokens=answer_tokens)
        reply = each.ask("run")
        rate = requests * answer_tokens / reply["wall_s"]
        row: Row = {"requests": requests, "tokens_per_s": round(rate, 1)}
        for key in ("wall_s", "mean_running", "preemptions"):
            row[key] = round(reply[key], 2)
        yield row

    for policy in (None, {"name": "snapkv", "budget": 512}):
        for row in machine.rows(_about(policy), policy, engine, served):
            rate = row.get("tokens_per_s", 0.0)
            if policy is None:
                stock = rate
            elif stock and rate:
                row["of_stock"] = round(rate / stock, 2)
            yield row
