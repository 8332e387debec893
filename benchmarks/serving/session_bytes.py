"""Bytes of a conversation's sessions in files and in memory, and the time to go back.

One conversation of synthetic turns. A file stores only what files of earlier turns do
not have; memory has of an earlier turn only what the next one does not have. "whole" is
what each would store on its own.

    python benchmarks/serving/session_bytes.py MODEL --policy flowkv
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
    """Run one conversation, list its files, and edit earlier messages."""
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
            prompts = _converse(engine, turns, turn_tokens, answer_tokens)
            name = "vllm:kv_policy_session_bytes"
            held = engine.ask("metric", name=name)["value"]
            rows = [_row(file) for file in _by_turn(folder)]
            back = _go_back(engine, prompts, turn_tokens)
        finally:
            engine.close()
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
        f"({written / whole:.2f}); {int(held) >> 20} MiB in memory ({held / whole:.2f})"
    )
    for turns_back, one in back:
        console.print(
            f"{turns_back} turns back: first token after {one['first_ms']:.0f} ms "
            f"({one['first_cpu_ms']:.0f} ms of processor time), "
            f"{one['computed']} tokens computed"
        )
    if json_out is not None:
        report = {
            "policy": chosen,
            "turns": rows,
            "memory_bytes": held,
            "back": [{"turns": turns_back, **one} for turns_back, one in back],
            **provenance(),
        }
        json_out.write_text(json.dumps(report, indent=2))


def _converse(
    engine: EngineProcess, turns: int, turn_tokens: int, answer_tokens: int
) -> list[tuple[list[int], list[int]]]:
    """Send the turns; each has the whole conversation in its prompt.

    Returns:
        Of each turn: its prompt without the new text, and the ends of earlier turns.
    """
    history: list[int] = []
    ends: list[int] = []
    sent = []
    for turn in range(turns):
        ends.append(len(history))
        sent.append((list(history), ends[1:]))
        history += synthetic_prompt(40000, turn_tokens, turn)
        arguments = {"turn_ends": ends[1:], "max_tokens": answer_tokens}
        history += engine.ask("turn", prompt=history, **arguments)["answer"]
        time.sleep(0.5)  # the next file needs this one only if it is written
    return sent


def _go_back(
    engine: EngineProcess, sent: list[tuple[list[int], list[int]]], turn_tokens: int
) -> list[tuple[int, dict[str, Any]]]:
    """Send other last messages, each after fewer turns; none is asked twice."""
    answers = []
    for turns_back in (1, 2, 4, 8, 16):
        if turns_back < len(sent):
            history, ends = sent[-turns_back]
            other = synthetic_prompt(40000, turn_tokens, 1000 + turns_back)
            arguments = {"turn_ends": ends, "max_tokens": 2}
            answer = engine.ask("turn", prompt=[*history, *other], **arguments)
            answers.append((turns_back, answer))
    return answers


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
