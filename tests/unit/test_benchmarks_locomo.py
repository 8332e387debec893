"""The contexts of LoCoMo's questions: methods, control runs, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import locomo as benchmark
import pytest
import typer
from typer.testing import CliRunner

app = typer.Typer()
app.command()(benchmark.main)


@pytest.fixture
def dialogues(tmp_path):
    """A file with two dialogues."""
    path = tmp_path / "locomo.json"
    path.write_text(json.dumps([{}, {}]))
    return path


def refusal(dialogues: Path, *options: str) -> str:
    outcome = CliRunner().invoke(
        app, ["model", str(dialogues), *options], env={"COLUMNS": "500"}
    )
    assert outcome.exit_code == 2
    return outcome.output


def test_controls_are_stock():
    for label in ("stock", *benchmark.CONTROLS):
        assert benchmark.job(label, 1024, 512, {"alpha": 1}).options == {"label": label}


def test_every_compressor_gets_the_settings():
    policies = {
        name: benchmark.job(name, 1024, 512, {"alpha": 1, "base": "h2o"}).options[
            "policy"
        ]
        for name in ("epicache", "keydiff")
    }
    assert {policy["alpha"] for policy in policies.values()} == {1}
    assert {policy["budget"] for policy in policies.values()} == {1024}
    assert policies["keydiff"]["base"] == "keydiff", "a method is its compressor"


def test_settings_that_no_method_takes_are_refused(dialogues):
    options = ["--method", "stock", "--config", '{"alpha": 1}']
    assert "remove --config" in refusal(dialogues, *options)


@pytest.mark.parametrize("config", ["{alpha: 1}", "[1]"])
def test_settings_that_are_no_json_object_are_refused(dialogues, config):
    assert f"--config {config}" in refusal(dialogues, "--config", config)


def test_retrievers_are_stock_with_the_settings_of_epicache():
    for label in benchmark.RETRIEVERS:
        options = benchmark.job(label, 1024, 512, {"episodes": 3}).options
        assert "policy" not in options
        assert options["label"] == label
        assert options["retriever"]["episodes"] == 3
        assert options["retriever"]["budget"] == 1024


def test_the_history_is_a_turn_that_was_answered():
    assert benchmark.told(["A: hi", "B: ho"]) == [
        {"role": "user", "content": "A: hi\nB: ho"},
        {"role": "assistant", "content": benchmark.READ},
    ]


def test_an_unknown_method_is_refused(dialogues):
    message = refusal(dialogues, "--method", "epicash", "--method", "stock")
    assert "epicash" in message
    assert "streaming-llm, nothing, another, evidence, rag, segments" in message


@pytest.mark.parametrize("dialogue", ["2", "-1"])
def test_a_dialogue_that_is_not_there_is_refused(dialogues, dialogue):
    message = refusal(dialogues, "--dialogue", dialogue)
    assert f"--dialogue {dialogue}: the file has 0 to 1" in message


def test_nothing_comes_after_the_last(dialogues):
    options = ["--method", "another", "--dialogue", "1"]
    assert "no dialogue comes after 1" in refusal(dialogues, *options)
    # the previous line has a different count
    setting = benchmark.Setting("model", str(dialogues), 0, 10, 1, "float32")
    benchmark.check(setting, ["another"])
