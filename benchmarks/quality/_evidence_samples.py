"""Samples of ``evidence.py``: two-turn conversations, and texts to continue.

Every policy gets the same tokens. The text is the first turn and the question is the
second one, so that policies for conversations work as intended.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from _documents import read_documents
from _quality_needles import multikey, passkey
from _quality_ruler import common_words, multiquery, multivalue, variables
from _quality_samples import Sample, Setting, TaskError, Tokens

PASSKEY, MULTIKEY, KL = "passkey", "multikey", "kl"
TASKS = (PASSKEY, MULTIKEY, KL)
# Not in the tables of all policies: what `auto` chooses by must not be what tests it.
RULER = {
    "multivalue": multivalue,
    "multiquery": multiquery,
    "variables": variables,
    "common_words": common_words,
}
FORCED_TOKENS = 32
READ = "I have read the text."
# Tokens at the end of a text that belong to no finished turn, like a question.
OPEN_TOKENS = 64
PATCHED_TOKENS = 128


def setting_of(
    model: str, texts: Path, dtype: str, samples: int, tokens: int = 2000, seed: int = 0
) -> Setting:
    """The setting of all tasks: contexts of this many tokens, from these texts."""
    return Setting(
        model=model,
        dtype=dtype,
        seed=seed,
        limit=samples,
        tokens=tokens,
        lengths=(tokens,),
        depths=samples,
        keys=16,
        questions=4,
        shots=0,
        fillers=0,
        max_prompt_tokens=0,
        haystack=str(texts),
        documents=str(texts),
    )


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request.

    Attributes:
        sample: the question; its ``truths`` and ``max_tokens`` hold. None for a text.
        name: unique within the task.
        group: samples that share a context.
        token_ids: the whole prompt.
        turn_end: tokens up to the end of the first turn.
        forced: tokens that the answer must consist of; empty for a question.
    """

    task: str
    name: str
    group: str
    token_ids: tuple[int, ...]
    turn_end: int
    sample: Sample | None = None
    forced: tuple[int, ...] = ()

    @property
    def patched_prompt(self) -> list[int]:
        """Tokens that stand for the conversation, for policies that need some.

        EpiCache uses the segments of an episode that are closest to its center. Here
        the only episode is the text, and its start stands for it.
        """
        return list(self.token_ids[: min(PATCHED_TOKENS, self.turn_end)])


def prompts_of(setting: Setting, tasks: Sequence[str]) -> list[Prompt]:
    """All prompts of these tasks; the same setting gives the same prompts.

    Raises:
        TaskError: the texts are too short.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(setting.model)
    makers = {
        PASSKEY: lambda: _questions(_shuffled(setting), tokenizer, passkey),
        MULTIKEY: lambda: _questions(setting, tokenizer, multikey),
        KL: lambda: _texts(setting, tokenizer),
    } | {
        name: partial(_questions, setting, tokenizer, task)
        for name, task in RULER.items()
    }
    return [prompt for task in tasks for prompt in makers[task]()]


def _shuffled(setting: Setting) -> Setting:
    """Pass keys at as many depths as there are samples."""
    return replace(setting, depths=setting.limit)


def _questions(setting: Setting, tokenizer: Any, task: Any) -> Iterator[Prompt]:
    for sample in task(setting, Tokens(tokenizer)):
        yield conversation(sample, tokenizer)


def conversation(sample: Sample, tokenizer: Any) -> Prompt:
    """The sample as two turns: the text, and the question about it."""
    content = sample.messages[0]["content"]
    start = content.rindex("\n")  # the question is the last line
    turn = [
        {"role": "user", "content": content[:start].rstrip()},
        {"role": "assistant", "content": READ},
    ]
    talk = [*turn, {"role": "user", "content": content[start:].strip()}]
    if sample.opening:
        talk.append({"role": "assistant", "content": sample.opening})

    def render(messages: list[dict[str, str]], **options: Any) -> list[int]:
        ids = tokenizer.apply_chat_template(messages, return_dict=False, **options)
        return list(ids)

    ids = render(
        talk,
        add_generation_prompt=not sample.opening,
        continue_final_message=bool(sample.opening),
    )
    first = render(turn)
    # A template may add text after the last message only.
    shared = next(
        (i for i, (a, b) in enumerate(zip(first, ids, strict=False)) if a != b),
        min(len(first), len(ids)),
    )
    group = sample.group or sample.name
    return Prompt(sample.task, sample.name, group, tuple(ids), shared, sample)


def _texts(setting: Setting, tokenizer: Any) -> Iterator[Prompt]:
    """Windows of the user's texts, each with the tokens that really follow."""
    documents = read_documents(Path(setting.documents or setting.haystack))
    random.Random(setting.seed).shuffle(documents)
    length = setting.tokens + FORCED_TOKENS
    encoded = [(each.name, tokenizer.encode(each.text)) for each in documents]
    chosen = list(windows(encoded, length))[: setting.limit]
    if len(chosen) < setting.limit:
        raise TaskError(f"--texts: only {len(chosen)} windows of {length} tokens")
    for group, name, ids in chosen:
        yield Prompt(
            task=KL,
            name=name,
            group=group,
            token_ids=tuple(ids[: setting.tokens]),
            turn_end=setting.tokens - OPEN_TOKENS,
            forced=tuple(ids[setting.tokens :]),
        )


def windows(
    documents: Sequence[tuple[str, list[int]]], length: int
) -> Iterator[tuple[str, str, list[int]]]:
    """Disjoint windows, first ones first: document, name and tokens of each."""
    longest = max((len(ids) for _, ids in documents), default=0)
    for number in range(longest // length):
        start = number * length
        for name, ids in documents:
            if len(ids) >= start + length:
                yield name, f"{name}#{number}", ids[start : start + length]


def reference_file(folder: Path, name: str) -> Path:
    """Stock's log-probabilities of a text."""
    return folder / f"{name.replace('/', '_').replace(':', '_')}.npy"


def order(prompts: Sequence[Prompt], seed: int) -> list[Prompt]:
    """A fixed random order, so that an interrupted run has samples of every task."""
    shuffled = list(prompts)
    random.Random(seed).shuffle(shuffled)
    return shuffled
