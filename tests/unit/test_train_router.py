"""Training a router of a tiny model: `kvplugins research train-router`."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from cli_errors import refused
from safetensors.torch import load_file
from tiny_model import write_tiny_model
from typer.testing import CliRunner

from vllm_kvplugins.cli.app import app
from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.errors import codes_in
from vllm_kvplugins.routers.files import read_router
from vllm_kvplugins.training import loop
from vllm_kvplugins.training.settings import TrainSettings
from vllm_kvplugins.training.texts import Text, parts

SEED = 20261123
WORDS = ["Repeat", "Summarize", "the", "context", "user", "."]
SETTINGS = {
    "queries": 64,
    "mined": 16,
    "window": 8,
    "held_out": 2,
    "routing_dim": 8,
    "passages": 2,
    "distill_every": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), SEED)


@pytest.fixture
def texts(tmp_path):
    print("seed", SEED)
    corpus = tmp_path / "texts"
    corpus.mkdir()
    for number in range(5):
        generator = torch.Generator().manual_seed(SEED + number)
        picks = torch.randint(len(WORDS), (700,), generator=generator).tolist()
        (corpus / f"{number}.txt").write_text(" ".join(WORDS[i] for i in picks))
    (corpus / "short.txt").write_text("Repeat the context")
    (corpus / "other.json").write_text("{}")
    return corpus


def run(folder, texts, out, *options, **settings):
    arguments = ["research", "train-router", str(folder)]
    arguments += ["--data", str(texts), "--out", str(out)]
    arguments += ["--steps", "8", "--lengths", "500,600", "--examples", "3"]
    arguments += ["--dtype", "float32", "--save-every", "3", *options]
    return CliRunner().invoke(
        app, [*arguments, "--settings", json.dumps(SETTINGS | settings)]
    )


def test_the_command_writes_a_router_that_serves_its_model(folder, texts, tmp_path):
    out = tmp_path / "out"
    done = run(folder, texts, out)
    assert done.exit_code == 0, done.output
    router, facts = read_router(out / "router.safetensors")
    assert router.projection.shape == (2, 4, 8, 32)
    assert facts.settings["steps"] == 8
    assert sorted(facts.texts) == [f"{i}.txt" for i in range(5)]
    assert json.loads((out / "report.json").read_text()) == facts.model_dump(
        mode="json"
    )
    corpus = facts.report
    for name in (
        "zoom_f1",
        "zoom_f1_in_room",
        "zoomed",
        "covered_in_room",
        "divergence",
    ):
        row = getattr(corpus, name)
        assert {"router", "mean_key"} <= row.keys()
        assert all(-1e-6 < value < math.inf for value in row.values()), row
    assert len(corpus.zoom_rate) == 2
    assert corpus.divergence["none"] > corpus.divergence["all"]
    assert corpus.zoom_f1["router"] == pytest.approx(
        corpus.zoom_f1["router_tuned"], 0.01
    )
    assert "held-out" in done.stdout
    options = {"name": "sekv", "router": str(out / "router.safetensors")}
    assert parse_policy(options).trained is not None
    check_plot(out / "router.safetensors", corpus, tmp_path / "zoom.svg")


def check_plot(router, corpus, picture):
    pytest.importorskip("matplotlib")
    arguments = ["research", "plot", "zoom", str(router), "-o", str(picture)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    root = ET.parse(picture).getroot()
    texts = " | ".join("".join(e.itertext()) for e in root.iter() if "text" in e.tag)
    for words in ("query head", "layer", f"{corpus.zoomed['router']:.0%} of all spans"):
        assert words in texts
    assert any("image" in e.tag for e in root.iter())
    arguments[3] = str(picture)
    assert codes_in(refused(CliRunner().invoke(app, arguments))) == ("KVP646",)


def test_thresholds_may_stay_as_they_were_learned(folder, texts, tmp_path):
    assert run(folder, texts, tmp_path / "a").exit_code == 0
    assert run(folder, texts, tmp_path / "b", calibrate=False).exit_code == 0
    (tuned, facts), (learned, others) = (
        read_router(tmp_path / name / "router.safetensors") for name in "ab"
    )
    assert tuned.projection.equal(learned.projection)
    # eight steps hardly change them
    assert (learned.tau - 0.4).abs().max() < 0.1 < (tuned.tau - 0.4).abs().max()
    scores, learnt = facts.report.zoom_f1, others.report.zoom_f1
    assert learnt["router_tuned"] == pytest.approx(scores["router"], abs=0.01)
    assert learnt["router"] != scores["router"]


def test_going_on_after_an_interruption_changes_nothing(
    folder, texts, tmp_path, monkeypatch
):
    assert run(folder, texts, tmp_path / "whole").exit_code == 0
    advance = loop.Training.advance

    def interrupted(self, *args):
        if self.step == 5:  # the last checkpoint is of step 3
            raise KeyboardInterrupt
        return advance(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Training, "advance", interrupted)
        assert run(folder, texts, tmp_path / "parts").exit_code != 0
    assert not (tmp_path / "parts" / "router.safetensors").exists()
    assert run(folder, texts, tmp_path / "parts").exit_code == 0
    for name in ("router", "checkpoint"):
        whole = load_file(tmp_path / "whole" / f"{name}.safetensors")
        parts = load_file(tmp_path / "parts" / f"{name}.safetensors")
        assert whole.keys() == parts.keys()
        for key, tensor in whole.items():
            assert tensor.equal(parts[key]), key


def test_a_checkpoint_of_other_settings_is_refused(folder, texts, tmp_path):
    out = tmp_path / "out"
    assert run(folder, texts, out).exit_code == 0
    message = refused(run(folder, texts, out, rank_weight=0.5))
    assert codes_in(message) == ("KVP644",)
    assert "rank_weight 0.02, now 0.5" in message
    (out / "checkpoint.safetensors").write_bytes(b"nothing")
    assert codes_in(refused(run(folder, texts, out))) == ("KVP644",)


def test_a_checkpoint_of_other_texts_or_another_model_is_refused(
    folder, texts, tmp_path
):
    out = tmp_path / "out"
    assert run(folder, texts, out).exit_code == 0
    (texts / "0.txt").write_text((texts / "0.txt").read_text() + " the")
    message = refused(run(folder, texts, out))
    assert codes_in(message) == ("KVP644",)


def test_what_the_machine_cannot_do_is_said(folder, texts, tmp_path, monkeypatch):
    done = run(folder, texts, tmp_path / "a", "--lengths", "9000")
    assert codes_in(done.stderr) == ("KVP643",)
    assert "8192 tokens" in done.stderr
    done = run(folder, texts, tmp_path / "b", "--device", "cuda:7")
    message = refused(done)
    assert codes_in(message) == ("KVP603",)
    assert "cuda:7" in message

    def full(*args):
        raise OSError("no space left")

    monkeypatch.setattr(loop, "save_file", full)
    done = run(folder, texts, tmp_path / "c")
    assert done.exit_code == 1
    assert codes_in(done.stderr) == ("KVP602",)
    assert "no space left" in done.stderr


def test_every_part_learns(folder, texts, tmp_path):
    steps = []

    def listening(self, *args):
        before = {name: t.detach().clone() for name, t in self.router.tensors.items()}
        terms = advance(self, *args)
        steps.append((terms, before))
        return terms

    advance = loop.Training.advance
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Training, "advance", listening)
        done = run(
            folder,
            texts,
            tmp_path / "out",
            *("--steps", "60", "--lengths", "600", "--examples", "1"),
            budget_weight=0.5,
            rank_weight=0.1,
        )
    assert done.exit_code == 0, done.output
    (first, start), (last, end) = steps[0], steps[-1]
    assert float(last.zoom) < 0.9 * float(first.zoom)
    assert float(last.rank) < float(first.rank)
    for name, tensor in start.items():
        assert not tensor.equal(end[name]), f"{name} never changed"


@pytest.mark.parametrize(
    ("change", "code", "value"),
    [
        ({"queries": 300}, "KVP603", "at least 600"),
        ({"window": 100}, "KVP603", "window of 100 tokens"),
        ({"tau": 1.0}, "KVP603", "tau: "),
        ({"what": 1}, "KVP603", "what: "),
        ({"steps": 3}, "KVP603", "steps"),
        ({"routing_dim": 33}, "KVP643", "routing_dim 33"),
        ({"held_out": 5}, "KVP642", "5 of 6 texts"),
        ({"learning_rate": 1e30}, "KVP645", "learning_rate"),
    ],
)
def test_mistakes_give_one_message(folder, texts, tmp_path, change, code, value):
    done = run(folder, texts, tmp_path / "out", **change)
    assert done.exit_code == 1, done.output
    assert codes_in(done.stderr) == (code,)
    assert value in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.output


def test_a_missing_folder_of_texts_is_said(folder, tmp_path):
    message = refused(run(folder, tmp_path / "none", tmp_path / "out"))
    assert codes_in(message) == ("KVP601",)


def test_every_setting_is_in_the_docs():
    docs = Path(__file__).parents[2] / "docs" / "policies" / "sekv.md"
    text = docs.read_text()
    for name, field in TrainSettings.model_fields.items():
        assert f"`{name}`" in text or f"`--{name}`" in text, name
        default = field.default
        if isinstance(default, float):
            assert f"{default:g}" in text, (name, default)


def test_each_stage_goes_on_with_other_texts():
    texts = [Text(str(i), range(100 * i, 100 * i + 50), "") for i in range(5)]
    first = parts(texts, 20, 3, "0", first_text=0, ends=False)
    second = parts(texts, 30, 3, "0", first_text=3, ends=False)
    assert [name for name, _ in first + second] == ["0", "1", "2", "3", "4", "0"]
    for name, tokens in first + second:
        assert tokens == list(range(tokens[0], tokens[0] + len(tokens)))
        assert 100 * int(name) <= tokens[0] <= tokens[-1] < 100 * int(name) + 50
    assert [tokens[-1] for _, tokens in first] != [49, 149, 249]
    last = parts(texts, 20, 3, "0", first_text=0, ends=True)
    assert [tokens[0] for _, tokens in last] == [30, 130, 230]


def test_the_rate_rises_and_falls():
    settings = TrainSettings(steps=100, warmup=0.1)
    rates = [loop.rate(step, settings) for step in range(100)]
    assert rates.index(max(rates)) == 10
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] < 0.01
    two = TrainSettings(steps=10, lengths=(600, 700))
    assert [loop.stage_of(step, two) for step in range(10)] == [0] * 5 + [1] * 5
