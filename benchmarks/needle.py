"""Pass key at several depths: how often each policy's answers are right.

A key stands somewhere in filler text, the question at the end. Every policy is
given the same prompts; stock vLLM and `random` are the bounds. Each runs in an
engine of its own, one after the other.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from _engine import provenance
from rich.console import Console
from rich.table import Table

FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. "
    "Here we go. There and back again. "
)
FILLER_TOKENS = 25
TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it "
    "and memorize it. I will quiz you about the important information there.\n\n"
)
QUESTION = "\n\nWhat is the pass key? Answer with the 5-digit number only."


def prompts(tokens: int, depths: int) -> list[tuple[str, str]]:
    """One (prompt, key) per depth, evenly spread over the document."""
    made = []
    for depth in range(depths):
        key = str(random.Random(depth).randrange(10_000, 100_000))
        lines = [FILLER] * (tokens // FILLER_TOKENS)
        place = (2 * depth + 1) * len(lines) // (2 * depths)
        lines.insert(place, f"The pass key is {key}. Remember it. {key} is the key. ")
        made.append((TASK + "".join(lines) + QUESTION, key))
    return made


def answer(model: str, policy: str, tokens: int, depths: int, dtype: str) -> None:
    """Child: run one engine, print one line of JSON with a verdict per depth."""
    from vllm import LLM, SamplingParams

    config = json.loads(policy)
    extra = {"additional_config": {"kv_policy": config}} if config else {}
    llm = LLM(
        model,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=8192,
        kv_cache_memory_bytes=1 << 30,
        **extra,
    )
    made = prompts(tokens, depths)
    outputs = llm.chat(
        [[{"role": "user", "content": prompt}] for prompt, _ in made],
        SamplingParams(temperature=0, max_tokens=16),
        use_tqdm=False,
    )
    right = [
        key in output.outputs[0].text
        for output, (_, key) in zip(outputs, made, strict=True)
    ]
    length = len(outputs[0].prompt_token_ids)
    print("RESULT " + json.dumps({"right": right, "prompt_tokens": length}))


def main(
    model: str,
    policies: Annotated[
        list[str], typer.Argument(help="JSON objects; {} is stock vLLM")
    ],
    tokens: int = 2900,
    depths: int = 10,
    dtype: str = "bfloat16",
    json_out: Path | None = None,
    child: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Ask every policy for the key at ``depths`` depths."""
    if child:
        answer(model, policies[0], tokens, depths, dtype)
        return
    console = Console()
    results = {}
    table = Table("policy", "right", *(f"{i + 1}" for i in range(depths)))
    for policy in policies:
        name = "stock" if not json.loads(policy) else policy
        command = [sys.executable, __file__, model, policy, "--child"]
        command += ["--tokens", str(tokens), "--depths", str(depths), "--dtype", dtype]
        with console.status(name):
            done = subprocess.run(command, capture_output=True, text=True)
        lines = [
            line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT ")
        ]
        if not lines:
            raise typer.Exit(console.print(done.stderr[-3000:]) or 1)
        results[name] = json.loads(lines[0])
        right = results[name]["right"]
        marks = ["+" if hit else "." for hit in right]
        table.add_row(name, f"{sum(right)}/{len(right)}", *marks)
    console.print(table)
    record = provenance() | {"results": results}
    console.print_json(data=provenance())
    if json_out:
        json_out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    typer.run(main)
