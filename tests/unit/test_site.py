"""The documentation builds as a site, without a network and without warnings."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="the extra dev has mkdocs-material")
    folder = tmp_path_factory.mktemp("site")
    # not --quiet: --strict counts logged warnings
    command = ["mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_there(site: Path):
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    assert len(pages) > 40
    for page in pages:
        assert (site / page.with_suffix(".html")).is_file(), page


def test_the_home_page_is_the_readme(site: Path):
    home = (site / "index.html").read_text(encoding="utf-8")
    assert "scripts/serve.sh" in home
    assert 'href="policies/snapkv.html"' in home
    assert 'href="changelog.html"' in home


def test_tables_made_by_the_generator_are_tables(site: Path):
    page = (site / "policies" / "snapkv.html").read_text(encoding="utf-8")
    assert "<td><code>kernel_size</code></td>" in page


def test_names_in_code_are_not_broken(site: Path):
    """Browsers break at hyphens; blocks of code are left alone."""
    page = (site / "cli.html").read_text(encoding="utf-8")
    assert '<code><span class="name">--json</span></code>' in page
    assert '<code>kvplugins COMMAND <span class="name">--help</span></code>' in page
    blocks = re.findall(r"<pre\b.*?</pre>", page, re.DOTALL)
    assert len(blocks) > 10
    assert not any('class="name"' in block for block in blocks)
    sessions = (site / "sessions.html").read_text(encoding="utf-8")
    assert "<td>int | none, &gt;=&nbsp;1</td>" in sessions


def test_pages_load_nothing_from_other_hosts(site: Path):
    remote = ('rel="stylesheet" href="http', 'script src="http', "gstatic")
    for path in site.rglob("*.html"):
        page = path.read_text(encoding="utf-8")
        for part in remote:
            assert part not in page, f"{path.name}: {part}"


def test_diagrams_are_pictures():
    """Material would load Mermaid from a CDN. Commit an SVG instead."""
    for path in (ROOT / "docs").rglob("*.md"):
        assert "```mermaid" not in path.read_text(encoding="utf-8"), path.name
