"""Texts for training, out of marked-up files."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from typer.testing import CliRunner

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "router_texts.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("router_texts", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_html_becomes_what_a_reader_sees(script, tmp_path):
    page = tmp_path / "page.html"
    page.write_text(
        "<html><head><title>no</title></head><body><nav>no</nav><h1>One &amp; two</h1>"
        "<script>no()</script><p>three   <b>four</b></p>\n\n\n<p>five</p></body></html>"
    )
    assert script.plain(page) == "One & two\nthree four\n\nfive"
    code = tmp_path / "code.py"
    code.write_text("def f():\n    return 1\n\n\n\nx = 2\n")
    assert script.plain(code) == "def f():\n    return 1\n\nx = 2"


def test_each_folder_gives_as_many_long_texts(script, tmp_path):
    import typer

    for folder, words in (("a", 50), ("b", 50), ("c", 2)):
        (tmp_path / folder).mkdir()
        for number in range(5):
            (tmp_path / folder / f"{number}.txt").write_text(f"{number} " * words)
    app = typer.Typer()
    app.command()(script.main)
    folders = [str(tmp_path / name) for name in "abc"]
    asked = [*folders, "--out", str(tmp_path / "out"), "--least", "60", "--most", "3"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    names = sorted(path.name[:5] for path in (tmp_path / "out").iterdir())
    assert names == ["0-000", "0-001", "0-002", "1-000", "1-001", "1-002"]
