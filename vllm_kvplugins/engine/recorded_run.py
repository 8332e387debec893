"""A recorded run: what retrieval fetched, as JSON Lines.

The first line is a :class:`Header`, every other line one :class:`Fetch`. This module
does not import torch, so that a run can be plotted without an engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from vllm_kvplugins.errors import KVPolicyError, coded

FORMAT = "kvplugins-retrieval-run"
VERSION = 1

_Line = TypeVar("_Line", "Header", "Fetch")


class RunFileError(KVPolicyError):
    """A file is not a recorded run, or it is damaged; the message says where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The model, the policy and the prompt of a recorded run.

    Attributes:
        model: as the user named it.
        config: all settings of the policy, as in --kv-policy-config.
        generated_tokens: includes the last one, whose KV was not computed.
        block_size: tokens per page.
        num_kv_heads: on this worker.
        token_bytes: key and value of one token, in one layer and KV head.
    """

    format: str = FORMAT
    version: int = VERSION
    model: str
    policy: str
    config: dict[str, Any]
    prompt_tokens: int
    generated_tokens: int
    block_size: int
    head_dim: int
    num_layers: int
    num_kv_heads: int
    token_bytes: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """The fetch of one request in one layer and step. Counts are over all KV heads.

    Attributes:
        step: number of the request's step; 0 is its first step that fetched.
        new_tokens: number of new tokens whose queries select: 1 in a decode step, up
            to 32 when a preempted request is recomputed or a request that continues a
            session prefills.
        offloaded_tokens: tokens on the host.
        hot_tokens: host tokens that are resident after the fetch; one per hot slot.
        fetched_tokens: tokens copied, because they were not resident.
        copied_bytes: bytes of their keys and values.
        mass_covered_share: share of the attention over the offloaded tokens that
            falls on the hot ones; see ``RetrievalLog``.
    """

    request: str
    step: int
    layer: int
    new_tokens: int
    offloaded_tokens: int
    hot_tokens: int
    fetched_tokens: int
    copied_bytes: int
    mass_covered_share: float


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A file's contents."""

    header: Header
    fetches: list[Fetch] = field(default_factory=list)


def lines_of(run: RecordedRun) -> Iterator[str]:
    """The file's lines."""
    lines: list[Header | Fetch] = [run.header, *run.fetches]
    for line in lines:
        yield json.dumps(asdict(line), ensure_ascii=False) + "\n"


def read_run(path: Path) -> RecordedRun:
    """Read a file of ``lines_of``.

    Raises:
        RunFileError: the file cannot be read, is of another kind or version, has a
            line that is cut off or incomplete, or contains no fetch.
    """
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise RunFileError(
            coded("KVP601", f"cannot read {path}: {error.strerror}; check the path")
        ) from error
    except UnicodeDecodeError as error:
        raise _other_format(path) from error
    try:
        first = json.loads(texts[0]) if texts else None
    except json.JSONDecodeError:
        first = None
    if not isinstance(first, dict) or first.get("format") != FORMAT:
        raise _other_format(path)
    if first.get("version") != VERSION:
        raise _damaged(
            f"{path} has version {first.get('version')!r} of the format, and this "
            f"program reads version {VERSION}"
        )
    header = _parse_line(Header, first, f"{path}, line 1")
    for name in ("block_size", "num_layers", "num_kv_heads"):
        if getattr(header, name) < 1:
            raise _damaged(f"{path}, line 1: {name} is {getattr(header, name)}")
    fetches = list(_fetches(texts[1:], header, path))
    if not fetches:
        raise _damaged(f"{path} contains no fetch")
    return RecordedRun(header, fetches)


def _other_format(path: Path) -> RunFileError:
    message = f"{path} is not a recorded run; `kvplugins research record` makes one"
    return RunFileError(coded("KVP607", message))


def _damaged(problem: str) -> RunFileError:
    return RunFileError(coded("KVP607", f"{problem}; record the run again"))


def _fetches(texts: Sequence[str], header: Header, path: Path) -> Iterator[Fetch]:
    for number, text in enumerate(texts, 2):
        where = f"{path}, line {number}"
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise _damaged(
                f"{where}: not JSON ({error.msg}), perhaps cut off"
            ) from error
        fetch = _parse_line(Fetch, values, where)
        if not 0 <= fetch.layer < header.num_layers:
            raise _damaged(
                f"{where}: layer is {fetch.layer}, of {header.num_layers} layers"
            )
        # Each step has at least one line.
        if not 0 <= fetch.step < len(texts):
            raise _damaged(
                f"{where}: step is {fetch.step}, but there are {len(texts)} fetches"
            )
        yield fetch


def _parse_line(kind: type[_Line], values: Any, where: str) -> _Line:
    """The object of a line as a ``Header`` or a ``Fetch``.

    Raises:
        RunFileError: a name or a type differs.
    """
    if not isinstance(values, dict):
        raise _damaged(f"{where}: not a JSON object")
    # Annotations are strings in this module. JSON may write a share of 1.0 as 1.
    types: dict[str, tuple[type, ...]] = {
        "int": (int,),
        "str": (str,),
        "float": (float, int),
        "dict[str, Any]": (dict,),
    }
    for item in fields(kind):
        value = values.get(item.name)
        if not isinstance(value, types[str(item.type)]) or isinstance(value, bool):
            raise _damaged(f"{where}: {item.name} is {value!r}, not {item.type}")
    return kind(**{item.name: values[item.name] for item in fields(kind)})
