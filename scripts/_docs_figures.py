"""What the measurements say of each policy, read from their own tables.

A figure stands in one place, beside its command; the policy's page repeats it with a
link there.
"""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
POLICIES = "measurements-policies.md"
RETRIEVAL = "measurements-retrieval.md"


def list_of(policy: str) -> str:
    """The measured figures of a policy, each with a link to its table and command.

    Raises:
        ValueError: there are none.
    """
    found = [*_fidelity(policy), *_pass_key(policy), *_coverage(policy)]
    if not found:
        raise ValueError(f"no measurement has a row for {policy}")
    return "\n".join([*(f"- {line}" for line in found), ""])


def table(page: str, start: str) -> list[list[str]]:
    """Cells of the first table behind a line that begins with ``start``.

    Raises:
        ValueError: the page has no such line, or no table behind it.
    """
    text = (DOCS / page).read_text(encoding="utf-8")
    parts = re.split(rf"^{re.escape(start)}", text, flags=re.MULTILINE)
    if len(parts) != 2:
        raise ValueError(f"{page} has {len(parts) - 1} lines that begin {start!r}")
    rows = re.search(r"(?:^\|.*\n)+", parts[1], re.MULTILINE)
    if rows is None:
        raise ValueError(f"{page} has no table behind {start!r}")
    lines = rows[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def rows_of(policy: str, page: str, start: str) -> list[tuple[str, list[str]]]:
    """Rows of a policy, and of it with other settings: what is special, its cells."""
    found = []
    for name, *cells in table(page, start)[2:]:
        base, _, rest = name.partition(" ")
        if base.rstrip(",") == policy:
            found.append((rest.strip(), cells))
    return found


def _listed(found: list[tuple[str, str]]) -> str:
    """What each variant got, the one with default settings first."""
    found = sorted(found, key=lambda one: bool(one[0]))
    return "; ".join(
        f"{special.replace('window=', 'window ')}: {said}" if special else said
        for special, said in found
    )


def _fidelity(policy: str) -> list[str]:
    start = "At 10 % of the prompt (320 tokens"
    rows = [
        (special, f"{kl} and {top1}")
        for special, (kl, top1, *_) in rows_of(policy, POLICIES, start)
    ]
    at = f"[Fidelity](../{POLICIES}#fidelity-how-far-from-full-kv)"
    said = "KL from full KV in nats per token, and share of equal next tokens, at 10 %"
    return [f"{at}: {said} of the prompt: {_listed(rows)}"] if rows else []


def _pass_key(policy: str) -> list[str]:
    start = "SmolLM2-135M, the key in essays, 4000"
    rows = [
        (special, ", ".join(cells))
        for special, (*cells, _) in rows_of(policy, POLICIES, start)
    ]
    at = f"[Pass key](../{POLICIES}#pass-key-is-it-still-there)"
    said = "found in 4103 tokens of essays with 128, 256 and 512 tokens per KV head"
    return [f"{at}: {said}: {_listed(rows)}"] if rows else []


def _coverage(policy: str) -> list[str]:
    start = "in brackets the lowest tenth of all"
    rows = [
        (special, ", ".join(cell.partition(" ")[0] for cell in cells))
        for special, cells in rows_of(policy, RETRIEVAL, start)
    ]
    at = f"[Coverage](../{RETRIEVAL}#coverage-how-much-of-the-attention-is-found)"
    said = "share of the attention that the best 64, 128 and 256 tokens get"
    return [f"{at}: {said}: {_listed(rows)}"] if rows else []
