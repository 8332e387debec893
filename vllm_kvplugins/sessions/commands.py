"""What the scheduler tells the workers about sessions, and what they answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from vllm_kvplugins.plan.residency_plan import Compaction

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """The cache of a conversation up to some token.

    Attributes:
        session_id: unique, and safe in file names.
        owner: digest of who may continue it (salt, adapter).
        tokens: int32 [n], those whose keys and values are kept.
        compaction: the last one that ran, its candidates counted from block 0;
            None = every token is there.
        num_bytes: on all ranks together.
        first_query: position of the first of its tokens' queries that are kept;
            the number of tokens = none are.
    """

    session_id: str
    owner: str
    tokens: Tokens
    compaction: Compaction | None
    num_bytes: int
    first_query: int

    @property
    def compacted_at(self) -> int:
        """Tokens without which the cache makes no sense."""
        return self.compaction.at_tokens if self.compaction else 0

    @property
    def first_block(self) -> int:
        """First logical block that is resident."""
        return self.compaction.retained.start if self.compaction else 0


@dataclass(frozen=True, slots=True)
class Save:
    """Copy a request's resident pages before its blocks are used again.

    Attributes:
        blocks: physical ids, from ``session.first_block`` on.
    """

    session: Session
    request_id: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Fill a request's blocks with the first ``tokens`` tokens of a session.

    Attributes:
        prompt_tokens: of the request.
        blocks: physical ids, from the session's first resident block on.
        in_place: they are those that the session was saved from, and nobody has
            written to them since.
    """

    session_id: str
    request_id: str
    prompt_tokens: int
    tokens: int
    blocks: tuple[int, ...]
    in_place: bool = False


@dataclass(slots=True)
class SessionCommands:
    """One step's orders, carried out in this order.

    Attributes:
        drop: sessions to remove from memory.
        unlink: sessions whose files to remove.
        stage: sessions to read from their files into memory; may have been dropped
            in the same step.
    """

    saves: list[Save] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    drop: list[str] = field(default_factory=list)
    unlink: list[str] = field(default_factory=list)
    stage: list[str] = field(default_factory=list)


Event = Literal["saved", "written", "staged", "loaded"]


@dataclass(frozen=True, slots=True)
class SessionAcks:
    """What became of one order on one rank; of loads, only that one failed.

    Attributes:
        problem: why it failed; None = it did not.
        load: what was to be loaded, of "loaded".
    """

    event: Event
    session_id: str
    problem: str | None = None
    load: Load | None = None
