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
from vllm_kvplugins.sessions.files import FORMAT, Identity, Scan, SessionFolder
from vllm_kvplugins.sessions.settings import SessionSettings, rename_deprecated
from vllm_kvplugins.vllm_adapter.config.engine_config import request_of


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


def session_folder(vllm_config: Any) -> SessionFolder | None:
    """Folder of this engine's session files; None if it writes none."""
    settings = request_of(vllm_config)
    sessions = parse_sessions(settings)
    if not sessions.sessions or sessions.session_dir is None:
        return None
    ranks = vllm_config.parallel_config.world_size
    return SessionFolder(sessions.session_dir, _identity(vllm_config, settings), ranks)


def disk_limit(
    settings: SessionSettings, files: SessionFolder | None, scan: Scan
) -> int | None:
    """Limit on session files; None: none.

    "auto" is a quarter of what is free without the folder's own files, so that a
    restart does not change it.
    """
    if settings.session_disk != "auto":
        return settings.session_disk
    if files is None:
        return None
    own = scan.other_bytes + sum(found.file_bytes for found in scan.sessions)
    return (shutil.disk_usage(files.folder).free + own) // 4


def _identity(vllm_config: Any, settings: Any) -> Identity:
    """Everything that a cache depends on, except for the layout of its pages."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    config = model.hf_config.to_dict()
    return Identity.of(
        model=model.model,
        revision=getattr(model.hf_config, "_commit_hash", None) or model.revision,
        quantization=model.quantization,
        config=_digest(json.dumps(config, sort_keys=True, default=str)),
        weights=_digest_of_weights(Path(model.model)),
        policy=describe(parse_policy(settings)),
        dtype=model.dtype,
        cache_dtype=cache.cache_dtype,
        session_dtype=parse_sessions(settings).session_dtype,
        block_size=cache.block_size,
        max_model_len=model.max_model_len,
        plugin=__version__,
        format=FORMAT,
    )


def _digest_of_weights(folder: Path) -> str:
    """Digest of names, sizes and times of local weights; "" for models from a hub."""
    if not folder.is_dir():
        return ""
    files = sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin"))
    stats = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    return _digest(json.dumps(stats))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
