"""Session settings of an engine, and the identity that its session files share."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from vllm_kvplugins import __version__
from vllm_kvplugins.config import describe, parse_policy, parse_sessions
from vllm_kvplugins.engine.heap import FP8_DTYPES
from vllm_kvplugins.engine.retrieval.host_tier import default_limit_bytes
from vllm_kvplugins.errors import coded
from vllm_kvplugins.policies.base import KVCachePolicy
from vllm_kvplugins.sessions.file_contents import FORMAT
from vllm_kvplugins.sessions.files import (
    Identity,
    Scan,
    SessionFiles,
    SessionFolder,
)
from vllm_kvplugins.sessions.head_shards import Heads
from vllm_kvplugins.sessions.object_store import open_storage, url_problems
from vllm_kvplugins.sessions.settings import SessionSettings, rename_deprecated
from vllm_kvplugins.sessions.weights import weights_digest
from vllm_kvplugins.vllm_adapter.config import speculation
from vllm_kvplugins.vllm_adapter.config.engine_config import request_of

# Of files that a file in a shared store needs.
_MAX_SOURCE_AGE_S = 3600.0


def resolve(settings: dict[str, Any], policy: KVCachePolicy) -> dict[str, Any]:
    """The settings with ``sessions`` true or false, so that all processes agree.

    Deprecated names are replaced, so that no other process warns about them.
    """
    on = are_on(settings, policy)
    return rename_deprecated(settings) | {"sessions": on}


def are_on(settings: dict[str, Any], policy: KVCachePolicy) -> bool:
    """Whether sessions are on, by the settings or by default."""
    return parse_sessions(settings).on_for(policy.turns is not None)


def hybrid_problems(settings: dict[str, Any], policy: KVCachePolicy) -> list[str]:
    """Why sessions cannot be used with layers that the policy leaves to vLLM."""
    if not are_on(settings, policy):
        return []
    return [
        coded(
            "KVP044",
            "a session stores full-attention layers only, and this model also has "
            "layers with a window, chunks or a recurrent state, which would be "
            'missing; set "sessions": false',
        )
    ]


def fp8_problems(settings: dict[str, Any], cache_dtype: str) -> list[str]:
    """Why the format of sessions does not fit an fp8 cache.

    Args:
        cache_dtype: vLLM's name.
    """
    dtype = parse_sessions(settings).session_dtype
    if dtype == "auto" or cache_dtype not in FP8_DTYPES:
        return []
    return [
        coded(
            "KVP312",
            f"session_dtype {dtype!r} with KV cache dtype {cache_dtype!r} would "
            "quantize elements that are quantized already; remove session_dtype: "
            "sessions then store the fp8 elements",
        )
    ]


def measured(settings: dict[str, Any]) -> dict[str, int]:
    """``session_memory``, a share of the memory that is free now.

    Empty if the user has set it, or if sessions are off.
    """
    sessions = parse_sessions(settings)
    if not sessions.sessions or sessions.session_memory:
        return {}
    return {"session_memory": default_limit_bytes() // 2}


def store_problems(settings: dict[str, Any], policy: KVCachePolicy) -> list[str]:
    """Why ``session_url`` cannot be used on this machine."""
    url = parse_sessions(settings).session_url
    if url is None or not are_on(settings, policy):
        return []
    return url_problems(url)


def session_files(vllm_config: Any) -> SessionFiles | None:
    """This engine's session files; None if it writes none."""
    settings = request_of(vllm_config)
    sessions = parse_sessions(settings)
    if not sessions.sessions:
        return None
    ranks = vllm_config.parallel_config.world_size
    heads = _heads(vllm_config, parse_policy(settings))
    if sessions.session_url is not None:
        identity = _identity(vllm_config, settings, of_replicas=True)
        storage = open_storage(sessions.session_url, identity.fingerprint)
        age_s = _max_source_age_s(sessions)
        return SessionFiles(storage, identity, ranks, heads, age_s)
    if sessions.session_dir is not None:
        identity = _identity(vllm_config, settings)
        return SessionFolder(sessions.session_dir, identity, ranks, heads)
    return None


def _max_source_age_s(sessions: SessionSettings) -> float:
    """A file in a shared store needs no file that was written earlier.

    Files are deleted by the time of writing them, by any replica or by the bucket's own
    rule, also when later ones need them. Later turns lose so much of their time.
    """
    limits = [_MAX_SOURCE_AGE_S]
    if sessions.session_max_age_s is not None:
        limits.append(sessions.session_max_age_s / 4)
    return min(limits)


def _heads(vllm_config: Any, policy: KVCachePolicy) -> Heads | None:
    """The KV heads that ranks divide; None: other sizes keep other tokens of a head."""
    if not (policy.scores_heads_separately and policy.page_allocator().uniform):
        return None
    models = [vllm_config.model_config]
    if (drafter := speculation.drafter_with_cache(vllm_config)) is not None:
        models.append(drafter[1])
    return Heads(
        tuple(model.get_total_num_kv_heads() for model in models),
        replicas_are_equal=not (
            policy.queries_needed or policy.observation or policy.probing
        ),
    )


def disk_limit(
    settings: SessionSettings, files: SessionFiles | None, scan: Scan
) -> int | None:
    """Limit on session files; None: none.

    "auto" is a quarter of what is free without the folder's own files, so that a
    restart does not change it. Files in a shared store have no limit.
    """
    if settings.session_disk != "auto":
        return settings.session_disk
    if not isinstance(files, SessionFolder):
        return None
    own = scan.other_bytes + sum(found.file_bytes for found in scan.sessions)
    return (shutil.disk_usage(files.folder).free + own) // 4


def _identity(vllm_config: Any, settings: Any, of_replicas: bool = False) -> Identity:
    """Everything that a cache depends on, except for the layout of its pages.

    The tensor-parallel size is in the names of files: see ``SessionFiles.reads``.

    Args:
        of_replicas: leave out what differs between machines: paths and times of files.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    drafter, drafts = speculation.drafter_with_cache(vllm_config), {}
    if drafter is not None:
        method, draft_model = drafter
        facts = _model_facts(draft_model, of_replicas)
        digest = _digest(json.dumps(facts, sort_keys=True, default=str))
        # Without a drafter, the fact is missing, and files of earlier versions match.
        drafts = {"drafter": f"{method} {facts['model']} {digest}"}
    policy = parse_policy(settings)
    allocation = policy.page_allocator().facts()
    # At default settings, the fact is missing, for the same reason.
    budgets = {"budgets": json.dumps(allocation, sort_keys=True)} if allocation else {}
    return Identity.of(
        **_model_facts(model, of_replicas),
        **drafts,
        **budgets,
        policy=describe(policy),
        cache_dtype=cache.cache_dtype,
        session_dtype=parse_sessions(settings).session_dtype,
        block_size=cache.block_size,
        max_model_len=model.max_model_len,
        plugin=__version__,
        format=FORMAT,
    )


def _model_facts(model: Any, of_replicas: bool) -> dict[str, Any]:
    """What the cache of a model depends on.

    Args:
        model: vLLM's configuration of the model, or of a drafter.
        of_replicas: see ``_identity``.
    """
    config, folder = model.hf_config.to_dict(), Path(model.model)
    name = model.model
    if of_replicas:
        config = _without_paths(config)
        name = folder.name if folder.is_dir() else name
        weights = weights_digest(folder)
    else:
        weights = _digest_of_weights(folder)
    return {
        "model": name,
        "revision": getattr(model.hf_config, "_commit_hash", None) or model.revision,
        "quantization": model.quantization,
        "config": _digest(json.dumps(config, sort_keys=True, default=str)),
        "weights": weights,
        "dtype": model.dtype,
    }


def _without_paths(config: Any) -> Any:
    """A model's configuration without the place of its files.

    That of an EAGLE head contains another one.
    """
    if not isinstance(config, dict):
        return config
    return {k: _without_paths(v) for k, v in config.items() if k != "_name_or_path"}


def _digest_of_weights(folder: Path) -> str:
    """Digest of names, sizes and times of local weights; "" for models from a hub."""
    if not folder.is_dir():
        return ""
    files = sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin"))
    stats = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    return _digest(json.dumps(stats))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
