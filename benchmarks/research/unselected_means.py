"""Do means of the tokens that a step does not select improve answers?

Retrieval attends to the tokens with the most attention and drops the rest of the
softmax. This experiment adds an entry per chunk of consecutive tokens: the mean of its
keys and values, and in its score the logarithm of how many of its tokens are not
selected. Means take room from selected tokens, so that all chunks hold as many bytes.

    OMP_NUM_THREADS=1 python benchmarks/research/unselected_means.py MODEL ESSAYS \\
        --tasks common_words --samples 12 --chunks=-1,0,32 --out rows.jsonl

The prompt is read with full attention; then every generated token selects exactly,
per KV head, by the softmax weights summed over its query heads. Sinks, the last tokens
of the prompt and the answer are always attended to. Chunk 0: no means; -1: full
attention. The same command continues an interrupted run.
"""

from __future__ import annotations

import copy
import json
import math
import statistics
from pathlib import Path
from typing import Annotated, Any

import _path  # noqa: F401
import torch
import torch.nn.functional as F
import typer
from _evidence_samples import RULER, Prompt, prompts_of, setting_of
from _quality_metrics import contains
from _quality_stats import interval
from transformers import AutoTokenizer

from vllm_kvplugins.training.reference_model import load_attending

SINKS, WINDOW = 16, 64
STOCK = -1
_TASKS = ", ".join(RULER)


def attend_selected(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    candidates: range,
    held: int,
    chunk: int,
) -> torch.Tensor:
    """Attention of one token to selected tokens, and to means of the others.

    Args:
        query: [num_q_heads, head_dim].
        keys, values: [num_kv_heads, tokens, head_dim].
        candidates: tokens of which some are selected; all others are attended to.
        held: rows of a key and a value per KV head for candidates, means included.
        chunk: candidates per mean; 0: no means.

    Returns:
        float32 [num_q_heads, head_dim].

    Raises:
        ValueError: the means alone take more than ``held`` rows.
    """
    heads, tokens, dim = keys.shape
    keys, values = keys.float(), values.float()
    grouped = query.float().view(heads, -1, dim) * scale
    scores = grouped @ keys.mT  # [heads, group, tokens]
    inside = slice(candidates.start, candidates.stop)
    means = math.ceil(len(candidates) / chunk) if chunk else 0
    if means > held:
        raise ValueError(
            f"{means} means do not fit {held} rows; give larger chunks, or more rows"
        )
    hot = min(held - means, len(candidates))
    weights = scores[:, :, inside].softmax(-1).sum(1)
    best = weights.topk(hot, -1).indices
    selected = torch.zeros(heads, len(candidates), dtype=torch.bool)
    selected.scatter_(1, best, True)
    kept = torch.ones(heads, tokens, dtype=torch.bool)
    kept[:, inside] = selected
    logits = scores.masked_fill(~kept[:, None], -torch.inf)
    if chunk:
        missing = chunk * means - len(candidates)
        others = _chunks((~selected).float()[..., None], missing, chunk).sum(2)[..., 0]
        sizes = torch.full((means,), float(chunk))
        sizes[-1] -= missing
        mean_keys, mean_values = (
            _chunks(rows[:, inside], missing, chunk).sum(2) / sizes[:, None]
            for rows in (keys, values)
        )
        entries = grouped @ mean_keys.mT + others.log()[:, None]
        logits = torch.cat([logits, entries], -1)
        values = torch.cat([values, mean_values], 1)
    return (logits.softmax(-1) @ values).flatten(0, 1)


def _chunks(rows: torch.Tensor, missing: int, chunk: int) -> torch.Tensor:
    """[heads, n, k] -> [heads, chunks, chunk, k], the last one filled with zeros."""
    return F.pad(rows, (0, 0, 0, missing)).unflatten(1, (-1, chunk))


class Reader:
    """A model that reads prompts with full attention, and answers with less."""

    def __init__(self, folder: str, dtype: str, held: int) -> None:
        self._held, self._prompt, self._chunk = held, 0, STOCK
        self._model = load_attending(folder, dtype, "kvp-unselected", self._attention)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)

    @torch.inference_mode()
    def read(self, prompt: Prompt) -> Any:
        """The cache of all tokens but the last."""
        self._prompt, self._chunk = len(prompt.token_ids), STOCK
        ids = torch.tensor([prompt.token_ids[:-1]])
        return self._model(ids, use_cache=True, logits_to_keep=1).past_key_values

    @torch.inference_mode()
    def answer(self, prompt: Prompt, cache: Any, chunk: int) -> str:
        assert prompt.sample is not None
        self._chunk, cache = chunk, copy.deepcopy(cache)
        token, said = prompt.token_ids[-1], list[int]()
        while len(said) < prompt.sample.max_tokens:
            ids = torch.tensor([[token]])
            result = self._model(ids, past_key_values=cache, use_cache=True)
            token = int(result.logits[0, -1].argmax())
            if token == self._tokenizer.eos_token_id:
                break
            said.append(token)
        return str(self._tokenizer.decode(said))

    def _attention(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        scaling: float,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Tensors are [1, heads, tokens, head_dim]."""
        if self._chunk == STOCK:
            output = F.scaled_dot_product_attention(
                *(query, key, value),
                is_causal=query.shape[2] > 1,
                scale=scaling,
                enable_gqa=True,
            )
            return output.transpose(1, 2), None
        candidates = range(SINKS, max(self._prompt - WINDOW, SINKS + 1))
        attended = attend_selected(
            query[0, :, 0],
            key[0],
            value[0],
            scaling,
            candidates,
            self._held,
            self._chunk,
        )
        return attended.to(query.dtype)[None, None], None


def report(rows: list[dict[str, Any]]) -> str:
    """Mean scores, and paired differences to the row without entries."""
    lines = ["| task | chunk | samples | score | less chunk 0's |", "|---" * 5 + "|"]
    scores: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows:
        scores.setdefault((row["task"], row["chunk"]), {})[row["sample"]] = row["score"]
    for (task, chunk), own in sorted(scores.items()):
        base = scores.get((task, 0), {})
        pairs = [name for name in own if name in base]
        gaps = [own[name] - base[name] for name in pairs]
        differ = chunk != 0 and len(set(gaps)) > 1  # equal ones have no spread
        bounds = interval(gaps, pairs, f"{task} {chunk}") if differ else None
        between = "" if not chunk or not gaps else f"{statistics.mean(gaps):+.2f}"
        if bounds is not None:
            between += f" ({bounds[0]:+.2f} to {bounds[1]:+.2f})"
        name = "stock" if chunk == STOCK else str(chunk)
        mean = statistics.mean(own.values())
        lines.append(f"| {task} | {name} | {len(own)} | {mean:.2f} | {between} |")
    return "\n".join(lines)


def _rows_of(out: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of an interrupted run.

    Raises:
        typer.BadParameter: they are of other settings.
    """
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    rows = [json.loads(line) for line in lines]
    if any(row[name] != value for row in rows for name, value in settings.items()):
        raise typer.BadParameter(
            f"{out} has rows of other settings than {settings}; give another --out"
        )
    return rows


def main(
    model: str,
    texts: Path,
    out: Annotated[Path, typer.Option(help="JSONL of scores")],
    tasks: Annotated[str, typer.Option(help=_TASKS)] = "common_words",
    samples: int = 10,
    chunks: Annotated[
        str, typer.Option(help="candidates per mean; 0: no means, -1: full attention")
    ] = "-1,0,32",
    held: Annotated[int, typer.Option(help="rows per KV head, means included")] = 120,
    dtype: str = "bfloat16",
) -> None:
    names = tasks.split(",")
    unknown = [name for name in names if name not in RULER]
    if unknown:
        raise typer.BadParameter(f"no task {', '.join(unknown)}; there are {_TASKS}")
    settings = {"model": Path(model).name, "dtype": dtype, "held": held}
    rows = _rows_of(out, settings)
    done = {(row["task"], row["sample"], row["chunk"]) for row in rows}
    reader = Reader(model, dtype, held)
    for prompt in prompts_of(setting_of(model, texts, dtype, samples), names):
        todo = [
            chunk
            for chunk in map(int, chunks.split(","))
            if (prompt.task, prompt.name, chunk) not in done
        ]
        cache = reader.read(prompt) if todo else None
        for chunk in todo:
            assert prompt.sample is not None
            score = contains(reader.answer(prompt, cache, chunk), prompt.sample)
            row = {"task": prompt.task, "sample": prompt.name, "chunk": chunk}
            rows.append(row | settings | {"score": score})
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            typer.echo(f"{prompt.task}, {prompt.name}, chunk {chunk}: {score:.2f}")
    typer.echo(report(rows))


if __name__ == "__main__":
    typer.run(main)
