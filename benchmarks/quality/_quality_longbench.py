"""LongBench: its published rows with its published prompts and metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _quality_files import json_rows, need
from _quality_samples import Sample, Setting, TaskError, Tokens

_QA = ("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique")
METRIC_OF: dict[str, str] = {
    **dict.fromkeys((*_QA, "triviaqa"), "word_f1"),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news", "samsum"), "rouge_l"),
    **dict.fromkeys(("trec", "lsht"), "classes"),
    **dict.fromkeys(("passage_retrieval_en", "passage_retrieval_zh"), "paragraph"),
    "passage_count": "counted",
    **dict.fromkeys(("lcc", "repobench-p"), "code"),
}
# Their metrics split Chinese into words; LongBench uses a package (jieba) for that.
CHINESE = ("multifieldqa_zh", "dureader", "vcsum")
# tasks to continue as plain text (worked examples, code); the others use a chat
NO_CHAT = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")
# for these only the first line of the answer counts
FIRST_LINE = ("trec", "triviaqa", "samsum", "lsht")


def longbench(setting: Setting, tokens: Tokens) -> Iterator[Sample]:
    """Rows of one LongBench dataset; too long contexts lose their middle."""
    path = need(setting, "longbench")
    folder = need(setting, "longbench_config")
    fields = ("input", "context", "answers", "dataset")
    rows = json_rows(path, fields)[: setting.limit]
    for number, row in enumerate(rows):
        name = row["dataset"].removesuffix("_e")
        if name in CHINESE:
            raise TaskError(
                f"{name} is scored by Chinese words, which are not cut here"
            )
        if name not in METRIC_OF:
            raise TaskError(f"{path}, row {number}: no LongBench dataset {name!r}")
        yield _sample(name, number, row, folder, setting, tokens)


def _sample(
    name: str,
    number: int,
    row: dict[str, Any],
    folder: Path,
    setting: Setting,
    tokens: Tokens,
) -> Sample:
    written = _config(folder / "dataset2prompt.json", name).format(**row)
    text = tokens.without_middle(written, setting.max_prompt_tokens)
    message = {"role": "user", "content": text}
    chat = name not in NO_CHAT
    return Sample(
        task=f"longbench:{name}",
        name=str(row.get("_id", number)),
        metric=METRIC_OF[name],
        truths=tuple(row["answers"]),
        prompt="" if chat else text,
        messages=(message,) if chat else (),
        max_tokens=_config(folder / "dataset2maxlen.json", name),
        classes=tuple(row.get("all_classes") or ()),
        first_line=name in FIRST_LINE,
    )


def _config(path: Path, name: str) -> Any:
    """LongBench's settings of a dataset."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))[name]
    except (OSError, ValueError, KeyError) as error:
        raise TaskError(f"{path} says nothing about {name}: {error}") from error
