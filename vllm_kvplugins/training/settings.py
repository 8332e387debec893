"""Settings of router training."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator


class TrainSettings(BaseModel):
    """Settings of ``kvplugins research train-router``.

    Attributes:
        lengths: tokens per text in each stage (the length curriculum).
        examples: texts per stage.
        passages: number of these texts that the student also reads.
        held_out: texts for the report only, with the length of the last stage.
        steps: over all stages; one example per step.
        distill_every: interval, in steps, at which the student runs.
        learning_rate: peak rate of AdamW, for logits of thresholds; relative to the
            initial size of the projections for these; a tenth of it for the
            predictor of rank gates.
        warmup: share of the steps in which the rate rises; then it falls as a cosine.
        routing_dim: d'.
        max_rank: R.
        tau: threshold of all heads before training.
        calibrate: after training, choose the thresholds with the best F1 on the
            texts of the last stage.
        coverage: rho.
        zoom_weight: lambda_1.
        ranking_weight: weight of the KL divergence from the teacher's attention shares.
        reconstruction_weight: lambda_2.
        budget_weight: lambda_3; rises from 0 during the first half of the steps.
        rank_weight: beta.
        positive_weight: w+.
        mined: queries per text for which targets are learned.
        window: tokens per text for the distillation.
        queries: tokens at the end of each text that mined queries and the window
            are taken from.
        ends: use the last tokens of each text instead of a random part.
        dtype: of the model.
        seed: of texts, their parts and their order.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    lengths: tuple[int, ...] = (1024, 2048)
    examples: int = Field(default=64, ge=1)
    passages: int = Field(default=16, ge=1)
    held_out: int = Field(default=12, ge=1)
    steps: int = Field(default=1500, ge=1)
    distill_every: int = Field(default=5, ge=1)
    learning_rate: float = Field(default=0.03, gt=0)
    weight_decay: float = Field(default=0.01, ge=0)
    warmup: float = Field(default=0.1, ge=0, lt=1)
    routing_dim: int = Field(default=32, ge=1)
    max_rank: int = Field(default=32, ge=1)
    tau: float = Field(default=0.4, gt=0, lt=1)
    calibrate: bool = True
    coverage: float = Field(default=0.9, gt=0, lt=1)
    zoom_weight: float = Field(default=1.0, ge=0)
    ranking_weight: float = Field(default=1.0, ge=0)
    reconstruction_weight: float = Field(default=0.5, ge=0)
    budget_weight: float = Field(default=0.1, ge=0)
    rank_weight: float = Field(default=0.02, ge=0)
    positive_weight: float = Field(default=1.0, gt=0)
    mined: int = Field(default=192, ge=1)
    window: int = Field(default=32, ge=1)
    queries: int = Field(default=256, ge=1)
    ends: bool = False
    dtype: str = "bfloat16"
    seed: int = 0

    @model_validator(mode="after")
    def _lengths_leave_a_prefix(self) -> TrainSettings:
        if not self.lengths or min(self.lengths) < 2 * self.queries:
            raise ValueError(
                f"lengths {list(self.lengths)} must all be at least "
                f"{2 * self.queries}: the last {self.queries} tokens are queries and "
                "need at least as many tokens before them"
            )
        if self.window > self.queries:
            raise ValueError(
                f"a window of {self.window} tokens does not fit into the "
                f"{self.queries} query tokens"
            )
        return self
