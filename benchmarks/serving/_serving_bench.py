"""Loads that ``vllm bench serve`` sends and measures.

The workload ``random`` has requests of random tokens, all of one size. The workload
``dataset`` has the requests of any dataset that ``vllm bench serve`` reads. Lines of a
custom dataset can have an ``answer``: the share of answers that contain it is then
measured in the same run as the speed.
"""

from __future__ import annotations

import hashlib
import json
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from _serving_metrics import PERCENTILES, Slo
from _serving_server import run_to_end, vllm_command

# Options that the benchmark sets itself; --bench-args must not repeat them.
_OWN_OPTIONS = """
    base-url dataset-name dataset-path disable-shuffle disable-tqdm goodput host
    ignore-eos max-concurrency metric-percentiles model num-prompts num-warmups
    percentile-metrics port ready-check-timeout-sec request-rate result-dir
    result-filename save-detailed save-result seed served-model-name temperature
"""
OWN_OPTIONS = frozenset("--" + name for name in _OWN_OPTIONS.split())
CUSTOM = "custom"


class BenchArgumentError(ValueError):
    """Options for ``vllm bench serve`` that it, or this benchmark, refuses."""


@dataclass(frozen=True, slots=True)
class BenchLoad:
    """Independent requests.

    Attributes:
        requests: how many.
        input_tokens, output_tokens: of random requests.
        dataset: name of the dataset; "random" has the sizes above.
        path: the dataset's file or id; "" = none.
        max_concurrency: most requests at a time; 0 = no limit.
        extra: more options of ``vllm bench serve``.
    """

    requests: int
    input_tokens: int = 0
    output_tokens: int = 0
    dataset: str = "random"
    path: str = ""
    max_concurrency: int = 0
    extra: tuple[str, ...] = ()

    def settings(self) -> dict[str, Any]:
        """What makes two loads comparable."""
        settings: dict[str, Any] = {"requests": self.requests}
        if self.dataset == "random":
            settings |= {
                "input_tokens": self.input_tokens,
                "output_tokens": self.output_tokens,
            }
        else:
            settings["dataset"] = self.dataset
        if self.path:
            settings |= {"dataset_path": Path(self.path).name}
            if Path(self.path).is_file():
                digest = hashlib.sha256(Path(self.path).read_bytes()).hexdigest()
                settings["dataset_sha256"] = digest[:12]
        if self.max_concurrency:
            settings["max_concurrency"] = self.max_concurrency
        if self.extra:
            settings["bench_args"] = list(self.extra)
        return settings

    def dataset_arguments(self) -> list[str]:
        """The options that choose and limit the requests."""
        arguments = ["--dataset-name", self.dataset]
        if self.path:
            arguments += ["--dataset-path", self.path]
        if self.dataset == "random":
            arguments += ["--random-input-len", str(self.input_tokens)]
            arguments += ["--random-output-len", str(self.output_tokens)]
        if self.max_concurrency:
            arguments += ["--max-concurrency", str(self.max_concurrency)]
        return [*arguments, *self.extra]


def check_load(load: BenchLoad) -> None:
    """Refuse options before any server starts, with vLLM's own parser.

    Raises:
        BenchArgumentError: an option is unknown, malformed, or set by this benchmark;
            or a custom dataset cannot be read, or needs a package.
    """
    own = sorted({option.partition("=")[0] for option in load.extra} & OWN_OPTIONS)
    if own:
        raise BenchArgumentError(
            f"--bench-args: {', '.join(own)} is set by this benchmark"
        )
    if load.dataset == CUSTOM and find_spec("pandas") is None:
        raise BenchArgumentError(
            "vllm bench serve needs pandas for the dataset custom: pip install pandas"
        )
    try:
        answers_of(load)
    except (OSError, ValueError) as error:
        raise BenchArgumentError(f"--dataset-path: {error}") from error
    _parse(load.dataset_arguments())


def _parse(arguments: Sequence[str]) -> None:
    """Parse options as ``vllm bench serve`` does.

    Raises:
        BenchArgumentError: it refuses them.
    """
    from vllm.benchmarks.serve import add_cli_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> None:
            raise BenchArgumentError(f"vllm bench serve: {message}")

    parser = Parser()
    add_cli_args(parser)
    parser.parse_args([*arguments, "--model", "m"])


# -- datasets with answers ------------------------------------------------------


def answers_of(load: BenchLoad) -> list[dict[str, Any]]:
    """Lines of a custom dataset whose answers are known; empty for other datasets.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not JSON lines, or only some lines have an ``answer``.
    """
    if load.dataset != CUSTOM or not load.path:
        return []
    text = Path(load.path).read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines() if line.strip()]
    known = [line for line in lines if str(line.get("answer", ""))]
    if known and len(known) < len(lines):
        raise ValueError(f"{len(lines) - len(known)} lines have no 'answer'")
    return known


def sampled(lines: Sequence[dict[str, Any]], count: int, seed: int) -> list[Any]:
    """``count`` lines in random order; all are used before one is repeated."""
    rng, chosen = random.Random(seed), list[Any]()
    while len(chosen) < count:
        chosen += rng.sample(list(lines), min(len(lines), count - len(chosen)))
    return chosen


def share_answered(lines: Sequence[dict[str, Any]], texts: Sequence[str]) -> float:
    """Share of the generated texts that contain their line's answer."""
    pairs = zip(lines, texts, strict=True)
    return sum(str(line["answer"]) in text for line, text in pairs) / len(lines)


# -- running --------------------------------------------------------------------


def bench_arguments(
    url: str,
    model: str,
    load: BenchLoad,
    rate: float,
    seed: int,
    slo: Slo,
    served: str = "",
) -> list[str]:
    """Arguments of ``vllm bench serve``, without the output path.

    There is no ready check and no warm-up: both send the first prompt, which would then
    be in the prefix cache.

    Args:
        served: name of the model on the server, if it differs from ``model``.
    """
    name = ("--served-model-name", served) if served and served != model else ()
    return [
        *("--backend", "vllm", "--base-url", url, "--model", model, *name),
        *("--num-prompts", str(load.requests), *load.dataset_arguments()),
        *("--ignore-eos", "--temperature", "0", "--seed", str(seed)),
        *("--request-rate", str(rate), "--disable-tqdm"),
        *("--ready-check-timeout-sec", "0", "--num-warmups", "0"),
        *("--percentile-metrics", "ttft,tpot,itl"),
        *("--metric-percentiles", ",".join(map(str, PERCENTILES))),
        *("--goodput", f"ttft:{slo.ttft_ms}", f"tpot:{slo.tpot_ms}"),
    ]


def bench(
    url: str,
    model: str,
    load: BenchLoad,
    rate: float,
    seed: int,
    slo: Slo,
    keep: Path,
    served: str = "",
) -> dict[str, Any]:
    """Run the client in a child process and read the result that it saved.

    Args:
        keep: file for the client's own JSON.
        served: as in :func:`bench_arguments`.

    Returns:
        The client's result; ``answered`` is added if the dataset has answers.

    Raises:
        ServerError: the client failed. The message has the end of its output.
    """
    lines = answers_of(load)
    keep.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvp-bench-") as folder:
        arguments = bench_arguments(url, model, load, rate, seed, slo, served)
        if lines:
            # Our own order, so that answers can be told apart.
            lines = sampled(lines, load.requests, seed)
            file = Path(folder) / "dataset.jsonl"
            file.write_text("".join(json.dumps(line) + "\n" for line in lines))
            arguments += ["--dataset-path", str(file), "--disable-shuffle"]
        saving = ["--save-result", "--save-detailed"]
        saving += ["--result-dir", str(keep.parent), "--result-filename", keep.name]
        run_to_end(
            vllm_command("bench", "serve", *arguments, *saving),
            Path(folder) / "bench.log",
            {"TMPDIR": folder, "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"},
        )
    result: dict[str, Any] = json.loads(keep.read_text())
    if lines:
        result["answered"] = share_answered(lines, result["generated_texts"])
    return result


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
    if "answered" in result:
        figures["answered_share"] = result["answered"]
    if drafts := result.get("spec_decode_draft_tokens"):
        accepted = result["spec_decode_accepted_tokens"]
        figures["accepted_draft_share"] = accepted / drafts
    for name in ("ttft", "tpot", "itl"):
        figures |= {f"p{p}_{name}_ms": result[f"p{p}_{name}_ms"] for p in PERCENTILES}
    return figures


def bench_window(result: dict[str, Any]) -> tuple[float, float]:
    """Time of the first request and end of the last answer."""
    start_s = min(result["start_times"])
    return start_s, start_s + result["duration"]
