"""``kvplugins research plot``: one subcommand per kind of plot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape

from vllm_kvplugins.cli.console import out, user_errors
from vllm_kvplugins.cli.inputs import check_targets
from vllm_kvplugins.engine.recorded_run import read_run
from vllm_kvplugins.episodes.encoder import load_encoder
from vllm_kvplugins.episodes.histories import read_history
from vllm_kvplugins.episodes.settings import DEFAULT_ENCODER, EpisodeSettings
from vllm_kvplugins.errors import KVPolicyError, coded

plots = typer.Typer(
    name="plot", help="Draw a recorded run or a measurement.", no_args_is_help=True
)
_KINDS = (".svg", ".png")


@plots.callback()
def _keep_subcommands() -> None:
    """Draw a recorded run or a measurement."""


PlotPath = Annotated[
    Path, typer.Option("--out", "-o", metavar="PLOT.svg|.png", help="Where to draw.")
]


@plots.command("hit-rate")
def hit_rate(
    run_path: Annotated[
        Path, typer.Argument(metavar="RUN.jsonl", help="File written by `record`.")
    ],
    plot_path: PlotPath,
) -> None:
    """Draw pages fetched and attention mass covered, per layer and step."""
    with user_errors():
        _check_plot(plot_path)
        from vllm_kvplugins.cli.hit_rate import draw

        run = read_run(run_path)
        _save(lambda: draw(run, plot_path), plot_path)


@plots.command("retention")
def retention(
    file_path: Annotated[
        Path,
        typer.Argument(
            metavar="RETENTION.json",
            help="File written by benchmarks/quality/retention.py.",
        ),
    ],
    plot_path: PlotPath,
) -> None:
    """Draw the share of attention to the first turn that remains after each turn."""
    with user_errors():
        _check_plot(plot_path)
        from vllm_kvplugins.cli.retention import draw, read_retention

        measured = read_retention(file_path)
        _save(lambda: draw(measured, plot_path), plot_path)


@plots.command("episodes")
def episodes(
    history_path: Annotated[
        Path,
        typer.Argument(
            metavar="HISTORY.json", help="List of chat messages, or a LoCoMo file."
        ),
    ],
    plot_path: PlotPath,
    dialogue: Annotated[
        int | None, typer.Option(metavar="N", help="Dialogue of a LoCoMo file, from 0.")
    ] = None,
    count: Annotated[
        str, typer.Option("--episodes", metavar="N|auto", help="Number of episodes.")
    ] = "4",
    segment_utterances: Annotated[
        int, typer.Option(metavar="N", min=1, help="Utterances per segment.")
    ] = 4,
    encoder: Annotated[
        str, typer.Option(metavar="E", help="Folder or Hugging Face ID.")
    ] = DEFAULT_ENCODER,
) -> None:
    """Draw the segments of a conversation by episode, with the texts of medoids."""
    with user_errors():
        _check_plot(plot_path)
        from vllm_kvplugins.cli.episodes import draw, episode_map

        settings = EpisodeSettings(
            episodes=_episodes(count),
            segment_utterances=segment_utterances,
            encoder=encoder,
        )
        history = read_history(history_path, dialogue)
        segments = episode_map(history, settings, load_encoder(settings.encoder))
        _save(lambda: draw(segments, plot_path), plot_path)


def _episodes(given: str) -> int | Literal["auto"]:
    if given == "auto":
        return "auto"
    if not given.isdecimal():
        raise KVPolicyError(
            coded("KVP603", f'--episodes is {given!r}; give a number, or "auto"')
        )
    return int(given)


@plots.command("sensitivity")
def sensitivity(
    profile_path: Annotated[
        list[Path],
        typer.Argument(metavar="PROFILE.json", help="File written by `calibrate`."),
    ],
    plot_path: PlotPath,
    budget: Annotated[
        int, typer.Option(metavar="M", min=1, help="Tokens per KV head on average.")
    ] = 1024,
    alpha: Annotated[
        float, typer.Option(min=0.0, help="The allocator's `alpha`.")
    ] = 1.1,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per page.")] = 32,
) -> None:
    """Draw the key similarity and the budget of each layer."""
    with user_errors():
        _check_plot(plot_path)
        from vllm_kvplugins.budgets.sensitivity_profile import read_profile
        from vllm_kvplugins.cli.sensitivity import check_count, draw, layer_tokens

        profiles = [read_profile(path) for path in profile_path]
        check_count(profiles)
        tokens = [
            layer_tokens(profile, path, budget, block_size, alpha)
            for profile, path in zip(profiles, profile_path, strict=True)
        ]
        title = (
            f"Budget of {budget} by layer, alpha {alpha:g}, pages of {block_size}; "
            "dotted: equal layers"
        )
        _save(lambda: draw(profiles, tokens, title, plot_path), plot_path)


@plots.command("zoom")
def zoom(
    router_path: Annotated[
        Path,
        typer.Argument(
            metavar="ROUTER.safetensors", help="File written by `train-router`."
        ),
    ],
    plot_path: PlotPath,
) -> None:
    """Draw how often each query head zooms into spans under a trained router."""
    with user_errors():
        _check_plot(plot_path)
        from vllm_kvplugins.cli.zoom import draw
        from vllm_kvplugins.routers.files import read_router

        facts = read_router(router_path)[1]
        _save(lambda: draw(facts, plot_path), plot_path)


def _check_plot(path: Path) -> None:
    """Refuse a path that cannot be written or that has an unknown suffix."""
    if path.suffix.lower() not in _KINDS:
        raise KVPolicyError(
            coded(
                "KVP603",
                f"cannot draw {path}: its name must end in {' or '.join(_KINDS)}",
            )
        )
    check_targets(path)


def _save(draw: Callable[[], None], path: Path) -> None:
    """Draw; report a missing package or an unwritable path in one message."""
    try:
        draw()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise KVPolicyError(
            coded(
                "KVP600",
                "plots need matplotlib, which is not installed: pip install "
                "matplotlib, or this package with its extra: pip install '.[plot]'",
            )
        ) from error
    except OSError as error:
        raise KVPolicyError(
            coded(
                "KVP602", f"cannot write {path}: {error.strerror}; choose another path"
            )
        ) from error
    out().print(f"wrote {escape(str(path))}", soft_wrap=True)
