"""What a session file contains: text, tensors and digests.

A file of format ``FORMAT`` stores every page. One of ``DELTA_FORMAT`` stores only what
other files do not have (``deltas``). ``header`` is the digest of text and tokens, which
a scan reads, and ``digest`` that of everything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast, get_args

import numpy as np
import torch

from vllm_kvplugins.plan.residency_plan import BlockSpan, Compaction
from vllm_kvplugins.sessions import deltas, tensor_file
from vllm_kvplugins.sessions.commands import Session, Tokens
from vllm_kvplugins.sessions.deltas import Delta, name_of
from vllm_kvplugins.sessions.page_tokens import PageFormat
from vllm_kvplugins.sessions.settings import SessionDtype
from vllm_kvplugins.sessions.snapshot import CacheSnapshot, HeapPart
from vllm_kvplugins.sessions.storage import SessionStorage
from vllm_kvplugins.sessions.tensor_file import SessionFileError

FORMAT = "kvp-session-4"
# Files that need others. Earlier versions do not read them.
DELTA_FORMAT = "kvp-session-delta-1"
FORMATS = (FORMAT, DELTA_FORMAT)
_OBSERVED = "observed"
_QUERIES_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# What a file of valid digests and other meaning raises.
CONTENT_ERRORS = (KeyError, TypeError, ValueError, AttributeError)


def tensors_of(
    session: Session, saved: CacheSnapshot, delta: Delta | None
) -> dict[str, torch.Tensor]:
    """The tensors of a session's file.

    Args:
        delta: what it stores instead of pages; None: pages.

    Returns:
        Contiguous tensors in host memory; tokens first, because scans read only them.
    """
    tensors = {"tokens": torch.from_numpy(session.tokens.astype(np.int32))}
    for index, part in enumerate(saved.parts):
        for key, name in _PART_TENSORS.items():
            if delta is None or key not in deltas.PAGES:
                tensors[name_of(key, index)] = getattr(part, name)
    tensors |= delta.tensors if delta else {}
    if saved.queries is not None:
        tensors["queries"] = saved.queries
    for layer, packed in saved.observed.items():
        for name, tensor in packed.items():
            tensors[f"{_OBSERVED}.{layer}.{name}"] = tensor
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


# Key in files -> field. Files of earlier versions call the retained region "zone", and
# they must stay loadable.
_PART_TENSORS = {
    "counts": "counts",
    "positions": "positions",
    "zone": "retained",
    "tail": "tail",
}


def _parts(
    about: Mapping[str, str], tensors: Mapping[str, torch.Tensor]
) -> tuple[HeapPart, ...]:
    parts: list[HeapPart] = []
    while not parts or name_of("layout", len(parts)) in about:
        index = len(parts)
        fields = {
            name: tensors[name_of(key, index)] for key, name in _PART_TENSORS.items()
        }
        parts.append(HeapPart(**fields, layout=about[name_of("layout", index)]))
    return tuple(parts)


def _session_dtype(name: str) -> SessionDtype:
    if name not in get_args(SessionDtype):
        raise ValueError(f"stored as {name!r}")
    return cast(SessionDtype, name)


def snapshot_of(
    about: Mapping[str, str], tensors: dict[str, torch.Tensor]
) -> CacheSnapshot:
    """The snapshot that a file with all pages contains.

    Raises:
        CONTENT_ERRORS: its tensors or its text are not those of a snapshot.
    """
    observed: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == _OBSERVED:
            layer, _, part = rest.partition(".")
            observed.setdefault(int(layer), {})[part] = tensor
    return CacheSnapshot(
        tokens=tensors["tokens"].numel(),
        compaction=_unpacked_compaction(json.loads(about["compaction"])),
        parts=_parts(about, tensors),
        dtype=_session_dtype(about["dtype"]),
        queries_dtype=_QUERIES_DTYPES[about["queries_dtype"]],
        queries=tensors.get("queries"),
        observed=observed,
    )


def checked_session(
    name: str, about: Mapping[str, str], tokens: torch.Tensor
) -> Session:
    """The session of a file whose keys and values have not been read.

    Raises:
        SessionFileError: text or tokens have changed, or are not those of a session.
    """
    text = {key: about[key] for key in about if key not in ("header", "digest")}
    if about.get("header") != tensor_file.digest(text, {"tokens": tokens}):
        raise SessionFileError(f"{name}: its header has changed")
    try:
        session = _session(text, tokens)
    except CONTENT_ERRORS as error:
        raise SessionFileError(f"{name}: not a session ({error})") from error
    n = len(session.tokens)
    if (
        session.num_bytes < 1
        or not 0 <= session.first_query <= n
        or not 0 <= session.compacted_at <= n
        or not (session.ttl_s is None or session.ttl_s > 0)
    ):
        raise SessionFileError(f"{name}: not a session (impossible numbers)")
    return session


def _session(about: Mapping[str, str], tokens: torch.Tensor) -> Session:
    if tokens.dtype != torch.int32 or tokens.ndim != 1:
        raise ValueError(f"tokens are {tokens.dtype} {list(tokens.shape)}")
    ids: Tokens = tokens.numpy().copy()
    return Session(
        session_id=about["session"],
        owner=about["owner"],
        tokens=ids,
        compaction=_unpacked_compaction(json.loads(about["compaction"])),
        num_bytes=int(about["num_bytes"]),
        first_query=int(about["first_query"]),
        ttl_s=float(about["ttl_s"]) if "ttl_s" in about else None,
    )


# Key in files -> field, as in _PART_TENSORS.
_SPANS = {"candidates": "candidates", "zone": "retained"}


def packed_compaction(compaction: Compaction | None) -> dict[str, Any] | None:
    """A compaction as JSON has it."""
    if compaction is None:
        return None
    fields = asdict(compaction)
    del fields["whole_tokens"]  # it has run
    return fields | {key: fields.pop(name) for key, name in _SPANS.items()}


def _unpacked_compaction(packed: dict[str, Any] | None) -> Compaction | None:
    if packed is None:
        return None
    spans = {name: BlockSpan(**packed[key]) for key, name in _SPANS.items()}
    numbers = {key: value for key, value in packed.items() if key not in _SPANS}
    return Compaction(**(numbers | spans))


def verified(
    storage: SessionStorage, name: str
) -> tuple[dict[str, str], dict[str, torch.Tensor], str]:
    """Text, tensors and digest of a file whose digest is correct.

    Raises:
        SessionFileError: it is missing or damaged.
        OSError: the storage failed.
    """
    about, tensors = storage.read(name)
    digest = about.pop("digest", None)
    if digest is None or digest != tensor_file.digest(about, tensors):
        raise SessionFileError(f"{name}: its contents have changed")
    return about, tensors, digest


def sources_of(name: str, about: Mapping[str, str]) -> tuple[str, ...]:
    """Sessions whose files a file needs, as its text says.

    Raises:
        SessionFileError: the text is not that of a session.
    """
    if about.get("format") != DELTA_FORMAT:
        return ()
    try:
        refs = deltas.unpacked_refs(about["files"])
    except CONTENT_ERRORS as error:
        raise SessionFileError(f"{name}: not a session ({error})") from error
    return tuple(ref.session_id for ref in refs)


def check_formats(about: Mapping[str, str], formats: Sequence[PageFormat]) -> None:
    """Refuse pages in another order of elements, or of another number of heaps.

    Raises:
        ValueError: they are.
    """
    layouts = [about.get(name_of("layout", i)) for i in range(len(formats) + 1)]
    if layouts != [*(form.layout for form in formats), None]:
        raise ValueError("its pages have the layout of another instruction set")
