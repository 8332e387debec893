"""What a user can say about sessions, beside the policy's own settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from vllm_kvplugins.budgets import parse_bytes


class SessionSettings(BaseModel):
    """Session settings; part of ``--kv-policy-config``."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    sessions: bool | None = Field(
        default=None,
        description="Keep what a request computed for the one that continues it; "
        "null: if the policy works turn by turn.",
    )
    session_memory: Annotated[int | None, BeforeValidator(parse_bytes)] = Field(
        default=None,
        ge=1,
        description='Most host memory for sessions ("2GiB"), all ranks together; '
        "null: a quarter of what is free at start-up.",
    )
    session_max_age_s: float | None = Field(
        default=None,
        gt=0,
        description="Sessions unused for so long are dropped; null: never.",
    )
    session_park: bool = Field(
        default=True,
        description="Leave what a request computed on the device, too, until somebody "
        "needs the room.",
    )
    session_dir: Path | None = Field(
        default=None,
        description="Directory for sessions that outlive memory and restarts; null: "
        "memory only. Whoever can read it can read the conversations.",
    )
    session_disk: Annotated[int | None, BeforeValidator(parse_bytes)] = Field(
        default=None,
        ge=1,
        description='Most bytes in session_dir ("20GiB"); null: no limit.',
    )

    @property
    def _given(self) -> list[str]:
        """Settings that only sessions can be about, and that the user has set."""
        others = {"sessions", "session_park"}
        return sorted(self.model_dump(exclude=others, exclude_none=True))

    @model_validator(mode="after")
    def _consistent(self) -> SessionSettings:
        if self.sessions is False and self._given:
            raise ValueError(f"sessions is false, but {', '.join(self._given)} is set")
        if self.session_disk is not None and self.session_dir is None:
            raise ValueError("session_disk needs a session_dir")
        return self

    def on_for(self, works_by_turns: bool) -> bool:
        """Whether sessions are kept under a policy that does or does not."""
        if self.sessions is None:
            return works_by_turns or bool(self._given)
        return self.sessions


SESSION_SETTINGS = tuple(SessionSettings.model_fields)


def session_part(request: dict[str, Any]) -> dict[str, Any]:
    """Of a kv_policy request, what is about sessions."""
    return {key: request[key] for key in SESSION_SETTINGS if key in request}
