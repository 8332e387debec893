"""How often the episode changes during a conversation, and the time of routing.

EpiCache, figure 7b. The first half of each LoCoMo dialogue is clustered. The second
half arrives piece by piece as queries, each with everything before it as its history.
After each query, full segments are embedded, as a server does while idle. The
clustering does not change, unless ``--recluster-growth`` is given.

    python benchmarks/research/episode_switches.py locomo.json --plot-out switches.svg
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median, quantiles
from time import process_time
from typing import Annotated, Any

import _path  # noqa: F401
import typer
from _engine import provenance
from _serving_plots import MARKERS, style
from rich.console import Console
from rich.table import Table

from vllm_kvplugins.episodes.clustering import full_segments
from vllm_kvplugins.episodes.encoder import Encoder, load_encoder
from vllm_kvplugins.episodes.histories import locomo_dialogues
from vllm_kvplugins.episodes.routing import EpisodeRouter, Route
from vllm_kvplugins.episodes.settings import DEFAULT_ENCODER, EpisodeSettings
from vllm_kvplugins.episodes.utterances import Utterance, dialogue_text

NEVER = 1e9  # growth that triggers a new clustering of a history


@dataclass(frozen=True, slots=True)
class Run:
    """One dialogue, query by query.

    Attributes:
        utterances, segments: of the half that was clustered.
        first_ms: time of the first route, which embeds and clusters that half.
        guides: per query, the chosen guides; the first query determines the initial
            cache.
        encode_ms, match_ms: per query after the first.
        cpu_ms: both, of all threads of this process; hardly depends on other load.
        learn_ms: CPU time of embedding after each query, for segments that the query
            did not wait for.
    """

    dialogue: int
    utterances: int
    segments: int
    episodes: int
    first_ms: float
    guides: list[int]
    encode_ms: list[float]
    match_ms: list[float]
    cpu_ms: list[float]
    learn_ms: list[float]

    @property
    def switches(self) -> list[int]:
        """Cumulative switches after each query; 0 after the first."""
        total, found = 0, [0]
        for before, now in zip(self.guides, self.guides[1:], strict=False):
            total += before != now
            found.append(total)
        return found

    @property
    def share(self) -> float:
        """Switches per query, among the queries that could switch."""
        return self.switches[-1] / (len(self.guides) - 1)

    @property
    def shuffled_share(self) -> float:
        """Mean share for the same queries in random order."""
        n, counts = len(self.guides), Counter(self.guides).values()
        return 1 - sum(k * (k - 1) for k in counts) / (n * (n - 1))


def routes(
    history: Sequence[Utterance],
    settings: EpisodeSettings,
    encoder: Encoder,
    query_utterances: int,
) -> Iterator[tuple[Route, float, float]]:
    """Route the second half of a dialogue.

    Returns:
        The routes, and milliseconds of CPU time of each route and of the embedding
        after it.
    """
    router = EpisodeRouter(settings, lambda _: encoder)
    half = len(history) // 2
    for at in range(half, len(history) - query_utterances + 1, query_utterances):
        query = dialogue_text(history[at : at + query_utterances])
        started = process_time()
        route = router.route("benchmark", history[:at], query)
        assert route is not None
        routed = process_time()
        router.embed_new_segments("benchmark", history[:at])
        yield route, (routed - started) * 1e3, (process_time() - routed) * 1e3


def run_dialogue(
    number: int,
    history: Sequence[Utterance],
    settings: EpisodeSettings,
    encoder: Encoder,
    query_utterances: int,
) -> Run:
    """Route a dialogue."""
    timed = list(routes(history, settings, encoder, query_utterances))
    found = [route for route, _, _ in timed]
    numbers: dict[str, int] = {}
    half = len(history) // 2
    first = found[0]
    return Run(
        number,
        half,
        len(full_segments(history[:half], settings.segment_utterances)),
        len(first.guides),
        first.encode_ms + first.match_ms,
        [numbers.setdefault(route.guide, len(numbers)) for route in found],
        [route.encode_ms for route in found[1:]],
        [route.match_ms for route in found[1:]],
        [cpu_ms for _, cpu_ms, _ in timed[1:]],
        [learn_ms for _, _, learn_ms in timed[1:]],
    )


def table(runs: Sequence[Run]) -> Table:
    """One row per dialogue, and one for all."""
    shown = Table(
        *("dialogue", "utter.", "segm.", "first, s", "queries", "switches"),
        *("share", "shuffled", "encode, ms", "match, ms", "CPU, ms", "learn, ms"),
    )
    for run in runs:
        shown.add_row(
            str(run.dialogue),
            str(run.utterances),
            str(run.segments),
            f"{run.first_ms / 1e3:.1f}",
            str(len(run.guides)),
            str(run.switches[-1]),
            f"{run.share:.0%}",
            f"{run.shuffled_share:.0%}",
            _times(run.encode_ms),
            _times(run.match_ms),
            _times(run.cpu_ms),
            _times(run.learn_ms),
        )
    could = sum(len(run.guides) - 1 for run in runs)
    switches = sum(run.switches[-1] for run in runs)
    mean = sum(run.shuffled_share * (len(run.guides) - 1) for run in runs) / could
    shown.add_row(
        *("all", "", "", ""),
        str(sum(len(run.guides) for run in runs)),
        str(switches),
        f"{switches / could:.0%}",
        f"{mean:.0%}",
        _times([ms for run in runs for ms in run.encode_ms]),
        _times([ms for run in runs for ms in run.match_ms]),
        _times([ms for run in runs for ms in run.cpu_ms]),
        _times([ms for run in runs for ms in run.learn_ms]),
    )
    return shown


def _times(ms: list[float]) -> str:
    """Median and 95th percentile."""
    return f"{median(ms):.1f} ({quantiles(ms, n=20)[-1]:.1f})"


def draw(runs: Sequence[Run], path: Path) -> None:
    """Plot cumulative switches over queries, and the worst case."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "kvp", "font.size": 9}
    figure = Figure(figsize=(7, 4.4), layout="constrained")
    axes = figure.subplots()
    max_queries = max(len(run.guides) for run in runs)
    axes.plot(
        [0, max_queries - 1],
        [0, max_queries - 1],
        "--",
        color="0.35",
        label="worst case",
    )
    for index, run in enumerate(runs):
        axes.plot(
            run.switches,
            marker=MARKERS[index % len(MARKERS)],
            markevery=0.1,
            markersize=4,
            label=f"dialogue {run.dialogue}",
            **style(index),
        )
    axes.set(xlabel="queries after the first", ylabel="episode switches so far")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    extra: dict[str, Any] = {"dpi": 150}
    if path.suffix.lower() == ".svg":
        extra = {"metadata": {"Date": None}}
    figure.savefig(path, **extra)


def main(
    path: Path,
    query_utterances: Annotated[
        int, typer.Option(min=1, help="utterances per query")
    ] = 4,
    episodes: int = 4,
    segment_utterances: int = 4,
    encoder: str = DEFAULT_ENCODER,
    recluster_growth: float = NEVER,
    plot_out: Path | None = None,
    json_out: Path | None = None,
) -> None:
    """Route the second halves of LoCoMo's dialogues."""
    if plot_out and not find_spec("matplotlib"):  # fail now instead of at the end
        raise typer.BadParameter("--plot-out needs matplotlib: pip install matplotlib")
    settings = EpisodeSettings(
        episodes=episodes,
        segment_utterances=segment_utterances,
        encoder=encoder,
        recluster_growth=recluster_growth,
    )
    loaded = load_encoder(encoder)
    loaded.encode(["warm up the encoder"])
    runs = [
        run_dialogue(number, history, settings, loaded, query_utterances)
        for number, history in enumerate(locomo_dialogues(path))
    ]
    console, source = Console(width=160), provenance()
    console.print(table(runs))
    console.print_json(data=source)
    if plot_out is not None:
        draw(runs, plot_out)
    if json_out is not None:
        rows = [asdict(run) for run in runs]
        json_out.write_text(json.dumps({"runs": rows} | source, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
