"""Adds pages of the repository's root to the site, so that no page exists twice.

``README.md`` is the home page. Links are rewritten relative to ``docs/``. Links to
files that are not pages (scripts, the license) become plain text. Also keeps names in
inline code from being broken.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
# Words of inline code that browsers would break at a hyphen. Longer ones may break, so
# that they fit phones.
CODE = re.compile(r"<pre\b.*?</pre>|<code>([^<]*)</code>", re.DOTALL)
HYPHENATED = re.compile(r"(?<!\S)(?=\S*-)\S{2,32}(?!\S)")
COMPARISON = re.compile(r"(&[gl]t;=?) (?=\d)")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=turned(text)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn the links of other pages to those of the root."""
    up = "../" * page.file.src_uri.count("/")
    for source, name in PAGES.items():
        markdown = markdown.replace(f"]({up}../{source})", f"]({up}{name})")
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """Keep options, names and comparisons on one line."""

    def code(found: re.Match[str]) -> str:
        if found[1] is None:
            return found[0]  # a block
        words = HYPHENATED.sub(r'<span class="name">\g<0></span>', found[1])
        return f"<code>{words}</code>"

    return CODE.sub(code, COMPARISON.sub(r"\1&nbsp;", html))


def turned(text: str) -> str:
    """A page of the root as seen from ``docs/``."""

    def link(found: re.Match[str]) -> str:
        image, label, target, anchor = found.groups(default="")
        if "://" in target:
            return found[0]
        if target in PAGES:
            return f"{image}[{label}]({PAGES[target]}{anchor})"
        if target.startswith("docs/"):
            return f"{image}[{label}]({target.removeprefix('docs/')}{anchor})"
        return label

    return LINK.sub(link, text)
