"""Where an engine's front ends keep the clusterings of conversations."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_kvplugins import __version__
from vllm_kvplugins.config import parse_sessions
from vllm_kvplugins.episodes.encoder import weights_folder
from vllm_kvplugins.episodes.settings import EpisodeSettings
from vllm_kvplugins.sessions.clustering_records import FORMAT
from vllm_kvplugins.sessions.clusterings import ClusteringFiles
from vllm_kvplugins.sessions.files import Identity
from vllm_kvplugins.sessions.object_store import open_storage
from vllm_kvplugins.sessions.settings import SessionSettings
from vllm_kvplugins.sessions.storage import DirectoryStorage, SessionStorage
from vllm_kvplugins.sessions.weights import weights_digest
from vllm_kvplugins.vllm_adapter.config.engine_config import request_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# A look-up in session_dir takes milliseconds, unless the disk is sick.
_DIR_LOOKUP_S, _DIR_LOAD_S = 1.0, 5.0
# Clusterings in session_dir, apart from session_disk: some kilobytes each, usually.
_LIMIT_BYTES = 64 << 20
_SHARE_OF_DISK = 16


def clustering_files(
    vllm_config: VllmConfig,
    settings: EpisodeSettings,
    counted: Callable[[str], None] = lambda name: None,
) -> ClusteringFiles | None:
    """The clusterings in ``session_dir`` or ``session_url``; None if there is none.

    Args:
        counted: as for ``ClusteringFiles``.
    """
    sessions = parse_sessions(request_of(vllm_config))
    storage_and_identity = _storage(vllm_config, sessions, settings)
    if storage_and_identity is None:
        return None
    storage, identity = storage_and_identity
    if sessions.session_url is not None:
        return ClusteringFiles(
            storage,
            identity,
            sessions.session_lookup_s,
            sessions.session_load_s,
            sessions.session_max_age_s,
            sweeps=sessions.session_refresh_s is not None,  # null: no listings
            counted=counted,
        )
    limit_bytes = _LIMIT_BYTES
    if isinstance(sessions.session_disk, int):
        limit_bytes = min(limit_bytes, sessions.session_disk // _SHARE_OF_DISK)
    return ClusteringFiles(
        storage,
        identity,
        _DIR_LOOKUP_S,
        _DIR_LOAD_S,
        sessions.session_max_age_s,
        limit_bytes,
        counted=counted,
    )


def delete_clusterings(vllm_config: VllmConfig, settings: EpisodeSettings) -> None:
    """Delete the clusterings in ``session_dir``, in the background.

    Those in a ``session_url`` stay, as the sessions there.
    """
    if parse_sessions(request_of(vllm_config)).session_url is None:
        files = clustering_files(vllm_config, settings)
        if files is not None:
            files.clear()


def _storage(
    vllm_config: VllmConfig, sessions: SessionSettings, settings: EpisodeSettings
) -> tuple[SessionStorage, Identity] | None:
    """A folder of its own next to those of session files, and what it is named after.

    The plugin's version is a part of it because sessions of another one are not found.
    """
    if not sessions.sessions:
        return None
    if sessions.session_dir is None and sessions.session_url is None:
        return None
    model = Path(vllm_config.model_config.model)
    of_settings = {k: v for k, v in asdict(settings).items() if k != "build"}
    identity = Identity.of(
        **of_settings,
        # Names and not paths, which differ between machines.
        model=model.name if model.is_dir() else model,
        encoder_weights=_digest_of_encoder(settings.encoder),
        plugin=__version__,
        format=FORMAT,
    )
    if sessions.session_url is not None:
        return open_storage(sessions.session_url, identity.fingerprint), identity
    root = sessions.session_dir
    assert root is not None
    return DirectoryStorage(root, root / identity.fingerprint), identity


def _digest_of_encoder(name: str) -> str:
    """Digest of an encoder's weights; "" for one that only its name identifies."""
    folder = weights_folder(name)
    if folder is None:
        return ""
    # Models of sentence-transformers may have their weights in folders of modules.
    folders = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
    digests = [f"{path.name} {weights_digest(path)}" for path in folders[1:]]
    digests.insert(0, weights_digest(folder))
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()[:16]
