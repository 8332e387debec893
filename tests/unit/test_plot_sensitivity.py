"""The plot of sensitivity by layer, from small constructed profiles."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from cli_errors import refused
from profiles import make_profile, write_made
from typer.testing import CliRunner

from vllm_kvplugins.cli import app
from vllm_kvplugins.cli.sensitivity import layer_tokens

runner = CliRunner()


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def plot(out, *arguments):
    command = ["research", "plot", "sensitivity"]
    return runner.invoke(app, [*command, *arguments, "-o", str(out)])


def test_an_svg_says_what_it_shows(tmp_path):
    pytest.importorskip("matplotlib")
    first = write_made(tmp_path / "1.json", [0.0, 0.1, 0.3], [0.0, 0.2, 0.3])
    second = write_made(tmp_path / "2.json", [0.0, 0.1, 0.1, 0.2])
    out = tmp_path / "plot.svg"
    done = plot(out, first, second, "--budget", "96", "--alpha", "2")
    assert done.exit_code == 0, done.output
    root = ET.parse(out).getroot()
    texts = " | ".join("".join(e.itertext()) for e in root.iter() if "text" in e.tag)
    for words in (
        "made$by$hand, M = 64, mean and range of 2 documents",
        "made$by$hand, M = 64, 1 document",
        "mean cosine of keys",
        "tokens per KV head",
        "Budget of 96 by layer, alpha 2, pages of 32",
    ):
        assert words in texts


def test_budgets_are_the_allocator_s(tmp_path):
    path = tmp_path / "p.json"
    write_made(path, [0.0, 0.1, 0.3])
    profile = make_profile([0.0, 0.1, 0.3])
    # 3 layers of 2 heads, 4 pages each: 2 pages for layer 0, 22 as 1 to 3
    assert layer_tokens(profile, path, 128, 32, 1.0) == [32, 96, 256]
    assert layer_tokens(profile, path, 100, 32, 0.0) == [128, 128, 128]


def test_a_png_has_the_colours(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    paths = [write_made(tmp_path / f"{i}.json", [0.0, 0.1 + i / 9]) for i in range(2)]
    assert plot(tmp_path / "plot.png", *paths).exit_code == 0
    pixels = image.imread(tmp_path / "plot.png")[..., :3]
    for colour in ((0, 114, 178), (213, 94, 0)):
        assert (np.abs(pixels - np.array(colour) / 255).max(-1) < 0.02).any()


def test_the_same_file_gives_the_same_svg(tmp_path):
    pytest.importorskip("matplotlib")
    path = write_made(tmp_path / "p.json", [0.0, 0.1])
    files = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for out in files:
        assert plot(out, path).exit_code == 0
    assert files[0].read_bytes() == files[1].read_bytes()


def test_what_cannot_be_drawn_is_one_line(tmp_path, monkeypatch):
    path, out = write_made(tmp_path / "p.json", [0.0, 0.1]), tmp_path / "plot.svg"
    assert "none.json" in refused(plot(out, "none.json"))
    assert "5 profiles are too many" in refused(plot(out, *[path] * 5))
    assert ".svg or .png" in refused(plot(tmp_path / "plot.pdf", path))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install '.[plot]'" in refused(plot(out, path))
    assert not out.exists()
