"""Settings of ``--kv-policy auto``."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from vllm_kvplugins.amounts import parse_bytes
from vllm_kvplugins.choice.requests import Workload

_ANSWER_TOKENS = 512


class AutoSettings(BaseModel):
    """What ``auto`` chooses a policy for. It chooses the settings of the policy itself.

    Settings of sessions, kernel and shared prefix stand next to these; ``auto`` chooses
    only policies that accept them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    workload: Workload = Field(
        default=Workload.AGENT,
        description="document: details are looked up. chat: turns continue a "
        "conversation. agent: both, and prompts share prefixes.",
    )
    context: int | None = Field(
        default=None,
        ge=1,
        description="Expected tokens of a prompt; null: the longest that the server "
        "accepts.",
    )
    answer: int = Field(
        default=_ANSWER_TOKENS, ge=2, description="Expected tokens of an answer."
    )
    concurrency: int | None = Field(
        default=None,
        ge=1,
        description="Expected requests at a time; null: --max-num-seqs.",
    )
    host_memory: Annotated[int | None, BeforeValidator(parse_bytes)] = Field(
        default=None,
        ge=0,
        description='Host memory that the policy may use ("8GiB"; 0: none), over all '
        "ranks; null: half of what is free at start-up.",
    )
    min_score: float = Field(
        default=0.95,
        ge=0,
        le=1,
        description="Smallest share of the keys that stock vLLM finds, on each "
        "measured model. If no policy that fits reaches it, no policy is used.",
    )
