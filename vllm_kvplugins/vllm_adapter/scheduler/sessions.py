"""The scheduler's side of sessions: finds, starts and saves them.

``admission`` describes the sequence of calls.
"""

from __future__ import annotations

import hashlib
import json
import uuid
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from vllm_kvplugins.config import parse_sessions
from vllm_kvplugins.engine.windows import first_saved
from vllm_kvplugins.errors import coded
from vllm_kvplugins.plan.geometry import Geometry
from vllm_kvplugins.plan.residency_plan import BlockSpan, Compaction
from vllm_kvplugins.policies.base import KVCachePolicy
from vllm_kvplugins.sessions.commands import Session, SessionAck, Tokens
from vllm_kvplugins.sessions.directory import SessionDirectory
from vllm_kvplugins.sessions.files import Scan, SessionFiles
from vllm_kvplugins.sessions.object_store import start_up_problem
from vllm_kvplugins.sessions.records import Match, SharedStore
from vllm_kvplugins.sessions.replicas import Query, ReplicaSessions
from vllm_kvplugins.sessions.session_ids import new_id
from vllm_kvplugins.sessions.settings import SessionDtype, SessionSettings
from vllm_kvplugins.sessions.stored_pages import query_rows, stored_bytes
from vllm_kvplugins.vllm_adapter.config.clustering_config import delete_clusterings
from vllm_kvplugins.vllm_adapter.config.engine_config import request_of
from vllm_kvplugins.vllm_adapter.config.host_memory import HostReservations
from vllm_kvplugins.vllm_adapter.config.request_params import (
    requested_patched_prompt,
    requested_ttl_s,
    uses_sessions,
)
from vllm_kvplugins.vllm_adapter.scheduler import idle_wakeup
from vllm_kvplugins.vllm_adapter.scheduler.admission import Admission
from vllm_kvplugins.vllm_adapter.scheduler.block_manager import ResidencyBlockManager
from vllm_kvplugins.vllm_adapter.scheduler.placed_sessions import (
    MIN_BYTES,
    PlacedSessions,
)
from vllm_kvplugins.vllm_adapter.scheduler.saving_blocks import SavingBlocks
from vllm_kvplugins.vllm_adapter.scheduler.session_config import (
    disk_limit,
    session_files,
)

# vLLM configures only the loggers below its own name.
logger = init_logger("vllm.kv_policy")

# Requests that end with an error are not saved.
_STATUSES_TO_SAVE = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_ABORTED,
)

# A step that computes nothing waits for a look-up for this long.
_LOOK_UP_WAIT_S = 0.005

# Metrics of an engine without sessions.
NO_SESSIONS = {
    "sessions": 0,
    "session_bytes": 0,
    "session_unwritten_bytes": 0,
    "session_disk_bytes": 0,
}
# Counts whose metric has an older name, which dashboards use.
_METRIC_NAMES = {"device_hits": "parked_hits"}


def owner_of(
    request: Any, patched_prompt: Sequence[int] = (), shared_blocks: int = 0
) -> str:
    """Digest of everything that must be equal to continue a request's session.

    Args:
        patched_prompt: token IDs for which the cache was compressed; empty: none.
        shared_blocks: blocks of its shared prefix, which no compaction changes.
    """
    lora = request.lora_request
    adapter = (lora.lora_name, lora.lora_int_id, lora.lora_path) if lora else None
    facts = [request.cache_salt, adapter]
    if patched_prompt:
        facts.append(patched_prompt)
    if shared_blocks:
        facts.append({"shared_blocks": shared_blocks})
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


class SchedulerSessions:
    """Finds, starts and saves the sessions of one engine.

    Args:
        manager: the engine's block manager.
        host: reservations of host memory.
    """

    def __init__(
        self, vllm_config: Any, manager: ResidencyBlockManager, host: HostReservations
    ) -> None:
        self._manager = manager
        self._host = host
        spec = manager.kv_cache_spec
        self._policy: KVCachePolicy = spec.policy
        self._geometry = spec.geometry
        self._draft_geometry: Geometry | None = spec.draft_geometry
        settings = parse_sessions(request_of(vllm_config))
        assert settings.session_memory is not None, "not measured"
        files = session_files(vllm_config)
        self._store: ReplicaSessions | None = None
        if settings.session_url is not None:
            assert files is not None
            self._store = _opened_store(files, settings, manager.block_size)
            # The engine may be deleted without being shut down.
            weakref.finalize(self, self._store.close)
        self._saving = SavingBlocks(
            manager.block_pool, vllm_config.parallel_config.world_size
        )
        self._placed = PlacedSessions(
            manager.block_pool,
            vllm_config.parallel_config.world_size,
            manager.device_sessions,
        )
        scan = Scan() if self._store is not None else _scan(files)
        disk_bytes = disk_limit(settings, files, scan)
        self.directory = SessionDirectory(
            settings.session_memory,
            ranks=vllm_config.parallel_config.world_size,
            min_tokens=manager.block_size,
            writes=files is not None,
            disk_bytes=disk_bytes,
            other_disk_bytes=scan.other_bytes,
            max_age_s=settings.session_max_age_s,
            # All tokens of a retrieval policy are on the host or the device.
            rewinds=self._policy.retrieval is not None,
            on_forgotten=_both(host.release_session, self._store),
            on_memory_freed=manager.device_sessions.drop,
            on_save_withdrawn=self._saving.release,
            shared=_shared(self._store, settings),
        )
        self._delete_clusterings: Callable[[], None] = lambda: None
        if (routing := self._policy.episode_routing) is not None:
            self._delete_clusterings = partial(
                delete_clusterings, vllm_config, routing.settings
            )
        self._keeps_on_device = settings.session_keep_on_device
        self._min_placed_bytes = MIN_BYTES
        logger.info(
            "sessions: up to %d KiB, unused for %s, files: %s",
            settings.session_memory >> 10,
            f"{settings.session_max_age_s} s" if settings.session_max_age_s else "ever",
            _described(files, disk_bytes),
        )
        self._reported_counts = asdict(self.directory.counts)
        self._reported_failures = 0
        self._prompts: WeakKeyDictionary[Any, Tokens] = WeakKeyDictionary()
        self._dtype = settings.session_dtype
        self._query_bytes = _query_bytes_per_token(vllm_config, self._dtype)
        self.directory.add_files(scan.sessions)
        if self._store is not None:
            self._store.start()
        elif files is not None:
            location = files.storage.location
            logger.info(
                "%d sessions found in %s", self.directory.num_sessions, location
            )
        idle_wakeup.install()

    # -- a store that other replicas use ------------------------------------------

    def look_up(self, request: Any) -> None:
        """Begin to search the store for sessions of a request that has arrived."""
        if self._store is None or not _may_continue(request):
            return
        match = self.match(request, more_than=0)
        known, prompt = match.tokens if match else 0, self._prompt_of(request)
        queries = [Query(owner, prompt, known) for owner in self._owners(request)]
        self._store.look_up(request.request_id, queries)

    def awaits_look_up(self, request: Any) -> bool:
        """Whether a request should wait for its look-up in the store."""
        if self._store is None:
            return False
        if self._store.waits(request.request_id):
            return True
        self.update_from_store()  # with what its look-up has found
        return False

    def update_from_store(self) -> None:
        """Add sessions that were found in the store; forget those that are gone."""
        if self._store is None:
            return
        changes = self._store.take()
        for found in changes.found:
            self.directory.add_stored(found.session, found.file_bytes)
            if found.session.session_id in self.directory:
                self._store.add_known(found.session.session_id)
        for session_id in changes.gone:
            self.directory.remove_stored(session_id)

    def wait_for_store(self) -> None:
        """Wait a little, if a request waits for a look-up and no other can run."""
        if self._store is not None:
            self._store.wait(_LOOK_UP_WAIT_S)

    def reset(self) -> None:
        """Drop all sessions: the engine may load other weights next.

        The name of its folder in a shared store does not tell them apart, so the engine
        does not use the store any more. The store keeps the files, which other replicas
        use.
        """
        if self._store is None:
            self.directory.clear()
            self._delete_clusterings()
            return
        logger.warning(
            "%s",
            coded(
                "KVP317",
                "the caches were reset, perhaps for other weights: sessions are in "
                "memory only from now on; restart the server to use session_url again",
            ),
        )
        self._store.close()
        self._store = None
        self.directory.detach()

    def drop_unsaved(self) -> None:
        """Drop the sessions that are being saved, and free their blocks.

        Workers may still read the blocks. They learn that the session is dropped before
        a step can change a block, and discard what they have copied.
        """
        for session_id in list(self._saving):
            self.directory.drop(session_id)
            if session_id in self._saving:  # workers have the command to save it
                self._saving.release(session_id)

    def close(self) -> None:
        """Stop listing the store."""
        if self._store is not None:
            self._store.close()

    # -- what workers report -----------------------------------------------------

    def process(self, acks: Sequence[SessionAck]) -> None:
        """Process acknowledgements of the workers."""
        for ack in acks:
            if ack.event == "saved":
                self._saving.acknowledge(ack.session_id)
        self.directory.process(acks)
        for ack in acks:
            if ack.event == "placed":
                ready = self.directory.is_ready(ack.session_id)
                failed = ack.problem is not None
                self._placed.acknowledge(ack.session_id, failed, ready)
        self._manager.device_sessions.keep_freed_blocks()

    @property
    def needs_step(self) -> bool:
        """Whether an engine without requests should run a step.

        It takes commands to the workers, and frees blocks and memory of what they have
        copied.
        """
        self.directory.expire()
        copies = len(self._saving) + len(self._placed) > 0
        return copies or self.directory.awaits_copies or self.directory.has_commands

    # -- a request starts -------------------------------------------------------

    def match(self, request: Any, more_than: int) -> Match | None:
        """The session that restores most tokens of a request. Changes nothing.

        Args:
            more_than: tokens that the request gets without a session.

        Returns:
            None if no session restores more tokens.
        """
        if not _may_continue(request):
            return None
        owner, *others = self._owners(request)
        best = self._best(request, owner, more_than)
        for other in others:
            at_least = best.tokens if best else more_than
            best = self._best(request, other, at_least, whole=True) or best
        return best

    def _owners(self, request: Any) -> list[str]:
        """Owners whose sessions a request can continue.

        With a patched prompt, also that of requests without one: a session that was
        never compressed fits any patched prompt.
        """
        patched = requested_patched_prompt(request.sampling_params)
        shared = self._shared_blocks(request)
        owners = [owner_of(request, patched, shared)]
        return [*owners, owner_of(request, shared_blocks=shared)] if patched else owners

    def _shared_blocks(self, request: Any) -> int:
        return self._manager.plans.continuing(request, None).shared_blocks

    def _best(
        self, request: Any, owner: str, more_than: int, whole: bool = False
    ) -> Match | None:
        """The session of one owner that restores most tokens.

        Args:
            whole: only sessions that were never compressed.
        """
        best: Match | None = None
        # Sessions that share equally many tokens go back to the same compaction.
        earlier = cache(partial(self._earlier_compaction, request))
        for match in self.directory.find(owner, self._prompt_of(request)):
            if match.shared <= more_than:
                break  # the remaining sessions share at most as many tokens
            if match.needs_file and not self._responds:
                continue
            if whole and match.session.compaction is not None:
                continue
            found = self._restorable(request, match)
            if found is None and match.session.compacted_at:
                found = self._rewound(request, match, earlier(match.shared))
            if found is not None and found.tokens > more_than:
                best, more_than = found, found.tokens
        return best

    @property
    def _responds(self) -> bool:
        """Whether requests may wait for session files."""
        return self._store is None or self._store.responds

    def _prompt_of(self, request: Any) -> Tokens:
        """Token IDs of the prompt; cached, because each attempt needs them."""
        ids = self._prompts.get(request)
        if ids is None:
            ids = self._prompts[request] = _token_ids(request.prompt_token_ids)
        return ids

    def _earlier_compaction(self, request: Any, shared: int) -> Compaction | None:
        """The last compaction of a session that goes back for a request.

        Args:
            shared: first tokens that the session and the prompt share.

        Returns:
            None: the policy cannot rebuild such a cache.
        """
        retrieval = self._policy.retrieval
        # The layers of a drafter have no tokens on the host.
        if retrieval is None or self._draft_geometry is not None:
            return None
        prompt_tokens = request.num_prompt_tokens
        tokens = min(shared, prompt_tokens - 1)
        return retrieval.rewound(tokens, prompt_tokens, self._geometry)

    def _rewound(
        self, request: Any, match: Match, earlier: Compaction | None
    ) -> Match | None:
        """The match with the session as it was before its last compaction.

        Returns:
            None: there is no earlier compaction, or the request cannot start from it.
        """
        if earlier is None or earlier.at_tokens >= match.session.compacted_at:
            return None
        session = match.session.rewound(earlier)
        return self._restorable(
            request, replace(match, session=session, is_rewound=True)
        )

    def _restorable(self, request: Any, match: Match) -> Match | None:
        """The match with the number of shared tokens from which a request can start.

        Excludes the last token, which the request must compute to sample, and tokens
        whose query the next compaction needs but the session lacks.

        Returns:
            None: it cannot start from any.
        """
        session = match.session
        tokens = min(match.shared, request.num_prompt_tokens - 1)
        if tokens < session.compacted_at:
            return None
        tokens = self._manager.plans.continuing(
            request, session.compaction
        ).can_start_at(
            tokens,
            session.compacted_at,
            self._policy.queries_needed,
            session.first_query,
        )
        # Observations of later tokens cannot be undone.
        if self._policy.observation is not None and tokens < len(session.tokens):
            return None
        if not tokens or not self._manager.starts.can_start(request, session, tokens):
            return None
        return replace(match, tokens=tokens)

    def awaits_copy(self, request: Any, match: Match, cached_tokens: int) -> bool:
        """Whether a request waits until a thread has copied its session to the device.

        Otherwise its step copies it, and all running requests wait.

        Args:
            match: the session, which is in host memory.
            cached_tokens: tokens of the shared prefix that are in the prefix cache.
        """
        session, manager = match.session, self._manager
        if session.session_id in self._placed:
            return True
        if (
            not self._keeps_on_device
            or self._policy.host_storage is not None  # few tokens are copied
            or not manager.req_to_blocks  # nobody would wait
            or session.num_bytes < self._min_placed_bytes
            or self._placed.was_tried(request.request_id)
            or session.session_id in manager.device_sessions
            or match.is_rewound
            or session.shared_blocks * manager.block_size != cached_tokens
        ):
            return False
        count = self._num_blocks(match.tokens) - session.first_block
        # Its prompt needs blocks, too, and each request that runs may need one.
        needed = self._num_blocks(request.num_prompt_tokens) - session.first_block
        free = manager.block_pool.get_num_free_blocks()
        if count < 1 or free < needed + len(manager.req_to_blocks):
            return False
        blocks = self._placed.begin(session.session_id, request.request_id, count)
        self.directory.place(match, request.request_id, blocks)
        return True

    def start(self, request: Any, admission: Admission) -> None:
        """Load the session of a request that has its blocks, if it continues one."""
        match = admission.match
        if self._store is not None:
            self._store.stop_waiting(request.request_id)
        if match is None:
            self._placed.forget(request.request_id)
            self.directory.stop_waiting(request.request_id)
            if not request.num_preemptions and uses_sessions(request.sampling_params):
                self.directory.count_miss()
            return
        request_id = request.request_id
        is_placed = self._placed.was_tried(request_id)
        self._placed.forget(request_id)
        table = self._manager.req_to_blocks[request_id]
        num_cached = admission.cached_tokens // self._manager.block_size
        first = max(admission.first_block, num_cached)
        self.directory.load(
            match,
            request_id,
            request.num_prompt_tokens,
            _block_ids(table[first : self._num_blocks(match.tokens)]),
            self._manager.starts.is_in_place(request_id),
            _block_ids(table[:num_cached]),
            admission.moves,
            admission.moves and self.is_branch(match),
            is_placed,
        )

    def is_branch(self, match: Match) -> bool:
        """Whether a session has more to offer than what a request continues.

        Templates often drop the last tokens of an answer, so a part of a block does not
        count.
        """
        return match.lost_tokens >= int(self._manager.block_size)

    # -- a request ends ---------------------------------------------------------

    def finish(self, request: Any, admission: Admission) -> int:
        """Save the cache of an ended request, if another request can continue it.

        Aborted requests are saved too, because the client may continue.

        Returns:
            Bytes of the session; 0: none is saved.
        """
        self.directory.stop_waiting(request.request_id)
        self._placed.forget(request.request_id)
        if self._store is not None:
            self._store.stop_waiting(request.request_id)
        tokens = min(request.num_computed_tokens, request.num_tokens)
        if (
            tokens < self._manager.block_size
            or admission.awaits_load(request)
            or request.status not in _STATUSES_TO_SAVE
            or not _can_use_sessions(request)
        ):
            return 0
        plan = self._manager.plans.of(request)
        done = plan.num_done(tokens)
        if plan.num_done(request.num_computed_tokens) != done:
            return 0  # a compaction included tokens whose IDs are not known yet
        compaction = _merged(plan.compaction(done - 1)) if done else None
        first = compaction.retained.start if compaction else 0
        table = self._manager.req_to_blocks.get(request.request_id, ())
        blocks = table[first : self._num_blocks(tokens)]
        assert not any(block.is_null for block in blocks), "a resident block is free"
        return self._save(request, tokens, compaction, blocks, admission)

    def _save(
        self,
        request: Any,
        tokens: int,
        compaction: Compaction | None,
        blocks: Sequence[Any],
        admission: Admission,
    ) -> int:
        """Save the first ``tokens`` tokens of a request, which are in ``blocks``.

        Returns:
            Bytes of the session; 0: there is no room for it.
        """
        first_query = first_saved(
            tokens,
            request.num_computed_tokens,
            self._policy.queries_needed,
            admission.first_query,
            compaction.at_tokens if compaction else 0,
        )
        slots = len(blocks) * self._manager.block_size
        page_bytes = stored_bytes(slots, self._geometry, self._dtype)
        if self._draft_geometry is not None:
            page_bytes += stored_bytes(slots, self._draft_geometry, self._dtype)
        query_bytes = (tokens - first_query) * self._query_bytes
        storage = self._policy.host_storage
        host_bytes = storage.host_bytes(tokens, self._geometry) if storage else 0
        patched = (
            requested_patched_prompt(request.sampling_params) if compaction else ()
        )
        owner = owner_of(request, patched, self._shared_blocks(request))
        ids = _token_ids(request.all_token_ids[:tokens])
        session = Session(
            session_id=self._new_id(owner, ids),
            owner=owner,
            tokens=ids,
            compaction=compaction,
            num_bytes=page_bytes + query_bytes + host_bytes,
            first_query=first_query,
            ttl_s=requested_ttl_s(request.sampling_params),
        )
        continued = admission.session.session_id if admission.session else None
        if not self.directory.save(
            session, request.request_id, _block_ids(blocks), continued
        ):
            return 0
        if self._store is not None:
            self._store.add_known(session.session_id)
        if host_bytes:
            self._host.hold_session(session.session_id, host_bytes)
        if self._keeps_on_device:
            self._manager.device_sessions.add(session.session_id, blocks)
        self._saving.hold(session.session_id, blocks)
        return session.num_bytes

    def _new_id(self, owner: str, tokens: Tokens) -> str:
        """A unique ID, from which other replicas find the session."""
        return uuid.uuid4().hex if self._store is None else new_id(owner, tokens)

    # -- metrics ----------------------------------------------------------------

    def take_metrics(self) -> dict[str, int]:
        """Current sizes, and counts since the last call."""
        directory, counts = self.directory, asdict(self.directory.counts)
        new = {name: n - self._reported_counts[name] for name, n in counts.items()}
        self._reported_counts = counts
        failures = self._store.failures if self._store else self._reported_failures
        new["store_failures"] = failures - self._reported_failures
        self._reported_failures = failures
        return {
            "sessions": directory.num_sessions,
            "session_bytes": directory.held_bytes,
            "session_unwritten_bytes": directory.unwritten_bytes,
            "session_disk_bytes": directory.written_bytes,
        } | {f"session_{_METRIC_NAMES.get(name, name)}": n for name, n in new.items()}

    def _num_blocks(self, tokens: int) -> int:
        return int(-(-tokens // self._manager.block_size))


def _scan(files: SessionFiles | None) -> Scan:
    """Prepare the folder and find its sessions; logs what is skipped."""
    if files is None:
        return Scan()
    files.prepare()
    scan = files.scan()
    for problem in scan.problems:
        logger.warning("%s", coded("KVP309", f"session file skipped: {problem}"))
    return scan


def _opened_store(
    files: SessionFiles, settings: SessionSettings, min_tokens: int
) -> ReplicaSessions:
    """The store of ``session_url``.

    Raises:
        KVPolicyError: it cannot be written to, for a reason that will not pass.
    """
    problem = start_up_problem(files.storage)
    if problem is not None:
        logger.warning("%s", coded("KVP316", f"{problem}; sessions are not shared yet"))
    return ReplicaSessions(
        files,
        min_tokens,
        settings.session_refresh_s,
        settings.session_lookup_s,
        settings.session_max_age_s,
        settings.session_index_memory // 2,  # look-ups find others
    )


def _shared(
    store: ReplicaSessions | None, settings: SessionSettings
) -> SharedStore | None:
    if store is None:
        return None
    return SharedStore(
        settings.session_index_memory,
        settings.session_load_s,
        on_unloadable=store.ignore,
        on_late=store.note_late_read,
    )


def _both(
    release: Callable[[str], None], store: ReplicaSessions | None
) -> Callable[[str], None]:
    """What to call when a session leaves the directory."""
    if store is None:
        return release

    def on_forgotten(session_id: str) -> None:
        release(session_id)
        store.forget(session_id)

    return on_forgotten


def _described(files: SessionFiles | None, disk_bytes: int | None) -> str:
    if files is None:
        return "none"
    limit = "without a limit" if disk_bytes is None else f"up to {disk_bytes >> 20} MiB"
    return f"{limit} in {files.storage.location}"


def _query_bytes_per_token(vllm_config: Any, dtype: SessionDtype) -> int:
    """Bytes of the stored queries of one token, over all layers, heads and ranks."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    heads = model.get_num_attention_heads(parallel) * parallel.tensor_parallel_size
    layers: int = model.get_num_layers(parallel)
    head_dim: int = model.get_head_size()
    rows = query_rows(dtype, head_dim)
    row_bytes = rows.row_bytes if rows else head_dim * model.dtype.itemsize
    return int(layers * heads * row_bytes)


def _can_use_sessions(request: Any) -> bool:
    """Whether the prompt consists of token IDs only, and the client allows sessions."""
    return (
        request.prompt_token_ids is not None
        and request.prompt_embeds is None
        and not request.mm_features
        and request.sampling_params is not None
        and uses_sessions(request.sampling_params)
    )


def _may_continue(request: Any) -> bool:
    """Whether a request may continue a session."""
    return _can_use_sessions(request) and not request.skip_reading_prefix_cache


def _token_ids(tokens: Any) -> Tokens:
    return np.asarray(tokens, dtype=np.int32)


def _block_ids(blocks: Iterable[Any]) -> list[int]:
    return [block.block_id for block in blocks]


def _merged(compaction: Compaction) -> Compaction:
    """The last compaction with candidates from the shared prefix on.

    As if it were the only one.
    """
    retained, shared = compaction.retained, compaction.shared_blocks
    return Compaction(
        compaction.at_tokens,
        BlockSpan(shared, retained.stop),
        retained,
        shared_blocks=shared,
    )
