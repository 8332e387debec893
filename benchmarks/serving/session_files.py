"""Bytes that each turn of a conversation writes to session_dir, and what reading takes.

One conversation of synthetic turns per policy. A file stores only what files of earlier
turns do not have; "whole" is what it would store on its own.

    python benchmarks/serving/session_files.py MODEL --policy flowkv
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import _path  # noqa: F401
import typer
from _engine import EngineProcess, provenance, synthetic_prompt
from rich.console import Console
from rich.table import Table

from vllm_kvplugins.sessions.inspection import FoundFile, list_files, open_folders


def main(
    model: str,
    policy: str = "flowkv",
    config: Annotated[str, typer.Option(help="JSON")] = '{"ratio": 0.5}',
    turns: int = 12,
    turn_tokens: Annotated[int, typer.Option(help="new text per turn")] = 200,
    answer_tokens: int = 40,
    dtype: str = "bfloat16",
    json_out: Path | None = None,
) -> None:
    """Run one conversation, and list its files."""
    console = Console(width=120)
    with tempfile.TemporaryDirectory() as folder:
        chosen = {"name": policy, **json.loads(config), "session_dir": folder}
        engine = EngineProcess(
            chosen | {"sessions": True},
            model=model,
            dtype=dtype,
            enforce_eager=True,
            max_model_len=turns * (turn_tokens + answer_tokens) + 64,
            kv_cache_memory_bytes=1 << 30,
        )
        try:
            _converse(engine, turns, turn_tokens, answer_tokens)
        finally:
            engine.close()
        rows = [_row(file) for file in _by_turn(folder)]
    table = Table(title=f"{policy} {config}, {dtype}")
    for heading in ("turn", "tokens", "written, KiB", "whole, KiB", "other files"):
        table.add_column(heading, justify="right")
    for turn, row in enumerate(rows, 1):
        sizes = (f"{row[key] / 1024:,.0f}" for key in ("written_bytes", "whole_bytes"))
        table.add_row(str(turn), str(row["tokens"]), *sizes, str(row["needs"]))
    console.print(table)
    written, whole = (
        sum(r[key] for r in rows) for key in ("written_bytes", "whole_bytes")
    )
    console.print(
        f"all turns: {written >> 20} MiB written, {whole >> 20} MiB as whole files "
        f"({written / whole:.2f})"
    )
    if json_out is not None:
        report = {"policy": chosen, "turns": rows, **provenance()}
        json_out.write_text(json.dumps(report, indent=2))


def _converse(
    engine: EngineProcess, turns: int, turn_tokens: int, answer_tokens: int
) -> None:
    """Send the turns; each has the whole conversation in its prompt."""
    history: list[int] = []
    ends: list[int] = []
    for turn in range(turns):
        ends.append(len(history))
        history += synthetic_prompt(40000, turn_tokens, turn)
        arguments = {"turn_ends": ends[1:], "max_tokens": answer_tokens}
        history += engine.ask("turn", prompt=history, **arguments)["answer"]
        time.sleep(0.5)  # the next file needs this one only if it is written


def _by_turn(folder: str) -> list[FoundFile]:
    """The conversation's files, first turn first."""
    return sorted(list_files(open_folders(folder)), key=lambda file: file.tokens)


def _row(file: FoundFile) -> dict[str, Any]:
    about, _ = file.storage.read(file.name, only=())
    return {
        "tokens": file.tokens,
        "written_bytes": file.num_bytes,
        "whole_bytes": int(about["num_bytes"]),
        "needs": len(file.sources),
    }


if __name__ == "__main__":
    typer.run(main)
