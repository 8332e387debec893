"""Clusterings of conversations in files, so that restarts and replicas find them.

::

    DIR/<fingerprint>/<key>-<segments>-<digest>-<random>.clustering.safetensors

The session of an episode is found by its patched prompt, which depends on when the
history was clustered. So whoever is to find the session must know the clustering.

Names are those of ``session_ids``, with segments instead of tokens: a router that gets
a history computes the keys of all clusterings that it may use, and lists the names with
these beginnings. Files are unique, and are never rewritten. They contain text.

::

    request ──> find ──> reader threads: list, read      waits for a limited time
    admitted ─> save ──> writer thread: touch, or write  never waits
    timer ─────────────> writer thread: delete old files
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from vllm_kvplugins.episodes.store import ClusteredHistory, ClusteringRecord
from vllm_kvplugins.errors import coded
from vllm_kvplugins.log_throttle import LogThrottle
from vllm_kvplugins.sessions import tensor_file
from vllm_kvplugins.sessions.clustering_records import (
    FILE_NAME,
    SUFFIX,
    clustered,
    first_part_of_id,
    packed,
    parsed_id,
    short_digest,
)
from vllm_kvplugins.sessions.commands import Tokens
from vllm_kvplugins.sessions.file_contents import verified
from vllm_kvplugins.sessions.file_thread import FileThread
from vllm_kvplugins.sessions.files import Identity
from vllm_kvplugins.sessions.session_ids import bucket_starts
from vllm_kvplugins.sessions.storage import SessionStorage, StoredFile
from vllm_kvplugins.sessions.tensor_file import SessionFileError

logger = logging.getLogger("vllm.kv_policy")

# A file holds centroids and a patched prompt per episode: some kilobytes, usually.
_MAX_FILE_BYTES = 4 << 20
_KEYS = 8  # of one look-up: clusterings of more than a quarter of the history
_MAX_TRIES = 4  # files of one key that are read
_READERS = 4
_MAX_RUNNING = 16  # look-ups that have not ended
_MAX_WAITING = 64  # clusterings that are not written yet
_MAX_KNOWN = 4096
# The first look-up of a process opens the connection to the store.
_OPEN_S = 5.0
_TOUCH_S = 60.0  # between two times that the file of a used clustering is touched
_CLOSE_S = 5.0


@dataclass(slots=True)
class Counts:
    """What has happened since the start.

    Attributes:
        found: look-ups that found a clustering.
        saved: files that were written.
        refused: clusterings that were not saved: too many waited, or they are too
            large.
        failures: look-ups and writes that failed, and look-ups that were late.
    """

    found: int = 0
    saved: int = 0
    refused: int = 0
    failures: int = 0


@dataclass(slots=True, eq=False)
class _LookUp:
    """One call of ``find``.

    Attributes:
        reads: whether a file is being read, so that it pays to wait for longer.
        deadline: seconds, on the clock; later, the store does not respond.
    """

    digests: Sequence[bytes]
    shortest: int
    deadline: float
    reads: bool = False
    has_ended: bool = False
    has_failed: bool = False
    found: ClusteredHistory | None = None


class ClusteringFiles:
    """Clusterings in a storage; implements ``episodes.store.ClusteringStore``.

    Thread-safe.

    Args:
        identity: of everything that a clustering depends on.
        lookup_s: how long ``find`` waits for names; 0: nothing is found.
        load_s: how long it waits in addition for a file that it has found.
        max_age_s: clusterings that were not used for so long are deleted; None: none.
        limit_bytes: limit on all files, least recently used first out; None: none.
        sweeps: whether to look for old files now and then; otherwise they are only
            not used.
        clock: seconds, monotonic.
        counted: is called with the name of a field of ``Counts`` when it grows; must
            return at once.
    """

    def __init__(
        self,
        storage: SessionStorage,
        identity: Identity,
        lookup_s: float,
        load_s: float,
        max_age_s: float | None = None,
        limit_bytes: int | None = None,
        sweeps: bool = True,
        clock: Callable[[], float] = time.monotonic,
        counted: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.storage = storage
        self.identity = identity
        self.counts = Counts()
        self._counted = counted
        self._lookup_s, self._load_s = lookup_s, load_s
        self._max_age_s = max_age_s
        self._limit_bytes = limit_bytes
        self._clock = clock
        # Guards everything below; no thread holds it while it uses the storage.
        self._changed = threading.Condition()
        self._responds = True
        self._is_open = False
        self._num_running = 0
        self._num_waiting = 0
        # When clusterings that are saved were last used, on the clock, by digest.
        self._known: OrderedDict[bytes, float] = OrderedDict()
        self._throttle = LogThrottle()
        self._is_prepared = False  # of the writer alone
        self._readers = FileThread("kvp-clustering-read", _READERS)
        self._writer = FileThread("kvp-clustering-write")
        # Also when the process ends: a restart needs what was written last.
        self._finalizer = weakref.finalize(self, _close, self._writer, self._readers)
        if max_age_s is not None and sweeps:
            period_s = min(max(max_age_s / 10, 0.1), 600.0)
            arguments = (weakref.ref(self), period_s)
            threading.Thread(
                target=_sweep_repeatedly,
                args=arguments,
                name="kvp-clustering-sweep",
                daemon=True,
            ).start()

    def close(self) -> None:
        """Wait until what is to be saved is written, for 5 s at most."""
        self._finalizer()

    @property
    def _is_closed(self) -> bool:
        """Also true when the process ends."""
        return not self._finalizer.alive

    # -- find ---------------------------------------------------------------------

    def find(self, digests: Sequence[bytes], shortest: int) -> ClusteredHistory | None:
        """See ``ClusteringStore``."""
        started = self._clock()
        with self._changed:
            waits = self._responds
            busy = self._num_running >= (_MAX_RUNNING if waits else 1)
            if self._is_closed or busy or not self._lookup_s:
                return None
            lookup_s = self._lookup_s + (0 if self._is_open else _OPEN_S)
            look_up = _LookUp(digests, shortest, started + lookup_s + self._load_s)
            self._num_running += 1
            self._readers.submit(partial(self._search, look_up))
            if not waits:
                return None  # It only tells whether the store responds again.
            self._changed.wait_for(lambda: look_up.has_ended or look_up.reads, lookup_s)
            if look_up.reads and not look_up.has_ended:
                left_s = look_up.deadline - self._clock()
                self._changed.wait_for(lambda: look_up.has_ended, left_s)
            if not look_up.has_ended:
                look_up.deadline = self._clock()
                self._fail("a look-up was not answered in time")
            elif look_up.found is not None:
                self._count("found")
            return look_up.found if look_up.has_ended else None

    def _search(self, look_up: _LookUp) -> None:
        try:
            look_up.found = self._longest(look_up)
        except OSError as error:
            look_up.has_failed = True
            with self._changed:
                self._fail(str(error))
        finally:
            with self._changed:
                look_up.has_ended = True
                self._num_running -= 1
                if not look_up.has_failed:
                    self._is_open = True
                    self._responds = self._clock() < look_up.deadline
                self._changed.notify_all()

    def _longest(self, look_up: _LookUp) -> ClusteredHistory | None:
        """Read the clustering of most segments; of equally many, the same everywhere.

        Raises:
            OSError: the storage failed.
        """
        digests, shortest = look_up.digests, look_up.shortest
        for start in bucket_starts(len(digests), shortest, _KEYS):
            files = [
                (parsed.num_tokens, file)
                for file in self.storage.list(f"{short_digest(digests[start - 1])}-")
                if (parsed := parsed_id(file.name)) is not None
                and shortest <= parsed.num_tokens <= len(digests)
                and parsed.digest == short_digest(digests[parsed.num_tokens - 1])
                and not self._is_expired(file)
            ]
            files.sort(key=lambda each: (-each[0], each[1].name))
            for segments, file in files[:_MAX_TRIES]:
                with self._changed:
                    look_up.reads = True
                    self._changed.notify_all()
                found = self._read(file, digests[segments - 1])
                if found is not None:
                    return found
        return None

    def _read(self, file: StoredFile, digest: bytes) -> ClusteredHistory | None:
        """The clustering of a file; None, with a message in the log, if it is damaged.

        Raises:
            OSError: the storage failed.
        """
        try:
            if file.num_bytes > _MAX_FILE_BYTES:
                raise SessionFileError(f"{file.name}: {file.num_bytes} bytes")
            about, tensors, _ = verified(self.storage, file.name)
            if about.get("fingerprint") != self.identity.fingerprint:
                raise SessionFileError(f"{file.name}: of another encoder or version")
            if about.get("history") != digest.hex():
                raise SessionFileError(f"{file.name}: of another history")
            found = clustered(file.name, about, tensors)
        except SessionFileError as error:
            with self._changed:
                self._log(coded("KVP309", f"file of a clustering skipped: {error}"))
            return None
        self.storage.touch(file.name)
        with self._changed:
            self._remember(digest)
        return found

    # -- save ---------------------------------------------------------------------

    def save(self, record: ClusteringRecord, tokens: Tokens) -> None:
        """Save a clustering that a request uses; returns at once.

        A clustering that is saved already is touched, at most once a minute.

        Args:
            tokens: int32 [n], token IDs of the history. Whoever deletes a session that
                begins with them deletes the clustering, too.
        """
        digest = record.digests[-1]
        with self._changed:
            used = self._known.get(digest)
            is_new = used is None or self._clock() - used >= _TOUCH_S
            if self._is_closed or not is_new:
                return
            if self._num_waiting >= _MAX_WAITING:
                self._count("refused")
                self._log(
                    coded(
                        "KVP319",
                        "a clustering was not saved, because many others are still "
                        "being written; the next request of its conversation tries "
                        "again",
                    )
                )
                return
            self._num_waiting += 1
            self._remember(digest)
            self._writer.submit(partial(self._save, record, tokens))

    def _save(self, record: ClusteringRecord, tokens: Tokens) -> None:
        try:
            self._write(record, tokens)
        except OSError as error:
            self._is_prepared = False  # somebody may have removed the folder
            with self._changed:
                self._known.pop(record.digests[-1], None)
                self._count("failures")
                self._log(coded("KVP319", f"a clustering could not be saved ({error})"))
        finally:
            with self._changed:
                self._num_waiting -= 1
                self._changed.notify_all()

    def _write(self, record: ClusteringRecord, tokens: Tokens) -> None:
        """Write a file, unless there is one already.

        Raises:
            OSError: the storage failed.
        """
        if not self._is_prepared:
            self.storage.prepare()
            self._is_prepared = True
        first = first_part_of_id(record.digests)
        for file in sorted(self.storage.list(first), key=lambda file: file.name):
            is_young = not self._is_aging(file.modified)
            if is_young and self._read(file, record.digests[-1]) is not None:
                return  # and touched
        about, tensors = packed(record, tokens, self.identity)
        num_bytes = len(tensor_file.packed(tensors, about))
        limit_bytes = min(_MAX_FILE_BYTES, self._limit_bytes or _MAX_FILE_BYTES)
        if num_bytes > limit_bytes:
            with self._changed:
                self._count("refused")
                self._log(
                    coded(
                        "KVP319",
                        f"a clustering was not saved: it takes {num_bytes} bytes, and "
                        f"at most {limit_bytes} are written",
                    )
                )
            return
        self._make_room(num_bytes)
        name = f"{first}{uuid.uuid4().hex[:16]}{SUFFIX}"
        self.storage.write(name, tensors, about)
        with self._changed:
            self._count("saved")

    def _make_room(self, num_bytes: int) -> None:
        """Delete what was not used for the longest time, so that a file fits."""
        if self._limit_bytes is None:
            return
        files = sorted(self.storage.list(), key=lambda file: file.modified)
        total = sum(file.num_bytes for file in files) + num_bytes
        for file in files:
            if total <= self._limit_bytes:
                return
            if FILE_NAME.fullmatch(file.name):
                self.storage.delete(file.name)
                total -= file.num_bytes

    # -- deletion -----------------------------------------------------------------

    def clear(self) -> None:
        """Delete all clusterings; returns at once."""
        with self._changed:
            if not self._is_closed:
                self._known.clear()
                self._writer.submit(partial(self._delete, lambda file: True))

    def sweep(self) -> None:
        """Delete clusterings that were not used for ``max_age_s``."""
        self._delete(self._is_expired)

    def _delete(self, is_unwanted: Callable[[StoredFile], bool]) -> None:
        try:
            for file in list(self.storage.list()):
                if FILE_NAME.fullmatch(file.name) and is_unwanted(file):
                    self.storage.delete(file.name)
        except OSError as error:
            with self._changed:
                self._count("failures")
                self._log(coded("KVP319", f"clusterings were not deleted ({error})"))

    def _is_expired(self, file: StoredFile) -> bool:
        return self._max_age_s is not None and (
            time.time() - file.modified > self._max_age_s
        )

    def _is_aging(self, modified: float) -> bool:
        """Whether a conversation that goes on needs a new file.

        In an object store, use does not make a file younger.
        """
        return self._max_age_s is not None and (
            time.time() - modified > self._max_age_s / 2
        )

    # -- state; hold the lock -------------------------------------------------------

    def _count(self, name: str) -> None:
        setattr(self.counts, name, getattr(self.counts, name) + 1)
        self._counted(name)

    def _remember(self, digest: bytes) -> None:
        self._known[digest] = self._clock()
        self._known.move_to_end(digest)
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)

    def _fail(self, problem: str) -> None:
        """Let no request wait until the store responds."""
        self._responds = False
        self._count("failures")
        self._log(
            coded(
                "KVP319",
                f"clusterings could not be looked up ({problem}); requests do not wait "
                f"for {self.storage.location} until it responds",
            )
        )

    def _log(self, message: str) -> None:
        text = self._throttle.format(message)
        if text is not None:
            logger.warning("%s", text)


def _close(writer: FileThread, readers: FileThread) -> None:
    readers.close(0)
    writer.close(_CLOSE_S)


def _sweep_repeatedly(files: weakref.ref[ClusteringFiles], period_s: float) -> None:
    """Delete old clusterings, also of an idle server, until nobody uses the files."""
    while (current := files()) is not None:
        if current._is_closed:
            return
        current.sweep()
        del current
        time.sleep(period_s)
