"""Finds the sessions that other replicas save in the same store, in the background.

::

    thread            scheduler
    listing ────┐     request arrives: look_up ──> keys of its prompt, in threads
    every       ├──>  next steps:      take ─────> SessionDirectory.add_stored
    refresh_s   │                      waits ────> try again, or start without it
    look-ups ───┘

No step waits for the store. A request waits in the queue until its look-up has ended,
for ``lookup_s`` at most. After a look-up that failed or was late, no request waits
until the store has answered in time again.

``SessionDirectory`` knows the sessions; this class knows the store.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from vllm_kvplugins.errors import coded
from vllm_kvplugins.log_throttle import LogThrottle
from vllm_kvplugins.sessions.commands import Session, Tokens
from vllm_kvplugins.sessions.file_thread import FileThread
from vllm_kvplugins.sessions.files import SessionFiles, SessionParts
from vllm_kvplugins.sessions.index import index_bytes
from vllm_kvplugins.sessions.session_ids import (
    ParsedId,
    bucket_start,
    bucket_starts,
    digests_at,
)
from vllm_kvplugins.sessions.tensor_file import SessionFileError

logger = logging.getLogger("vllm.kv_policy")

# Keys of one look-up: sessions of more than a third of the prompt's length.
_KEYS = 8
_THREADS = 8
# Look-ups that have not ended. With a store that does not respond they pile up.
_MAX_RUNNING = 64
# Sessions that share the beginning of a prompt only by their key: read so many of them.
_MAX_PARTIAL = 4
_MAX_TRIES = 3
# Found sessions that no step has taken yet. The engine may be idle.
_MAX_FOUND = 128
_TAKE = 32
# A session that could not be loaded is not tried again for a while.
_IGNORE_S = 600.0
_MAX_IGNORED = 4096


@dataclass(frozen=True, slots=True)
class StoredSession:
    """A session in the store.

    Attributes:
        file_bytes: size of its files, over all ranks.
    """

    session: Session
    file_bytes: int


@dataclass(slots=True)
class Changes:
    """What has changed in the store.

    Attributes:
        found: sessions that the scheduler did not know.
        gone: IDs of sessions that were listed before and are not any more.
    """

    found: list[StoredSession] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Query:
    """What a look-up searches.

    Attributes:
        owner: see ``Session``.
        prompt: int32 [n], token IDs.
        more_than: do not search sessions of so many tokens or fewer.
    """

    owner: str
    prompt: Tokens
    more_than: int = 0


@dataclass(slots=True, eq=False)
class _LookUp:
    """The look-up of one request.

    Attributes:
        deadline: seconds, on the clock; the request waits no longer.
        keys_due: number of keys that are not listed yet.
        files: per query, sessions whose key is one of the prompt's.
    """

    queries: list[Query]
    deadline: float
    keys_due: int = 0
    files: list[list[tuple[ParsedId, SessionParts]]] = field(default_factory=list)
    has_failed: bool = False
    has_ended: bool = False


class ReplicaSessions:
    """The store's sessions, as the scheduler of one replica sees them.

    All methods return at once, except for ``wait``.

    Args:
        files: of this engine, and of all replicas with the same identity.
        min_tokens: prompts do not continue sessions that are shorter.
        refresh_s: seconds between two listings of the store; None: there are none.
        lookup_s: how long a request waits for its look-up; 0: no look-ups.
        max_age_s: sessions that were written earlier are deleted; None: none.
        index_bytes: the newest sessions of a listing that fit in it are found.
        clock: seconds, monotonic.

    Attributes:
        failures: listings and look-ups that failed or were late.
    """

    def __init__(
        self,
        files: SessionFiles,
        min_tokens: int,
        refresh_s: float | None,
        lookup_s: float,
        max_age_s: float | None = None,
        index_bytes: int = 1 << 28,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failures = 0
        self._files = files
        self._min_tokens = min_tokens
        self._refresh_s = refresh_s
        self._lookup_s = lookup_s
        self._max_age_s = max_age_s
        self._index_bytes = index_bytes
        self._clock = clock
        # Guards everything below; no thread holds it while it uses the store.
        self._changed = threading.Condition()
        self._closed = False
        self._responds = True
        self._known: set[str] = set()
        self._ignored: dict[str, float] = {}  # until when, on the clock
        self._found: deque[StoredSession] = deque()
        self._gone: list[str] = []
        self._look_ups: dict[str, _LookUp] = {}  # by request ID
        self._num_running = 0
        self._listed: set[str] = set()  # of the listing thread alone
        self._throttle = LogThrottle()
        self._threads = FileThread("kvp-session-look-up", _THREADS)
        self._listing = threading.Thread(
            target=self._list_repeatedly, name="kvp-session-list", daemon=True
        )

    def start(self) -> None:
        """Begin to list the store, now and every ``refresh_s``."""
        if self._refresh_s is not None:
            self._listing.start()

    def close(self) -> None:
        """Stop. Does not wait for the store, which may not respond."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._threads.close(timeout_s=0)

    # -- the scheduler: what it knows -----------------------------------------------

    def add_known(self, session_id: str) -> None:
        """Do not find this session: the scheduler knows it."""
        with self._changed:
            self._known.add(session_id)

    def forget(self, session_id: str) -> None:
        """The scheduler does not know this session any more."""
        with self._changed:
            self._known.discard(session_id)

    def ignore(self, session_id: str) -> None:
        """Do not find this session for a while: it could not be loaded."""
        with self._changed:
            self._ignored[session_id] = self._clock() + _IGNORE_S
            if len(self._ignored) > _MAX_IGNORED:
                del self._ignored[next(iter(self._ignored))]

    def take(self) -> Changes:
        """Changes since the last call; of many, a part: adding them takes time."""
        with self._changed:
            count = min(len(self._found), _TAKE)
            changes = Changes([self._found.popleft() for _ in range(count)], self._gone)
            self._gone = []
            if count:
                self._changed.notify_all()
        return changes

    @property
    def responds(self) -> bool:
        """Whether requests may wait for the store."""
        return self._responds

    def note_late_read(self) -> None:
        """A request has waited for too long for a session to be read."""
        with self._changed:
            self._fail("a session was not read in time")

    # -- the scheduler: look-ups ----------------------------------------------------

    def look_up(self, request_id: str, queries: list[Query]) -> None:
        """Begin to search the sessions that a request may continue."""
        with self._changed:
            busy = self._num_running >= (_MAX_RUNNING if self._responds else 1)
            if self._closed or busy or not self._lookup_s:
                return
            look_up = _LookUp(queries, self._clock() + self._lookup_s)
            self._look_ups[request_id] = look_up
            self._num_running += 1
            self._threads.submit(partial(self._begin, look_up))

    def waits(self, request_id: str) -> bool:
        """Whether a request should wait for its look-up. Afterwards, ``take``."""
        with self._changed:
            look_up = self._look_ups.get(request_id)
            if look_up is None:
                return False
            late = self._clock() >= look_up.deadline
            if self._responds and not look_up.has_ended and not late:
                return True
            del self._look_ups[request_id]
            if self._responds and not look_up.has_ended:
                self._fail(f"a look-up took more than {self._lookup_s:g} s")
        return False

    def stop_waiting(self, request_id: str) -> None:
        """A request has started or ended; its look-up continues for later ones."""
        with self._changed:
            self._look_ups.pop(request_id, None)

    def wait(self, timeout_s: float) -> None:
        """Wait until a look-up ends, if a request waits for one.

        Call when a step computes nothing, so that the engine does not busy-wait.
        """
        with self._changed:
            if any(not each.has_ended for each in self._look_ups.values()):
                self._changed.wait(timeout_s)

    # -- look-ups, in threads ---------------------------------------------------------

    def _begin(self, look_up: _LookUp) -> None:
        """List the keys of a look-up, each in a job of its own."""
        jobs = []
        for number, query in enumerate(look_up.queries):
            look_up.files.append([])
            shortest = max(self._min_tokens, query.more_than + 1)
            starts = bucket_starts(len(query.prompt), shortest, _KEYS)
            digests = digests_at(query.owner, query.prompt, starts)
            jobs += [
                partial(self._list_key, look_up, number, digests[start])
                for start in starts
            ]
        look_up.keys_due = len(jobs)
        if not jobs:
            self._end(look_up)
        with self._changed:
            for job in jobs if not self._closed else ():
                self._threads.submit(job)

    def _list_key(self, look_up: _LookUp, number: int, key: str) -> None:
        try:
            found = self._files.list_complete(f"{key}-")
            files = [
                (parsed, file)
                for file in found.values()
                if (parsed := ParsedId.of(file.session_id))
                and not self._is_expired(file)
            ]
            with self._changed:
                look_up.files[number] += files
        except OSError as error:
            self._report(look_up, error)
        finally:
            with self._changed:
                look_up.keys_due -= 1
                is_last = not look_up.keys_due
            if is_last:
                self._end(look_up)

    def _end(self, look_up: _LookUp) -> None:
        """Read the best of the listed sessions, and end the look-up."""
        try:
            for query, files in zip(look_up.queries, look_up.files, strict=True):
                self._read_best(query, files)
        except OSError as error:
            self._report(look_up, error)
        finally:
            with self._changed:
                look_up.has_ended = True
                self._num_running -= 1
                if not look_up.has_failed:
                    self._responds = self._clock() < look_up.deadline
                self._changed.notify_all()

    def _read_best(
        self, query: Query, files: list[tuple[ParsedId, SessionParts]]
    ) -> None:
        """Read the longest session that the prompt continues as a whole.

        If there is none, the newest of those that share most tokens by their key.
        """
        lengths = {parsed.num_tokens for parsed, _ in files}
        n = len(query.prompt)
        digests = digests_at(query.owner, query.prompt, {m for m in lengths if m <= n})
        whole = [
            (parsed, file)
            for parsed, file in files
            if digests.get(parsed.num_tokens) == parsed.digest
        ]
        whole.sort(key=lambda each: (each[0].num_tokens, each[1].modified))
        for parsed, file in whole[: -_MAX_TRIES - 1 : -1]:
            if self._is_known(parsed.session_id) or self._read(parsed, file):
                return
        others = [each for each in files if each not in whole]
        others.sort(
            key=lambda each: (bucket_start(each[0].num_tokens), each[1].modified)
        )
        for parsed, file in others[: -_MAX_PARTIAL - 1 : -1]:
            if not self._is_known(parsed.session_id):
                self._read(parsed, file)

    # -- listings, in a thread --------------------------------------------------------

    def _list_repeatedly(self) -> None:
        assert self._refresh_s is not None, "there are no listings"
        while True:
            try:
                self._refresh()
                with self._changed:
                    self._responds = True
            except OSError as error:
                self._report(None, error)
            # Replicas that start together do not list together for ever.
            delay_s = self._refresh_s * random.uniform(0.9, 1.1)
            with self._changed:
                if self._changed.wait_for(lambda: self._closed, delay_s):
                    return

    def _refresh(self) -> None:
        """List the store once; find new sessions, and those that are gone.

        Raises:
            OSError: the store failed.
        """
        files = self._files.list_complete()
        self._delete_expired(files)
        gone = self._listed.difference(files)
        self._listed = set(files)
        with self._changed:
            self._gone += gone
        left = self._index_bytes
        for file in sorted(files.values(), key=lambda file: -file.modified):
            parsed = ParsedId.of(file.session_id)
            if parsed is None:
                continue
            left -= index_bytes(parsed.num_tokens)
            if left < 0:
                return
            if not self._is_known(parsed.session_id):
                if not self._wait_for_room():
                    return
                self._read(parsed, file, first=False)

    def _delete_expired(self, files: dict[str, SessionParts]) -> None:
        """Delete sessions that were written too long ago, also for other replicas."""
        for session_id in [i for i, file in files.items() if self._is_expired(file)]:
            for rank in range(self._files.ranks):
                self._files.unlink(session_id, rank, files[session_id].ranks)
            del files[session_id]

    def _is_expired(self, file: SessionParts) -> bool:
        return self._max_age_s is not None and (
            time.time() - file.modified > self._max_age_s
        )

    def _wait_for_room(self) -> bool:
        """Wait until the scheduler has taken what was found.

        Returns:
            False if it has not, for example because the engine is idle. The next
            listing continues.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or len(self._found) < _MAX_FOUND, self._refresh_s
            )
            return not self._closed and len(self._found) < _MAX_FOUND

    # -- both -------------------------------------------------------------------------

    def _is_known(self, session_id: str) -> bool:
        """Whether the scheduler knows a session, or soon will."""
        with self._changed:
            return session_id in self._known or any(
                each.session.session_id == session_id for each in self._found
            )

    def _read(self, parsed: ParsedId, file: SessionParts, first: bool = True) -> bool:
        """Read the beginning of a session for the scheduler.

        Args:
            first: the scheduler takes it before others: a request waits for it.

        Returns:
            Whether it can be continued.

        Raises:
            OSError: the store failed.
        """
        session_id = parsed.session_id
        with self._changed:
            until = self._ignored.get(session_id)
            if until is not None and self._clock() < until:
                return False
            self._ignored.pop(session_id, None)
        try:
            session = self._files.read_session(session_id, file.ranks)
            # A wrong size in its header would not reserve enough memory to read it.
            if file.num_bytes > self._files.max_bytes(session, file.ranks):
                raise SessionFileError(f"{session_id}: larger than its header says")
        except SessionFileError as error:
            self.ignore(session_id)
            self._log(coded("KVP309", f"session file skipped: {error}"))
            return False
        with self._changed:
            found = StoredSession(session, file.num_bytes)
            if first:
                self._found.appendleft(found)
            else:
                self._found.append(found)
            if len(self._found) > 2 * _MAX_FOUND:
                self._found.pop()
        return True

    def _report(self, look_up: _LookUp | None, error: OSError) -> None:
        """Note that the store has failed."""
        with self._changed:
            if look_up is not None:
                look_up.has_failed = True
            self._fail(str(error))

    def _fail(self, problem: str) -> None:
        """Let no request wait for the store until it responds; hold the lock."""
        self._responds = False
        self.failures += 1
        self._log(
            coded(
                "KVP316",
                f"session_url failed or was late ({problem}); requests do not wait for "
                "sessions of other replicas until it responds",
            )
        )

    def _log(self, message: str) -> None:
        with self._changed:
            text = self._throttle.format(message)
        if text is not None:
            logger.warning("%s", text)
