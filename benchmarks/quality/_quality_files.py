"""Tasks from published files: RULER, GSM8K, LongGenBench, PrefEval and LoCoMo."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import locomo as locomo_files
from _dialogue import filler
from _quality_samples import Sample, Setting, TaskError, Tokens

# answer length in tokens, by prefix of a RULER task's name
RULER_ANSWERS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
# instruction for LongGenBench's questions about GSM8K
LONG_SYSTEM = (
    "Answer all questions step by step, in order and in the format of the examples: "
    "begin each answer with its name and end it with 'The answer is'. Do not repeat "
    "the questions."
)
BY_STEPS = (
    "Think step by step, and explain each step. End with a line of the form "
    "'#### number'."
)
NOTED = "Thank you for telling me, I will keep that in mind."
CHOOSE = "{question}\n{options}\nWhich of these suits me best? Say its letter only."
REPEAT = "What did I tell you about myself at the beginning? Repeat it word by word."
# tokens for a question and the text around a dialogue
LOCOMO_ROOM = 128
LETTERS = "ABCDEFGHIJ"


def need(setting: Setting, name: str) -> Path:
    """The file or folder of a task.

    Raises:
        TaskError: the option is missing, or the path does not exist.
    """
    value = getattr(setting, name)
    option = "--" + name.replace("_", "-")
    if not value:
        raise TaskError(f"give {option}")
    path = Path(value)
    if not path.exists():
        raise TaskError(f"{option}: {path} does not exist")
    return path


def json_rows(path: Path, fields: tuple[str, ...]) -> list[dict[str, Any]]:
    """Rows of a JSON or JSONL file.

    Raises:
        TaskError: the file is unreadable, or a row lacks a field.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            rows = json.loads(text)
        else:
            rows = [json.loads(line) for line in text.split("\n") if line.strip()]
    except (OSError, ValueError) as error:
        raise TaskError(f"{path} cannot be read: {error}") from error
    for number, row in enumerate(rows):
        missing = [field for field in fields if field not in row]
        if missing:
            raise TaskError(f"{path}, row {number} lacks {', '.join(missing)}")
    return list(rows)


def ruler(setting: Setting, tokens: Tokens) -> Iterator[Sample]:
    """Rows of a RULER task with its base template: texts to continue."""
    path = need(setting, "ruler")
    task = path.stem
    for row in json_rows(path, ("index", "input", "outputs"))[: setting.limit]:
        count = tokens.count(row["input"])
        if count > setting.max_prompt_tokens:
            raise TaskError(
                f"{path}, row {row['index']} has {count} tokens; raise "
                f"--max-prompt-tokens {setting.max_prompt_tokens}"
            )
        yield Sample(
            task=f"ruler:{task}",
            name=str(row["index"]),
            metric="contains_any" if task.startswith("qa") else "contains",
            truths=tuple(row["outputs"]),
            prompt=row["input"],
            max_tokens=next(
                (n for name, n in RULER_ANSWERS.items() if task.startswith(name)), 128
            ),
        )


# -- GSM8K ----------------------------------------------------------------------------


def _drawn(setting: Setting) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Worked examples and questions, shuffled by the seed."""
    path = need(setting, "gsm8k")
    rows = json_rows(path, ("question", "answer"))
    random.Random(f"gsm8k {setting.seed}").shuffle(rows)
    if len(rows) <= setting.shots:
        raise TaskError(
            f"{path} has {len(rows)} rows, too few for --shots {setting.shots}"
        )
    return rows[: setting.shots], rows[setting.shots :]


def gsm8k(setting: Setting, tokens: Tokens) -> Iterator[Sample]:
    """A question after many worked examples, which all questions share.

    Without examples it is a chat that asks for the steps, so that most of the cache is
    the model's own answer.
    """
    shots, questions = _drawn(setting)
    if not shots:
        yield from _reasoned(questions[: setting.limit], setting.answer_tokens)
        return
    shown = "".join(
        f"Question: {row['question']}\nAnswer: {row['answer']}\n\n" for row in shots
    )
    for number, row in enumerate(questions[: setting.limit]):
        yield Sample(
            task="gsm8k",
            name=str(number),
            metric="same_number",
            truths=(row["answer"],),
            prompt=f"{shown}Question: {row['question']}\nAnswer:",
            max_tokens=256,
            stop=("Question:",),
        )


def _reasoned(questions: list[dict[str, str]], most_tokens: int) -> Iterator[Sample]:
    for number, row in enumerate(questions):
        yield Sample(
            task="gsm8k",
            name=str(number),
            metric="same_number",
            truths=(row["answer"],),
            messages=(_said("user", f"{row['question']}\n\n{BY_STEPS}"),),
            max_tokens=most_tokens,
        )


def longgen_gsm8k(setting: Setting, tokens: Tokens) -> Iterator[Sample]:
    """Several questions in one prompt, answered one after the other (LongGenBench,
    arXiv:2410.04199).

    The model's own answers fill the cache.
    """
    shots, questions = _drawn(setting)
    each = setting.questions
    shown = "\n".join(
        f"Question_{i}:\n{row['question']}\nAnswer_{i}:\n{_worked(row['answer'])}\n"
        for i, row in enumerate(shots, 1)
    )
    for number in range(setting.limit):
        rows = questions[number * each : (number + 1) * each]
        if len(rows) < each:
            return
        first = len(shots) + 1
        numbered = "".join(
            f"Question_{i}:\n{row['question']}\n" for i, row in enumerate(rows, first)
        )
        text = f"Examples:\n{shown}\n\nFollowing questions:\n{numbered}"
        yield Sample(
            task="longgen_gsm8k",
            name=str(number),
            metric="numbers_in_order",
            truths=tuple(row["answer"] for row in rows),
            messages=(_said("system", LONG_SYSTEM), _said("user", text)),
            max_tokens=min(192 * each, setting.answer_tokens),
            place={"first": first, "questions": each},
        )


def _worked(answer: str) -> str:
    steps, _, last = answer.rpartition("####")
    return f"{steps.strip()} The answer is {last.strip()}."


def longgenbench(setting: Setting, tokens: Tokens) -> Iterator[Sample]:
    """Instructions for a text of many numbered parts (LongGenBench, arXiv:2409.02076).

    The score is the share of parts that exist, limited to the number that fits into
    ``answer_tokens``. Their contents are not scored, as this needs a judge model.
    """
    path = need(setting, "longgenbench")
    rows = json_rows(path, ("prompt", "type", "number"))[: setting.limit]
    for number, row in enumerate(rows):
        yield Sample(
            task="longgenbench",
            name=str(number),
            metric="parts",
            truths=(str(row["number"]),),
            prompt=row["prompt"],
            max_tokens=setting.answer_tokens,
            stop=("*** finished",),
            place={"type": row["type"]},
        )


# -- conversations ------------------------------------------------------------------


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def prefeval(setting: Setting, tokens: Tokens) -> Iterator[Sample]:
    """A preference, turns about other topics, and a question that depends on it.

    Rows with ``options`` (PrefEval's choice-based form) are answered with a letter.
    Others ask for the preference itself, because their own questions need a judge
    model.
    """
    path = need(setting, "prefeval")
    files = sorted(path.rglob("*.json")) if path.is_dir() else [path]
    rows = [
        (f"{file.stem} {number}", row)
        for file in files
        for number, row in enumerate(json_rows(file, ("preference",)))
    ]
    random.Random(f"prefeval {setting.seed}").shuffle(rows)
    for name, row in rows[: setting.limit]:
        rng = random.Random(f"{setting.seed} {name}")
        messages = [_said("user", row["preference"]), _said("assistant", NOTED)]
        for _ in range(setting.fillers):
            user, assistant = filler(rng, 12)
            messages += [_said("user", user), _said("assistant", assistant)]
        yield _about_preference(name, row, messages, rng)


def _about_preference(
    name: str, row: dict[str, Any], messages: list[dict[str, str]], rng: random.Random
) -> Sample:
    if "options" not in row:
        return Sample(
            task="prefeval:repeat",
            name=name,
            metric="word_f1",
            truths=(row["preference"],),
            messages=(*messages, _said("user", REPEAT)),
            max_tokens=64,
        )
    options = rng.sample(row["options"], len(row["options"]))
    if row["aligned_op"] not in options:
        raise TaskError(f"{name}: aligned_op is none of its options")
    lines = [f"{a}. {o}" for a, o in zip(LETTERS, options, strict=False)]
    question = CHOOSE.format(question=row["implicit_query"], options="\n".join(lines))
    return Sample(
        task="prefeval:choice",
        name=name,
        metric="letter",
        truths=(LETTERS[options.index(row["aligned_op"])],),
        messages=(*messages, _said("user", question)),
        opening="Letter:",
        max_tokens=8,
    )


def locomo(setting: Setting, tokens: Tokens) -> Iterator[Sample]:
    """Questions about the beginning of each dialogue, cut to the maximum length."""
    path = need(setting, "locomo")
    try:
        dialogues = len(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise TaskError(f"{path} cannot be read: {error}") from error
    per_dialogue = [
        sample
        for dialogue in range(dialogues)
        for sample in _of_dialogue(setting, path, dialogue, tokens)
    ]
    # the first question of each dialogue, then the second of each …
    yield from sorted(per_dialogue, key=lambda s: s.place["question"])[: setting.limit]


def _of_dialogue(
    setting: Setting, path: Path, dialogue: int, tokens: Tokens
) -> Iterator[Sample]:
    options = locomo_files.Setting(
        setting.model,
        str(path),
        dialogue,
        setting.max_prompt_tokens - LOCOMO_ROOM,
        setting.limit,
        setting.dtype,
    )
    history, questions = locomo_files.excerpt(options, tokens.count)
    for number, question in enumerate(questions):
        yield Sample(
            task="locomo",
            name=f"dialogue {dialogue}, question {number}",
            metric="locomo_f1",
            truths=(question.answer,),
            messages=(*history, _said("user", locomo_files.ASK.format(question.text))),
            max_tokens=locomo_files.MAX_TOKENS,
            group=f"dialogue {dialogue}",
            place={"category": question.category, "question": number},
        )
