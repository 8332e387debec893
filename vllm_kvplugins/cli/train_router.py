"""``kvplugins train-router``: teach SeKV which spans a model's queries want to see."""

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
from vllm_kvplugins.errors import KVPolicyError, refuse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_kvplugins.model_config import ConfigOnlyModel
    from vllm_kvplugins.plan.geometry import Geometry
    from vllm_kvplugins.routers.files import RouterReport
    from vllm_kvplugins.training.examples import Example
    from vllm_kvplugins.training.losses import Terms
    from vllm_kvplugins.training.settings import TrainSettings
    from vllm_kvplugins.training.texts import Text, Texts

ROUTER, CHECKPOINT, REPORT = (
    "router.safetensors",
    "checkpoint.safetensors",
    "report.json",
)
# Texts are cut as for a pool of such blocks, which moves a cut by less than that.
_BLOCK_SIZE = 16


def train_router(
    model: Model,
    data: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder of texts, .txt or .md, UTF-8.")
    ],
    out_dir: Annotated[
        Path,
        typer.Option(
            "--out",
            metavar="DIR",
            help=f"Gets {ROUTER}, {REPORT} and {CHECKPOINT}, from which the same "
            "command goes on.",
        ),
    ],
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="In all.")] = 1500,
    lengths: Annotated[
        str, typer.Option(metavar="N,N", help="Tokens of a text, stage by stage.")
    ] = "1024,2048",
    examples: Annotated[
        int, typer.Option(metavar="N", min=1, help="Texts per stage.")
    ] = 64,
    seed: Annotated[int, typer.Option(metavar="N", help="Of all that is drawn.")] = 0,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Of the model.")
    ] = "bfloat16",
    device: Annotated[
        str, typer.Option(metavar="D", help="Of the model, as torch calls it.")
    ] = "cpu",
    settings: Annotated[
        str | None,
        typer.Option(
            metavar="JSON", help="Others, such as '{\"rank_weight\": 0.1}'; see docs."
        ),
    ] = None,
    save_every: Annotated[
        int, typer.Option(metavar="N", min=1, help="Steps between checkpoints.")
    ] = 25,
) -> None:
    """Train a router for `sekv`; the model itself stays as it is."""
    with user_errors():
        chosen = _settings(steps, lengths, examples, seed, dtype, settings)
        try:
            out_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise KVPolicyError(
                f"cannot write into {out_dir}: {error.strerror}; choose another place"
            ) from error
        try:
            found = _run(model, data, out_dir, chosen, device, save_every)
        except (OSError, SafetensorError) as error:
            raise KVPolicyError(
                f"cannot write into {out_dir}: {error}; make room, and give the same "
                "command again to go on"
            ) from error
    _print_report(found, out_dir)


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
    told = parse_options(others) if others is not None else {}
    if twice := sorted(named.keys() & told.keys()):
        raise KVPolicyError(
            f"--settings holds {', '.join(twice)}, which have options of their own"
        )
    try:
        return TrainSettings.model_validate(named | told)
    except ValidationError as error:
        said = "; ".join(
            ": ".join([".".join(map(str, item["loc"])), item["msg"]]).removeprefix(": ")
            for item in error.errors()
        )
        raise KVPolicyError(f"these settings cannot be: {said}") from error


def _run(
    model: str,
    data: Path,
    out_dir: Path,
    settings: TrainSettings,
    device: str,
    save_every: int,
) -> RouterReport:
    import torch

    from vllm_kvplugins import __version__
    from vllm_kvplugins.model_config import ConfigOnlyModel, read_model_config
    from vllm_kvplugins.plan.geometry import Geometry
    from vllm_kvplugins.routers.files import RouterFacts, write_router
    from vllm_kvplugins.training import loop, report, thresholds
    from vllm_kvplugins.training.teacher import load_model
    from vllm_kvplugins.training.texts import read_texts
    from vllm_kvplugins.vllm_adapter.config import validation

    config = read_model_config(model, settings.dtype)
    reasons = [
        *validation.model_problems(config),
        *config.layer_problems(),
        *_shape_problems(settings, config),
    ]
    refuse(f"no router can be trained for {model}", reasons)
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
        shape = config.cache_shape()
        geometry = Geometry(
            _BLOCK_SIZE, shape.num_layers, shape.num_kv_heads, shape.bytes_per_token(2)
        )
        maker = _Maker(loaded, settings, texts, geometry, progress)
        held_out = maker.held_out()  # first: unfit texts are said before the long run
        if run is None:
            router = loop.starting_router(maker.stage(0), settings)
            run = loop.Training.begin(router, settings, of, loaded.device)
        task = progress.add_task("training", total=settings.steps, completed=run.step)

        def done(step: int, terms: Terms) -> None:
            said = (
                f"training: zoom {float(terms.zoom):.3f}, lost energy "
                f"{float(terms.reconstruction):.3f}"
            )
            progress.update(task, completed=step, description=said)
            if step % save_every == 0 or step == settings.steps:
                run.save(checkpoint)
                _log(progress, f"step {step} of {settings.steps}, {said}")

        router = loop.train(loaded, run, maker.stage, done)
        seen = maker.stage(len(settings.lengths) - 1)
        if settings.calibrate:
            _log(progress, "choosing thresholds")
            on_device = thresholds.calibrated(router.on(loaded.device), seen)
            router = on_device.on(torch.device("cpu"))
        with torch.no_grad():
            found = report.report(loaded, router.on(loaded.device), seen, held_out)
    facts = RouterFacts(
        plugin=__version__,
        model=Path(model).name,
        fingerprint=fingerprint,
        settings=settings.model_dump(mode="json"),
        texts=texts.digests,
        report=found,
    )
    (out_dir / REPORT).write_text(
        json.dumps(facts.model_dump(mode="json"), indent=1), encoding="utf-8"
    )
    write_router(router, facts, out_dir / ROUTER)
    return found


def _shape_problems(settings: TrainSettings, config: ConfigOnlyModel) -> list[str]:
    """What does not fit the model's sizes."""
    problems, head_dim = [], config.cache_shape().head_dim
    longest, most = max(settings.lengths), config.max_positions
    if most is not None and longest > most:
        problems.append(
            f"--lengths holds {longest}, and the model takes {most} tokens; give "
            "smaller ones"
        )
    if settings.routing_dim > head_dim:
        problems.append(
            f"routing_dim {settings.routing_dim} is more than the {head_dim} "
            "dimensions of a head; give at most that"
        )
    return problems


class _Maker:
    """Makes examples of texts when they are wanted."""

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
        """The examples of a stage; only those of the last one asked for are kept."""
        if number not in self._made:
            length = self._settings.lengths[number]
            self._made.clear()  # first, as they fill the memory
            settings = self._settings
            self._made[number] = self._make(
                self._texts.training,
                length,
                settings.examples,
                settings.passages,
                "training",
                # each stage goes on where the one before has stopped
                first_text=number * settings.examples,
            )
        return self._made[number]

    def held_out(self) -> Sequence[Example]:
        """Those of texts that no step has seen."""
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
        what: str,
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
            f"reading {what} texts of {length} tokens", total=count
        )
        found = list["Example"]()
        for number, (_, tokens) in enumerate(
            parts(
                texts,
                length,
                count,
                f"{settings.seed} {what}",
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
                with_passage=len(found) < passages,
            )
            if example is not None:
                found.append(example.to(self._model.device))
            self._progress.update(task, advance=1)
            _log(self._progress, f"{number + 1} of {count} {what} texts of {length}")
        self._progress.remove_task(task)
        if not found:
            raise KVPolicyError(
                f"none of the {what} texts of {length} tokens has two spans; give "
                "longer --lengths"
            )
        return found


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


def _log(progress: Progress, said: str) -> None:
    """A line where no bar is seen, as in a log file."""
    if not progress.console.is_terminal:
        progress.console.print(said)


def _print_report(found: RouterReport, out_dir: Path) -> None:
    console = out()
    table = Table("held-out", "router", "mean-key", "others")
    for name, others in (
        ("zoom_f1", ("router_tuned", "all")),
        ("zoom_f1_in_room", ()),
        ("zoomed", ("wanted",)),
        ("covered_in_room", ("teacher",)),
        ("divergence", ("none", "all")),
    ):
        row = getattr(found, name)
        table.add_row(
            name,
            f"{row['router']:.3f}",
            f"{row['mean_key']:.3f}",
            ", ".join(f"{other} {row[other]:.3f}" for other in others),
        )
    console.print(table)
    console.print(
        f"gates keep {found.kept_energy:.1%} of the squared norm with "
        f"{found.mean_rank:.1f} components on average"
    )
    console.print(f"wrote {out_dir / ROUTER} and {REPORT}", soft_wrap=True)
