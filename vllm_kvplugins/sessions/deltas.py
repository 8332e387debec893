"""Session files that store only the tokens that earlier files do not have.

::

    turn 1   file a    every slot of its pages
    turn 2   file b    slots of new tokens; for all others: (a, slot in a)
    turn 3   file c    slots of new tokens; for all others: (a, slot) or (b, slot)

A compaction moves kept tokens to other slots and pages, but changes no key or value. So
the unit is one token of one KV head. A request that restored the first ``n`` tokens of
a session has, at each of these positions, the key and the value that the session's
files have.

A file refers to at most ``MAX_FILES`` files, itself included, and never to a file
through another one. Together they store at most ``_MAX_GROWTH`` times what a whole file
would: earlier files also have tokens that were dropped since. Otherwise the session is
written whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from vllm_kvplugins.plan.residency_plan import Compaction
from vllm_kvplugins.sessions.page_tokens import (
    PageFormat,
    PartSlots,
    bits,
    finish_pages,
    put_tokens,
    shared_slots,
    take_tokens,
)

MAX_FILES = 8
# A file that stores more than this share of its session's tokens is written whole:
# reading it does not need other files, and these may be deleted.
_MAX_SHARE = 0.75
_MAX_GROWTH = 3

_UNUSED = 255  # in ``PartOrigin.file``
_OWN = "own"
PAGES = ("zone", "tail")  # names in whole files, in the order of slots

FileContents = tuple[Mapping[str, str], Mapping[str, torch.Tensor]]


class FileRef(NamedTuple):
    """A session file of the same rank. A file is never rewritten.

    Attributes:
        page_bytes: of the keys and values that it stores.
    """

    session_id: str
    digest: str
    page_bytes: int


@dataclass(frozen=True, slots=True)
class PartOrigin:
    """Where files have the slots of one part, in the order of its stored pages.

    Attributes:
        file: uint8 [slots], index in ``Origins.files``; 255: the slot is unused.
        place: int32 [slots], among the slots that this file stores.
    """

    file: torch.Tensor
    place: torch.Tensor


@dataclass(frozen=True, slots=True)
class Origins:
    """The files of a session.

    Attributes:
        files: the last one is its own, and may be the only one.
        parts: None: the session's own file stores every slot.
        first_written: when the oldest of them was written, seconds since the epoch.
    """

    files: tuple[FileRef, ...]
    parts: tuple[PartOrigin, ...] | None
    first_written: float

    @property
    def session_id(self) -> str:
        """Of the session."""
        return self.files[-1].session_id

    @property
    def sources(self) -> tuple[str, ...]:
        """Sessions whose files it needs, besides its own."""
        return tuple(file.session_id for file in self.files[:-1])


@dataclass(slots=True)
class FileRecord:
    """What is known of the file of a session in memory.

    Attributes:
        origins: None: there is no file, or not yet. A thread that writes sets it.
    """

    origins: Origins | None = None


@dataclass(frozen=True, slots=True)
class Lineage:
    """The saved tokens with which a request began.

    Attributes:
        file: of the session that it continues.
        tokens: how many it restored.
        saved_tokens, compaction, parts: of the session.
    """

    file: FileRecord
    tokens: int
    saved_tokens: int
    compaction: Compaction | None
    parts: tuple[PartSlots, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """The contents of a file that needs earlier ones.

    Attributes:
        tensors: instead of the pages.
        files: earlier files.
        parts: see ``Origins``; the own file comes after ``files``.
        first_written: of ``files``.
    """

    tensors: dict[str, torch.Tensor]
    files: tuple[FileRef, ...]
    parts: tuple[PartOrigin, ...]
    first_written: float


def name_of(key: str, part: int) -> str:
    """The name of a tensor of a part in a file."""
    return f"{key}.{part}" if part else key  # files without a drafter have one part


def page_bytes_of(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes of the keys and values in a file of either kind."""
    kinds = (_OWN, *PAGES)
    return sum(t.nbytes for name, t in tensors.items() if name.split(".")[0] in kinds)


# -- writing ---------------------------------------------------------------------------


def delta_of(
    compaction: Compaction | None,
    tokens: int,
    parts: Sequence[tuple[PartSlots, torch.Tensor, torch.Tensor]],
    formats: Sequence[PageFormat],
    lineage: Lineage,
) -> Delta | None:
    """What a session's file stores if earlier files are there.

    Args:
        compaction, tokens: of the session.
        parts: its slots, and the stored pages of its retained region and behind it.
        formats: of the pages of each part.
        lineage: the session that it continues, which has a file.

    Returns:
        None: most of it is new, or it would need too many files.

    Cost: sorts the tokens of both sessions, and copies the new ones once.
    """
    origins = lineage.file.origins
    assert origins is not None, "it has no file"
    if len(origins.files) >= MAX_FILES:
        return None
    found = [
        _found(slots, compaction, tokens, form.block_size, lineage, index)
        for index, ((slots, _, _), form) in enumerate(zip(parts, formats, strict=True))
    ]
    own, used = len(origins.files), [part.file != _UNUSED for part in found]
    num_own = sum(int((part.file == own).sum()) for part in found)
    if num_own > _MAX_SHARE * sum(int(each.sum()) for each in used):
        return None
    needed = sorted({int(i) for part in found for i in part.file.unique()} - {_UNUSED})
    files = tuple(origins.files[i] for i in needed if i < own)
    whole_bytes = sum(pages.nbytes for _, *both in parts for pages in both)
    if sum(file.page_bytes for file in files) > (_MAX_GROWTH - 1) * whole_bytes:
        return None
    new_index = torch.full((_UNUSED + 1,), _UNUSED, dtype=torch.uint8)
    new_index[[i for i in needed if i < own]] = torch.arange(
        len(files), dtype=torch.uint8
    )
    new_index[own] = len(files)
    tensors: dict[str, torch.Tensor] = {}
    renumbered = []
    for index, part in enumerate(found):
        _, retained, tail = parts[index]
        slots = (part.file == own).nonzero().flatten()
        tensors[name_of("file", index)] = new_index[part.file.long()]
        tensors[name_of("place", index)] = part.place
        tensors[name_of(_OWN, index)] = take_tokens(
            (retained, tail), slots, formats[index]
        )
        renumbered.append(PartOrigin(tensors[name_of("file", index)], part.place))
    return Delta(tensors, files, tuple(renumbered), origins.first_written)


def _found(
    slots: PartSlots,
    compaction: Compaction | None,
    tokens: int,
    block_size: int,
    lineage: Lineage,
    index: int,
) -> PartOrigin:
    """Which slots of a part earlier files have; the own file has all others."""
    origins = lineage.file.origins
    assert origins is not None
    keys = slots.keys(compaction, tokens, block_size)
    earlier = lineage.parts[index].keys(
        lineage.compaction, lineage.saved_tokens, block_size
    )
    is_there, slot = shared_slots(keys, earlier, lineage.tokens)
    own = len(origins.files)
    file = torch.full(keys.shape, own, dtype=torch.uint8)
    place = torch.zeros(keys.shape, dtype=torch.int32)
    if origins.parts is None:
        file[is_there], place[is_there] = own - 1, slot.int()
    else:
        known = origins.parts[index]
        file[is_there], place[is_there] = known.file[slot], known.place[slot]
    file[keys < 0] = _UNUSED
    new = file == own
    place[new] = torch.arange(int(new.sum()), dtype=torch.int32)
    return PartOrigin(file, place)


# -- reading ---------------------------------------------------------------------------


def packed_refs(files: Sequence[FileRef]) -> str:
    """References as a text."""
    return json.dumps(files)


def unpacked_refs(text: str) -> tuple[FileRef, ...]:
    """References of a text.

    Raises:
        ValueError, TypeError: it is not one.
    """
    refs = tuple(
        FileRef(str(name), str(digest), int(page_bytes))
        for name, digest, page_bytes in json.loads(text)
    )
    if not 0 < len(refs) < MAX_FILES:
        raise ValueError(f"it needs {len(refs)} other files")
    return refs


def whole_pages(
    tensors: Mapping[str, torch.Tensor],
    files: Sequence[FileRef],
    formats: Sequence[PageFormat],
    read: Callable[[FileRef], FileContents],
) -> tuple[dict[str, torch.Tensor], tuple[PartOrigin, ...]]:
    """The pages of a session whose file needs others.

    Args:
        tensors: of its own file.
        files: the others.
        read: reads and checks one of them.

    Returns:
        Stored pages by their names in whole files, and where its slots are.

    Raises:
        ValueError, KeyError, IndexError, RuntimeError: the files do not fit together.

    Cost: copies each token once. One other file at a time is in memory.
    """
    origins = tuple(
        PartOrigin(tensors[name_of("file", i)], tensors[name_of("place", i)])
        for i in range(len(formats))
    )
    pages = [
        _empty_pages(tensors, origin, form, i, len(files))
        for i, (origin, form) in enumerate(zip(origins, formats, strict=True))
    ]
    for number in range(len(files) + 1):
        contents = tensors if number == len(files) else read(files[number])[1]
        for i, form in enumerate(formats):
            slots = (origins[i].file == number).nonzero().flatten()
            places = origins[i].place[slots].long()
            _fill(pages[i], slots, form, contents, places, i)
        del contents  # before the next file is read
    for each, form in zip(pages, formats, strict=True):
        finish_pages(each, form)
    named = {
        name_of(key, i): pages[i][part]
        for i in range(len(formats))
        for part, key in enumerate(PAGES)
    }
    return named, origins


def _empty_pages(
    tensors: Mapping[str, torch.Tensor],
    origin: PartOrigin,
    form: PageFormat,
    index: int,
    num_files: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages of the retained region and behind it, filled with zeros.

    Args:
        num_files: that the own file needs.
    """
    own = tensors[name_of(_OWN, index)]
    size, width = form.slots.shape
    if own.shape[1:] != (width,) or origin.file.shape != origin.place.shape:
        raise ValueError(f"its tokens are {list(own.shape)}, not of {width} elements")
    num_pages, rest = divmod(len(origin.file), size)
    retained = int(tensors[name_of("counts", index)].sum())
    if rest or not 0 <= retained <= num_pages:
        raise ValueError(f"{len(origin.file)} slots for {retained} pages")
    unknown = (origin.file > num_files) & (origin.file != _UNUSED)
    if bool(unknown.any()) or bool((origin.place < 0).any()):
        raise ValueError(f"its slots are not all in {num_files + 1} files")
    sizes = retained, num_pages - retained
    first, second = (torch.zeros(n, size * width, dtype=own.dtype) for n in sizes)
    return first, second


def _fill(
    pages: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    form: PageFormat,
    contents: Mapping[str, torch.Tensor],
    places: torch.Tensor,
    index: int,
) -> None:
    """Copy tokens of one file into pages.

    Args:
        slots: int64 [m], where they belong, in ascending order.
        places: int64 [m], where they are among the file's slots.
    """
    put_tokens(
        pages,
        slots,
        form,
        lambda some: _read_places(contents, places[some], form, index),
    )


def _read_places(
    contents: Mapping[str, Any], places: torch.Tensor, form: PageFormat, index: int
) -> torch.Tensor:
    """Tokens of a file of either kind."""
    own = contents.get(name_of(_OWN, index))
    if own is not None:
        tokens: torch.Tensor = bits(own)[places].view(own.dtype)
        return tokens
    ordered, back = places.sort()
    pages = [contents[name_of(key, index)] for key in PAGES]
    size, width = form.slots.shape
    if any(each.shape[1:] != (size * width,) for each in pages):
        raise ValueError("its pages have another size")
    total = sum(len(each) for each in pages) * size
    if len(ordered) and not 0 <= int(ordered[0]) <= int(ordered[-1]) < total:
        raise IndexError(f"slot {int(ordered[-1])} of {total}")
    out = torch.empty(len(places), width, dtype=pages[0].dtype)
    bits(out)[back] = bits(take_tokens(pages, ordered, form))
    return out
