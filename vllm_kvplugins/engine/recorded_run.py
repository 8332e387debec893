"""A recorded run: what retrieval fetched, as JSON Lines.

The first line is a :class:`Header`, every other line one :class:`Fetch`. Needs no
torch, so that a run can be looked at where no engine is installed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

FORMAT = "kvplugins-retrieval-run"
VERSION = 1

_Line = TypeVar("_Line", "Header", "Fetch")


class RunFileError(ValueError):
    """A file is not a recorded run, or a broken one; the message says where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What ran.

    Attributes:
        model: as the user named it.
        config: all settings of the policy, as a user writes them.
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
    """One request in one layer of one step. Counts are over all KV heads.

    Attributes:
        step: of this request, from 0: the first one that fetched.
        new_tokens: whose queries asked; 1 when decoding, more (32 at most) where a
            preempted request is recomputed or a continued one reads its prompt.
        offloaded_tokens: on the host.
        hot_tokens: resident of these after the fetch, as many as hot slots.
        fetched_tokens: copied for it because they were not resident.
        copied_bytes: the same in bytes, keys and values.
        mass_covered_share: of the attention over the offloaded tokens, what falls
            on the hot ones; see ``RetrievalLog``.
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
    """Read a file that ``lines_of`` made.

    Raises:
        RunFileError: no such file, another kind of file, another version, a line
            that is cut off or lacks something, or no fetch at all.
    """
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise RunFileError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RunFileError(_foreign(path)) from error
    try:
        first = json.loads(texts[0]) if texts else None
    except json.JSONDecodeError:
        first = None
    if not isinstance(first, dict) or first.get("format") != FORMAT:
        raise RunFileError(_foreign(path))
    if first.get("version") != VERSION:
        raise RunFileError(
            f"{path} has version {first.get('version')!r} of the format, this program "
            f"reads {VERSION}; record the run again"
        )
    header = _line(Header, first, f"{path}, line 1")
    if min(header.block_size, header.num_layers, header.num_kv_heads) < 1:
        raise RunFileError(f"{path}, line 1: a cache without pages, layers or heads")
    fetches = list(_fetches(texts[1:], header, path))
    if not fetches:
        raise RunFileError(f"{path} holds no fetch; record the run again")
    return RecordedRun(header, fetches)


def _foreign(path: Path) -> str:
    return f"{path} is not a recorded run; `kvplugins record` makes one"


def _fetches(texts: Sequence[str], header: Header, path: Path) -> Iterator[Fetch]:
    for number, text in enumerate(texts, 2):
        where = f"{path}, line {number}"
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise RunFileError(f"{where}: not JSON ({error.msg}); cut off?") from error
        fetch = _line(Fetch, found, where)
        # steps are counted from 0, so that none can exceed the number of lines
        known = 0 <= fetch.layer < header.num_layers and 0 <= fetch.step < len(texts)
        if not known:
            raise RunFileError(
                f"{where}: there is no layer {fetch.layer} or no step {fetch.step}"
            )
        yield fetch


def _line(kind: type[_Line], found: Any, where: str) -> _Line:
    """A line's object as one of the classes above.

    Raises:
        RunFileError: a name or a type differs.
    """
    if not isinstance(found, dict):
        raise RunFileError(f"{where}: not an object")
    # annotations are text here; a mass of exactly 1 may have been written as 1
    types: dict[str, tuple[type, ...]] = {
        "int": (int,),
        "str": (str,),
        "float": (float, int),
        "dict[str, Any]": (dict,),
    }
    for item in fields(kind):
        value = found.get(item.name)
        if not isinstance(value, types[str(item.type)]) or isinstance(value, bool):
            raise RunFileError(f"{where}: {item.name} is {value!r}, not {item.type}")
    return kind(**{item.name: found[item.name] for item in fields(kind)})
