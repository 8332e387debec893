"""Training a router: a curriculum of lengths, one example a step, resumable."""

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

from vllm_kvplugins.errors import KVPolicyError
from vllm_kvplugins.routers.router import Router
from vllm_kvplugins.training.examples import Example
from vllm_kvplugins.training.losses import Terms, Weights, terms
from vllm_kvplugins.training.settings import TrainSettings
from vllm_kvplugins.training.student import routed, student_logits

# Gradients longer than this are shortened to it.
_LONGEST_GRADIENT = 1.0


def starting_router(examples: Sequence[Example], settings: TrainSettings) -> Router:
    """A router that ranks about as means do: its projections pick the coordinates of
    a head in which products of queries and mean keys vary most from span to span,
    scaled so that gates are as steep as attention.

    Coordinates, not directions: RoPE turns each pair of them alone, so what picks
    pairs depends on distances, as attention does, and not on positions.

    Differs from the paper, which does not say how projections start.
    """
    layers, heads, _, dim = examples[0].queries.shape
    group = heads // examples[0].means.shape[2]
    varies = torch.zeros(layers, heads, dim)
    for example in examples:
        asked = example.queries.float().square().mean(2)
        spread = example.means[0].var(2, correction=0).repeat_interleave(group, 1)
        varies += (asked * spread).cpu()
    chosen = varies.topk(settings.routing_dim, -1).indices.sort(-1).values
    directions = F.one_hot(chosen, dim).float()
    length = torch.zeros(layers, heads)
    for example in examples:
        keys = example.means[0].cpu().repeat_interleave(group, 1) @ directions.mT
        length += keys.norm(dim=-1).mean(-1) / len(examples)
    # of (W q)(W k) / (|W k| sqrt(d')), so that it is q k / sqrt(d) on average
    size = length * (settings.routing_dim / dim) ** 0.5
    projection = directions * size[..., None, None]
    return Router.new(projection, settings.tau, settings.max_rank, settings.seed)


@dataclass(slots=True, eq=False)
class Training:
    """A router on its way, with all that is needed to go on later.

    Attributes:
        of: what it is trained for and on, as text; nothing else may go on.
        projection_size: mean size of the projections' numbers at the start, which
            their learning rate is relative to.
        step: how many are done.
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
        """From a router that no step has seen."""
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
        """Whether the next step's example is read by the student, too."""
        return self.step % self.settings.distill_every == 0

    def advance(self, model: Any, example: Example) -> Terms:
        """One step on one example."""
        settings = self.settings
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * rate(self.step, settings)
        student = teacher = None
        if self.distills:
            assert example.passage is not None
            teacher = model.get_output_embeddings()(example.passage.hidden).float()
            student = student_logits(model, example, routed(self.router, example))
        weights = Weights.of(settings)
        found = terms(self.router, example, weights, student, teacher)
        total = found.total(weights, min(2 * self.step / settings.steps, 1.0))
        if not bool(torch.isfinite(total)):
            raise KVPolicyError(
                f"the loss is {float(total.detach())} at step {self.step}; try a "
                "smaller learning_rate, or --dtype float32"
            )
        self.optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(
            list(self.router.tensors.values()), _LONGEST_GRADIENT
        )
        self.optimizer.step()
        self.step += 1
        return found.detached()

    # -- checkpoints --------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write all there is; whoever is interrupted finds the one before."""
        tensors = {f"router.{n}": t.detach() for n, t in self.router.tensors.items()}
        for name, tensor in self.router.tensors.items():
            for what, moment in self.optimizer.state.get(tensor, {}).items():
                tensors[f"{what}.{name}"] = moment
        told = {
            "step": str(self.step),
            "projection_size": str(self.projection_size),
            "of": self.of,
            "settings": self.settings.model_dump_json(),
        }
        fresh = path.with_suffix(".new")
        save_file(tensors, fresh, told)
        fresh.replace(path)

    @staticmethod
    def load(
        path: Path, settings: TrainSettings, of: str, device: torch.device
    ) -> Training:
        """Go on from :meth:`save`.

        Raises:
            KVPolicyError: it is no checkpoint, or one of other settings, or of
                another model or other texts.
        """
        try:
            with safe_open(path, "pt") as file:
                told = file.metadata() or {}
                names = file.keys()
                tensors = {name: file.get_tensor(name) for name in names}
            step, size = int(told["step"]), float(told["projection_size"])
            before = TrainSettings.model_validate_json(told["settings"])
            begun_for = told["of"]
            parts = [name.partition(".")[::2] for name in tensors]
            router = Router(
                **{n: tensors[f"router.{n}"] for what, n in parts if what == "router"}
            )
        except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
            raise KVPolicyError(
                f"{path} is no checkpoint of a router ({error}); remove it, or give "
                "another --out"
            ) from error
        if before != settings:
            raise KVPolicyError(
                f"{path} was begun with other settings "
                f"({_differences(before, settings)}); give the same, or another --out"
            )
        if begun_for != of:
            raise KVPolicyError(
                f"{path} was begun for another model or with other texts; give the "
                "same, or another --out"
            )
        training = Training._of(router, settings, of, device, size)
        for name, tensor in training.router.tensors.items():
            state = {
                # AdamW wants its count of steps on the CPU
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
    """Share of the peak learning rate: a linear rise, then half a cosine to zero."""
    rising = settings.warmup * settings.steps
    if step < rising:
        return (step + 1) / (rising + 1)
    done = (step - rising) / max(settings.steps - rising, 1)
    return 0.5 * (1 + math.cos(math.pi * done))


def stage_of(step: int, settings: TrainSettings) -> int:
    """Index of the length that a step learns from."""
    return step * len(settings.lengths) // settings.steps


def train(
    model: Any,
    training: Training,
    stage_examples: Callable[[int], Sequence[Example]],
    done: Callable[[int, Terms], None],
) -> Router:
    """All steps that are left.

    Args:
        stage_examples: of a stage, asked for when it begins.
        done: after each step.

    Returns:
        The router, apart from gradients.

    Cost: per step a forward and a backward pass of the gates of all layers; every
        ``distill_every`` steps one of the model, over ``window`` tokens, on top.
    """
    settings = training.settings
    stage, examples = -1, list[Example]()
    while training.step < settings.steps:
        if stage != stage_of(training.step, settings):
            stage = stage_of(training.step, settings)
            examples = list(stage_examples(stage))
        some = [e for e in examples if e.passage] if training.distills else examples
        pick = random.Random(f"{settings.seed} {training.step}").randrange(len(some))
        found = training.advance(model, some[pick])
        done(training.step, found)
    return training.router.on(torch.device("cpu"))
