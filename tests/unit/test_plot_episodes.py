"""Histories from files, and the plot of their episodes."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from cli_errors import refused
from fake_encoder import TOPICS, BagOfWords, Constant
from typer.testing import CliRunner

from vllm_kvplugins.cli import app, plot
from vllm_kvplugins.cli.episodes import episode_map
from vllm_kvplugins.episodes.histories import locomo_dialogues, read_history
from vllm_kvplugins.episodes.settings import EpisodeSettings
from vllm_kvplugins.episodes.utterances import Utterance
from vllm_kvplugins.errors import KVPolicyError

runner = CliRunner()
MESSAGES = [
    {"role": "user", "content": f"{word} {words} $m$ \x07 end"}
    for words in TOPICS.values()
    for word in words.split()[:6]
    for _ in range(2)
]


@pytest.fixture(autouse=True)
def no_model(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(plot, "load_encoder", lambda name: BagOfWords())


def locomo(*dialogues):
    """Contents of a file: dialogues of sessions of texts."""
    return [
        {
            "qa": [],
            "conversation": {"speaker_a": "Ann", "session_1_date_time": "1:56 pm"}
            | {
                f"session_{number}": [
                    {"speaker": "AB"[i % 2], "text": text, "dia_id": "x"}
                    for i, text in enumerate(texts)
                ]
                for number, texts in sessions.items()
            },
        }
        for sessions in dialogues
    ]


def write(path: Path, contents) -> Path:
    path.write_text(json.dumps(contents))
    return path


def draw(file: Path, out: Path, *options: str):
    return runner.invoke(
        app, ["research", "plot", "episodes", str(file), "--out", str(out), *options]
    )


# -- histories -----------------------------------------------------------------------


def test_a_list_of_messages_is_a_history(tmp_path):
    file = write(tmp_path / "h.json", [{"role": "user", "content": "A: x\nB: y"}])
    assert read_history(file) == [Utterance("A", "x"), Utterance("B", "y")]


def test_sessions_come_in_the_order_of_their_numbers(tmp_path):
    contents = locomo({10: ["c"], 2: ["a", " ", "b"]}, {1: ["other"]})
    file = write(tmp_path / "l.json", contents)
    utterances = [Utterance("A", "a"), Utterance("A", "b"), Utterance("A", "c")]
    assert locomo_dialogues(file) == [utterances, [Utterance("A", "other")]]
    assert read_history(file, 0) == utterances
    assert read_history(file, 1) == [Utterance("A", "other")]


@pytest.mark.parametrize(
    ("contents", "dialogue", "value"),
    [
        (None, None, "h.json"),
        ("{", None, "h.json"),
        ({"role": "user"}, None, "dict"),
        ([], None, "h.json"),
        ([{"role": "user", "content": " "}], None, "h.json"),
        ([3], None, "message 0"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], None, "'image_url'"),
        (locomo({}, {}), None, "from 0 to 1"),
        (locomo({}, {}), 2, "no dialogue 2; choose one from 0 to 1"),
        (locomo({}, {}), -1, "no dialogue -1"),
        ([{"role": "user", "content": "x"}], 0, "h.json"),
        ([], 0, "h.json"),
        ([{"conversation": {"session_one": []}}], 0, "one"),
        ([{"conversation": {"session_1": [{"speaker": "A"}]}}], 0, "text"),
        ([{"conversation": []}], 0, "items"),
    ],
)
def test_rejects_unusable_files(tmp_path, contents, dialogue, value):
    file = tmp_path / "h.json"
    if contents is not None:
        text = contents if isinstance(contents, str) else json.dumps(contents)
        file.write_text(text)
    with pytest.raises(KVPolicyError) as caught:
        read_history(file, dialogue)
    assert caught.value.codes == ("KVP508",)
    assert value in str(caught.value)


# -- the plot ------------------------------------------------------------------------


def test_an_svg_says_what_it_shows(tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "plot.svg"
    done = draw(write(tmp_path / "h.json", MESSAGES), out, "--encoder", "bag$of$words")
    assert done.exit_code == 0, done.output
    root = ET.parse(out).getroot()
    texts = " | ".join("".join(e.itertext()) for e in root.iter() if "text" in e.tag)
    for words in (
        "48 utterances, 12 segments, 4 episodes",
        "silhouette 0.",
        "bag$of$words",
        "episode 0, 3 segments",
        "episode 3, 3 segments",
        "boat wave sail harbour fish tide $m$ end",
        "leash bark puppy bone paw fur $m$ end",
        "stars: medoids",
    ):
        assert words in texts


def test_a_png_has_the_episodes_colours(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    file, out = write(tmp_path / "h.json", MESSAGES), tmp_path / "plot.png"
    assert draw(file, out, "--episodes", "2").exit_code == 0
    pixels = image.imread(out)[..., :3]

    def has(*colour):
        return (np.abs(pixels - np.array(colour) / 255).max(-1) < 0.02).any()

    assert has(0, 114, 178)
    assert has(213, 94, 0)
    assert not has(0, 158, 115)


def test_the_same_history_gives_the_same_svg(tmp_path):
    pytest.importorskip("matplotlib")
    file = write(tmp_path / "h.json", MESSAGES)
    files = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for out in files:
        assert draw(file, out).exit_code == 0
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_dialogue_of_a_locomo_file_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    texts = [message["content"] for message in MESSAGES]
    file = write(tmp_path / "l.json", locomo({}, {1: texts[:20], 2: texts[20:]}))
    out = tmp_path / "plot.svg"
    options = ["--dialogue", "1", "--segment-utterances", "2", "--episodes", "auto"]
    assert draw(file, out, *options).exit_code == 0
    assert "48 utterances, 24 segments" in out.read_text()


def test_a_map_shows_what_was_clustered():
    history = [Utterance("user", message["content"]) for message in MESSAGES]
    drawn = episode_map(history, EpisodeSettings(), BagOfWords())
    assert drawn.points.shape == (12, 2)
    assert np.isfinite(drawn.points).all()
    assert drawn.labels.tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert drawn.texts[0].splitlines()[0].startswith("user: ")
    assert 0 < drawn.silhouette < 1


def test_equal_vectors_are_drawn_without_a_silhouette():
    history = [Utterance("user", message["content"]) for message in MESSAGES]
    drawn = episode_map(history, EpisodeSettings(), Constant())
    assert np.isnan(drawn.silhouette)
    assert np.isfinite(drawn.points).all()


@pytest.mark.parametrize(
    ("messages", "options", "words"),
    [
        (MESSAGES[:15], [], "15 utterances have 3 different segments of 4"),
        (MESSAGES[:1] * 40, [], "40 utterances have 1 different segments"),
        (MESSAGES, ["--segment-utterances", "16"], "have 3 different segments of 16"),
        (MESSAGES, ["--episodes", "four"], "--episodes is 'four'"),
        (MESSAGES, ["--episodes", "0"], "episodes is 0"),
        (MESSAGES, ["--dialogue", "0"], "KVP508"),
    ],
)
def test_mistakes_give_one_line(tmp_path, messages, options, words):
    file, out = write(tmp_path / "h.json", messages), tmp_path / "plot.svg"
    done = draw(file, out, *options)
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)
    assert words in done.stderr
    assert not out.exists()


def test_a_missing_matplotlib_is_said(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    file = write(tmp_path / "h.json", MESSAGES)
    assert "pip install '.[plot]'" in refused(draw(file, tmp_path / "plot.svg"))


def test_another_kind_of_picture_is_refused(tmp_path):
    done = draw(write(tmp_path / "h.json", MESSAGES), tmp_path / "plot.pdf")
    assert "must end in .svg or .png" in refused(done)
