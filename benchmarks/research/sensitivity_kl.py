"""Do layer budgets bring block-wise prefill closer to full KV?

EpiCache's figure 4b. Each document is read block by block under a policy, with every
allocator at the same memory, and once by stock vLLM. Then all receive the same next
tokens. Reports the KL of their predictions from stock's, nats per token, mean over
these tokens. Each allocator is compared with the one that differs only in its layer
budgets: ``head-adaptive`` for allocators that share a layer's pages among heads,
``uniform`` for the others.

The next tokens are the document's own or, with ``--answers``, the reference answer of a
LongBench row, requested after its context.

Engines run one after another. Results go to ``--out``; an interrupted run resumes from
this file.

    python benchmarks/research/sensitivity_kl.py MODEL DOCUMENTS --out kl.jsonl
"""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import _path  # noqa: F401
import torch
import typer
from _documents import read_documents
from _engine import child_rows, provenance
from fidelity import choose, kl_divergence
from rich.console import Console
from rich.table import Table

POLICIES = ("snapkv", "infinipot", "keydiff")
ALLOCATORS = (
    "uniform",
    "pyramid",
    '{"name": "sensitivity", "heads": "uniform"}',
    "head-adaptive",
    "sensitivity",
)
QUESTION = "\n\nWrite a one-page summary of all the news above.\n\nSummary:"


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings that all engines of a run share."""

    model: str
    documents: str
    answers: bool
    prompt_tokens: int
    next_tokens: int
    count: int
    seed: int
    dtype: str
    block_size: int

    def shared(self) -> dict[str, Any]:
        """The settings that each row records."""
        names = {"model": Path(self.model).name, "documents": Path(self.documents).name}
        return asdict(self) | names


@dataclass(frozen=True, slots=True)
class Sample:
    """One document. ``next``: tokens that follow the prompt."""

    name: str
    prompt: list[int]
    next: list[int]


# -- documents ---------------------------------------------------------------------


def make_samples(setting: Setting, tokenizer: Any) -> list[Sample]:
    """The documents of a run.

    Raises:
        ValueError: too few documents are long enough.
    """
    path, tokens = Path(setting.documents), setting.prompt_tokens
    if setting.answers:
        return answered(path, tokenizer, setting)
    needed = tokens + setting.next_tokens
    texts = read_documents(path)
    chosen = choose(texts, tokenizer, needed, setting.count, setting.seed)
    return [Sample(name, ids[:tokens], ids[tokens:]) for name, ids in chosen]


def answered(path: Path, tokenizer: Any, setting: Setting) -> list[Sample]:
    """Contexts cut to length followed by a question, and the reference answers."""

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    question = encode(QUESTION)
    room, samples = setting.prompt_tokens - len(question), []
    lines = path.read_text(encoding="utf-8").splitlines()
    numbered = list(enumerate(lines))
    random.Random(setting.seed).shuffle(numbered)
    for number, line in numbered:
        row = json.loads(line)
        context = encode(row["context"])[:room]
        answer = encode(" " + row["answers"][0].strip())[: setting.next_tokens]
        if len(context) == room and len(answer) == setting.next_tokens:
            name = f"{path.name}:{number}"
            samples.append(Sample(name, context + question, answer))
        if len(samples) == setting.count:
            return samples
    raise ValueError(f"only {len(samples)} rows of {path} are long enough")


# -- an engine ---------------------------------------------------------------------


def run_engine(setting: Setting, config: str, logits_path: str) -> None:
    """Child: print a JSON line per document and save the logits before every next
    token.
    """
    # only an engine in this process gives access to its logits processor
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from _talk import Recorded
    from vllm import LLM, SamplingParams

    policy = json.loads(config)
    extra = {"additional_config": {"kv_policy": policy}} if policy else {}
    llm = LLM(
        setting.model,
        dtype=setting.dtype,
        enforce_eager=True,
        max_model_len=setting.prompt_tokens + setting.next_tokens + 512,
        max_num_batched_tokens=2048,
        block_size=setting.block_size,
        kv_cache_memory_bytes=1 << 30,
        logits_processors=[Recorded],
        **extra,
    )
    kept = []
    for sample in make_samples(setting, llm.get_tokenizer()):
        Recorded.seen.clear()
        params = SamplingParams(
            temperature=0,
            max_tokens=len(sample.next),
            ignore_eos=True,
            extra_args={"prescribed": sample.next},
        )
        request: Any = {"prompt_token_ids": sample.prompt}
        (output,) = llm.generate([request], params, use_tqdm=False)
        assert list(output.outputs[0].token_ids) == sample.next, "it said otherwise"
        kept.append(torch.stack(Recorded.seen))
        row = {"sample": sample.name, "held_blocks": _held_blocks(llm, sample)}
        print("RESULT " + json.dumps(row), flush=True)
    torch.save(torch.stack(kept), logits_path)


def _held_blocks(llm: Any, sample: Sample) -> int:
    """Blocks that the prompt holds at its end, by the plan."""
    from vllm_kvplugins.plan.geometry import Lengths
    from vllm_kvplugins.vllm_adapter.config.engine_config import geometry_of, policy_of

    config = llm.llm_engine.vllm_config
    policy, tokens = policy_of(config), len(sample.prompt)
    if policy is None:
        return -(-tokens // config.cache_config.block_size)
    return policy.plan(Lengths(tokens), geometry_of(config)).resident_blocks(tokens)


def ask_engine(setting: Setting, config: str) -> tuple[list[dict[str, Any]], Any]:
    """Run one engine in a child process.

    Returns:
        The rows, and float32 logits [documents, next tokens, vocabulary].
    """
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        request = json.dumps([asdict(setting), config, file.name])
        rows = list(child_rows(__file__, request, config))
        return rows, torch.load(file.name)


# -- figures -----------------------------------------------------------------------


def config_of(policy: str, allocator: str, budget: int, block: int) -> str:
    """A policy's configuration as JSON; equal settings give equal text."""
    named = [
        json.loads(text) if text.startswith("{") else {"name": text}
        for text in (policy, allocator)
    ]
    sizes = {"budget": budget, "prefill_block": block}
    return json.dumps(sizes | named[0] | {"allocator": named[1]}, sort_keys=True)


def allocator_label(config: str) -> str:
    """An allocator's name and options."""
    options = json.loads(config)["allocator"]
    if "profile" in options:
        options["profile"] = Path(options["profile"]).stem
    extra = [f"{key}={value}" for key, value in options.items() if key != "name"]
    return " ".join([options["name"], *sorted(extra)])


def base_of(config: str) -> str:
    """The configuration with equal layer budgets and the same sharing among heads."""
    options = json.loads(config)
    allocator = options["allocator"]
    shared = allocator["name"] in ("head-adaptive", "sensitivity")
    adaptive = shared and allocator.get("heads", "head-adaptive") == "head-adaptive"
    name = "head-adaptive" if adaptive else "uniform"
    return json.dumps(options | {"allocator": {"name": name}}, sort_keys=True)


def mean_interval(values: list[float]) -> str:
    """Mean and standard deviation."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):+.4f} ±{deviation:.4f}"


def summary(rows: dict[str, dict[str, float]]) -> Table:
    """KL per configuration, and its change against equal layers, per sample.

    Args:
        rows: configuration -> sample -> KL.
    """
    table = Table("policy", "allocator", "KL", "change", "lower on", "per sample")
    for config, divergences in rows.items():
        base = rows.get(base_of(config), {})
        both = [sample for sample in divergences if sample in base]
        changes = [divergences[sample] - base[sample] for sample in both]
        own = config == base_of(config)
        table.add_row(
            json.loads(config)["name"],
            allocator_label(config),
            f"{statistics.mean(divergences.values()):.4f}",
            "" if own or not both else mean_interval(changes),
            "" if own else f"{sum(c < 0 for c in changes)} of {len(changes)}",
            "" if own else " ".join(f"{change:+.3f}" for change in changes),
        )
    return table


def key_of(row: dict[str, Any]) -> str:
    """Identifies a measurement, except for the document."""
    fields = (*Setting.__dataclass_fields__, "config")
    return json.dumps([row[field] for field in fields])


def read_rows(out: Path) -> list[dict[str, Any]]:
    """Results of an earlier run, without an incomplete last line."""
    rows = []
    for line in out.read_text().splitlines() if out.exists() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        rows.append(row)
    return rows


def measure(setting: Setting, configs: list[str], out: Path) -> None:
    """Run every engine whose results ``out`` lacks, then show all."""
    console, source = Console(), provenance()
    shared, done = setting.shared(), read_rows(out)
    labels = {key_of(shared | {"config": config}): config for config in configs}
    missing = [c for key, c in labels.items() if key not in map(key_of, done)]
    full = ask_engine(setting, "null")[1] if missing else None
    for config in missing:
        rows, logits = ask_engine(setting, config)
        for row, reference, sample_logits in zip(rows, full, logits, strict=True):
            nats = kl_divergence(reference, sample_logits)
            agree = (reference.argmax(-1) == sample_logits.argmax(-1)).double()
            figures = {"kl": nats.mean().item(), "top1": agree.mean().item()}
            done.append(shared | {"config": config} | row | figures | source)
            with out.open("a") as file:
                file.write(json.dumps(done[-1]) + "\n")
        mean = statistics.mean(row["kl"] for row in done[-len(rows) :])
        label = f"{json.loads(config)['name']} {allocator_label(config)}"
        console.print(f"{label:50} KL {mean:.4f}", highlight=False)
    divergences: dict[str, dict[str, float]] = {config: {} for config in configs}
    for row in done:
        if key_of(row) in labels:
            divergences[row["config"]][row["sample"]] = row["kl"]
    console.print(summary(divergences))
    console.print_json(data=source)


def main(
    model: Annotated[str, typer.Argument()] = "",
    documents: Annotated[
        str, typer.Argument(help="a text or JSONL file, or a folder")
    ] = "",
    policy: Annotated[
        list[str] | None, typer.Option(help="name or JSON object; default: 3")
    ] = None,
    allocator: Annotated[
        list[str] | None, typer.Option(help="name or JSON object; default: 5")
    ] = None,
    budget: Annotated[int, typer.Option(help="tokens per KV head")] = 1024,
    prefill_block: int = 512,
    answers: Annotated[
        bool, typer.Option(help="use the answers of LongBench's rows as next tokens")
    ] = False,
    prompt_tokens: int = 4096,
    next_tokens: int = 64,
    count: Annotated[int, typer.Option(help="documents")] = 5,
    seed: Annotated[int, typer.Option(help="seed of the choice of documents")] = 0,
    dtype: str = "float32",
    block_size: int = 32,
    out: Path = Path("sensitivity_kl.jsonl"),
    child: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Compare allocators under block-wise prefill with full KV."""
    if child:
        fields, config, logits_path = json.loads(child)
        run_engine(Setting(**fields), config, logits_path)
        return
    if not model or not documents:
        raise typer.BadParameter("give a MODEL and DOCUMENTS")
    setting = Setting(
        model,
        documents,
        answers,
        prompt_tokens,
        next_tokens,
        count,
        seed,
        dtype,
        block_size,
    )
    configs = [
        config_of(one, shares, budget, prefill_block)
        for one in policy or POLICIES
        for shares in allocator or ALLOCATORS
    ]
    measure(setting, configs, out)


if __name__ == "__main__":
    typer.run(main)
