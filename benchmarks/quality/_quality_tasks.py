"""The tasks of ``quality.py`` by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from _quality_files import (
    gsm8k,
    locomo,
    longgen_gsm8k,
    longgenbench,
    prefeval,
    ruler,
)
from _quality_longbench import longbench
from _quality_needles import multikey, needle, passkey
from _quality_ruler import common_words, multiquery, multivalue, variables
from _quality_samples import Sample, Setting, TaskError, Tokens

TASKS: dict[str, Callable[[Setting, Tokens], Iterable[Sample]]] = {
    "passkey": passkey,
    "multikey": multikey,
    "multivalue": multivalue,
    "multiquery": multiquery,
    "variables": variables,
    "common_words": common_words,
    "needle": needle,
    "ruler": ruler,
    "longbench": longbench,
    "locomo": locomo,
    "gsm8k": gsm8k,
    "longgen_gsm8k": longgen_gsm8k,
    "longgenbench": longgenbench,
    "prefeval": prefeval,
}


def samples_of(setting: Setting, tasks: Sequence[str]) -> list[Sample]:
    """All samples of these tasks; the same setting gives the same samples.

    Raises:
        TaskError: a task lacks its file, or the file is malformed.
    """
    if not tasks:
        return []
    tokens = Tokens.of(setting.model)
    samples = []
    for task in tasks:
        task_samples = list(TASKS[task](setting, tokens))
        if not task_samples:
            raise TaskError(f"{task} has no samples")
        if len({(sample.task, sample.name) for sample in task_samples}) < len(
            task_samples
        ):
            raise TaskError(f"{task} has two samples of one name")
        samples += task_samples
    return samples
