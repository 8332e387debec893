"""How to choose pages of similar keys: by their mean, by a bound, or by attention mass.

Divides the keys of a document into pages of sixteen similar ones, as ``CodedIndex``
does, in exact arithmetic. The queries of a KV head then choose pages together:

- ``best of any``: those that any query ranks highest, by an estimate of their best key;
- ``warm start``: also those in which the step before found its tokens;
- ``until coverage``: in the order of their estimated attention, until a share of it is
  reached.

``found`` is the attention to the best 64 tokens of these pages, summed over the
queries, as a share of that to the best 64 of all.

    python benchmarks/research/page_estimates.py MODEL TEXT --tokens 6144
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import _path  # noqa: F401
import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "helpers"))

PAGE, SEGMENT, RESIDENT, QUERIES = 16, 2048, 64, 64
TOKENS = 64  # to find
PAGES_PER_QUERY = (16, 24, 32, 64)
COVERAGES = (0.9, 0.95, 0.98, 0.99)
MOST_PAGES = 128


@dataclass(frozen=True, slots=True)
class Head:
    """Keys of a KV head in pages, without those that stay on the device.

    Attributes:
        keys: [n, head_dim]; those of the pages come first.
        pages: int64 [pages, 16], rows of ``keys``.
        queries: [num_queries, group, head_dim], times the softmax scale.
    """

    keys: torch.Tensor
    pages: torch.Tensor
    queries: torch.Tensor

    @property
    def in_pages(self) -> int:
        return self.pages.numel()

    def votes(self, position: int) -> torch.Tensor:
        """[n], the attention of the group."""
        return (self.queries[position] @ self.keys.T).softmax(-1).sum(0)

    def means(self) -> torch.Tensor:
        """[pages, head_dim]."""
        return self.keys[self.pages].mean(1)

    def variances(self) -> torch.Tensor:
        """[pages, head_dim], of the keys of each page."""
        return self.keys[self.pages].var(1, unbiased=False)


# [num_queries, group, pages]: an estimate of the best logit in each page.
Estimate = Callable[[Head], torch.Tensor]
# Per position, the pages that the group reads.
Choice = Iterator[torch.Tensor]


def by_mean(head: Head) -> torch.Tensor:
    return head.queries @ head.means().T


def by_deviations(head: Head) -> torch.Tensor:
    """The mean and three standard deviations along the query."""
    spread = (head.queries.square() @ head.variances().T).sqrt()
    return by_mean(head) + 3.0 * spread


def by_corners(head: Head) -> torch.Tensor:
    """Quest's bound: the best corner of the box around the keys."""
    keys, queries = head.keys[head.pages], head.queries
    return queries.clamp(min=0) @ keys.amax(1).T + queries.clamp(max=0) @ keys.amin(1).T


def by_mass(head: Head) -> torch.Tensor:
    """The logarithm of a page's attention, if its keys are normally distributed."""
    return by_mean(head) + 0.5 * head.queries.square() @ head.variances().T


def best_of_any(head: Head, estimate: Estimate, count: int) -> Choice:
    """The pages that are among the best of any query of the group."""
    for one in estimate(head).topk(count).indices:
        yield one.unique()


def warm_start(head: Head, estimate: Estimate, count: int) -> Choice:
    """The same, and the pages in which the step before found its best tokens."""
    recent = torch.empty(0, dtype=torch.int64)
    for position, best in enumerate(best_of_any(head, estimate, count)):
        pages = torch.cat([best, recent]).unique()
        yield pages
        votes = head.votes(position)[head.pages[pages]]
        best_tokens = votes.flatten().topk(TOKENS).indices
        recent = pages[(best_tokens // PAGE).unique()]


def until_coverage(head: Head, estimate: Estimate, share: float) -> Choice:
    """The best pages with this share of the group's estimated attention."""
    for one in estimate(head).softmax(-1).sum(1):
        mass, order = one.sort(descending=True)
        reached = int((mass.cumsum(0) < share * mass.sum()).sum()) + 1
        yield order[: min(reached, MOST_PAGES)]


def covered(head: Head, position: int, pages: torch.Tensor) -> float:
    """Attention found in some pages and behind the last, as a share of the possible."""
    votes = head.votes(position)
    read = torch.cat([votes[head.pages[pages].flatten()], votes[head.in_pages :]])
    found = read.topk(min(TOKENS, len(read))).values.sum()
    return float(found / votes.topk(TOKENS).values.sum())


def divided(keys: torch.Tensor) -> torch.Tensor:
    """Pages of similar keys: int64 [n / 16, 16], n a multiple of 16.

    Halves the keys at the median along the direction in which they vary most, until
    sixteen are left; see ``code_pages.hpp``.
    """

    def split(rows: torch.Tensor) -> Iterator[torch.Tensor]:
        if len(rows) <= PAGE:
            yield rows.sort().values
            return
        centered = keys[rows] - keys[rows].mean(0)
        along = centered[:, centered.square().mean(0).argmax()]
        for _ in range(2):
            direction = along @ centered
            along = centered @ (direction / direction.norm().clamp(min=1e-30))
        half = len(rows) // PAGE // 2 * PAGE
        order = along.argsort(stable=True)
        yield from split(rows[order[:half]])
        yield from split(rows[order[half:]])

    return torch.stack(list(split(torch.arange(len(keys)))))


def heads_of(model: str, text: str, tokens: int, most: int) -> Iterator[Head]:
    """KV heads of layers from the third on, evenly spaced: layers differ much."""
    from real_keys import capture

    layers = capture(model, text, tokens + 2 * RESIDENT, QUERIES)[2:]
    count = min(most, len(layers))
    for i in range(count):
        queries, keys = layers[i * len(layers) // count]
        head = i % len(keys)
        own = keys[head, RESIDENT : RESIDENT + tokens]
        starts = range(0, tokens - SEGMENT + 1, SEGMENT)
        pages = torch.cat([at + divided(own[at : at + SEGMENT]) for at in starts])
        yield Head(own, pages, queries[head].transpose(0, 1) * own.shape[1] ** -0.5)


def main(
    model: Annotated[str, typer.Argument(help="model folder")],
    text: Annotated[Path, typer.Argument(help="a text file")],
    tokens: Annotated[int, typer.Option(min=SEGMENT)] = 6144,
    heads: Annotated[int, typer.Option(min=1)] = 14,
) -> None:
    """Print how much attention the best tokens of the chosen pages get."""
    data = list(heads_of(model, text.read_text(), tokens, heads))
    table = Table(box=box.MARKDOWN)
    columns = ("estimate", "pages", "read", "found", "lowest tenth", "lowest hundredth")
    for column in columns:
        table.add_column(column, no_wrap=True)
    for choose, estimates in CHOICES.items():
        options = COVERAGES if choose is until_coverage else PAGES_PER_QUERY
        for (name, estimate), option in itertools.product(estimates.items(), options):
            shares, read = [], []
            for head in data:
                for position, pages in enumerate(choose(head, estimate, option)):
                    shares.append(covered(head, position, pages))
                    read.append(len(pages))
            shares.sort()
            table.add_row(
                name,
                f"{choose.__name__.replace('_', ' ')}, {option}",
                f"{statistics.mean(read):.0f}",
                f"{statistics.mean(shares):.4f}",
                f"{shares[len(shares) // 10]:.4f}",
                f"{shares[len(shares) // 100]:.3f}",
            )
    Console(width=120).print(f"{tokens} keys, {len(data)} KV heads", table)


CHOICES: dict[Callable[..., Choice], dict[str, Estimate]] = {
    best_of_any: {
        "mean": by_mean,
        "mean and 3 deviations": by_deviations,
        "corners (Quest)": by_corners,
        "mass": by_mass,
    },
    warm_start: {"mean": by_mean, "mean and 3 deviations": by_deviations},
    until_coverage: {"mean": by_mean, "mass": by_mass},
}

if __name__ == "__main__":
    typer.run(main)
