"""ProtoKV's three speed targets, measured.

1. SnapKV's compression as a share of the prefill of one prompt (target: 3 %);
2. ProtoKV's compression time over SnapKV's (target: 1.3), in alternating engines;
3. scikit-learn's K-Means over ProtoKV's clustering (target: 3), on the same keys with
   the same number of clusters, alternating.

Reports wall and CPU time, medians and spread. Ratios are taken within a turn.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import _path  # noqa: F401
import torch
import typer
from _engine import EngineProcess, provenance, synthetic_prompt
from rich.console import Console
from rich.progress import track
from rich.table import Table

from vllm_kvplugins.ops.clusters import assign_and_average
from vllm_kvplugins.policies.protokv import ProtoKV

Times = dict[str, list[float]]


def main(
    model: str,
    prompt_tokens: int = 4096,
    rounds: int = 7,
    budget: int = 512,
    kmeans_layers: int = 3,
) -> None:
    """Measure the three targets.

    Args:
        kmeans_layers: number of the model's layers to cluster.
    """
    console = Console()
    engines = time_engines(model, prompt_tokens, rounds, budget, console)
    show(console, "compression of one prompt", engines, "ms", 1.0)
    share = [
        100 * c / (p - c)
        for c, p in zip(engines["snapkv wall"], engines["snapkv prefill"], strict=True)
    ]
    ratios = {
        "SnapKV, % of prefill, wall (at most 3)": share,
        "ProtoKV / SnapKV, wall (at most 1.3)": over(engines, "protokv", "snapkv"),
        "ProtoKV / SnapKV, CPU": over(engines, "protokv", "snapkv", "cpu"),
    }
    clusters = time_clusterings(model, prompt_tokens, rounds, kmeans_layers, console)
    show(console, "clustering, per layer", clusters, "ms", 1 / kmeans_layers)
    for init in ("k-means++", "random"):
        ratio = over(clusters, f"K-Means {init}", "ProtoKV")
        ratios[f"K-Means {init} / ProtoKV, wall (at least 3)"] = ratio
    show(console, "targets", ratios, "", 1.0)
    facts: dict[str, Any] = {"torch threads": torch.get_num_threads()}
    console.print_json(data=provenance() | facts)


def over(times: Times, upper: str, lower: str, kind: str = "wall") -> list[float]:
    """Ratios of the times within each turn."""
    pairs = zip(times[f"{upper} {kind}"], times[f"{lower} {kind}"], strict=True)
    return [a / b for a, b in pairs]


def show(console: Console, title: str, times: Times, unit: str, factor: float) -> None:
    table = Table("", f"median {unit}", "min..max", title=title)
    for name, values in times.items():
        scaled = [factor * value for value in values]
        low, high = min(scaled), max(scaled)
        table.add_row(
            name, f"{statistics.median(scaled):.2f}", f"{low:.2f}..{high:.2f}"
        )
    console.print(table)


# -- in engines -----------------------------------------------------------------


def time_engines(
    model: str, prompt_tokens: int, rounds: int, budget: int, console: Console
) -> Times:
    """Milliseconds per turn: compression (wall, CPU) and the whole prefill."""
    names = ("snapkv", "protokv")
    engines = [
        EngineProcess(
            {"name": name, "budget": budget},
            model=model,
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=8192,
            kv_cache_memory_bytes=1 << 30,
            enable_prefix_caching=False,
        )
        for name in names
    ]
    kinds = ("wall", "cpu", "prefill")
    times: Times = {f"{name} {kind}": [] for name in names for kind in kinds}
    try:
        for turn in track(range(rounds + 1), "prefills in turns", console=console):
            for engine in engines:
                timing = time_prefill(
                    engine, synthetic_prompt(40000, prompt_tokens, turn)
                )
                for kind, ms in zip(kinds, timing, strict=True):
                    if turn:  # the first one warms up
                        times[f"{engine.name} {kind}"].append(ms)
    finally:
        for engine in engines:
            engine.close()
    return times


def time_prefill(
    engine: EngineProcess, prompt: list[int]
) -> tuple[float, float, float]:
    """Milliseconds: compression (wall, CPU), and the prefill that includes it."""
    before = engine.ask("drain")
    engine.ask("add", prompts=[prompt], max_tokens=2)
    prefill = sum(step[0] for step in engine.ask("prefill")["steps"])
    after = engine.ask("drain")
    assert after["compressions"] == before["compressions"] + 1, "nothing compressed"
    wall = after["compression_s"] - before["compression_s"]
    cpu = after["compression_cpu_s"] - before["compression_cpu_s"]
    return 1e3 * wall, 1e3 * cpu, prefill


# -- against K-Means ------------------------------------------------------------


def time_clusterings(
    model: str, prompt_tokens: int, rounds: int, layers: int, console: Console
) -> Times:
    """Milliseconds per turn, over all KV heads of the chosen layers."""
    policy = ProtoKV()
    keys = prompt_keys(model, prompt_tokens, layers, policy.window)
    votes = torch.rand(keys.shape[1:3], generator=torch.Generator().manual_seed(0))
    count = policy.prototypes(keys[0]).shape[1]
    heads = keys.float().flatten(0, 1).numpy()

    def protokv() -> None:
        for layer in keys:
            assign_and_average(layer, policy.prototypes(layer), votes)

    def kmeans(init: str) -> None:
        from sklearn.cluster import KMeans

        for head in heads:
            # tol=0: run all 20 iterations unless the clusters stop changing
            KMeans(count, init=init, n_init=1, max_iter=20, tol=0, random_state=0).fit(
                head
            )

    runs: dict[str, Callable[[], None]] = {
        "ProtoKV": protokv,
        "K-Means k-means++": lambda: kmeans("k-means++"),
        "K-Means random": lambda: kmeans("random"),
    }
    times: Times = {f"{name} {kind}": [] for name in runs for kind in ("wall", "cpu")}
    with warnings.catch_warnings():
        # the warning that 20 iterations do not converge
        warnings.simplefilter("ignore")
        for turn in track(range(rounds + 1), "clusterings in turns", console=console):
            for name, run in runs.items():
                wall, cpu = time.perf_counter(), time.process_time()
                run()
                if turn:
                    times[f"{name} wall"].append(1e3 * (time.perf_counter() - wall))
                    times[f"{name} cpu"].append(1e3 * (time.process_time() - cpu))
    return times


def prompt_keys(
    model: str, prompt_tokens: int, layers: int, window: int
) -> torch.Tensor:
    """Keys of the benchmark's first prompt, computed by transformers.

    Layers are spread evenly, starting with the first.

    Returns:
        bfloat16 [layers, kv_heads, slots before the window, head_dim], after RoPE.
    """
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    prompt = torch.tensor([synthetic_prompt(40000, prompt_tokens, 1)])
    with torch.inference_mode():
        cache = network(prompt, use_cache=True, logits_to_keep=1).past_key_values
    step = len(cache.layers) // layers
    chosen = [cache.layers[i * step].keys[0] for i in range(layers)]
    return torch.stack(chosen)[:, :, : prompt_tokens - window].clone()


if __name__ == "__main__":
    typer.run(main)
