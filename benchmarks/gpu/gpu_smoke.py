"""Checks this package on one GPU within minutes; writes one JSON file and one table.

    benchmarks/gpu/gpu_smoke.sh MODEL OUT_DIR

The stages run in this order. A failed stage is recorded as failed, and the next one
runs. Each row is written at once. No engine starts or runs after the time limit
(``--minutes``); stages that did not run say so, and ``--stages`` runs them alone.

build      compile the extension with CUDA, for this GPU
gather     bandwidth of page copies, on the GPU and from pinned host memory, against
           plain copies of the same number of bytes
fetch      copy tokens from the host tier into hot slots, `host_fetch` staged and direct
attention  decode attention alone, at a budget of 2048 tokens, by kernel
policies   every policy answers a prompt in float32; compare with stock vLLM and, with
           `--expected`, with the answers of another machine
decode     decode steps with Llama-3.1-8B's shape and random weights, stock and under
           policies, with and without graphs, at several prompt lengths
kernels    the test suites of the attention kernels and of the compiled ops, on the GPU
graphs     answers with and without CUDA graphs, in bfloat16, by kernel and mode
serving    concurrent requests in a quarter of the memory that they need

`--expected FILE` takes the `gpu_smoke.json` of

    benchmarks/gpu/gpu_smoke.sh MODEL OTHER_DIR --device cpu \\
        --stages policies --minutes 60
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Annotated, Any

import _path  # noqa: F401
import torch
import typer
from _engine import ROOT, provenance
from _gpu_copies import MIB, Row, attention, fetch, gather
from _gpu_engines import Machine, decode, graphs, policies, serving
from rich.console import Console

STAGES = "build,gather,fetch,attention,policies,decode,kernels,graphs,serving"
SUITE_S = 200.0  # seconds of one test suite
NVCC = Path("/usr/local/cuda/bin/nvcc")
CELL = 160  # maximum length of a table cell; the JSON file has the whole text


def main(
    model: str,
    out: Path,
    stages: Annotated[str, typer.Option()] = STAGES,
    minutes: Annotated[float, typer.Option(help="limit for all stages")] = 7.5,
    expected: Annotated[Path | None, typer.Option(help="gpu_smoke.json")] = None,
    lengths: Annotated[str, typer.Option(help="prompt tokens")] = "8192,32768,131072",
    layers: Annotated[int, typer.Option(help="layers of the decoded model")] = 32,
    kv_bytes: int = 24 << 30,
    device: str = "cuda",
) -> None:
    """Run the stages and write ``OUT/gpu_smoke.json`` and ``OUT/gpu_smoke.md``."""
    unknown = set(stages.split(",")) - set(STAGES.split(","))
    if unknown:
        raise typer.BadParameter(f"no such stages: {sorted(unknown)}")
    if not Path(model, "config.json").is_file():
        raise typer.BadParameter(f"no model in {model}: there is no config.json")
    # IEEE float32 in vLLM's Triton kernels as in ours, because answers are compared
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory() as scratch:
        folder, place = Path(scratch), torch.device(device)
        machine = Machine(model, folder, device, end)
        sizes = [int(n) for n in lengths.split(",")]
        work: dict[str, Callable[[], Iterator[Row]]] = {
            "build": lambda: build(folder / "build", device),
            "gather": lambda: gather(place),
            "fetch": lambda: fetch(place),
            "attention": lambda: attention(place),
            "policies": lambda: policies(machine, expected),
            "decode": lambda: decode(machine, sizes, layers, kv_bytes),
            "kernels": lambda: kernels(folder, end),
            "graphs": lambda: graphs(machine),
            "serving": lambda: serving(machine, layers),
        }
        run(out, facts(device), {name: work[name] for name in stages.split(",")})


def run(
    out: Path, about: dict[str, str], work: dict[str, Callable[[], Iterator[Row]]]
) -> None:
    """Run the stages in order; write the report after each row."""
    console = Console()
    stages: dict[str, Any] = {}
    for name, stage in work.items():
        console.print(f"[bold]{name}[/]")
        stages[name] = {"seconds": 0.0, "rows": []}
        began = time.monotonic()
        for row in kept_going(stage):
            stages[name]["rows"].append(row)
            stages[name]["seconds"] = round(time.monotonic() - began, 1)
            console.print(f"  {row}", highlight=False)
            report = {"about": about, "stages": stages}
            (out / "gpu_smoke.json").write_text(json.dumps(report, indent=2))
            (out / "gpu_smoke.md").write_text(markdown(report))
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # free memory for the engines of the next stage


def kept_going(stage: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    """The rows of a stage; an exception becomes the last row."""
    try:
        yield from stage()
    except Exception as error:  # a failed stage must not stop the others
        yield {"problem": f"{type(error).__name__}: {error}"}


def facts(device: str) -> dict[str, str]:
    """Machine, software and commit of a run."""
    results = provenance()
    installed = packages_distributions()
    for package in ("vllm", "triton", "flashinfer"):
        names = installed.get(package, [])
        results[package] = ", ".join(f"{n} {version(n)}" for n in names) or "none"
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        memory = gpu.total_memory // MIB
        results["gpu"] = f"{gpu.name}, {memory} MiB, compute {gpu.major}.{gpu.minor}"
        ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        results["driver"] = run_boxed(ask, 20)[1].strip()
    return results


def run_boxed(command: list[str], seconds: float, **env: str) -> tuple[int, str]:
    """Run a command; then end all processes that it started.

    Returns:
        Exit status and the end of the output. The status is 124 after a timeout and 127
        if the command does not exist.
    """
    try:
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        return 127, str(error)
    try:
        output, _ = child.communicate(timeout=max(seconds, 0.0))
        status = child.returncode
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        output, _ = child.communicate()
        status = 124
    return status, output.decode(errors="replace")[-4000:]


def build(folder: Path, device: str) -> Iterator[Row]:
    """Build with CUDA for this GPU, or without if that fails; torch then runs the
    ops."""
    ask = "import json; from vllm_kvplugins import ops; print(ops.extension_info())"
    for cuda in ("ON", "OFF") if device == "cuda" else ("OFF",):
        status, output = _cmake(folder / cuda, cuda)
        row: Row = {"cuda": cuda, "status": status}
        if status:
            yield row | {"problem": output}
            continue
        yield row | {"extension": run_boxed([sys.executable, "-c", ask], 60)[1]}
        return


def _cmake(folder: Path, cuda: str) -> tuple[int, str]:
    options = [f"-DPython_EXECUTABLE={sys.executable}", f"-DKVP_CUDA={cuda}"]
    env = {}
    if cuda == "ON":
        major, minor = torch.cuda.get_device_capability()
        options.append(f"-DCMAKE_CUDA_ARCHITECTURES={major}{minor}")
        if shutil.which("nvcc") is None and NVCC.exists():
            env["CUDACXX"] = str(NVCC)
    configure = ["cmake", "-S", ".", "-B", str(folder), *options]
    status, output = run_boxed(configure, 60, **env)
    if status:
        return status, output
    return run_boxed(["cmake", "--build", str(folder), "--parallel"], 180)


def kernels(folder: Path, end: float) -> Iterator[Row]:
    """Run the kernel tests and the tests of the compiled ops.

    FlashInfer's tests run separately and last, because FlashInfer compiles its kernels
    first.
    """
    attends = "tests/helpers/kernel_suite.py"
    suites = [
        (attends, "not flashinfer"),
        ("tests/helpers/selection_kernel_suite.py", ""),
        ("tests/unit/test_cuda_ops.py", ""),
    ]
    if importlib.util.find_spec("flashinfer") is not None:
        suites.append((attends, "flashinfer"))
    for number, (suite, chosen) in enumerate(suites):
        results = folder / f"tests-{number}.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += [f"--junitxml={results}", suite, "-k", chosen]
        if importlib.util.find_spec("xdist") is not None:
            command += ["-n", "8"]
        left = min(SUITE_S, end - time.monotonic())
        status, output = run_boxed(command, left)
        row: Row = {"suite": suite, "chosen": chosen, "status": status}
        yield row | (tested(results) if results.exists() else {"problem": output})


def tested(results: Path) -> Row:
    """Counts of a junit report, with names and messages of failures."""
    suites = ElementTree.parse(results).getroot().iter("testsuite")
    counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    failed: list[str] = []
    for suite in suites:
        for key in counts:
            counts[key] += int(suite.get(key, 0))
        failed += [
            f"{case.get('name')}: {problem.get('message', '')}"
            for case in suite.iter("testcase")
            for kind in ("failure", "error")
            if (problem := case.find(kind)) is not None
        ]
    return {
        "tests": counts["tests"],
        "skipped": counts["skipped"],
        "failed": counts["failures"] + counts["errors"],
        "which": failed,
    }


def markdown(report: dict[str, Any]) -> str:
    """The report as tables, without answers, with the end of each error."""
    lines = [f"- {key}: {value}" for key, value in report["about"].items()]
    for name, stage in report["stages"].items():
        lines += ["", f"## {name} ({stage['seconds']} s)", ""]
        columns = list(dict.fromkeys(key for row in stage["rows"] for key in row))
        columns = [key for key in columns if key != "answer"]
        lines.append("| " + " | ".join(columns) + " |")
        lines.append("|" + "---|" * len(columns))
        for row in stage["rows"]:
            cells = (" ".join(str(row.get(key, "")).split()) for key in columns)
            cells = (cell[-CELL:].replace("|", "\\|") for cell in cells)
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    typer.run(main)
