"""The grid of a serving run, and its result rows: one JSON line per measurement."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _serving_metrics import Slo

Row = dict[str, Any]
STOCK = "stock"
WORKLOADS = ("chat", "random", "dataset", "agents")


@dataclass(frozen=True, slots=True)
class Pool:
    """The KV cache and engine settings that all servers of a comparison share."""

    model: str
    pool_tokens: int
    block_size: int
    max_model_len: int
    dtype: str
    prefix_caching: bool
    eager: bool
    extra: tuple[str, ...] = ()

    @property
    def blocks(self) -> int:
        """Blocks for the pool's tokens."""
        return -(-self.pool_tokens // self.block_size)

    def arguments(self, seed: int) -> list[str]:
        """Arguments of ``vllm serve``, without the policy."""
        caching = "" if self.prefix_caching else "no-"
        return [
            *(self.model, "--seed", str(seed), "--dtype", self.dtype),
            *("--max-model-len", str(self.max_model_len)),
            *("--block-size", str(self.block_size)),
            # One more block, because vLLM does not use its null block.
            *("--num-gpu-blocks-override", str(self.blocks + 1)),
            f"--{caching}enable-prefix-caching",
            *(("--enforce-eager",) if self.eager else ()),
            *self.extra,
        ]


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement: a policy under a load, once. ``policy``: {} is stock."""

    policy: Mapping[str, Any]
    workload: str
    rate: float
    repetition: int

    @property
    def label(self) -> str:
        """The policy's name and settings."""
        return label_of(self.policy)

    def seed(self, seed: int) -> int:
        """Seed of the load: equal for all systems, different for every other cell.

        With one seed for all rates, a server with prefix caching would reuse prompts of
        the first rate at the second.
        """
        parts = [seed, WORKLOADS.index(self.workload)]
        # All at once has a seed too.
        parts += [round(1e6 * min(self.rate, 1e9)), self.repetition]
        return int(np.random.SeedSequence(parts).generate_state(1)[0]) >> 1


def label_of(policy: Mapping[str, Any]) -> str:
    """``snapkv budget=256`` for its settings; ``stock`` for none."""
    settings = [f"{key}={value}" for key, value in policy.items() if key != "name"]
    return " ".join([str(policy.get("name", STOCK)), *settings])


def split_policies(text: str) -> list[dict[str, Any]]:
    """Parse ``stock,snapkv,{"name": "h2o", "budget": 64}``; {} is stock.

    Raises:
        ValueError: the text is malformed, or a policy appears twice.
    """
    policies: list[dict[str, Any]] = []
    rest = text.strip()
    while rest:
        if rest.startswith("{"):
            policy, end = json.JSONDecoder().raw_decode(rest)
            rest = rest[end:]
            if policy and "name" not in policy:
                raise ValueError(f"no 'name' in {json.dumps(policy)}")
        else:
            name, comma, rest = rest.partition(",")
            rest = comma + rest
            policy = {} if name.strip() == STOCK else {"name": name.strip()}
        rest = rest.strip()
        if rest and not rest.startswith(","):
            raise ValueError(f"expected a comma before {rest!r}")
        if policy in policies:
            raise ValueError(f"{label_of(policy)} is named twice")
        policies.append(policy)
        rest = rest[1:].strip()
    if not policies:
        raise ValueError("no policy is named")
    return policies


def cells_of(
    policies: list[dict[str, Any]],
    workloads: list[str],
    rates: list[float],
    repetitions: int,
) -> list[Cell]:
    """All measurements, in the order in which they run.

    Policies alternate within a repetition, so that drift of the machine affects all of
    them equally.
    """
    return [
        Cell(policy, workload, rate, repetition)
        for repetition in range(repetitions)
        for policy in policies
        for workload in workloads
        for rate in rates
    ]


def settings_of(pool: Pool, seed: int, load: Any, slo: Slo) -> dict[str, Any]:
    """Everything that makes rows comparable, except policy, rate and repetition."""
    shared = asdict(pool) | {"model": Path(pool.model).name}
    if getattr(load, "texts", ""):
        shared["texts"] = Path(load.texts).name
    own = load.settings() if hasattr(load, "settings") else asdict(load)
    flat = shared | own | asdict(slo) | {"seed": seed}
    return flat | {"extra": list(pool.extra)}


def running_settings_of(
    url: str, model: str, seed: int, load: Any, slo: Slo
) -> dict[str, Any]:
    """``settings_of`` for a server that this benchmark did not start."""
    own = load.settings() if hasattr(load, "settings") else asdict(load)
    return {"base_url": url, "model": model} | own | asdict(slo) | {"seed": seed}


def make_row(cell: Cell, settings: dict[str, Any], measured: dict[str, Any]) -> Row:
    """One line of the file."""
    identity = {"policy": dict(cell.policy), "workload": cell.workload}
    identity |= {"rate": cell.rate, "repetition": cell.repetition}
    return identity | {"settings": settings} | measured


def strict(row: Row) -> Row:
    """A row without infinity, which JSON does not have."""
    endless = row.get("rate") == float("inf")
    return row | {"rate": "inf"} if endless else row


def key_of(row: Row) -> str:
    """Identifies a measurement."""
    names = ("policy", "workload", "rate", "repetition", "settings")
    return json.dumps([strict(row)[name] for name in names], sort_keys=True)


def lines_of(path: Path, kind: str = "figures") -> Iterator[Row]:
    """The rows of a file that have this field, without an incomplete last line."""
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and kind in row:
            if "rate" in row:
                row["rate"] = float(row["rate"])
            yield row


def read_rows(path: Path) -> dict[str, Row]:
    """Rows of an earlier run by key; a later row replaces an earlier one."""
    return {key_of(row): row for row in lines_of(path)}


def read_unavailable(path: Path) -> dict[str, str]:
    """Why systems could not run, by label; a system that ran later is not listed."""
    latest: dict[str, str] = {}
    for row in lines_of(path, "policy"):
        label = label_of(row["policy"])
        if "unavailable" in row:
            latest[label] = str(row["unavailable"])
        else:
            latest.pop(label, None)
    return latest


def append_row(path: Path, row: Row) -> None:
    """Append a line; first end an incomplete one."""
    cut = path.exists() and path.stat().st_size and path.read_bytes()[-1:] != b"\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(("\n" if cut else "") + json.dumps(strict(row)) + "\n")
