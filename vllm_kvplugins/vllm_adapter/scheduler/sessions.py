"""Sessions in vLLM: which request continues what, and where its blocks are."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from vllm_kvplugins import __version__
from vllm_kvplugins.config import describe, parse_policy, parse_sessions
from vllm_kvplugins.engine.retrieval.host_tier import default_limit_bytes
from vllm_kvplugins.engine.windows import first_saved
from vllm_kvplugins.plan.residency_plan import BlockSpan, Compaction
from vllm_kvplugins.policies.base import KVCachePolicy
from vllm_kvplugins.sessions.commands import Session, Tokens
from vllm_kvplugins.sessions.directory import Match, SessionDirectory
from vllm_kvplugins.sessions.files import (
    FORMAT,
    Identity,
    SessionFileError,
    SessionFolder,
)
from vllm_kvplugins.vllm_adapter.config.engine_config import request_of
from vllm_kvplugins.vllm_adapter.config.turns import asked_patched_prompt

if TYPE_CHECKING:
    from vllm_kvplugins.vllm_adapter.config.host_memory import HostReservations
    from vllm_kvplugins.vllm_adapter.scheduler.block_manager import (
        ResidencyBlockManager,
    )

# vLLM configures only the loggers below its own name.
logger = init_logger("vllm.kv_policy")

_ENDED_WELL = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_ABORTED,
)


# What the metrics say where sessions are off.
NO_SESSIONS = {"sessions": 0, "session_bytes": 0, "session_disk_bytes": 0}


# -- configuration ---------------------------------------------------------------


def settled(request: dict[str, Any], policy: KVCachePolicy) -> dict[str, Any]:
    """The settings with whether sessions are kept, so that all processes know the
    same."""
    has_turns = policy.turns is not None
    return request | {"sessions": parse_sessions(request).on_for(has_turns)}


def measured(request: dict[str, Any]) -> dict[str, int]:
    """How much memory they are kept in, from what is free now, if they are and the
    user left it open."""
    settings = parse_sessions(request)
    if not settings.sessions or settings.session_memory:
        return {}
    return {"session_memory": default_limit_bytes() // 2}


def session_dir(vllm_config: Any) -> SessionFolder | None:
    """Where this engine's sessions are written; None if they are not."""
    request = request_of(vllm_config)
    settings = parse_sessions(request)
    if not settings.sessions or settings.session_dir is None:
        return None
    ranks = vllm_config.parallel_config.world_size
    return SessionFolder(settings.session_dir, _identity(vllm_config, request), ranks)


def _identity(vllm_config: Any, request: Any) -> Identity:
    """Everything that a cache depends on, but how pages are laid out."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    config = model.hf_config.to_dict()
    return Identity.of(
        model=model.model,
        revision=getattr(model.hf_config, "_commit_hash", None) or model.revision,
        quantization=model.quantization,
        config=_digest(json.dumps(config, sort_keys=True, default=str)),
        weights=_weights(Path(model.model)),
        policy=describe(parse_policy(request)),
        dtype=model.dtype,
        cache_dtype=cache.cache_dtype,
        block_size=cache.block_size,
        max_model_len=model.max_model_len,
        plugin=__version__,
        format=FORMAT,
    )


def _weights(folder: Path) -> str:
    """Names, sizes and times of local weights; "" for models from a hub."""
    if not folder.is_dir():
        return ""
    files = sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin"))
    stats = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    return _digest(json.dumps(stats))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def owner_of(request: Any, patched_prompt: Sequence[int] = ()) -> str:
    """Digest of who may continue a request's session.

    Args:
        patched_prompt: by which it was compressed; empty = by none.
    """
    lora = request.lora_request
    adapter = (lora.lora_name, lora.lora_int_id, lora.lora_path) if lora else None
    said = [request.cache_salt, adapter, *([patched_prompt] if patched_prompt else [])]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


# -- the scheduler's side ------------------------------------------------------------


class SchedulerSessions:
    """Finds, starts and ends sessions of one engine.

    Args:
        manager: of the engine's blocks.
        host: of what policies offload.
    """

    def __init__(
        self, vllm_config: Any, manager: ResidencyBlockManager, host: HostReservations
    ) -> None:
        self._manager = manager
        self._host = host
        spec = manager.kv_cache_spec
        self._policy: KVCachePolicy = spec.policy
        self._geometry = spec.geometry
        settings = parse_sessions(request_of(vllm_config))
        assert settings.session_memory is not None, "not settled"
        files = session_dir(vllm_config)
        self.keeper = SessionDirectory(
            settings.session_memory,
            ranks=vllm_config.parallel_config.world_size,
            least_tokens=manager.block_size,
            writes=files is not None,
            disk_bytes=settings.session_disk,
            max_age_s=settings.session_max_age_s,
            # what lies on the host is not copied
            moves=self._policy.retrieval is not None,
            on_gone=host.let_go,
            on_leave=manager.parked.drop,
        )
        self._parks = settings.session_park
        logger.info(
            "sessions: up to %d KiB, unused for %s, files in %s",
            settings.session_memory >> 10,
            f"{settings.session_max_age_s} s" if settings.session_max_age_s else "ever",
            files.folder if files else "none",
        )
        self._said = asdict(self.keeper.counts)
        self._prompts: WeakKeyDictionary[Any, Tokens] = WeakKeyDictionary()
        # request -> position from which on its worker has seen its queries
        self._queries_from: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._query_bytes = _query_bytes(vllm_config)
        if files is not None:
            self._find(files)

    def _find(self, files: SessionFolder) -> None:
        files.prepare()
        for found in files.scan():
            if isinstance(found, SessionFileError):
                logger.warning("session file skipped: %s", found)
            else:
                self.keeper.found(*found)
        logger.info("%d sessions found in %s", self.keeper.num_sessions, files.folder)

    # -- a request starts -------------------------------------------------------

    def match(self, request: Any, at_least: int) -> Match | None:
        """The session that a request can continue, if that saves more than
        ``at_least`` tokens. Changes nothing."""
        if not _has_plain_prompt(request) or request.skip_reading_prefix_cache:
            return None
        patched = asked_patched_prompt(request.sampling_params)
        matches = [self._match_of(request, owner_of(request, patched))]
        if patched:
            # what was never compressed holds whatever is asked
            whole = self._match_of(request, owner_of(request), whole=True)
            matches.append(whole)
        found = [m for m in matches if m is not None and m.tokens > at_least]
        return max(found, key=lambda match: match.tokens, default=None)

    def _match_of(self, request: Any, owner: str, whole: bool = False) -> Match | None:
        def usable(session: Session, shared: int) -> int:
            if whole and session.compaction is not None:
                return 0
            return self._usable(request, session, shared)

        return self.keeper.match(owner, self._prompt(request), usable)

    def _prompt(self, request: Any) -> Tokens:
        """Its token ids; a request that waits is asked for them at every step."""
        ids = self._prompts.get(request)
        if ids is None:
            ids = self._prompts[request] = _ids(request.prompt_token_ids)
        return ids

    def _usable(self, request: Any, session: Session, shared: int) -> int:
        """How many of the shared tokens a request can start from: not its last
        one, and none whose query the next compaction needs and nobody kept."""
        tokens = min(shared, request.num_prompt_tokens - 1)
        plan = self._manager.plan_from(request, session.compaction)
        tokens = plan.can_start_at(
            tokens,
            session.compacted_at,
            self._policy.queries_needed,
            session.first_query,
        )
        # what was observed of later tokens cannot be taken back
        if self._policy.observation is not None and tokens < len(session.tokens):
            return 0
        return tokens if self._manager.can_start(request, session, tokens) else 0

    def begin(self, request: Any, hit_tokens: int, match: Match | None) -> None:
        """A request will start behind so many tokens of the prefix cache, which has
        no queries, or else from a session, if it is given blocks."""
        known = hit_tokens
        if match is not None:
            known = min(match.session.first_query, match.tokens)
        self._queries_from[request] = known

    def start(self, request: Any, match: Match | None) -> None:
        """A request was given its blocks: from a session, or from nothing."""
        if match is None:
            self.keeper.give_up(request.request_id)
            if not request.num_preemptions:
                self.keeper.missed()
            return
        blocks = self._manager.req_to_blocks[request.request_id]
        first, last = match.session.first_block, self._blocks_of(match.tokens)
        ids = [block.block_id for block in blocks[first:last]]
        name, prompt_tokens = request.request_id, request.num_prompt_tokens
        in_place = self._manager.takes_over(name)
        self.keeper.load(match, name, prompt_tokens, ids, in_place)

    # -- a request ends ---------------------------------------------------------

    def end(self, request: Any) -> None:
        """Keep what a request computed, whole or cut short, if it can be continued."""
        self.keeper.give_up(request.request_id)
        tokens = min(request.num_computed_tokens, request.num_tokens)
        if (
            tokens < self._manager.block_size
            or request.status not in _ENDED_WELL
            or not _has_plain_prompt(request)
        ):
            return
        plan = self._manager.plan(request)
        done = plan.num_done(tokens)
        if plan.num_done(request.num_computed_tokens) != done:
            return  # compacted beyond the tokens that are known
        compaction = _whole(plan.compaction(done - 1)) if done else None
        first = compaction.retained.start if compaction else 0
        held = self._manager.req_to_blocks.get(request.request_id, ())
        blocks = held[first : self._blocks_of(tokens)]
        assert not any(block.is_null for block in blocks), "a resident block is gone"
        size = self._manager.block_size * self._geometry.kv_bytes_per_token
        storage = self._policy.host_storage
        host_bytes = storage.host_bytes(tokens, self._geometry) if storage else 0
        patched = asked_patched_prompt(request.sampling_params) if compaction else ()
        first_query = first_saved(
            tokens,
            request.num_computed_tokens,
            self._policy.queries_needed,
            self._queries_from.get(request, 0),
            compaction.at_tokens if compaction else 0,
        )
        query_bytes = (tokens - first_query) * self._query_bytes
        session = Session(
            session_id=uuid.uuid4().hex,
            owner=owner_of(request, patched),
            tokens=_ids(request.all_token_ids[:tokens]),
            compaction=compaction,
            num_bytes=len(blocks) * size + query_bytes + host_bytes,
            first_query=first_query,
        )
        ids = (block.block_id for block in blocks)
        if not self.keeper.save(session, request.request_id, ids):
            return
        if host_bytes:
            self._host.hold(session.session_id, host_bytes)
        if self._parks:
            self._manager.parked.add(session.session_id, blocks)

    def take_numbers(self) -> dict[str, int]:
        """For the metrics: what there is, and what happened since the last call."""
        keeper, counts = self.keeper, asdict(self.keeper.counts)
        new = {name: count - self._said[name] for name, count in counts.items()}
        self._said = counts
        return {
            "sessions": keeper.num_sessions,
            "session_bytes": keeper.held_bytes,
            "session_disk_bytes": keeper.written_bytes,
        } | {f"session_{name}": count for name, count in new.items()}

    def _blocks_of(self, tokens: int) -> int:
        return int(-(-tokens // self._manager.block_size))


def _query_bytes(vllm_config: Any) -> int:
    """Of one token, all layers, all heads of all ranks together."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    heads = model.get_num_attention_heads(parallel) * parallel.tensor_parallel_size
    layers: int = model.get_num_layers(parallel)
    return int(layers * heads * model.get_head_size() * model.dtype.itemsize)


def _has_plain_prompt(request: Any) -> bool:
    """Whether token ids say all about it."""
    return (
        request.prompt_token_ids is not None
        and request.prompt_embeds is None
        and not request.mm_features
        and request.sampling_params is not None
    )


def _ids(tokens: Any) -> Tokens:
    return np.asarray(tokens, dtype=np.int32)


def _whole(compaction: Compaction) -> Compaction:
    """The same retained region, as if all compactions so far had been one."""
    retained = compaction.retained
    return Compaction(compaction.at_tokens, BlockSpan(0, retained.stop), retained)
