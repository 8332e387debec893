"""Train a router: length curriculum, one example per step, resumable."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vllm_kvplugins.errors import KVPolicyError, coded
from vllm_kvplugins.routers.router import Router
from vllm_kvplugins.training.examples import Example
from vllm_kvplugins.training.losses import Terms, Weights, terms
from vllm_kvplugins.training.settings import TrainSettings
from vllm_kvplugins.training.student import routed, student_logits

# Gradients are clipped to this norm.
_LONGEST_GRADIENT = 1.0


def starting_router(examples: Sequence[Example], settings: TrainSettings) -> Router:
    """An untrained router that ranks spans approximately as their mean keys do.

    The projection of a head selects the coordinates in which products of queries and
    mean keys vary most between spans. It is scaled so that gates are as steep as
    attention.

    Selecting coordinates instead of general directions keeps RoPE intact: RoPE rotates
    each pair of coordinates separately, so selected pairs depend on distances, as
    attention does, and not on positions.

    The paper does not describe how projections are initialized.

    Args:
        examples: of the first stage.
    """
    layers, heads, _, dim = examples[0].queries.shape
    group = heads // examples[0].means.shape[2]
    variation = torch.zeros(layers, heads, dim)
    for example in examples:
        energy = example.queries.float().square().mean(2)
        spread = example.means[0].var(2, correction=0).repeat_interleave(group, 1)
        variation += (energy * spread).cpu()
    selected = variation.topk(settings.routing_dim, -1).indices.sort(-1).values
    directions = F.one_hot(selected, dim).float()
    length = torch.zeros(layers, heads)
    for example in examples:
        keys = example.means[0].cpu().repeat_interleave(group, 1) @ directions.mT
        length += keys.norm(dim=-1).mean(-1) / len(examples)
    # makes (W q)(W k) / (|W k| sqrt(d')) equal to q k / sqrt(d) on average
    size = length * (settings.routing_dim / dim) ** 0.5
    projection = directions * size[..., None, None]
    return Router.new(projection, settings.tau, settings.max_rank, settings.seed)


@dataclass(slots=True, eq=False)
class Training:
    """A router in training, with the state that a checkpoint needs.

    Attributes:
        of: identifies model and texts; a checkpoint continues only with the same.
        projection_size: mean absolute value of the initial projections; their learning
            rate is relative to it.
        step: number of finished steps.
    """

    router: Router
    settings: TrainSettings
    of: str
    optimizer: torch.optim.AdamW
    projection_size: float
    step: int = 0

    @staticmethod
    def begin(
        router: Router, settings: TrainSettings, of: str, device: torch.device
    ) -> Training:
        """Start with an untrained router."""
        size = float(router.projection.detach().abs().mean())
        return Training._of(router, settings, of, device, size)

    @staticmethod
    def _of(
        router: Router,
        settings: TrainSettings,
        of: str,
        device: torch.device,
        projection_size: float,
    ) -> Training:
        router = router.on(device)
        for tensor in router.tensors.values():
            tensor.requires_grad_()
        rates = dict.fromkeys(router.tensors, settings.learning_rate / 10)
        rates["projection"] = settings.learning_rate * projection_size
        rates["threshold"] = settings.learning_rate
        groups = [
            {"params": [tensor], "lr": rates[name], "peak": rates[name]}
            for name, tensor in router.tensors.items()
        ]
        optimizer = torch.optim.AdamW(groups, weight_decay=settings.weight_decay)
        return Training(router, settings, of, optimizer, projection_size)

    @property
    def distills(self) -> bool:
        """Whether the student reads the example of the next step."""
        return self.step % self.settings.distill_every == 0

    def advance(self, model: Any, example: Example) -> Terms:
        """Run one training step on one example.

        Raises:
            KVPolicyError: the loss is not finite.
        """
        settings = self.settings
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * rate(self.step, settings)
        student = teacher = None
        if self.distills:
            assert example.passage is not None
            teacher = model.get_output_embeddings()(example.passage.hidden).float()
            student = student_logits(model, example, routed(self.router, example))
        weights = Weights.of(settings)
        losses = terms(self.router, example, weights, student, teacher)
        total = losses.total(weights, min(2 * self.step / settings.steps, 1.0))
        if not bool(torch.isfinite(total)):
            raise KVPolicyError(
                coded(
                    "KVP645",
                    f"the loss is {float(total.detach())} at step {self.step}; try a "
                    "smaller learning_rate, or --dtype float32",
                )
            )
        self.optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(
            list(self.router.tensors.values()), _LONGEST_GRADIENT
        )
        self.optimizer.step()
        self.step += 1
        return losses.detached()

    # -- checkpoints --------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write a checkpoint; an interrupted write leaves the previous one intact."""
        tensors = {f"router.{n}": t.detach() for n, t in self.router.tensors.items()}
        for name, tensor in self.router.tensors.items():
            for what, moment in self.optimizer.state.get(tensor, {}).items():
                tensors[f"{what}.{name}"] = moment
        metadata = {
            "step": str(self.step),
            "projection_size": str(self.projection_size),
            "of": self.of,
            "settings": self.settings.model_dump_json(),
        }
        temporary = path.with_suffix(".new")
        save_file(tensors, temporary, metadata)
        temporary.replace(path)

    @staticmethod
    def load(
        path: Path, settings: TrainSettings, of: str, device: torch.device
    ) -> Training:
        """Continue from a checkpoint of :meth:`save`.

        Raises:
            KVPolicyError: the file is not a checkpoint, or belongs to other settings,
                another model or other texts.
        """
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                names = file.keys()
                tensors = {name: file.get_tensor(name) for name in names}
            step, size = int(metadata["step"]), float(metadata["projection_size"])
            before = TrainSettings.model_validate_json(metadata["settings"])
            saved_of = metadata["of"]
            parts = [name.partition(".")[::2] for name in tensors]
            router = Router(
                **{n: tensors[f"router.{n}"] for what, n in parts if what == "router"}
            )
        except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
            raise KVPolicyError(
                coded(
                    "KVP644",
                    f"{path} is not a checkpoint of a router ({error}); remove it, or "
                    "give another --out",
                )
            ) from error
        if before != settings:
            raise KVPolicyError(
                coded(
                    "KVP644",
                    f"{path} belongs to a run with other settings "
                    f"({_differences(before, settings)}); give the same settings, or "
                    "another --out",
                )
            )
        if saved_of != of:
            raise KVPolicyError(
                coded(
                    "KVP644",
                    f"{path} belongs to a run with another model or other texts; give "
                    "the same, or another --out",
                )
            )
        training = Training._of(router, settings, of, device, size)
        for name, tensor in training.router.tensors.items():
            state = {
                # AdamW keeps its step count on the CPU
                what: tensors[f"{what}.{name}"].to("cpu" if what == "step" else device)
                for what, owner in parts
                if owner == name and what != "router"
            }
            if state:
                training.optimizer.state[tensor] = state
        training.step = step
        return training


def _differences(before: TrainSettings, now: TrainSettings) -> str:
    old, new = before.model_dump(), now.model_dump()
    return ", ".join(
        f"{name} {old[name]}, now {new[name]}" for name in old if old[name] != new[name]
    )


def rate(step: int, settings: TrainSettings) -> float:
    """Factor of the peak learning rate: linear warm-up, then cosine decay to zero."""
    rising = settings.warmup * settings.steps
    if step < rising:
        return (step + 1) / (rising + 1)
    done = (step - rising) / max(settings.steps - rising, 1)
    return 0.5 * (1 + math.cos(math.pi * done))


def stage_of(step: int, settings: TrainSettings) -> int:
    """Index of the length stage to which a step belongs."""
    return step * len(settings.lengths) // settings.steps


def train(
    model: Any,
    training: Training,
    stage_examples: Callable[[int], Sequence[Example]],
    done: Callable[[int, Terms], None],
) -> Router:
    """Run all remaining steps.

    Args:
        model: frozen, from ``teacher.load_model``.
        training: its state; advanced in place.
        stage_examples: returns the examples of a stage; called when the stage begins.
        done: called after each step with the step and its loss terms.

    Returns:
        The trained router on the CPU, without gradients.

    Cost: per step, a forward and a backward pass of the gates of all layers; every
        ``distill_every`` steps also one of the model over ``window`` tokens.
    """
    settings = training.settings
    stage, examples = -1, list[Example]()
    while training.step < settings.steps:
        if stage != stage_of(training.step, settings):
            stage = stage_of(training.step, settings)
            examples = list(stage_examples(stage))
        pool = [e for e in examples if e.passage] if training.distills else examples
        pick = random.Random(f"{settings.seed} {training.step}").randrange(len(pool))
        losses = training.advance(model, pool[pick])
        done(training.step, losses)
    return training.router.on(torch.device("cpu"))
