"""Session settings that a user can set next to the policy's own."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from vllm_kvplugins.budgets import parse_bytes
from vllm_kvplugins.errors import coded

logger = logging.getLogger("vllm.kv_policy")

SessionDtype = Literal["auto", "int8", "int4"]

# Old name -> name. The old names still work in this version.
DEPRECATED_SETTINGS = {"session_park": "session_keep_on_device"}

# Settings of the access to session_url.
_OF_URL = {
    "session_refresh_s",
    "session_lookup_s",
    "session_load_s",
    "session_index_memory",
}

_warned: set[str] = set()


def rename_deprecated(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings under their current names; warns once per old name.

    Raises:
        ValueError: a setting is given under both names.
    """
    renamed = dict(settings)
    for old, new in DEPRECATED_SETTINGS.items():
        if old not in renamed:
            continue
        if new in renamed:
            text = f"{old} is the old name of {new}, and both are set; remove {old}"
            raise ValueError(coded("KVP303", text))
        renamed[new] = renamed.pop(old)
        if old not in _warned:
            _warned.add(old)
            logger.warning("%s is deprecated; use %s", old, new)
    return renamed


def _bytes_or_auto(value: Any) -> Any:
    if value == "auto":
        return value
    num_bytes = parse_bytes(value)
    if num_bytes is not None and num_bytes < 1:
        raise ValueError(f'write at least 1 byte, "auto" or null; got {value!r}')
    return num_bytes


class SessionSettings(BaseModel):
    """Session settings; part of ``--kv-policy-config``."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    sessions: bool | None = Field(
        default=None,
        description="Keep the KV cache of a request for the request that continues "
        "it; null: only if the policy works turn by turn.",
    )
    session_memory: Annotated[int | None, BeforeValidator(parse_bytes)] = Field(
        default=None,
        ge=1,
        description='Host memory for sessions ("2GiB"), over all ranks; null: a '
        "quarter of the memory that is free at start-up.",
    )
    session_max_age_s: float | None = Field(
        default=None,
        gt=0,
        description="Seconds after which an unused session is dropped, also by an idle "
        "server; null: never.",
    )
    session_keep_on_device: bool = Field(
        default=True,
        description="Also leave a session's blocks on the device until other requests "
        "need them.",
    )
    session_dtype: SessionDtype = Field(
        default="auto",
        description="How keys and values of sessions lie in host memory and files: as "
        "in the cache (auto), or quantized to 8 bits (int8: about half of bfloat16; "
        "loses little) or 4 bits (int4: less than a third; loses much).",
    )
    session_dir: Path | None = Field(
        default=None,
        description="Directory for session files, which outlive memory and restarts; "
        "null: memory only. Users who can read it can read the conversations.",
    )
    session_disk: Annotated[
        int | Literal["auto"] | None,
        BeforeValidator(_bytes_or_auto),
    ] = Field(
        default="auto",
        description='Limit on the files of this engine in session_dir ("20GiB"); auto: '
        "a quarter of the space that is free at start-up; null: no limit.",
    )

    session_url: str | None = Field(
        default=None,
        description="Store that several replicas share: an object store "
        '("s3://bucket/prefix") or a shared directory ("file:///mnt/sessions"); null: '
        "none. Who can read it can read the conversations; who can write to it can "
        "change the answers.",
    )
    session_refresh_s: float | None = Field(
        default=15.0,
        gt=0,
        description="Seconds between two listings of session_url, which find the "
        "sessions of other replicas and delete old ones; null: no listings.",
    )
    session_lookup_s: float = Field(
        default=0.2,
        ge=0,
        description="How long a new request waits while the sessions that its prompt "
        "may continue are looked up in session_url; 0: only listings find sessions.",
    )
    session_load_s: float = Field(
        default=5.0,
        gt=0,
        description="How long a request waits for a session to be read from "
        "session_url; then it computes its prompt.",
    )
    session_index_memory: Annotated[int, BeforeValidator(parse_bytes)] = Field(
        default=256 << 20,
        ge=1,
        description='Memory of the scheduler ("1GiB") for sessions that are only in '
        "session_url; a look-up still finds those that do not fit.",
    )

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, settings: Any) -> Any:
        return rename_deprecated(settings) if isinstance(settings, dict) else settings

    @property
    def _needs_sessions(self) -> list[str]:
        """Settings that the user has set and that have no effect without sessions."""
        names = self.model_fields_set - {"sessions", "session_keep_on_device"}
        return sorted(
            name for name in names if getattr(self, name) not in (None, "auto")
        )

    @model_validator(mode="after")
    def _check_consistency(self) -> SessionSettings:
        if self.sessions is False and self._needs_sessions:
            names = ", ".join(self._needs_sessions)
            raise ValueError(
                coded("KVP301", f"sessions is false, but {names} is set; remove one")
            )
        if isinstance(self.session_disk, int) and self.session_dir is None:
            raise ValueError(
                coded(
                    "KVP302",
                    f"session_disk {self.session_disk} needs a session_dir; set one",
                )
            )
        if self.session_url is None:
            alone = sorted(self.model_fields_set & _OF_URL)
            if alone:
                text = f"{', '.join(alone)} needs a session_url; set one, or remove it"
                raise ValueError(coded("KVP302", text))
            return self
        if self.session_dir is not None:
            text = (
                "session_dir and session_url are both set, and sessions are written to "
                "one place; remove session_dir: session_url outlives restarts too"
            )
            raise ValueError(coded("KVP313", text))
        if self.session_refresh_s is None and not self.session_lookup_s:
            text = (
                "session_refresh_s is null and session_lookup_s is 0, so no session of "
                "session_url would be found; set one of them"
            )
            raise ValueError(coded("KVP318", text))
        return self

    def on_for(self, works_by_turns: bool) -> bool:
        """Whether sessions are on.

        Args:
            works_by_turns: whether the policy works turn by turn.
        """
        if self.sessions is None:
            return works_by_turns or bool(self._needs_sessions)
        return self.sessions


SESSION_SETTINGS = tuple(SessionSettings.model_fields)


def session_part(settings: dict[str, Any]) -> dict[str, Any]:
    """The session settings among all settings of a policy."""
    names = (*SESSION_SETTINGS, *DEPRECATED_SETTINGS)
    return {key: settings[key] for key in names if key in settings}
