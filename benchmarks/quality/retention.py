"""Share of the attention to the first turn that remains, turn by turn.

Runs dialogues (``_dialogue.py``) in the engine under FlowKV and under its nested
baseline, and records what each compaction keeps. The model with full KV gives the
attention that the last question's tokens pay to the tokens of turn 1. The share on
tokens still kept after turn t is the retention at turn t. All t use the same queries,
so only dropped tokens reduce it.

    python benchmarks/quality/retention.py MODEL --json-out retention.json
    kvplugins research plot retention retention.json --out retention.svg
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import _path  # noqa: F401
import torch
import typer
from _dialogue import dialogue
from _engine import child_rows, provenance
from rich.console import Console
from rich.table import Table

from vllm_kvplugins.cli.retention import Retention, Run, write_retention

STRATEGIES = {"flowkv": False, "nested": True}


# -- what the engine kept ------------------------------------------------------------


def ask_engine(
    model: str, engine: dict[str, Any], policy: dict[str, Any], seeds: int
) -> Iterator[dict[str, Any]]:
    """Run an engine in a child process; one row per dialogue."""
    request = json.dumps([model, engine, policy, seeds])
    return child_rows(__file__, request, json.dumps(policy))


def run_engine(
    model: str, engine: dict[str, Any], policy: dict[str, Any], seeds: int
) -> None:
    """Child: print each dialogue's prompt, its turn ends, and the kept part of turn
    1."""
    # only an engine in this process gives access to its records
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    from vllm_kvplugins.plan.geometry import Lengths
    from vllm_kvplugins.vllm_adapter.config.engine_config import geometry_of, policy_of

    llm = LLM(
        model,
        enforce_eager=True,
        max_model_len=4096,
        kv_cache_memory_bytes=1 << 29,
        # a shared prefix of two dialogues would not be compacted again
        enable_prefix_caching=False,
        additional_config={"kv_policy": policy},
        **engine,
    )
    llm.collective_rpc("kv_policy_record", args=(True,))
    config = llm.llm_engine.vllm_config
    active, geometry = policy_of(config), geometry_of(config)
    assert active is not None
    for seed in range(seeds):
        messages = dialogue(seed)[-1].messages
        sampling = SamplingParams(temperature=0, max_tokens=1)
        (output,) = llm.chat([messages], sampling, use_tqdm=False)
        (records,) = llm.collective_rpc("kv_policy_take_records")
        prompt = list(output.prompt_token_ids)
        ends = list(active.find_turn_ends(prompt, None))
        if len(ends) < 3:
            raise RuntimeError(f"this model's prompts show {len(ends)} turns")
        plan = active.plan(Lengths(len(prompt), tuple(ends)), geometry)
        first = range(ends[0], ends[1])
        compactions = [
            {
                "at": compaction.at_tokens,
                "kept": [
                    [[p for p in head if p in first] for head in layer]
                    for layer in record.kept_positions
                ],
            }
            for compaction, record in zip(plan.compactions, records, strict=True)
        ]
        row = {"prompt": prompt, "ends": ends, "compactions": compactions}
        print("RESULT " + json.dumps(row), flush=True)


# -- what the model looks at ----------------------------------------------------------


def attention_mass(
    queries: torch.Tensor, keys: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of the newest queries to each key, summed over the queries.

    Args:
        queries: [num_q_heads, n, head_dim], of the newest n tokens.
        keys: [num_kv_heads, tokens, head_dim].
        scale: softmax scale.

    Returns:
        float [num_kv_heads, tokens], summed over each KV head's queries.
    """
    heads, tokens, _ = keys.shape
    count = queries.shape[1]
    grouped = queries.unflatten(0, (heads, -1))  # [kv heads, group, n, dim]
    logits = grouped @ keys[:, None].transpose(2, 3) * scale
    future = torch.ones(count, tokens, dtype=torch.bool).triu_(tokens - count + 1)
    shares = logits.masked_fill(future, -torch.inf).softmax(-1)
    return shares.sum((1, 2))


def retention(row: dict[str, Any], mass: torch.Tensor) -> list[float]:
    """Per turn from the first, the share of turn 1's attention that is still kept.

    Args:
        row: one row of ``run_engine``.
        mass: [layers, num_kv_heads, tokens].
    """
    start, stop = row["ends"][0], row["ends"][1]
    whole = mass[..., start:stop]
    measured = []
    for end in row["ends"][1:]:
        kept = torch.ones(whole.shape, dtype=torch.bool)
        done = [c for c in row["compactions"] if c["at"] <= end]
        if done:
            # tokens after the last compaction are all kept
            kept[..., : done[-1]["at"] - start] = False
            for layer, heads in enumerate(done[-1]["kept"]):
                for head, positions in enumerate(heads):
                    kept[layer, head, [p - start for p in positions]] = True
        measured.append(float(whole[kept].sum() / whole.sum()))
    return measured


def masses(model: Any, row: dict[str, Any]) -> torch.Tensor:
    """Attention of the last question under full KV: [layers, num_kv_heads, tokens]."""
    prompt = model.read(row["prompt"])
    count = len(row["prompt"]) - row["ends"][-1]
    layers = zip(prompt.queries, prompt.keys, prompt.scales, strict=True)
    return torch.stack(
        [attention_mass(q[:, -count:], keys, scale) for q, keys, scale in layers]
    )


def runs_of(
    model: str, engine: dict[str, Any], policy: dict[str, Any], seeds: int
) -> Iterator[Run]:
    """One run per strategy and dialogue."""
    from _masked_model import MaskedModel

    rows = {
        strategy: list(ask_engine(model, engine, policy | {"nested": nested}, seeds))
        for strategy, nested in STRATEGIES.items()
    }
    masked = MaskedModel(model)
    for seed in range(seeds):
        own_runs = {strategy: measured[seed] for strategy, measured in rows.items()}
        mass = masses(masked, own_runs["flowkv"])
        for strategy, row in own_runs.items():
            yield Run(strategy, seed, retention(row, mass))


def summary(measured: Retention) -> Table:
    """Mean, minimum and maximum per turn, and the two models of appendix C."""
    table = Table("turn", *STRATEGIES, "model r", "model r^t")
    models = [measured.modelled(strategy) for strategy in STRATEGIES]
    for turn in range(measured.turns):
        cells = []
        for strategy in STRATEGIES:
            values = [shares[turn] for shares in measured.shares(strategy)]
            mean = statistics.mean(values)
            cells.append(f"{mean:.3f} ({min(values):.3f}..{max(values):.3f})")
        table.add_row(
            str(turn + 1), *cells, *(f"{model[turn]:.3f}" for model in models)
        )
    return table


def main(
    model: Annotated[str, typer.Argument()] = "",
    base: Annotated[
        str, typer.Option(help="JSON of a compressor, with its name")
    ] = '{"name": "snapkv", "window": 8}',
    ratio: float = 0.3,
    floor: Annotated[
        int, typer.Option(help="minimum tokens to keep of each turn")
    ] = 32,
    seeds: Annotated[int, typer.Option(help="dialogues")] = 5,
    block_size: int = 32,
    dtype: Annotated[str, typer.Option(help="dtype of the engine")] = "bfloat16",
    json_out: Path = Path("retention.json"),
    child: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure the retention of turn 1 under FlowKV and its nested baseline."""
    if child:
        run_engine(*json.loads(child))
        return
    if not model:
        raise typer.BadParameter("give a MODEL")
    config = json.loads(base)
    policy = {
        "name": "flowkv",
        "base": config.pop("name"),
        "base_config": config,
        "ratio": ratio,
        "floor": floor,
    }
    engine = {"block_size": block_size, "dtype": dtype}
    runs = list(runs_of(model, engine, policy, seeds))
    source = provenance()
    measured = Retention(Path(model).name, policy, block_size, runs, source)
    write_retention(measured, json_out)
    console = Console()
    console.print(summary(measured))
    console.print_json(data=source)


if __name__ == "__main__":
    typer.run(main)
