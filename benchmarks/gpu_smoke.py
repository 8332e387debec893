"""What one GPU says of this package, within minutes: one JSON file and one table.

    benchmarks/gpu_smoke.sh MODEL OUT_DIR

Stages, each in a time box; one that fails or runs out of time is written down as that,
and the others go on:

build     compiles the extension, with CUDA kernels where nvcc is
kernels   the suite of attention kernels, and the compiled ops, on the GPU
policies  every policy answers a prompt; `full` as stock, in float32
graphs    each attention kernel answers in CUDA graphs as without, in bfloat16
decode    steps of a model with Llama-3.1-8B's shape and random weights, stock and under
          policies, at several prompt lengths
gather    pages copied in bulk, on the GPU and from pinned host memory, against plain
          copies of as many bytes
fetch     tokens out of the host tier into hot slots, as `host_fetch` staged and direct
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from _engine import ROOT, EngineProcess, provenance, synthetic_prompt
from rich.console import Console

from vllm_kvplugins import ops
from vllm_kvplugins.policies.registry import available_policies, get_policy_class
from vllm_kvplugins.residency.host_tier import HostTier

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
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
SNAPKV = {"name": "snapkv", "budget": 2048}
PIECEWISE = {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}
# policy, and settings of the engine; the first two also where there is no GPU
DECODERS: list[tuple[dict[str, Any] | None, dict[str, Any]]] = [
    (None, {}),
    (SNAPKV, {}),
    (SNAPKV, PIECEWISE),
    (SNAPKV | {"kernel": "flashinfer"}, {}),
    (SNAPKV | {"kernel": "triton"}, {}),
]
GRAPH_KERNELS = ("flash", "flashinfer", "triton")
FETCHED = (32, 256, 2048)  # tokens per KV head
MIB = 1 << 20
Row = dict[str, Any]


def main(
    model: str,
    out: Path,
    stages: Annotated[str, typer.Option()] = (
        "build,kernels,policies,graphs,decode,gather,fetch"
    ),
    lengths: Annotated[str, typer.Option(help="prompt tokens")] = "8192,32768,131072",
    layers: Annotated[int, typer.Option(help="of the decoded model")] = 32,
    kv_bytes: int = 24 << 30,
    device: str = "cuda",
) -> None:
    """Run the stages and write ``OUT/gpu_smoke.json`` and ``OUT/gpu_smoke.md``."""
    out.mkdir(parents=True, exist_ok=True)
    console = Console()
    work: dict[str, Callable[[], list[Row]]] = {
        "build": lambda: build(out),
        "kernels": kernels,
        "policies": lambda: policies(model),
        "graphs": lambda: graphs(model),
        "decode": lambda: decode(
            model, out, [int(n) for n in lengths.split(",")], layers, kv_bytes, device
        ),
        "gather": lambda: gather(torch.device(device)),
        "fetch": lambda: fetch(torch.device(device)),
    }
    unknown = set(stages.split(",")) - set(work)
    if unknown:
        raise typer.BadParameter(f"no such stages: {sorted(unknown)}")
    report: dict[str, Any] = {"about": facts(device), "stages": {}}
    for name in stages.split(","):
        began = time.monotonic()
        try:
            rows = work[name]()
        except Exception as error:  # one stage must not cost us the others
            rows = [{"problem": f"{type(error).__name__}: {str(error)[-600:]}"}]
        seconds = round(time.monotonic() - began, 1)
        report["stages"][name] = {"seconds": seconds, "rows": rows}
        console.print(f"[bold]{name}[/] {seconds} s")
        for row in rows:
            console.print(f"  {row}")
        (out / "gpu_smoke.json").write_text(json.dumps(report, indent=2))
        (out / "gpu_smoke.md").write_text(markdown(report))


def facts(device: str) -> dict[str, str]:
    """Where and of what the figures are."""
    found = provenance()
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        memory = gpu.total_memory // MIB
        found["gpu"] = f"{gpu.name}, {memory} MiB, compute {gpu.major}.{gpu.minor}"
    return found


def run_boxed(command: list[str], seconds: float) -> tuple[int, str]:
    """Exit status and the end of the output; 124 if time ran out."""
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as late:
        said = late.stdout or b""
        return 124, said.decode(errors="replace")[-600:]
    return done.returncode, done.stdout[-600:]


def build(out: Path) -> list[Row]:
    """cmake, with whatever CUDA it finds."""
    folder = str(out / "build")
    steps = [
        ["cmake", "-S", ".", "-B", folder, f"-DPython_EXECUTABLE={sys.executable}"],
        ["cmake", "--build", folder, "--parallel"],
    ]
    for step in steps:
        status, said = run_boxed(step, 180)
        if status:
            return [{"status": status, "said": said}]
    ask = "import json; from vllm_kvplugins import ops; print(ops.extension_info())"
    return [{"status": 0, "extension": run_boxed([sys.executable, "-c", ask], 60)[1]}]


def kernels() -> list[Row]:
    """The suite of attention kernels, and the tests of the compiled ops."""
    rows = []
    for suite in ("tests/helpers/kernel_suite.py", "tests/unit/test_cuda_ops.py"):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        status, said = run_boxed([*command, suite], 100)
        last = said.strip().splitlines()[-1:]
        rows.append({"suite": suite, "status": status, "said": " ".join(last)})
    return rows


def policies(model: str) -> list[Row]:
    """Each in an engine of its own; answers to one prompt of 900 tokens."""
    engine = {
        "model": model,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "kv_cache_memory_bytes": 512 * MIB,
        "enable_prefix_caching": False,
    }
    prompt = synthetic_prompt(40000, 900, 0)
    wanted: list[dict[str, Any] | None] = [None]
    for name in available_policies():
        cls = get_policy_class(name)
        budget = {"budget": 256} if "budget" in cls.model_fields else {}
        wanted.append({"name": name, **budget})
    rows: list[Row] = []
    stock: list[int] = []
    for policy in wanted:
        began = time.monotonic()
        row: Row = {"policy": policy["name"] if policy else "stock"}
        try:
            each = EngineProcess(policy, **engine)
        except RuntimeError as error:
            rows.append(row | {"problem": str(error)[-600:]})
            continue
        try:
            told = each.ask("turn", prompt=prompt, turn_ends=[600], max_tokens=24)
            held = each.ask("steps", count=0)["held_blocks"]
        except RuntimeError as error:
            rows.append(row | {"problem": str(error)[-600:]})
            continue
        finally:
            each.close()
        stock = stock or told["answer"]
        same = sum(a == b for a, b in zip(told["answer"], stock, strict=True))
        row |= {"tokens_as_stock": f"{same} of {len(stock)}", "blocks_left": held}
        rows.append(row | {"seconds": round(time.monotonic() - began, 1)})
    return rows


def graphs(model: str) -> list[Row]:
    """Tokens in graphs that are those without, per kernel."""
    prompt = synthetic_prompt(40000, 900, 0)
    rows: list[Row] = []
    for kernel in GRAPH_KERNELS:
        policy = {"name": "snapkv", "budget": 256, "kernel": kernel}
        row: Row = {"kernel": kernel}
        answers: list[list[int]] = []
        for eager in (True, False):
            engine = {
                "model": model,
                "dtype": "bfloat16",
                "enforce_eager": eager,
                "max_model_len": 2048,
                "max_num_seqs": 4,
                "kv_cache_memory_bytes": 512 * MIB,
            }
            try:
                each = EngineProcess(policy, **engine)
            except RuntimeError as error:
                row["problem"] = str(error)[-600:]
                break
            try:
                told = each.ask("turn", prompt=prompt, turn_ends=[], max_tokens=48)
                answers.append(told["answer"])
            except RuntimeError as error:
                row["problem"] = str(error)[-600:]
                break
            finally:
                each.close()
        if len(answers) == 2:
            same = sum(a == b for a, b in zip(*answers, strict=True))
            row["tokens_as_eager"] = f"{same} of {len(answers[0])}"
        rows.append(row)
    return rows


def decode(
    tokenizer: str,
    out: Path,
    lengths: list[int],
    layers: int,
    kv_bytes: int,
    device: str,
) -> list[Row]:
    """Median step of one request, engine after engine, at each prompt length."""
    folder = out / "decoded-model"
    folder.mkdir(exist_ok=True)
    config = LLAMA_8B | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    engine = {
        "model": str(folder),
        "tokenizer": tokenizer,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": max(lengths) + 512,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": kv_bytes,
        "enable_prefix_caching": False,
    }
    rows: list[Row] = []
    for policy, settings in DECODERS[: None if device == "cuda" else 2]:
        name = json.dumps(policy) if policy else "stock"
        name += f" {json.dumps(settings)}" if settings else ""
        try:
            each = EngineProcess(policy, **engine, **settings)
        except RuntimeError as error:
            rows.append({"policy": name, "problem": str(error)[-600:]})
            continue
        try:
            for tokens in lengths:
                prompt = synthetic_prompt(40000, tokens, tokens)
                each.ask("add", prompts=[prompt], max_tokens=80)
                prefill = each.ask("prefill")
                each.ask("steps", count=8)
                steps = each.ask("steps", count=48)
                each.ask("drain")
                walls = [wall for wall, _ in steps["steps"]]
                rows.append(
                    {
                        "policy": name,
                        "prompt_tokens": tokens,
                        "prefill_ms": round(sum(w for w, _ in prefill["steps"])),
                        "step_ms": round(statistics.median(walls), 3),
                        "step_ms_range": [round(min(walls), 3), round(max(walls), 3)],
                        "held_blocks": steps["held_blocks"],
                    }
                )
        except RuntimeError as error:
            rows.append({"policy": name, "problem": str(error)[-600:]})
        finally:
            each.close()
    return rows


def gather(device: torch.device, total: int = 256 * MIB) -> list[Row]:
    """Bandwidth of 8 KiB pages picked at random, and of plain copies."""
    page = 8192
    arena = torch.ones(2 * total // page, page // 2, dtype=torch.bfloat16)
    ids = torch.randperm(len(arena))[: total // page].to(device)
    target = torch.empty(len(ids), page // 2, dtype=torch.bfloat16, device=device)
    plain = torch.empty_like(target)
    here = arena.to(device)
    copies: dict[str, Callable[[], Any]] = {
        "bulk copy on the device": lambda: ops.copy_pages(target, None, here, ids),
        "plain copy on the device": lambda: plain.copy_(here[: len(ids)]),
    }
    if device.type == "cuda":
        staged = arena[: len(ids)].pin_memory()
        copies["plain copy from pinned memory"] = lambda: plain.copy_(staged)
    times = timed(copies, device)
    return [
        {"copy": name, "gib_per_s": round(total / statistics.median(took) / 2**30, 1)}
        for name, took in times.items()
    ]


def timed(
    copies: Mapping[str, Callable[[], Any]], device: torch.device
) -> dict[str, list[float]]:
    """Seconds of ten runs of each, in turns."""
    times: dict[str, list[float]] = {name: [] for name in copies}
    for turn in range(12):
        for name, copy in copies.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            copy()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn >= 2:  # the first ones warm up
                times[name].append(time.perf_counter() - began)
    return times


def fetch(device: torch.device, sizes: Sequence[int] = FETCHED) -> list[Row]:
    """One layer of one request with 8 KV heads: nothing that is wanted is hot yet.

    Args:
        sizes: tokens per KV head, multiples of 16.
    """
    rows: list[Row] = []
    for tokens in sizes:
        ways: dict[str, Callable[[], Any]] = {}
        ways["staged"] = fetcher(device, "staged", tokens)
        try:
            ways["direct"] = fetcher(device, "direct", tokens)
        except RuntimeError as error:
            rows.append({"host_fetch": "direct", "problem": str(error)[-600:]})
        for how, took in timed(ways, device).items():
            seconds, total = statistics.median(took), tokens * 8 * 2 * 128 * 2
            row: Row = {"host_fetch": how, "tokens_per_head": tokens}
            row |= {"ms": round(1000 * seconds, 3), "kib": total >> 10}
            rows.append(row | {"gib_per_s": round(total / seconds / 2**30, 2)})
    return rows


def fetcher(device: torch.device, how: str, tokens: int) -> Callable[[], torch.Tensor]:
    """Makes other tokens hot each time; returns how many were copied."""
    heads, dim, size = 8, 128, 16
    held = 4 * tokens // size  # pages of the host per head
    page_bytes = 2 * size * dim * 2
    reader = device if how == "direct" else None
    tier = HostTier(heads * held * page_bytes, size, dim, torch.bfloat16, reader)
    table = tier.take(heads * held)[torch.randperm(heads * held)].view(1, heads, held)
    tier.pages.fill_(1)
    layout = ops.PageLayout.interleaved(size, dim).to(device)
    shape = heads * tokens // size, layout.page_elems
    heap = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    spots = torch.arange(heads * tokens).view(1, heads, tokens)
    order = torch.rand(1, heads, 4 * tokens).argsort(-1).split(tokens, -1)
    hot, *others = (part.contiguous() for part in order)
    turns = itertools.cycle([*others, hot.clone()])
    zones = hot, spots // size, spots % size, torch.tensor([tokens])
    seat = torch.tensor([0])

    def run() -> torch.Tensor:
        place = heap, layout, tier.pages, table
        return ops.fill_hot(*place, next(turns), seat, *zones, tier.reads)

    return run


def markdown(report: dict[str, Any]) -> str:
    """The report as tables."""
    lines = [f"- {key}: {value}" for key, value in report["about"].items()]
    for name, stage in report["stages"].items():
        lines += ["", f"## {name} ({stage['seconds']} s)", ""]
        columns = list(dict.fromkeys(key for row in stage["rows"] for key in row))
        lines.append("| " + " | ".join(columns) + " |")
        lines.append("|" + "---|" * len(columns))
        for row in stage["rows"]:
            cells = [str(row.get(key, "")).replace("|", "\\|") for key in columns]
            lines.append("| " + " | ".join(c.replace("\n", " ") for c in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    typer.run(main)
