"""What an engine does about a model without a profile, with small commands."""

from __future__ import annotations

import gc
import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from profiles import make_profile
from tiny_model import LLAMA, write_tiny_model

pytest.importorskip("vllm", reason="a part of the adapter")

from vllm_kvplugins import calibration_job
from vllm_kvplugins.budgets import profile_cache
from vllm_kvplugins.budgets.sensitivity_profile import read_profile
from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.errors import codes_in
from vllm_kvplugins.model_config import float32_bytes
from vllm_kvplugins.vllm_adapter.config import layer_budgets
from vllm_kvplugins.vllm_adapter.config.engine_config import fingerprint_of
from vllm_kvplugins.vllm_adapter.scheduler import calibration

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="uses Linux's prctl")

SEED = 20261127
PATIENCE_S = 240.0  # nice processes wait where all cores are busy
CACHE_BYTES = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    print("seed", SEED)
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", SEED)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache; measurements are permitted, and one that is not faked fails."""
    monkeypatch.delenv("KVP_MODEL_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(calibration_job.SWITCH, "1")
    command(monkeypatch, "raise SystemExit('error: not faked')")
    return tmp_path / "cache" / "vllm_kvplugins" / "sensitivity"


def command(monkeypatch, code: str) -> None:
    """Replace ``kvplugins research calibrate``; arguments: MODEL -o PROFILE."""
    monkeypatch.setattr(calibration, "_PROGRAM", (sys.executable, "-c", code))


@pytest.fixture
def log(monkeypatch) -> list[tuple[int, str]]:
    messages: list[tuple[int, str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(  # type: ignore[method-assign]
        (record.levelno, record.getMessage())
    )
    logger = logging.Logger("test")
    logger.addHandler(handler)
    monkeypatch.setattr(calibration, "logger", logger)
    return messages


def engine(
    model: Any, request: Any = None, local_rank: int | None = None, **changes: Any
) -> Any:
    """vLLM's configuration, as far as a measurement reads it."""
    if request is None:
        request = {"name": "epicache"}
    config = LLAMA | changes
    return SimpleNamespace(
        additional_config={"kv_policy": request} if request else {},
        kv_transfer_config=None,
        parallel_config=SimpleNamespace(data_parallel_rank_local=local_rank),
        model_config=SimpleNamespace(
            model=str(model),
            dtype="torch.float32",
            hf_config=SimpleNamespace(to_dict=lambda: config),
        ),
    )


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def refusal(log: list[tuple[int, str]], model: Any) -> str:
    """The one message: why nothing is measured, and what to run instead."""
    ((level, message),) = log
    assert level == logging.WARNING
    assert codes_in(message)[0] == "KVP118"
    assert f"`kvplugins research calibrate {model}`" in message
    return message


# -- when it starts ------------------------------------------------------------


@pytest.mark.slow  # it runs only while nothing else does
def test_the_next_start_uses_what_this_one_measured(folder, cache, log, monkeypatch):
    """The real command, on the tiny model."""
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parents[1]))
    monkeypatch.setenv(calibration_job.SWITCH, "1")
    monkeypatch.setattr(calibration, "logger", logging.Logger("test"))
    config = engine(folder)
    request = config.additional_config["kv_policy"]

    def configured() -> Any:
        found = layer_budgets.resolve_allocator(
            request, parse_policy(request), lambda: fingerprint_of(config)
        )
        return parse_policy(found).page_allocator()

    before = configured()
    assert before.measured is None
    running = calibration.start(config, CACHE_BYTES)
    assert running is not None
    files = profile_cache.job_files(str(folder), fingerprint_of(config))
    until(lambda: files.profile.exists() or files.failure.exists())
    assert not files.failure.exists(), files.failure.read_text()
    assert "most sensitive: layer 1" in files.log.read_text()
    assert before.measured is None, "a running engine keeps what it has"
    after = configured()
    assert after.measured == read_profile(files.profile)
    assert after.measured.model == "tiny"
    assert not after.wants_calibration
    assert before.facts() != after.facts(), "sessions of the two differ"


def test_the_command_gets_model_and_place_and_the_log_the_result(
    folder, cache, log, monkeypatch
):
    command(
        monkeypatch,
        "import json, sys; json.dump(sys.argv[1:], open(sys.argv[3], 'w'))",
    )
    running = calibration.start(engine(folder), CACHE_BYTES)
    assert running is not None
    until(lambda: len(log) == 2)
    (profile,) = cache.glob("tiny-*.json")
    assert json.loads(profile.read_text()) == [str(folder), "-o", str(profile)]
    assert [level for level, _ in log] == [logging.INFO] * 2
    assert "for the next start" in log[0][1]
    assert str(profile.with_suffix(".log")) in log[0][1]
    assert "the next start uses" in log[1][1]
    assert str(profile) in log[1][1]


OFF = {
    "no policy": {"request": False},
    "another allocator": {"request": {"name": "epicache", "allocator": "pyramid"}},
    "a policy without an allocator": {"request": {"name": "quest"}},
    "the option": {
        "request": {
            "name": "snapkv",
            "allocator": {"name": "sensitivity", "calibrate": False},
        }
    },
    "the second engine of a machine": {"local_rank": 1},
}


@pytest.mark.parametrize("settings", OFF.values(), ids=OFF)
def test_nothing_starts(folder, cache, log, settings):
    assert calibration.start(engine(folder, **settings), CACHE_BYTES) is None
    assert not cache.exists()
    assert log == []


def test_nothing_starts_when_the_environment_says_so(folder, cache, log, monkeypatch):
    monkeypatch.setenv(calibration_job.SWITCH, "0")
    assert calibration.start(engine(folder), CACHE_BYTES) is None
    assert not cache.exists()
    assert log == []


def test_a_profile_needs_no_measurement(folder, cache, log):
    content = make_profile([0.1, 0.2], config=LLAMA).model_dump(mode="json")
    allocator = {"name": "sensitivity", "profile": content}
    request = {"name": "snapkv", "allocator": allocator}
    assert calibration.start(engine(folder, request), CACHE_BYTES) is None
    assert log == []


def test_a_profile_that_has_appeared_since_is_not_measured_again(folder, log):
    profile_cache.store(make_profile([0.1, 0.2], config=LLAMA), str(folder))
    assert calibration.start(engine(folder), CACHE_BYTES) is None
    ((level, message),) = log
    assert level == logging.INFO
    assert "the next start uses it" in message


def test_a_damaged_profile_is_measured_again(folder, log, monkeypatch):
    path = profile_cache.store(make_profile([0.1, 0.2], config=LLAMA), str(folder))
    path.write_text("{")
    command(
        monkeypatch,
        "import sys; p = sys.argv[3]; open(p + 'x', 'w').write('new')\n"
        "import os; os.replace(p + 'x', p)",
    )
    running = calibration.start(engine(folder), CACHE_BYTES)
    assert running is not None
    until(lambda: len(log) == 2)
    assert path.read_text() == "new"


# -- one process ---------------------------------------------------------------


def test_a_second_server_leaves_it_to_the_first(folder, cache, log, monkeypatch):
    command(monkeypatch, "import time; time.sleep(600)")
    first = calibration.start(engine(folder), CACHE_BYTES)
    assert first is not None
    until(lambda: list(cache.glob("*.log")))
    del log[:]
    assert calibration.start(engine(folder), CACHE_BYTES) is None
    ((level, message),) = log
    assert level == logging.INFO
    assert "another process measures this model" in message
    first.stop()


def test_of_two_that_start_at_once_one_measures(folder, cache, log, monkeypatch):
    command(monkeypatch, "import time; time.sleep(600)")
    monkeypatch.setattr(calibration_job, "is_running", lambda files: False)
    both = [calibration.start(engine(folder), CACHE_BYTES) for _ in range(2)]
    assert all(both)
    until(lambda: len(log) == 3)
    assert "another process measures this model" in log[2][1]
    assert [Path(f"/proc/{each.pid}").exists() for each in both].count(True) == 1


@pytest.mark.parametrize("way", ["stop", "collected"])
def test_it_ends_with_the_engine(folder, cache, log, monkeypatch, way):
    command(monkeypatch, "import time; time.sleep(600)")
    running = calibration.start(engine(folder), CACHE_BYTES)
    assert running is not None
    until(lambda: list(cache.glob("*.log")))
    process = Path(f"/proc/{running.pid}")
    assert process.exists()
    if way == "stop":
        running.stop()
        running.stop()  # the scheduler may be shut down twice
    del running
    gc.collect()
    until(lambda: not process.exists())
    assert not list(cache.glob("*.failed.json"))
    assert len(log) == 1, "it was stopped, and has not failed"


# -- obstacles -----------------------------------------------------------------


def with_memory(monkeypatch, available: int, on_cpu: bool = True) -> None:
    monkeypatch.setattr(calibration, "available_bytes", lambda: available)
    platform = SimpleNamespace(is_cpu=lambda: on_cpu)
    monkeypatch.setattr(calibration, "current_platform", platform)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_it_needs_twice_the_model_in_float32(folder, cache, log, monkeypatch, on_cpu):
    (weights,) = folder.glob("*.safetensors")
    needed = 2 * float32_bytes(str(folder))
    assert 2 * weights.stat().st_size - 16384 < needed < 2 * weights.stat().st_size
    held = CACHE_BYTES if on_cpu else 0
    with_memory(monkeypatch, needed + held - 1, on_cpu)
    assert calibration.start(engine(folder), CACHE_BYTES) is None
    assert "GiB of host memory are free" in refusal(log, folder)
    assert not cache.exists()
    del log[:]
    with_memory(monkeypatch, needed + held, on_cpu)
    assert calibration.start(engine(folder), CACHE_BYTES) is not None


def test_weights_in_16_bits_need_twice_their_size(tmp_path):
    import torch
    from safetensors.torch import save_file

    (tmp_path / "config.json").write_text("{}")
    save_file(
        {"w": torch.zeros(30, 10, dtype=torch.bfloat16)}, tmp_path / "model.safetensors"
    )
    assert float32_bytes(str(tmp_path)) == 1200
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"0" * 600)
    assert float32_bytes(str(tmp_path)) == 1200
    (tmp_path / "pytorch_model.bin").unlink()
    assert float32_bytes(str(tmp_path)) is None


def test_a_model_that_is_not_here_is_not_downloaded(cache, log):
    assert calibration.start(engine("org/none"), CACHE_BYTES) is None
    assert "KVP628" in refusal(log, "org/none")
    assert not cache.exists()


def test_a_folder_without_weights_is_not_measured(tmp_path, cache, log):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert calibration.start(engine(tmp_path), CACHE_BYTES) is None
    assert "no files with weights" in refusal(log, tmp_path)


def test_damaged_weights_are_a_message(tmp_path, log):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{]")
    assert calibration.start(engine(tmp_path), CACHE_BYTES) is None
    refusal(log, tmp_path)


UNFIT = {
    "windows": ({"sliding_window": 64, "model_type": "mistral"}, "KVP012"),
    "ALiBi": ({"alibi": True}, "KVP016"),
    "quantized": ({"quantization_config": {"quant_method": "gptq"}}, "quantized"),
}


@pytest.mark.parametrize(("changes", "words"), UNFIT.values(), ids=UNFIT)
def test_a_model_that_cannot_be_measured_is_named(
    folder, tmp_path, log, changes, words
):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    assert calibration.start(engine(tmp_path, **changes), CACHE_BYTES) is None
    assert words in refusal(log, tmp_path)


def test_a_model_that_the_engine_changes_is_not_measured(folder, log):
    """Its profile would belong to another model at the next start, and at each."""
    config = engine(folder, rope_theta=5.0)
    assert calibration.start(config, CACHE_BYTES) is None
    assert "the engine changes its configuration (rope" in refusal(log, folder)


def test_a_foreign_profile_is_not_replaced(folder, log):
    files = profile_cache.job_files(str(folder), fingerprint_of(engine(folder)))
    files.profile.parent.mkdir(parents=True)
    other = make_profile([0.1, 0.2], config=LLAMA | {"vocab_size": 7})
    files.profile.write_text(other.model_dump_json())
    assert calibration.start(engine(folder), CACHE_BYTES) is None
    assert str(files.profile) in refusal(log, folder)


def test_a_cache_that_cannot_be_written_is_a_message(folder, tmp_path, log):
    (tmp_path / "cache").write_text("a file in the place of the folder")
    assert calibration.start(engine(folder), CACHE_BYTES) is None
    assert str(tmp_path / "cache") in refusal(log, folder)


def test_a_failure_is_logged_once_and_not_repeated(folder, cache, log, monkeypatch):
    command(
        monkeypatch,
        "import pathlib, sys; p = pathlib.Path(sys.argv[3] + '.runs')\n"
        "p.write_text(p.read_text() + '.' if p.exists() else '.')\n"
        "sys.exit('error: [KVP626] its own attention')",
    )
    running = calibration.start(engine(folder), CACHE_BYTES)
    assert running is not None
    until(lambda: len(log) == 2)
    assert "[KVP626] its own attention" in refusal(log[1:], folder)
    for _ in range(2):
        del log[:]
        assert calibration.start(engine(folder), CACHE_BYTES) is None
        assert "[KVP626] its own attention" in refusal(log, folder)
    (runs,) = cache.glob("*.runs")
    assert runs.read_text() == "."
