"""Results of a serving run: client latencies and the server's metrics.

Times are those of ``time.perf_counter``. On Linux all processes share this clock, so
the samples of this process and the requests of ``vllm bench serve`` are comparable.
"""

from __future__ import annotations

import re
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np

PERCENTILES = (50, 99)
EVERY_S = 0.5
# Metrics of the server, without prefix and engine label.
GAUGES = {
    "kv_cache_usage_perc": "usage",
    "kv_policy_device_table_bytes": "device_table_bytes",
    "kv_policy_host_bytes": "host_bytes",
    "kv_policy_session_bytes": "session_bytes",
    "kv_policy_session_disk_bytes": "session_disk_bytes",
    "kv_policy_held_requests": "held_requests",
    "num_requests_running": "running",
    "num_requests_waiting": "waiting",
}
# Bytes outside the pool of blocks.
BYTES = ("device_table_bytes", "host_bytes", "session_bytes", "session_disk_bytes")
COUNTERS = {
    "num_preemptions_total": "preemptions",
    "prefix_cache_queries_total": "prefix_queries",
    "prefix_cache_hits_total": "prefix_hits",
    "prompt_tokens_total": "prompt_tokens",
    # A sum over finished requests, without what a cache or a session had.
    "request_prefill_kv_computed_tokens_sum": "computed_tokens",
    "kv_policy_blocks_freed_total": "blocks_freed",
}
_LINE = re.compile(r"^vllm:(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_BLOCKS = re.compile(r'\bnum_gpu_blocks="(\d+)"')


# -- requests -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency limits that a request must meet to count for goodput."""

    ttft_ms: float
    tpot_ms: float


@dataclass(slots=True)
class Answer:
    """One request as the client saw it.

    ``token_s``: arrival time of each chunk with new tokens. ``tokens`` can be larger,
    because a chunk can hold several tokens. ``error``: why the request failed.
    """

    start_s: float
    token_s: list[float] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int = 0
    text: str = ""
    error: str = ""

    @property
    def ttft_ms(self) -> float:
        """Time to the first token."""
        return 1e3 * (self.token_s[0] - self.start_s)

    @property
    def tpot_ms(self) -> float:
        """Mean time per token after the first; 0 for an answer of one token."""
        if self.tokens < 2:
            return 0.0
        return 1e3 * (self.token_s[-1] - self.token_s[0]) / (self.tokens - 1)

    @property
    def itl_ms(self) -> list[float]:
        """Times between chunks, as in ``vllm bench serve``."""
        pairs = zip(self.token_s, self.token_s[1:], strict=False)
        return [1e3 * (later - earlier) for earlier, later in pairs]

    def meets(self, slo: Slo) -> bool:
        """Whether both times are within the limits."""
        return self.ttft_ms <= slo.ttft_ms and self.tpot_ms <= slo.tpot_ms


def percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    """``p50_NAME_ms`` and ``p99_NAME_ms``; empty if there are no values."""
    if not values:
        return {}
    return {
        f"p{p}_{name}_ms": float(np.percentile(np.asarray(values), p))
        for p in PERCENTILES
    }


def latency_figures(
    answers: Sequence[Answer], duration_s: float, slo: Slo
) -> dict[str, Any]:
    """The client's results of a run, with the names of ``vllm bench serve``.

    Args:
        answers: all requests. Failed ones are counted, but enter no other result.
        duration_s: from the first request to the end of the last answer.
        slo: limits for goodput.

    Returns:
        Counts, throughputs, goodput per minute and percentiles.
    """
    good = [answer for answer in answers if not answer.error]
    output = sum(answer.tokens for answer in good)
    figures: dict[str, Any] = {
        "duration_s": duration_s,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "input_tokens": sum(answer.prompt_tokens for answer in good),
        "output_tokens": output,
        "request_throughput_per_s": len(good) / duration_s,
        "output_throughput_tokens_per_s": output / duration_s,
        "goodput_per_min": 60 * sum(a.meets(slo) for a in good) / duration_s,
    }
    figures |= percentiles("ttft", [a.ttft_ms for a in good])
    figures |= percentiles("tpot", [a.tpot_ms for a in good if a.tokens > 1])
    return figures | percentiles("itl", [gap for a in good for gap in a.itl_ms])


# -- the server's metrics -------------------------------------------------------


def parse_metrics(text: str) -> dict[str, float]:
    """The server metrics that we record, summed over engines, from Prometheus' text.

    Metrics that the server does not export are absent; a stock server has no policy
    metrics.
    """
    recorded = GAUGES | COUNTERS
    values: dict[str, float] = {}
    for name, labels, value in _LINE.findall(text):
        if name in recorded:
            short = recorded[name]
            values[short] = values.get(short, 0.0) + float(value)
        elif name == "cache_config_info" and (match := _BLOCKS.search(labels)):
            values["blocks"] = float(match[1]) - 1  # without vLLM's null block
    return values


def read_metrics(url: str) -> dict[str, float]:
    """Read the metrics of the server at ``url``; empty if it does not answer."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            return parse_metrics(answer.read().decode())
    except OSError:
        return {}


class Sampler:
    """Context manager: reads the server's metrics every half second."""

    def __init__(self, url: str, every_s: float = EVERY_S) -> None:
        self.url = url
        self.every_s = every_s
        self.samples: list[dict[str, float]] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Sampler:
        self._sample()  # counters before the load
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()
        if error is None:
            self._sample()  # counters after it

    def _sample(self) -> None:
        values = read_metrics(self.url)
        if values:
            self.samples.append({"at_s": time.perf_counter()} | values)

    def _run(self) -> None:
        while not self._done.wait(self.every_s):
            self._sample()


def server_figures(
    samples: Sequence[dict[str, float]], start_s: float, end_s: float
) -> dict[str, Any]:
    """Memory, load and counters of a run.

    Args:
        samples: from a Sampler; the first and last were read before and after the load.
        start_s: time of the first request; earlier gauges do not count.
        end_s: end of the last answer.

    Returns:
        Differences of counters; means and peaks of gauges between the two times; and
        the samples as columns, with seconds since the start. Empty without samples.
    """
    if not samples:
        return {}
    first, last = samples[0], samples[-1]
    change = {
        name: last.get(name, 0.0) - first.get(name, 0.0) for name in COUNTERS.values()
    }
    inside = [sample for sample in samples if start_s <= sample["at_s"] <= end_s]
    pool = last.get("blocks", 0.0)
    columns = {
        "at_s": [round(sample["at_s"] - start_s, 3) for sample in inside],
        "held_blocks": [round(sample.get("usage", 0) * pool) for sample in inside],
    }
    for name in (*BYTES, "running", "waiting", "held_requests"):
        columns[name] = [round(sample.get(name, 0)) for sample in inside]
    queries = change.pop("prefix_queries")
    hits = change.pop("prefix_hits")
    prompt_tokens = change.pop("prompt_tokens")
    figures: dict[str, Any] = {"pool_blocks": round(pool)}
    figures |= {name: round(value) for name, value in change.items()}
    figures["prefix_hit_share"] = hits / queries if queries else 0.0
    if prompt_tokens:
        figures["computed_share"] = change["computed_tokens"] / prompt_tokens
    for name in BYTES:
        # Also of the last sample: a gauge keeps the value of the last step.
        figures[f"peak_{name}"] = max(
            [round(last.get(name, 0)), *columns[name]], default=0
        )
    if inside:
        for name in ("held_blocks", "running"):
            figures[f"mean_{name}"] = float(np.mean(columns[name]))
            figures[f"peak_{name}"] = max(columns[name])
    return figures | {"samples": columns}
