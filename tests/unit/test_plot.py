"""Plots and their files, from a small constructed run; refusals of `record`."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cli_errors import refused
from typer.testing import CliRunner

from vllm_kvplugins.cli import app
from vllm_kvplugins.cli.hit_rate import grids_of
from vllm_kvplugins.engine.recorded_run import (
    Fetch,
    Header,
    RecordedRun,
    lines_of,
)

runner = CliRunner()
LAYERS, SKIPPED, STEPS, HEADS, BLOCK = 4, 2, 5, 2, 16


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def small_run(requests: int = 1, steps: int = STEPS) -> RecordedRun:
    header = Header(
        model="models/tiny$model$",
        policy="quest",
        config={"budget": 32, "skip_layers": SKIPPED},
        prompt_tokens=300,
        generated_tokens=steps + 1,
        block_size=BLOCK,
        head_dim=8,
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        token_bytes=64,
    )
    fetches = [
        Fetch(
            request=str(request),
            step=step,
            layer=layer,
            new_tokens=1,
            offloaded_tokens=500,
            hot_tokens=HEADS * BLOCK * 2,
            fetched_tokens=HEADS * BLOCK * step // 4 + 8 * request,
            copied_bytes=0,
            mass_covered_share=layer / 4,
        )
        for request in range(requests)
        for step in range(steps)
        for layer in range(SKIPPED, LAYERS)
    ]
    return RecordedRun(header, fetches)


def write(run: RecordedRun, path: Path) -> Path:
    path.write_text("".join(lines_of(run)))
    return path


def plot(run: Path, out: Path):
    arguments = ["research", "plot", "hit-rate", str(run), "--out", str(out)]
    return runner.invoke(app, arguments)


def test_grids_are_means_over_requests_in_pages():
    grids = grids_of(small_run(requests=2))
    assert grids.pages.shape == (LAYERS, STEPS)
    assert np.isnan(grids.pages[:SKIPPED]).all()
    assert np.isnan(grids.mass[:SKIPPED]).all()
    pages = np.arange(STEPS) / 4 + 4 / (HEADS * BLOCK)
    assert grids.pages[SKIPPED:] == pytest.approx(np.stack([pages] * 2))
    assert (grids.hot_pages[SKIPPED:] == 2).all()
    assert grids.fetched_share == pytest.approx(pages / 2)
    assert grids.mean_mass == pytest.approx(np.full(STEPS, 5 / 8))


def test_a_missing_matplotlib_is_said(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = tmp_path / "plot.svg"
    message = refused(plot(write(small_run(), tmp_path / "run.jsonl"), out))
    assert "pip install '.[plot]'" in message
    assert not out.exists()


@pytest.mark.parametrize(("requests", "steps"), [(1, STEPS), (3, STEPS), (1, 1)])
def test_an_svg_names_both_panels_and_what_ran(tmp_path, requests, steps):
    pytest.importorskip("matplotlib")
    run = write(small_run(requests, steps), tmp_path / "run.jsonl")
    out = tmp_path / "plot.svg"
    done = plot(run, out)
    assert done.exit_code == 0, done.output
    assert f"wrote {out}" in done.stdout
    root = ET.parse(out).getroot()
    texts = " | ".join("".join(e.itertext()) for e in root.iter() if "text" in e.tag)
    for words in (
        "Tokens fetched per KV head, in pages of 16",
        "pages (hot slots: 2)",
        "Mass covered: share of the attention over offloaded tokens",
        "All layers together",
        "quest, budget 32 tokens per KV head",
        "tiny$model$",
        "300 prompt tokens",
        "grey: the 2 layers that keep everything",
        "decode step",
    ):
        assert words in texts
    assert ("mean of 3 requests" in texts) == (requests == 3)
    images = [e for e in root.iter() if e.tag.endswith("}image")]
    assert len(images) >= 2, "heat maps are pictures inside the SVG"
    assert "models/" not in texts, "a path of this machine was recorded"


def test_the_same_run_gives_the_same_svg(tmp_path):
    pytest.importorskip("matplotlib")
    run = write(small_run(), tmp_path / "run.jsonl")
    files = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for out in files:
        assert plot(run, out).exit_code == 0
    assert files[0].read_bytes() == files[1].read_bytes()


def test_drawing_needs_neither_torch_nor_a_display(tmp_path, monkeypatch):
    """Plots work where no engine is installed."""
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "TkAgg")
    monkeypatch.delenv("DISPLAY", raising=False)
    run, out = write(small_run(), tmp_path / "run.jsonl"), tmp_path / "plot.png"
    code = (
        "import sys; sys.modules['torch'] = sys.modules['vllm'] = None\n"
        "from vllm_kvplugins.cli import app\n"
        f"app(['plot', 'hit-rate', {str(run)!r}, '--out', {str(out)!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert out.exists()


def test_a_png_is_drawn_in_colours_from_dark_to_light(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    run = write(small_run(), tmp_path / "run.jsonl")
    out = tmp_path / "plot.png"
    assert plot(run, out).exit_code == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    pixels = image.imread(out)[..., :3]
    for ends in ((0.267, 0.005, 0.329), (0.993, 0.906, 0.144)):
        assert (np.abs(pixels - ends).max(-1) < 0.02).any(), "viridis"


def test_nothing_fetched_is_drawn_too(tmp_path):
    pytest.importorskip("matplotlib")
    run = small_run()
    idle = [replace(fetch, fetched_tokens=0) for fetch in run.fetches]
    path = write(RecordedRun(run.header, idle), tmp_path / "run.jsonl")
    assert plot(path, tmp_path / "plot.svg").exit_code == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file"),
        ("", "not a recorded run"),
        ("a,b\n1,2\n", "not a recorded run"),
        (json.dumps({"model": "m", "layers": []}), "not a recorded run"),
    ],
)
def test_foreign_files_give_one_line(tmp_path, text, words):
    run, out = tmp_path / "run.jsonl", tmp_path / "plot.svg"
    if text is not None:
        run.write_text(text)
    assert words in refused(plot(run, out))
    assert not out.exists()


def test_a_cut_off_or_binary_file_gives_one_line(tmp_path):
    run, out = write(small_run(), tmp_path / "run.jsonl"), tmp_path / "plot.svg"
    run.write_text(run.read_text()[:-40])
    assert "not JSON" in refused(plot(run, out))
    run.write_bytes(b"\x89PNG\xff\xfe")
    assert "not a recorded run" in refused(plot(run, out))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("plot.pdf", "must end in .svg or .png"),
        ("plot", "must end in .svg or .png"),
        ("absent/plot.svg", "does not exist"),
    ],
)
def test_places_that_cannot_be_drawn_to(tmp_path, name, words):
    run = write(small_run(), tmp_path / "run.jsonl")
    assert words in refused(plot(run, tmp_path / name))


# -- record: what is wrong is said before an engine starts ----------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"--policy": "snapkv"}, ["KVP604", "exact-topk, icecache"]),
        ({"--policy": "full"}, ["KVP604", "full"]),
        ({"--policy": "qest"}, ["KVP100", "qest"]),
        ({"--policy-config": '{"windw": 3}'}, ["KVP036", "windw"]),
        ({"--prompt-file": "absent.txt"}, ["KVP601", "absent.txt"]),
        ({"--out": "nowhere/o.jsonl"}, ["KVP602", "nowhere"]),
    ],
)
def test_mistakes_give_one_message(tmp_path, monkeypatch, change, words):
    monkeypatch.chdir(tmp_path)
    Path("p.txt").write_text("some text")
    options = {
        "--policy": "quest",
        "--prompt-file": "p.txt",
        "--max-tokens": "8",
        "--out": "o.jsonl",
    } | change
    flags = sum(options.items(), ())
    done = runner.invoke(app, ["research", "record", "model", *flags])
    assert done.exit_code == 1
    assert done.stderr.startswith("error: ")
    assert isinstance(done.exception, SystemExit), "another exception escaped"
    for word in words:
        assert word in done.stderr
    assert not Path("o.jsonl").exists()


def test_one_token_cannot_be_recorded():
    arguments = ["research", "record", "m", "--policy", "quest", "--prompt-file", "p"]
    done = runner.invoke(app, [*arguments, "--max-tokens", "1", "--out", "o"])
    assert done.exit_code == 2
    assert "--max-tokens" in done.output
