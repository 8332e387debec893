"""Session commands of the scheduler, and acknowledgements of the workers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from vllm_kvplugins.plan.residency_plan import Compaction

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """The cache of the first tokens of a conversation.

    Attributes:
        session_id: unique, and valid in file names.
        owner: digest of cache salt, adapter and patched prompt; only requests with the
            same digest can continue the session.
        tokens: int32 [n], IDs of all tokens, with those that were dropped.
        compaction: the last compaction, with candidates from the shared prefix on;
            None: keys and values of all tokens are resident.
        num_bytes: host memory, over all ranks.
        first_query: position of the first stored query; the number of tokens if no
            query is stored.
        file_ranks: ranks of the engine that wrote its files; None: as many as this
            engine has.
        ttl_s: seconds after its last use until which it is evicted last, and after
            which it is dropped; None: neither. Files do not have it.
    """

    session_id: str
    owner: str
    tokens: Tokens
    compaction: Compaction | None
    num_bytes: int
    first_query: int
    file_ranks: int | None = None
    ttl_s: float | None = None

    @property
    def compacted_at(self) -> int:
        """Smallest number of tokens to restore, because compactions are final."""
        return self.compaction.at_tokens if self.compaction else 0

    def rewound(self, compaction: Compaction) -> Session:
        """The session as it is rebuilt for a request that begins before its last
        compaction, with ``compaction`` as the last one."""
        return replace(self, compaction=compaction)

    @property
    def first_block(self) -> int:
        """First logical block that the session stores.

        It does not store a shared prefix in front of tokens that were dropped: only
        requests that find the prefix in the prefix cache continue the session.
        """
        return self.compaction.retained.start if self.compaction else 0

    @property
    def shared_blocks(self) -> int:
        """First blocks that it does not store, because they are a shared prefix."""
        return self.compaction.shared_blocks if self.compaction else 0

    @property
    def dropped_blocks(self) -> int:
        """Number of blocks that were dropped, those of a shared prefix not counted."""
        return self.compaction.dropped_blocks if self.compaction else 0


@dataclass(frozen=True, slots=True)
class Save:
    """Copy the resident pages of a request before its blocks are reused.

    Attributes:
        blocks: physical IDs, from the first resident block of the session.
        writes: whether to write a file too.
        continues: ID of the session that the request has continued, if its file is
            there and stays; the new file may leave out what that one stores.
        reduces: ID of the session that the request has continued, if memory is to keep
            only those of its tokens that this one does not have.
    """

    session: Session
    request_id: str
    blocks: tuple[int, ...]
    writes: bool = False
    continues: str | None = None
    reduces: str | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """Fill a request's blocks with the first ``tokens`` tokens of a session.

    Attributes:
        prompt_tokens: length of the request's prompt.
        blocks: physical IDs, from the first resident block of the session; behind
            those of ``prefix``.
        in_place: the session was saved from these blocks, and no other request has
            written to them since; nothing is copied.
        prefix: physical IDs of the first blocks of a shared prefix that come from the
            prefix cache. Others may read them, so nothing is copied there.
        rewound: the last compaction of the restored cache, if the request begins before
            that of the session; see ``Session.rewound``.
        moves: the session has left the directory, and the request takes what it has.
    """

    session_id: str
    request_id: str
    prompt_tokens: int
    tokens: int
    blocks: tuple[int, ...]
    in_place: bool = False
    prefix: tuple[int, ...] = ()
    rewound: Compaction | None = None
    moves: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """Fill blocks with the first ``tokens`` tokens of a session, in a thread.

    A request then continues it in place (``Load.in_place``), and no step waits for the
    copy.

    Attributes:
        blocks: physical IDs, from the first resident block of the session. Nobody else
            uses them.
    """

    session_id: str
    tokens: int
    blocks: tuple[int, ...]


@dataclass(slots=True)
class SessionCommands:
    """Commands of one step.

    Workers first make room, with ``unlink`` and with ``drop`` of sessions that are not
    loaded in this step. Then they execute the other commands in the order of the
    fields.

    Attributes:
        unlink: sessions whose files to delete.
        saves: requests to save.
        loads: sessions to load.
        places: sessions to copy into blocks.
        drop: sessions to delete from memory.
        stage: sessions to read from their files into memory, or to make whole if they
            are reduced; a session may be dropped and staged in the same step.
        file_ranks: of the sessions to unlink or to stage, those that an engine of
            another size wrote, with its number of ranks.
    """

    unlink: list[str] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    drop: list[str] = field(default_factory=list)
    stage: list[str] = field(default_factory=list)
    file_ranks: dict[str, int] = field(default_factory=dict)

    @property
    def copy_pages(self) -> bool:
        """Whether workers need their caches."""
        return bool(self.saves or self.loads or self.places or self.stage)


Event = Literal["saved", "written", "staged", "loaded", "reduced", "placed"]


@dataclass(frozen=True, slots=True)
class SessionAck:
    """The outcome of one command on one rank.

    Attributes:
        event: "loaded" is sent only when a load failed. "written" follows every save
            with a file, when the file is written or will not be: the copy failed, or
            the session was removed. "reduced" follows every save that reduces another
            session, with that one's ID.
        problem: why the command failed; None: it succeeded.
        load: the command, for "loaded".
        num_bytes: size of the file, for "written"; memory that was freed, for
            "reduced".
        sources: sessions whose files the file needs, for "written".
    """

    event: Event
    session_id: str
    problem: str | None = None
    load: Load | None = None
    num_bytes: int = 0
    sources: tuple[str, ...] = ()
