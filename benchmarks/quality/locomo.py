"""Questions of LoCoMo about long dialogues, answered from caches of a fixed budget.

Every policy reads the same history in blocks, keeps the same number of tokens of it,
and answers the same questions. ``epicache`` keeps one cache per episode and routes
questions; the others keep one cache. ``stock`` keeps everything. The other compressors
are bases of ``epicache``, with its allocator and with the settings of ``--config``;
``'{"allocator": "uniform"}'`` gives all heads the same budget.

Control runs use stock with another context: ``nothing``, only the question;
``another``, the next dialogue, cut to the same length; ``evidence``, only the lines
with the answer.

Two more tell stock the parts of the history that are near the question, at most
``--budget`` tokens of them, in the order of the dialogue: ``rag``, the segments of the
question's episode (EpiCache, appendix B.1), and if they are too many, the nearest of
them; ``segments``, the nearest ones of all episodes. They divide, cluster and embed the
dialogue as ``epicache`` does with the same ``--config``.

Two metrics per question: the F1 score of the answer's words (LoCoMo's measure, without
its stemmer), and the surprisal of the true answer in nats per token, which also works
for models too small to answer.

    python benchmarks/quality/locomo.py MODEL locomo.json --budget 1024
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import _path  # noqa: F401
import typer
from _dialogue import mean_interval
from _engine import EngineJob, child_rows, provenance
from _locomo_segments import SegmentIndex
from rich.console import Console
from rich.table import Table

MAX_TOKENS = 16
ADVERSARIAL = 5  # question categories left out, as in EpiCache's appendix A.1
READ = "I have read it."
ASK = "{} Answer in a few words."
# EpiCache, appendix A.2
METHODS: dict[str, dict[str, Any]] = {
    "stock": {},
    "epicache": {},
    "infinipot": {"base": "infinipot"},
    "snapkv": {"base": "snapkv", "base_config": {"window": 64}},
    "kvzip": {"base": "kvzip"},
    "keydiff": {"base": "keydiff"},
    "streaming-llm": {"base": "streaming-llm", "base_config": {"sinks": 128}},
}
# control runs: context for stock instead of the history
NO_REQUIREMENTS, ANOTHER, EVIDENCE = "nothing", "another", "evidence"
CONTROLS = (NO_REQUIREMENTS, ANOTHER, EVIDENCE)
# stock with segments of the history
RAG, SEGMENTS = "rag", "segments"
RETRIEVERS = (RAG, SEGMENTS)
UNCONFIGURED = ("stock", *CONTROLS)  # --config does not apply to them


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings that all engines of a run share."""

    model: str
    path: str
    dialogue: int
    history_tokens: int
    questions: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its answer, and the lines of the dialogue with the evidence."""

    text: str
    answer: str
    category: int
    evidence: tuple[str, ...]


class Job(EngineJob):
    """One method at one budget; ``config`` has the method's label as its name."""

    @property
    def label(self) -> str:
        return str(self.options["label"])


def job(method: str, budget: int, block: int, more: dict[str, Any]) -> Job:
    """The settings of an engine.

    Args:
        more: settings of EpiCache, which runs the compressor of every method; a
            retriever uses its budget and its episodes.
    """
    if method in UNCONFIGURED:
        return Job(json.dumps({"label": method}))
    policy = {"name": "epicache", "budget": budget, "prefill_block": block}
    policy |= {"session_memory": "3GiB", **more, **METHODS.get(method, {})}
    use = "retriever" if method in RETRIEVERS else "policy"
    return Job(json.dumps({"label": method, use: policy}))


# -- the data -----------------------------------------------------------------------


def utterances(dialogue: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """A dialogue's lines by id, in order."""
    spoken = dialogue["conversation"]
    names = sorted(
        (name for name, lines in spoken.items() if isinstance(lines, list)),
        key=lambda name: int(name.removeprefix("session_")),
    )
    for name in names:
        date = spoken.get(f"{name}_date_time", "")
        for number, turn in enumerate(spoken[name]):
            line = f"{turn['speaker']}: {turn['text']}"
            if number == 0 and date:
                line += f" ({date})"
            yield turn["dia_id"], line


def parsed(config: str) -> dict[str, Any]:
    """The settings of ``--config``.

    Raises:
        typer.BadParameter: it is not a JSON object.
    """
    try:
        settings = json.loads(config)
    except json.JSONDecodeError as error:
        raise typer.BadParameter(f"--config {config}: no JSON ({error})") from None
    if not isinstance(settings, dict):
        raise typer.BadParameter(f"--config {config}: give an object, as {{}}")
    return settings


def check(setting: Setting, methods: list[str]) -> None:
    """Check the options before any engine starts.

    Raises:
        typer.BadParameter: the dialogue or a method does not exist.
    """
    known = [*METHODS, *CONTROLS, *RETRIEVERS]
    if unknown := set(methods) - set(known):
        raise typer.BadParameter(
            f"--method {', '.join(sorted(unknown))}: give one of {', '.join(known)}"
        )
    last = len(json.loads(Path(setting.path).read_text())) - 1
    if not 0 <= setting.dialogue <= last:
        raise typer.BadParameter(
            f"--dialogue {setting.dialogue}: the file has 0 to {last}"
        )
    if ANOTHER in methods and setting.dialogue == last:
        raise typer.BadParameter(
            f"--method {ANOTHER}: no dialogue comes after {last}, give a smaller "
            "--dialogue"
        )


def excerpt(
    setting: Setting, count_tokens: Any
) -> tuple[list[dict[str, str]], list[Question]]:
    """The chat with the start of a dialogue, and the questions that it answers."""
    lines, questions = opening(setting, count_tokens)
    return told(lines), questions


def opening(setting: Setting, count_tokens: Any) -> tuple[list[str], list[Question]]:
    """The start of a dialogue that fits, and the questions that it answers.

    If the dialogue is too short, the next dialogues follow; all questions are about the
    first.
    """
    first, *others = json.loads(Path(setting.path).read_text())[setting.dialogue :]
    lines: list[str] = []
    lines_by_id: dict[str, str] = {}
    used = 0
    for dialogue in (first, *others):
        for name, line in utterances(dialogue):
            used += count_tokens(line) + 1
            if used > setting.history_tokens:
                break
            lines.append(line)
            if dialogue is first:
                lines_by_id[name] = line
        if used > setting.history_tokens:
            break
    questions = [
        Question(
            item["question"],
            str(item["answer"]),
            item["category"],
            tuple(lines_by_id[name] for name in item["evidence"]),
        )
        for item in first["qa"]
        if item["category"] != ADVERSARIAL
        and item["evidence"]
        and set(item["evidence"]) <= lines_by_id.keys()
    ]
    return lines, questions[: setting.questions]


def told(lines: Iterable[str]) -> list[dict[str, str]]:
    """The chat with a dialogue in its first message."""
    opening = {"role": "user", "content": "\n".join(lines)}
    return [opening, {"role": "assistant", "content": READ}]


def message_of(question: Question) -> dict[str, str]:
    return {"role": "user", "content": ASK.format(question.text)}


def evidence_at(
    offsets: list[tuple[int, int]], text: str, question: Question
) -> list[int]:
    """Positions of the tokens that hold the answer.

    Args:
        offsets: (start, end) of every token in characters of ``text``.
    """
    spans = [
        (text.index(line), text.index(line) + len(line)) for line in question.evidence
    ]
    return [
        position
        for position, (start, stop) in enumerate(offsets)
        if any(start < last and stop > first for first, last in spans)
    ]


def evidence_in(text: str, question: Question) -> float:
    """Share of the evidence lines that a text contains."""
    return sum(line in text for line in question.evidence) / len(question.evidence)


def words(text: str) -> list[str]:
    """Lower-case words without punctuation and articles."""
    plain = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the|and)\b", " ", plain).split()


def f1(answer: str, truth: str) -> float:
    """Harmonic mean of precision and recall over words."""
    answered, expected = Counter(words(answer)), Counter(words(truth))
    common = sum((answered & expected).values())
    if not common:
        return 0.0
    precision, recall = common / answered.total(), common / expected.total()
    return 2 * precision * recall / (precision + recall)


# -- an engine -------------------------------------------------------------------


def open_model(setting: Setting, policy: dict[str, Any] | None) -> Any:
    """An ``LLM`` for the history, a question and prescribed answers."""
    from _talk import Prescribed
    from vllm import LLM

    extra = {"additional_config": {"kv_policy": policy}} if policy else {}
    return LLM(
        setting.model,
        dtype=setting.dtype,
        enforce_eager=True,
        max_model_len=setting.history_tokens + 2048,
        block_size=32,
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=1 << 30,
        logits_processors=[Prescribed],
        **extra,
    )


def asked(
    setting: Setting, work: Job, count_tokens: Callable[[str], int]
) -> Iterator[tuple[list[dict[str, str]], Question]]:
    """The questions, each with the chat before it."""
    lines, questions = opening(setting, count_tokens)
    history = told(lines)
    if work.label == ANOTHER:
        other = replace(setting, dialogue=setting.dialogue + 1)
        history = excerpt(other, count_tokens)[0]
    elif work.label == NO_REQUIREMENTS:
        history = []
    elif work.label in RETRIEVERS:
        retrieve = retriever(work, lines, count_tokens)
    for question in questions:
        if work.label == EVIDENCE:
            history = told(question.evidence)
        elif work.label in RETRIEVERS:
            history = told(retrieve(question))
        yield history, question


def retriever(
    work: Job, lines: list[str], count_tokens: Callable[[str], int]
) -> Callable[[Question], list[str]]:
    """A function that returns the segments of the dialogue to tell for a question."""
    from vllm_kvplugins.config import parse_policy
    from vllm_kvplugins.episodes.encoder import load_encoder
    from vllm_kvplugins.episodes.utterances import dialogue_text, utterances_of

    policy = work.options["retriever"]
    routing = parse_policy(policy).episode_routing
    assert routing is not None, "epicache routes episodes"
    encoder = load_encoder(routing.settings.encoder)
    index = SegmentIndex(lines, routing.settings, encoder, count_tokens)

    def retrieve(question: Question) -> list[str]:
        # what epicache embeds
        query = dialogue_text(utterances_of([message_of(question)]))
        return index.near(query, policy["budget"], of_episode=work.label == RAG)

    return retrieve


def run_engine(setting: Setting, work: Job) -> None:
    """Child: answer all questions, one JSON line each."""
    from vllm import SamplingParams

    llm = open_model(setting, work.options.get("policy"))
    tokenizer = llm.get_tokenizer()

    def count_tokens(text: str) -> int:
        return len(tokenizer.encode(text))

    chats = asked(setting, work, count_tokens)
    for number, (history, question) in enumerate(chats):
        extra = {}
        if "policy" in work.options and work.label != "epicache":
            # one cache for all questions
            extra = {"turn_ends": [len(rendered(tokenizer, history))]}
        truth = tokenizer.encode(question.answer, add_special_tokens=False)
        free = SamplingParams(
            temperature=0, max_tokens=MAX_TOKENS, extra_args=extra or None
        )
        forced = SamplingParams(**prescribed(truth, extra))
        outputs = [
            llm.chat([[*history, message_of(question)]], [sampling], use_tqdm=False)[0]
            for sampling in (free, forced)
        ]
        row = {
            "question": number,
            "category": question.category,
            "prompt_tokens": len(outputs[0].prompt_token_ids),
            "evidence_told": evidence_in(text_of(history), question),
            "f1": f1(outputs[0].outputs[0].text, question.answer),
            "nats": nats(outputs[1].outputs[0]),
        }
        print("RESULT " + json.dumps(row), flush=True)


def text_of(messages: list[dict[str, str]]) -> str:
    return "\n".join(message["content"] for message in messages)


def prescribed(truth: list[int], extra: dict[str, Any]) -> dict[str, Any]:
    """Sampling parameters that force the true answer and return its
    log-probabilities."""
    return {
        "temperature": 0,
        "max_tokens": len(truth),
        "ignore_eos": True,
        "logprobs": 0,  # of the token itself
        "extra_args": {"prescribed": truth} | extra,
    }


def nats(completion: Any) -> float:
    """Surprisal of each prescribed token in nats; lower is better."""
    steps = zip(completion.token_ids, completion.logprobs, strict=True)
    return -sum(logprobs[t].logprob for t, logprobs in steps) / len(
        completion.token_ids
    )


def rendered(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(messages, return_dict=False)
    return ids


def keep(out: Path, setting: Setting, row: dict[str, Any]) -> None:
    """Append a row to a file, with the settings of its run."""
    with out.open("a") as file:
        file.write(json.dumps(asdict(setting) | row) + "\n")


def answers(setting: Setting, work: Job) -> Iterator[dict[str, Any]]:
    """Rows of one engine in a child process, as they arrive."""
    request = json.dumps([asdict(setting), work.config])
    return child_rows(__file__, request, work.label)


# -- tables ----------------------------------------------------------------------


def spread(values: list[float]) -> str:
    """Mean and its 95 % interval."""
    mean, low, high = mean_interval(values)
    return f"{mean:.3f} ({low:.3f}..{high:.3f})"


def table_of(rows: dict[str, list[dict[str, Any]]]) -> Table:
    """Means over questions, and differences to stock question by question."""
    table = Table("method", "questions", "F1", "nats", "nats above stock")
    full = {row["question"]: row["nats"] for row in rows.get("stock", [])}
    for label, method_rows in rows.items():
        above = [
            r["nats"] - full[r["question"]]
            for r in method_rows
            if r["question"] in full
        ]
        table.add_row(
            label,
            str(len(method_rows)),
            spread([row["f1"] for row in method_rows]),
            spread([row["nats"] for row in method_rows]),
            spread(above) if above and label != "stock" else "",
        )
    return table


def main(
    model: Annotated[str, typer.Argument()] = "",
    path: Annotated[str, typer.Argument(help="a file of LoCoMo")] = "",
    dialogue: int = 0,
    history_tokens: Annotated[int, typer.Option(help="tokens of the dialogue")] = 6000,
    questions: Annotated[int, typer.Option(help="maximum number")] = 30,
    budget: int = 1024,
    block: Annotated[int, typer.Option(help="tokens between compressions")] = 512,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help=f"default: {', '.join(METHODS)}; controls: {', '.join(CONTROLS)}; "
            f"retrieval: {', '.join(RETRIEVERS)}"
        ),
    ] = None,
    config: Annotated[
        str, typer.Option(help="settings of epicache for all methods, as JSON")
    ] = "{}",
    dtype: str = "bfloat16",
    out: Path = Path("locomo.jsonl"),
    child: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Ask questions about a dialogue under several policies."""
    if child:
        fields, config_json = json.loads(child)
        run_engine(Setting(**fields), Job(config_json))
        return
    if not model or not path:
        raise typer.BadParameter("give a MODEL and a file of LoCoMo")
    more = parsed(config)
    if more and set(method or METHODS) <= set(UNCONFIGURED):
        raise typer.BadParameter(
            f"--config {config}: it does not apply to {', '.join(method or [])}; "
            f"remove --config, or add a --method other than {', '.join(UNCONFIGURED)}"
        )
    setting = Setting(model, path, dialogue, history_tokens, questions, dtype)
    check(setting, method or [])
    console, rows = Console(), {}
    source = provenance()
    for name in method or METHODS:
        rows[name] = []
        for row in answers(setting, job(name, budget, block, more)):
            rows[name].append(row)
            facts = {"method": name, "budget": budget, "block": block}
            keep(out, setting, facts | row | source)
        console.print(f"{name:16} {spread([r['nats'] for r in rows[name]])}")
    console.print(table_of(rows))
    console.print_json(data=source)


if __name__ == "__main__":
    typer.run(main)
