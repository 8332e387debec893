"""Samples of a quality run, and the settings that determine them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

# Settings that are paths. The header identifies a file by its contents, not its path.
PATHS = (
    *("haystack", "ruler", "longbench", "longbench_config", "locomo", "gsm8k"),
    *("longgenbench", "prefeval", "documents"),
)


class TaskError(ValueError):
    """The user's options or files do not suffice for a task."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One question to a model.

    Attributes:
        task: e.g. ``passkey``, ``longbench:multi_news``.
        name: unique within its task.
        metric: a name in ``_quality_metrics.METRICS``.
        truths: answers that count as right.
        prompt: text to continue; "" for a chat.
        messages: of a chat; the last one is the user's.
        opening: forced start of the answer, in a chat.
        max_tokens: of the answer.
        stop: texts that end the answer.
        group: samples that share a context; bootstrap draws them together.
        classes: the classes that ``truths`` come from, if there are any.
        first_line: whether only the answer's first line counts.
        place: keys for sorting a report, such as depth and length.
    """

    task: str
    name: str
    metric: str
    truths: tuple[str, ...]
    prompt: str = ""
    messages: tuple[dict[str, str], ...] = ()
    opening: str = ""
    max_tokens: int = 32
    stop: tuple[str, ...] = ()
    group: str = ""
    classes: tuple[str, ...] = ()
    first_line: bool = False
    place: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything that determines samples and answers, except the policy.

    Attributes:
        tokens: length of a generated context.
        lengths, depths: of the needle grid; the pass key uses the depths too.
        limit: maximum samples of every other task. A larger limit only adds samples, so
            two runs may differ in it.
        keys, questions: pairs in a context of ``multikey``, and questions about them.
        answer_tokens: maximum length of answers that are long by design.
        shots: worked examples before a question of GSM8K.
        fillers: turns between a preference and the question about it.
        haystack: text to plant keys in; "" is repeated filler.
    """

    model: str
    dtype: str
    seed: int
    limit: int
    tokens: int
    lengths: tuple[int, ...]
    depths: int
    keys: int
    questions: int
    shots: int
    fillers: int
    max_prompt_tokens: int
    answer_tokens: int = 1024
    block_size: int = 32
    haystack: str = ""
    ruler: str = ""
    longbench: str = ""
    longbench_config: str = ""
    locomo: str = ""
    gsm8k: str = ""
    longgenbench: str = ""
    prefeval: str = ""
    documents: str = ""

    def header(self) -> dict[str, Any]:
        """The settings that two runs must share for their rows to be comparable."""
        header: dict[str, Any] = {}
        for one in fields(self):
            if one.name == "limit":
                continue
            value = getattr(self, one.name)
            if one.name in PATHS:
                value = fingerprint(Path(value)) if value else ""
            elif one.name == "model":
                value = Path(value).name
            header[one.name] = list(value) if isinstance(value, tuple) else value
        return header


def fingerprint(path: Path) -> str:
    """Name and content hash of a file or folder.

    Raises:
        TaskError: the path does not exist.
    """
    if not path.exists():
        raise TaskError(f"{path} does not exist")
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode())
        digest.update(file.read_bytes())
    return f"{path.name} {digest.hexdigest()[:12]}"


class Tokens:
    """Counts and cuts texts by a model's tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def of(cls, model: str) -> Tokens:
        """The tokenizer of a model's folder or id."""
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(model))

    def count(self, text: str) -> int:
        """Tokens of a text, without special ones."""
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def prompt(self, sample: Sample) -> int:
        """Length of a sample's prompt in tokens, including the chat template."""
        if not sample.messages:
            return len(self._tokenizer.encode(sample.prompt))
        talk = [*sample.messages]
        if sample.opening:
            talk.append({"role": "assistant", "content": sample.opening})
        ids = self._tokenizer.apply_chat_template(
            talk,
            add_generation_prompt=not sample.opening,
            continue_final_message=bool(sample.opening),
            return_dict=False,
        )
        return len(ids)

    def first(self, text: str, count: int) -> str:
        """The first ``count`` tokens of a text."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return str(self._tokenizer.decode(ids[:count]))

    def without_middle(self, text: str, max_tokens: int) -> str:
        """Start and end of a text that is too long, as LongBench cuts it."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        if len(ids) <= max_tokens:
            return text
        half = max_tokens // 2
        parts = (ids[:half], ids[len(ids) - half :])
        return "".join(
            self._tokenizer.decode(part, skip_special_tokens=True) for part in parts
        )
