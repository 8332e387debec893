"""What a session directory tells its user, and what it needs to know of a store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm_kvplugins.sessions.commands import Session


@dataclass(frozen=True, slots=True)
class Match:
    """A session that a prompt can continue.

    Attributes:
        tokens: number of tokens to restore.
        shared: number of first tokens that session and prompt share.
        ready: whether it is in memory as a whole; if not, ``fetch`` makes it so.
        needs_file: whether ``fetch`` reads it from a file.
        is_rewound: the session is rebuilt as it was before its last compaction;
            ``session`` then has the earlier one.
    """

    session: Session
    tokens: int
    shared: int
    ready: bool
    is_rewound: bool = False
    needs_file: bool = False

    @property
    def lost_tokens(self) -> int:
        """Tokens of the session that the prompt does not share."""
        return len(self.session.tokens) - self.shared


@dataclass(slots=True)
class Counts:
    """Events since the start.

    Attributes:
        hits: requests that continued a session.
        device_hits: hits whose pages were still on the device.
        misses: requests that started without a session.
        restored_tokens: prompt tokens restored from sessions.
        recomputed_tokens: prompt tokens that a session shares but does not restore.
        evictions: sessions removed from memory or disk to make room, or by age.
        refused: sessions that were not saved because memory was full, also with
            sessions whose files are not written yet.
        failures: sessions lost to an error.
        store_hits: hits of sessions that were found in a shared store, where another
            replica has usually saved them.
        rewinds: hits at a token before the session's last compaction.
        cut_off: hits that took a session although they do not share all of its tokens,
            because host memory was full.
    """

    hits: int = 0
    device_hits: int = 0
    misses: int = 0
    restored_tokens: int = 0
    recomputed_tokens: int = 0
    evictions: int = 0
    refused: int = 0
    failures: int = 0
    store_hits: int = 0
    rewinds: int = 0
    cut_off: int = 0


@dataclass(frozen=True, slots=True)
class SharedStore:
    """How a directory treats files that other replicas write and read, too.

    Such a file is deleted only when its session is replaced, or expires. A session that
    cannot be loaded is forgotten: the file may be of use to others.

    Attributes:
        index_bytes: memory for sessions that are only in the store. The least recently
            used ones are forgotten; their files stay.
        max_wait_s: how long a request waits for a file.
        on_unloadable: called with the ID of each session that could not be loaded.
        on_late: called when a request has waited for too long.
    """

    index_bytes: int
    max_wait_s: float
    on_unloadable: Callable[[str], None] = lambda session_id: None
    on_late: Callable[[], None] = lambda: None
