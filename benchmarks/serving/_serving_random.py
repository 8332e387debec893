"""Requests of random tokens, sent and measured by ``vllm bench serve``."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _serving_metrics import PERCENTILES, Slo
from _serving_server import run_to_end, vllm_command


@dataclass(frozen=True, slots=True)
class RandomLoad:
    """Independent requests of equal size."""

    requests: int
    input_tokens: int
    output_tokens: int


def bench_arguments(
    url: str, model: str, load: RandomLoad, rate: float, seed: int, slo: Slo
) -> list[str]:
    """Arguments of ``vllm bench serve``, without the output path.

    There is no ready check and no warm-up: both send the first prompt, which would then
    be in the prefix cache.
    """
    return [
        *("--backend", "vllm", "--base-url", url, "--model", model),
        *("--dataset-name", "random", "--num-prompts", str(load.requests)),
        *("--random-input-len", str(load.input_tokens)),
        *("--random-output-len", str(load.output_tokens)),
        *("--ignore-eos", "--temperature", "0", "--seed", str(seed)),
        *("--request-rate", str(rate), "--disable-tqdm"),
        *("--ready-check-timeout-sec", "0", "--num-warmups", "0"),
        *("--percentile-metrics", "ttft,tpot,itl"),
        *("--metric-percentiles", ",".join(map(str, PERCENTILES))),
        *("--goodput", f"ttft:{slo.ttft_ms}", f"tpot:{slo.tpot_ms}"),
    ]


def bench(arguments: list[str]) -> dict[str, Any]:
    """Run the client in a child process and read the result that it saved.

    Raises:
        ServerError: the client failed. The message has the end of its output.
    """
    with tempfile.TemporaryDirectory(prefix="kvp-bench-") as folder:
        result = Path(folder) / "result.json"
        saving = ["--save-result", "--save-detailed", "--result-dir", folder]
        saving += ["--result-filename", result.name]
        run_to_end(
            vllm_command("bench", "serve", *arguments, *saving),
            Path(folder) / "bench.log",
            {"TMPDIR": folder, "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"},
        )
        report: dict[str, Any] = json.loads(result.read_text())
        return report


def bench_figures(result: dict[str, Any]) -> dict[str, Any]:
    """The client's own results, with the names of ``latency_figures``."""
    figures = {
        "duration_s": result["duration"],
        "completed": result["completed"],
        "failed": result["failed"],
        "input_tokens": result["total_input_tokens"],
        "output_tokens": result["total_output_tokens"],
        "request_throughput_per_s": result["request_throughput"],
        "output_throughput_tokens_per_s": result["output_throughput"],
        "goodput_per_min": 60 * result["request_goodput"],
    }
    for name in ("ttft", "tpot", "itl"):
        figures |= {f"p{p}_{name}_ms": result[f"p{p}_{name}_ms"] for p in PERCENTILES}
    return figures


def bench_window(result: dict[str, Any]) -> tuple[float, float]:
    """Time of the first request and end of the last answer."""
    start_s = min(result["start_times"])
    return start_s, start_s + result["duration"]
