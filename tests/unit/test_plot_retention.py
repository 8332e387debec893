"""The plot of retention by turn, from a small constructed file."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from cli_errors import refused
from typer.testing import CliRunner

from vllm_kvplugins.cli import app
from vllm_kvplugins.cli.retention import Retention, Run, write_retention
from vllm_kvplugins.errors import codes_in

runner = CliRunner()
POLICY = {"base": "snapkv", "base_config": {}, "ratio": 0.3, "floor": 16}


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def write(path: Path, turns: int = 4) -> Path:
    runs = [
        Run(strategy, seed, [0.5 * base**turn + 0.02 * seed for turn in range(turns)])
        for seed in range(3)
        for strategy, base in (("flowkv", 1.0), ("nested", 0.8))
    ]
    write_retention(Retention("tiny$m$", POLICY, 16, runs, {"commit": "c"}), path)
    return path


def plot(file: Path, out: Path):
    arguments = ["research", "plot", "retention", str(file), "-o", str(out)]
    return runner.invoke(app, arguments)


def test_means_are_over_dialogues():
    runs = [Run("nested", 0, [0.2, 0.1, 0.0]), Run("nested", 1, [0.4, 0.3])]
    result = Retention("m", POLICY, 16, runs, {})
    assert result.turns == 2
    assert result.mean("nested") == pytest.approx([0.3, 0.2])


def test_an_svg_says_what_it_shows(tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "plot.svg"
    done = plot(write(tmp_path / "r.json"), out)
    assert done.exit_code == 0, done.output
    root = ET.parse(out).getroot()
    texts = " | ".join("".join(e.itertext()) for e in root.iter() if "text" in e.tag)
    for words in (
        "FlowKV, mean and range of 3",
        "nested baseline, mean and range of 3",
        "model: r = 0.52",
        "model: r^t",
        "finished turns",
        "attention to turn 1 still covered",
        "snapkv, ratio 0.3, floor 16",
        "tiny$m$",
    ):
        assert words in texts


def test_a_png_has_both_colours(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    out = tmp_path / "plot.png"
    assert plot(write(tmp_path / "r.json"), out).exit_code == 0
    pixels = image.imread(out)[..., :3]
    for colour in ((0, 114, 178), (213, 94, 0)):
        assert (np.abs(pixels - np.array(colour) / 255).max(-1) < 0.02).any()


def test_the_same_file_gives_the_same_svg(tmp_path):
    pytest.importorskip("matplotlib")
    file = write(tmp_path / "r.json")
    files = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for out in files:
        assert plot(file, out).exit_code == 0
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_missing_matplotlib_is_said(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = tmp_path / "plot.svg"
    assert "pip install '.[plot]'" in refused(plot(write(tmp_path / "r.json"), out))
    assert not out.exists()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (None, "KVP601"),
        ("", "KVP607"),
        ("[1]", "KVP607"),
        ({"format": "other"}, "KVP607"),
        ({"version": 9}, "KVP607"),
        ({"runs": []}, "KVP607"),
        ({"runs": [{"strategy": "flowkv"}]}, "KVP607"),
        ({"more": 1}, "KVP607"),
        (
            {
                "runs": [
                    {"strategy": name, "dialogue": 0, "shares": []}
                    for name in ("flowkv", "nested")
                ]
            },
            "KVP606",
        ),
    ],
)
def test_foreign_files_give_one_line(tmp_path, change, code):
    file, out = tmp_path / "r.json", tmp_path / "plot.svg"
    if isinstance(change, dict):
        result = json.loads(write(file).read_text()) | change
        change = json.dumps(result)
    if change is not None:
        file.write_text(change)
    assert codes_in(refused(plot(file, out))) == (code,)
    assert not out.exists()


def test_another_kind_of_picture_is_refused(tmp_path):
    done = plot(write(tmp_path / "r.json"), tmp_path / "plot.pdf")
    assert "must end in .svg or .png" in refused(done)
