"""Measured figures of each policy, read from the tables of the research pages.

A figure stands in one place, next to its command. The policy's page repeats it with a
link.
"""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
POLICIES = "research/dropping-tokens.md"
RETRIEVAL = "research/retrieval.md"


def list_of(policy: str) -> str:
    """List the measured figures of a policy, with links to table and command.

    Raises:
        ValueError: no table has a row for the policy.
    """
    figures = [*_fidelity(policy), *_pass_key(policy), *_coverage(policy)]
    if not figures:
        raise ValueError(f"no measurement has a row for {policy}")
    return "\n".join([*(f"- {line}" for line in figures), ""])


def table(page: str, start: str) -> list[list[str]]:
    """Return the cells of the first table after a line that begins with ``start``.

    Raises:
        ValueError: the page has no such line, or no table after it.
    """
    text = (DOCS / page).read_text(encoding="utf-8")
    parts = re.split(rf"^{re.escape(start)}", text, flags=re.MULTILINE)
    if len(parts) != 2:
        raise ValueError(f"{page} has {len(parts) - 1} lines that begin with {start!r}")
    rows = re.search(r"(?:^\|.*\n)+", parts[1], re.MULTILINE)
    if rows is None:
        raise ValueError(f"{page} has no table after {start!r}")
    lines = rows[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def rows_of(policy: str, page: str, start: str) -> list[tuple[str, list[str]]]:
    """Return the rows of a policy as (settings, cells); default settings are ""."""
    rows = []
    for name, *cells in table(page, start)[2:]:
        base, _, settings = name.partition(" ")
        if base.rstrip(",") == policy:
            rows.append((settings.strip(), cells))
    return rows


def _joined(variants: list[tuple[str, str]]) -> str:
    """Join the figures of all variants, default settings first."""
    variants = sorted(variants, key=lambda variant: bool(variant[0]))
    return "; ".join(
        f"{settings.replace('window=', 'window ')}: {figure}" if settings else figure
        for settings, figure in variants
    )


def _fidelity(policy: str) -> list[str]:
    start = "At 10 % of the prompt (320 tokens"
    rows = [
        (settings, f"{kl} and {top1}")
        for settings, (kl, top1, *_) in rows_of(policy, POLICIES, start)
    ]
    link = f"[Fidelity](../{POLICIES}#fidelity-how-far-from-full-kv)"
    what = "KL from full KV in nats per token, and share of equal next tokens, at 10 %"
    return [f"{link}: {what} of the prompt: {_joined(rows)}"] if rows else []


def _pass_key(policy: str) -> list[str]:
    start = "SmolLM2-135M, the key in essays, 4000"
    rows = [
        (settings, ", ".join(cells))
        for settings, (*cells, _) in rows_of(policy, POLICIES, start)
    ]
    link = f"[Pass key](../{POLICIES}#pass-key-is-it-still-there)"
    what = "found in 4103 tokens of essays with 128, 256 and 512 tokens per KV head"
    return [f"{link}: {what}: {_joined(rows)}"] if rows else []


def _coverage(policy: str) -> list[str]:
    start = "Four essays, 3072 tokens each, full KV"
    rows = [
        (settings, ", ".join(cell.partition(" ")[0] for cell in cells))
        for settings, cells in rows_of(policy, RETRIEVAL, start)
    ]
    link = f"[Coverage](../{RETRIEVAL}#coverage-how-much-of-the-attention-is-found)"
    what = "share of the attention that the best 64, 128 and 256 tokens get"
    return [f"{link}: {what}: {_joined(rows)}"] if rows else []
