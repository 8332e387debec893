"""How much of the attention to the first turn is left, turn by turn.

Dialogues (``_dialogue.py``) run in the engine under FlowKV and under its nested
baseline, which tell what each compaction kept. The model with full KV then says how
much attention the last question's tokens pay to the tokens of turn 1; the share of it
that falls on tokens still kept after turn t is the retention at turn t. The queries
are the same for every t, so that only what is dropped can make it fall.

    python benchmarks/quality/retention.py MODEL --json-out retention.json
    kvplugins plot retention retention.json --out retention.svg
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
    """A row per dialogue from an engine in a child process."""
    request = json.dumps([model, engine, policy, seeds])
    return child_rows(__file__, request, json.dumps(policy))


def run_engine(
    model: str, engine: dict[str, Any], policy: dict[str, Any], seeds: int
) -> None:
    """Child: each dialogue's prompt, its turns' ends, and what of turn 1 was kept."""
    # records come as they are only from an engine in this process
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    from vllm_kvplugins.plan.geometry import Lengths
    from vllm_kvplugins.vllm_adapter.config.engine_config import geometry_of, policy_of

    llm = LLM(
        model,
        enforce_eager=True,
        max_model_len=4096,
        kv_cache_memory_bytes=1 << 29,
        # what another dialogue began with is not compacted again
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
    """Attention that the newest queries pay to each key, summed over them.

    Args:
        queries: [num_q_heads, n, head_dim], of the newest n tokens.
        keys: [num_kv_heads, tokens, head_dim].

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
    """Per turn from the first, the share of turn 1's mass that is still covered.

    Args:
        row: what ``run_engine`` tells of a dialogue.
        mass: [layers, num_kv_heads, tokens].
    """
    start, stop = row["ends"][0], row["ends"][1]
    whole = mass[..., start:stop]
    found = []
    for end in row["ends"][1:]:
        kept = torch.ones(whole.shape, dtype=torch.bool)
        done = [c for c in row["compactions"] if c["at"] <= end]
        if done:
            # what came after the last compaction is all there
            kept[..., : done[-1]["at"] - start] = False
            for layer, heads in enumerate(done[-1]["kept"]):
                for head, positions in enumerate(heads):
                    kept[layer, head, [p - start for p in positions]] = True
        found.append(float(whole[kept].sum() / whole.sum()))
    return found


def masses(model: Any, row: dict[str, Any]) -> torch.Tensor:
    """[layers, num_kv_heads, tokens]: full KV, asked by the last question."""
    prompt = model.read(row["prompt"])
    count = len(row["prompt"]) - row["ends"][-1]
    layers = zip(prompt.queries, prompt.keys, prompt.scales, strict=True)
    return torch.stack(
        [attention_mass(q[:, -count:], keys, scale) for q, keys, scale in layers]
    )


def runs_of(
    model: str, engine: dict[str, Any], policy: dict[str, Any], seeds: int
) -> Iterator[Run]:
    """A run per strategy and dialogue."""
    from _masked_model import MaskedModel

    rows = {
        strategy: list(ask_engine(model, engine, policy | {"nested": nested}, seeds))
        for strategy, nested in STRATEGIES.items()
    }
    masked = MaskedModel(model)
    for seed in range(seeds):
        mine = {strategy: found[seed] for strategy, found in rows.items()}
        mass = masses(masked, mine["flowkv"])
        for strategy, row in mine.items():
            yield Run(strategy, seed, retention(row, mass))


def summary(found: Retention) -> Table:
    """Mean, least and most per turn, and the two models of appendix C."""
    table = Table("turn", *STRATEGIES, "model r", "model r^t")
    models = [found.modelled(strategy) for strategy in STRATEGIES]
    for turn in range(found.turns):
        cells = []
        for strategy in STRATEGIES:
            values = [shares[turn] for shares in found.shares(strategy)]
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
    floor: Annotated[int, typer.Option(help="tokens that each turn keeps")] = 32,
    seeds: Annotated[int, typer.Option(help="dialogues")] = 5,
    block_size: int = 32,
    dtype: Annotated[str, typer.Option(help="of the engine")] = "bfloat16",
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
    found = Retention(Path(model).name, policy, block_size, runs, source)
    write_retention(found, json_out)
    console = Console()
    console.print(summary(found))
    console.print_json(data=source)


if __name__ == "__main__":
    typer.run(main)
