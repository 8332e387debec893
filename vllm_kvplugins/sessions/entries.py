"""What a session directory knows of each session."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from vllm_kvplugins.sessions.commands import Session
from vllm_kvplugins.sessions.index import index_bytes

Presence = Literal["absent", "pending", "present"]
MemoryPresence = Literal["absent", "pending", "present", "reduced"]


@dataclass(slots=True)
class Entry:
    """Where one session is.

    Attributes:
        memory: "pending" until all ranks have acknowledged; "reduced": without what a
            later turn has.
        disk: "pending" until all ranks have acknowledged.
        file_bytes: disk space of its files, with those that are being written.
        last_used: seconds, on the directory's clock.
        acks_due: number of missing acknowledgements, per event.
        is_found: whether it was found in a shared store.
        num_loads: how many requests have continued it.
        sources: sessions whose files its files need.
        freed_bytes: memory that it saves, or will save, by being reduced.
    """

    session: Session
    memory: MemoryPresence
    disk: Presence
    last_used: float
    file_bytes: int
    acks_due: dict[str, int] = field(default_factory=dict)
    is_found: bool = False
    num_loads: int = 0
    sources: tuple[str, ...] = ()
    freed_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        """Memory of the session. One that is being copied counts as whole."""
        if self.memory == "absent":
            return 0
        freed = self.freed_bytes if self.memory == "reduced" else 0
        return self.session.num_bytes - freed

    @property
    def index_bytes(self) -> int:
        """Memory of the scheduler for a session, if it is only in a file."""
        is_only_there = self.memory == "absent" and self.disk != "absent"
        return index_bytes(len(self.session.tokens)) if is_only_there else 0


@dataclass(slots=True)
class Write:
    """A session whose file is not written yet. Until then it stays in memory.

    Attributes:
        num_bytes: host memory, over all ranks.
        acks_due: number of ranks that have not acknowledged.
        file_bytes: size of the files that are written.
        may_need: sessions whose files the new files may need.
        needs: of these, the ones that they need.
    """

    num_bytes: int
    acks_due: int
    file_bytes: int = 0
    may_need: tuple[str, ...] = ()
    needs: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Wait:
    """What a request waits for.

    Attributes:
        session_id: None: it has waited for too long and starts without a session.
        since: seconds, on the directory's clock.
    """

    session_id: str | None
    since: float
