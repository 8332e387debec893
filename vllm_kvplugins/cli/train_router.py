"""``kvplugins research train-router``: train a router that chooses spans for SeKV."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TaskID, TimeElapsedColumn
from rich.table import Table
from safetensors import SafetensorError

from vllm_kvplugins.cli.console import out, user_errors
from vllm_kvplugins.cli.inputs import Model, load_tokenizer
from vllm_kvplugins.errors import KVPolicyError, coded, refuse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_kvplugins.model_config import ConfigOnlyModel
    from vllm_kvplugins.plan.geometry import Geometry
    from vllm_kvplugins.routers.files import RouterReport
    from vllm_kvplugins.routers.router import Router
    from vllm_kvplugins.training.examples import Example
    from vllm_kvplugins.training.loop import Training
    from vllm_kvplugins.training.losses import Terms
    from vllm_kvplugins.training.settings import TrainSettings
    from vllm_kvplugins.training.texts import Text, Texts

ROUTER, CHECKPOINT, REPORT = (
    "router.safetensors",
    "checkpoint.safetensors",
    "report.json",
)
# Block size for which texts are cut into spans; shifts a cut by less than a block.
_BLOCK_SIZE = 16


def train_router(
    model: Model,
    data: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder of UTF-8 texts, .txt or .md.")
    ],
    out_dir: Annotated[
        Path,
        typer.Option(
            "--out",
            metavar="DIR",
            help=f"Folder for {ROUTER}, {REPORT} and {CHECKPOINT}; the same command "
            "continues from the checkpoint.",
        ),
    ],
    steps: Annotated[
        int, typer.Option(metavar="N", min=1, help="Training steps in total.")
    ] = 1500,
    lengths: Annotated[
        str, typer.Option(metavar="N,N", help="Tokens per text in each stage.")
    ] = "1024,2048",
    examples: Annotated[
        int, typer.Option(metavar="N", min=1, help="Texts per stage.")
    ] = 64,
    seed: Annotated[int, typer.Option(metavar="N", help="Random seed.")] = 0,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Type of the weights.")
    ] = "bfloat16",
    device: Annotated[
        str, typer.Option(metavar="D", help="torch device of the model.")
    ] = "cpu",
    settings: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="Other settings, for example '{\"rank_weight\": 0.1}'; see docs.",
        ),
    ] = None,
    save_every: Annotated[
        int, typer.Option(metavar="N", min=1, help="Steps between checkpoints.")
    ] = 25,
) -> None:
    """Train a router for `sekv`; the weights of the model do not change."""
    with user_errors():
        chosen = _settings(steps, lengths, examples, seed, dtype, settings)
        try:
            out_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise KVPolicyError(
                coded(
                    "KVP602",
                    f"cannot write into {out_dir}: {error.strerror}; choose another "
                    "folder",
                )
            ) from error
        try:
            held_out_report = _run(model, data, out_dir, chosen, device, save_every)
        except (OSError, SafetensorError) as error:
            raise KVPolicyError(
                coded(
                    "KVP602",
                    f"cannot write into {out_dir}: {error}; free some space, then "
                    "repeat the command to continue",
                )
            ) from error
    _print_report(held_out_report, out_dir)


def _settings(
    steps: int, lengths: str, examples: int, seed: int, dtype: str, others: str | None
) -> TrainSettings:
    from vllm_kvplugins.config import parse_options
    from vllm_kvplugins.training.settings import TrainSettings

    named = {
        "steps": steps,
        "lengths": lengths.split(","),
        "examples": examples,
        "seed": seed,
        "dtype": dtype,
    }
    options = parse_options(others) if others is not None else {}
    if repeated := sorted(named.keys() & options.keys()):
        raise KVPolicyError(
            coded(
                "KVP603",
                f"--settings contains {', '.join(repeated)}; use the option of that "
                "name instead",
            )
        )
    try:
        return TrainSettings.model_validate(named | options)
    except ValidationError as error:
        problems = "; ".join(
            ": ".join([".".join(map(str, item["loc"])), item["msg"]]).removeprefix(": ")
            for item in error.errors()
        )
        raise KVPolicyError(
            coded("KVP603", f"these settings are invalid: {problems}")
        ) from error


def _run(
    model: str,
    data: Path,
    out_dir: Path,
    settings: TrainSettings,
    device: str,
    save_every: int,
) -> RouterReport:
    """Train and evaluate a router, and write its files."""
    from vllm_kvplugins import __version__
    from vllm_kvplugins.model_config import ConfigOnlyModel
    from vllm_kvplugins.routers.files import RouterFacts, write_router
    from vllm_kvplugins.training import loop
    from vllm_kvplugins.training.teacher import load_model
    from vllm_kvplugins.training.texts import read_texts

    geometry = _checked_geometry(model, settings)
    tokenizer = load_tokenizer(model)
    texts = read_texts(
        data, tokenizer, max(settings.lengths), settings.held_out, settings.seed
    )
    loaded = load_model(model, settings.dtype, device)
    fingerprint = ConfigOnlyModel(model, "", loaded.config.to_dict()).fingerprint()
    of = json.dumps([fingerprint.model_dump(mode="json"), texts.digests])
    checkpoint = out_dir / CHECKPOINT
    run = None
    if checkpoint.exists():
        run = loop.Training.load(checkpoint, settings, of, loaded.device)
    with _progress() as progress:
        maker = _Maker(loaded, settings, texts, geometry, progress)
        held_out = maker.held_out()  # first, to refuse unsuitable texts early
        if run is None:
            router = loop.starting_router(maker.stage(0), settings)
            run = loop.Training.begin(router, settings, of, loaded.device)
        router = _train(loaded, run, maker, checkpoint, save_every, progress)
        router, figures = _evaluate(loaded, router, settings, maker, held_out, progress)
    facts = RouterFacts(
        plugin=__version__,
        model=Path(model).name,
        fingerprint=fingerprint,
        settings=settings.model_dump(mode="json"),
        texts=texts.digests,
        report=figures,
    )
    (out_dir / REPORT).write_text(
        json.dumps(facts.model_dump(mode="json"), indent=1), encoding="utf-8"
    )
    write_router(router, facts, out_dir / ROUTER)
    return figures


def _checked_geometry(model: str, settings: TrainSettings) -> Geometry:
    """Refuse models and settings that cannot work, before weights are loaded."""
    from vllm_kvplugins.model_config import read_model_config
    from vllm_kvplugins.plan.geometry import Geometry
    from vllm_kvplugins.vllm_adapter.config import validation

    config = read_model_config(model, settings.dtype)
    reasons = [
        *validation.model_problems(config),
        *validation.training_problems(config),
        *config.layer_problems(),
        *_shape_problems(settings, config),
    ]
    refuse(f"no router can be trained for {model}", reasons)
    shape = config.cache_shape()
    return Geometry(
        _BLOCK_SIZE,
        shape.num_layers,
        shape.num_kv_heads,
        shape.bytes_per_token(2),
        shape.head_dim,
        2,
    )


def _train(
    model: Any,
    run: Training,
    maker: _Maker,
    checkpoint: Path,
    save_every: int,
    progress: Progress,
) -> Router:
    """Run all remaining steps; show the progress and write checkpoints."""
    from vllm_kvplugins.training import loop

    steps = run.settings.steps
    task = progress.add_task("training", total=steps, completed=run.step)

    def done(step: int, terms: Terms) -> None:
        status = (
            f"training: zoom {float(terms.zoom):.3f}, lost energy "
            f"{float(terms.reconstruction):.3f}"
        )
        progress.update(task, completed=step, description=status)
        if step % save_every == 0 or step == steps:
            run.save(checkpoint)
            _log(progress, f"step {step} of {steps}, {status}")

    return loop.train(model, run, maker.stage, done)


def _evaluate(
    model: Any,
    router: Router,
    settings: TrainSettings,
    maker: _Maker,
    held_out: Sequence[Example],
    progress: Progress,
) -> tuple[Router, RouterReport]:
    """Choose thresholds, if set, and evaluate the router on held-out texts."""
    import torch

    from vllm_kvplugins.training import report, thresholds

    examples = maker.stage(len(settings.lengths) - 1)
    if settings.calibrate:
        _log(progress, "choosing thresholds")
        calibrated = thresholds.calibrated(router.on(model.device), examples)
        router = calibrated.on(torch.device("cpu"))
    with torch.no_grad():
        on_device = router.on(model.device)
        return router, report.report(model, on_device, examples, held_out)


def _shape_problems(settings: TrainSettings, config: ConfigOnlyModel) -> list[str]:
    """Settings that do not fit the sizes of the model."""
    problems, head_dim = [], config.cache_shape().head_dim
    longest, max_positions = max(settings.lengths), config.max_positions
    if max_positions is not None and longest > max_positions:
        problems.append(
            coded(
                "KVP643",
                f"--lengths contains {longest}, but the model takes at most "
                f"{max_positions} tokens; give smaller lengths",
            )
        )
    if settings.routing_dim > head_dim:
        problems.append(
            coded(
                "KVP643",
                f"routing_dim {settings.routing_dim} exceeds the {head_dim} dimensions "
                "of a head; give a smaller one",
            )
        )
    return problems


class _Maker:
    """Makes the examples of a stage when the stage begins."""

    def __init__(
        self,
        model: Any,
        settings: TrainSettings,
        texts: Texts,
        geometry: Geometry,
        progress: Progress,
    ) -> None:
        self._model, self._settings, self._texts = model, settings, texts
        self._geometry = geometry
        self._progress = progress
        self._made: dict[int, list[Example]] = {}

    def stage(self, number: int) -> Sequence[Example]:
        """The examples of a stage; only those of the latest stage stay in memory."""
        if number not in self._made:
            length = self._settings.lengths[number]
            self._made.clear()  # before the next ones are made: they fill the memory
            settings = self._settings
            self._made[number] = self._make(
                self._texts.training,
                length,
                settings.examples,
                settings.passages,
                "training",
                # start after the texts of the previous stage
                first_text=number * settings.examples,
            )
        return self._made[number]

    def held_out(self) -> Sequence[Example]:
        """The examples of held-out texts."""
        return self._make(
            self._texts.held_out,
            self._settings.lengths[-1],
            self._settings.held_out,
            self._settings.held_out,
            "held-out",
            first_text=0,
        )

    def _make(
        self,
        texts: Sequence[Text],
        length: int,
        count: int,
        passages: int,
        purpose: str,
        first_text: int,
    ) -> list[Example]:
        from vllm_kvplugins.training.examples import Cut, make_example
        from vllm_kvplugins.training.teacher import read
        from vllm_kvplugins.training.texts import parts

        settings = self._settings
        cut = Cut(
            queries=settings.queries,
            mined=settings.mined,
            window=settings.window,
            coverage=settings.coverage,
            max_rank=settings.max_rank,
        )
        task: TaskID = self._progress.add_task(
            f"reading {purpose} texts of {length} tokens", total=count
        )
        made = list["Example"]()
        for number, (_, tokens) in enumerate(
            parts(
                texts,
                length,
                count,
                f"{settings.seed} {purpose}",
                first_text,
                settings.ends,
            )
        ):
            reading = read(self._model, tokens, length - settings.queries)
            example = make_example(
                reading,
                cut,
                self._geometry,
                settings.seed + number,
                with_passage=len(made) < passages,
            )
            if example is not None:
                made.append(example.to(self._model.device))
            self._progress.update(task, advance=1)
            _log(self._progress, f"{number + 1} of {count} {purpose} texts of {length}")
        self._progress.remove_task(task)
        if not made:
            raise KVPolicyError(
                coded(
                    "KVP642",
                    f"none of the {purpose} texts of {length} tokens has two spans; "
                    "give longer --lengths",
                )
            )
        return made


@contextmanager
def _progress() -> Iterator[Progress]:
    console = Console(stderr=True, highlight=False)
    columns = (
        *Progress.get_default_columns(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield progress


def _log(progress: Progress, line: str) -> None:
    """Print a line if there is no terminal to show a bar, as in a log file."""
    if not progress.console.is_terminal:
        progress.console.print(line)


def _print_report(figures: RouterReport, out_dir: Path) -> None:
    console = out()
    table = Table("held-out", "router", "mean-key", "others")
    for name, others in (
        ("zoom_f1", ("router_tuned", "all")),
        ("zoom_f1_in_room", ()),
        ("zoomed", ("wanted",)),
        ("covered_in_room", ("teacher",)),
        ("divergence", ("none", "all")),
    ):
        row = getattr(figures, name)
        table.add_row(
            name,
            f"{row['router']:.3f}",
            f"{row['mean_key']:.3f}",
            ", ".join(f"{other} {row[other]:.3f}" for other in others),
        )
    console.print(table)
    console.print(
        f"gates keep {figures.kept_energy:.1%} of the squared norm with "
        f"{figures.mean_rank:.1f} components on average"
    )
    console.print(f"wrote {out_dir / ROUTER} and {REPORT}", soft_wrap=True)
