"""Profiles in the user's cache: names, lookup order, damaged and foreign files."""

from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path

import pytest
from profiles import make_profile, write_made
from tiny_model import LLAMA

from vllm_kvplugins import calibration_job
from vllm_kvplugins.budgets import parse_allocator, profile_cache, sensitivity
from vllm_kvplugins.budgets.sensitivity_profile import (
    read_profile,
    shipped_profiles,
    write_profile,
)
from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.errors import codes_in
from vllm_kvplugins.model_config import ConfigOnlyModel
from vllm_kvplugins.vllm_adapter.config import layer_budgets

REQUEST = {"name": "snapkv", "allocator": "sensitivity"}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.delenv("KVP_MODEL_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vllm_kvplugins" / "sensitivity"


def fingerprint(**changes):
    return ConfigOnlyModel("m", "", LLAMA | changes).fingerprint()


def stored(*sensitivity: float, model: str = "m", **changes) -> Path:
    profile = make_profile(list(sensitivity), config=LLAMA | changes)
    return profile_cache.store(profile, model)


def resolved(caplog, request=REQUEST, **options):
    """The allocator that an engine gets, and the log: levels and messages."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "vllm.kv_policy"):
        found = layer_budgets.resolve_allocator(
            request, parse_policy(request), fingerprint, **options
        )
    # as a configuration on its way to another process
    policy = parse_policy(json.loads(json.dumps(found)))
    return policy.page_allocator(), [(r.levelno, r.message) for r in caplog.records]


# -- names ---------------------------------------------------------------------


def test_the_folder_is_next_to_the_default_model(cache, monkeypatch):
    assert profile_cache.cache_folder() == cache
    monkeypatch.setenv("KVP_MODEL_DIR", "/models/small")
    assert profile_cache.cache_folder() == Path("/models/sensitivity")


def test_a_file_is_named_after_its_model_and_fingerprint(cache):
    first = profile_cache.job_files("org/Name-1.5B", fingerprint()).profile
    assert first.parent == cache
    assert first.name.startswith("Name-1.5B-")
    assert first.suffix == ".json"
    other = profile_cache.job_files("org/Name-1.5B", fingerprint(vocab_size=7)).profile
    assert other != first
    snapshot = "/hub/models--org--Name-1.5B/snapshots/0123abcd"
    assert profile_cache.job_files(snapshot, fingerprint()).profile == first


def test_equal_numbers_give_one_file():
    rounded = profile_cache.job_files("m", fingerprint(rope_theta=10000))
    assert rounded == profile_cache.job_files("m", fingerprint(rope_theta=10000.0))


def test_names_stay_in_the_folder(cache):
    for model in ("..", "/", "a b/c:d", "models/..."):
        profile = profile_cache.job_files(model, fingerprint()).profile
        assert profile.resolve().parent == cache.resolve()


# -- lookup --------------------------------------------------------------------


def test_an_explicit_profile_comes_first(tmp_path, monkeypatch, caplog):
    cached, shipped = (
        stored(0.1, 0.2),
        Path(write_made(tmp_path / "s.json", [0.1, 0.3])),
    )
    own = write_made(tmp_path / "own.json", [0.1, 0.4], config=LLAMA)
    monkeypatch.setattr(sensitivity, "shipped_profile", lambda model: shipped)
    given = REQUEST | {"allocator": {"name": "sensitivity", "profile": own}}
    for request, last, source in (
        (given, 0.4, own),
        (REQUEST, 0.3, shipped),
    ):
        allocator, log = resolved(caplog, request)
        assert allocator.measured.sensitivity == (0.1, last)
        ((_, message),) = log
        assert str(source) in message
    monkeypatch.setattr(sensitivity, "shipped_profile", lambda model: None)
    allocator, ((level, message),) = resolved(caplog)
    assert allocator.measured.sensitivity == (0.1, 0.2)
    assert str(cached) in message
    assert level == logging.INFO


def test_without_a_file_layers_are_equal(caplog):
    allocator, ((level, message),) = resolved(caplog)
    assert allocator.measured is None
    assert level == logging.INFO
    assert "all layers get the same budget" in message


def test_the_content_travels_and_not_the_path(caplog):
    """Other processes of the engine see neither a new file nor a missing one."""
    path = stored(0.1, 0.2)
    with caplog.at_level(logging.INFO, "vllm.kv_policy"):
        request = layer_budgets.resolve_allocator(
            REQUEST, parse_policy(REQUEST), fingerprint
        )
    stored(0.1, 0.9)
    assert parse_policy(request).page_allocator().measured.sensitivity == (0.1, 0.2)
    path.unlink()
    assert parse_policy(request).page_allocator().measured.sensitivity == (0.1, 0.2)


@pytest.mark.parametrize("name", ["snapkv", "epicache", "flowkv"])
def test_a_policy_with_a_cached_profile_can_be_hashed(name):
    """vLLM hashes the specification of a KV cache, which contains the policy."""
    stored(0.1, 0.2)
    options = {"allocator": "sensitivity"}
    if name == "flowkv":
        options = {"base": "snapkv", "base_config": options}
    request = {"name": name} | options
    policies = [
        parse_policy(
            layer_budgets.resolve_allocator(request, parse_policy(request), fingerprint)
        )
        for _ in range(2)
    ]
    assert policies[0].page_allocator().measured is not None
    assert policies[0] == policies[1]
    assert hash(policies[0]) == hash(policies[1])


def test_another_model_finds_nothing(caplog):
    stored(0.1, 0.2, vocab_size=7)
    allocator, _ = resolved(caplog)
    assert allocator.measured is None


def test_a_fine_tuned_model_finds_the_profile_of_its_base(caplog):
    stored(0.1, 0.2, model="base")
    allocator, _ = resolved(caplog)
    assert allocator.measured.sensitivity == (0.1, 0.2)


def test_several_nodes_use_no_cache(caplog, monkeypatch):
    """Each node has its own."""
    monkeypatch.setenv(calibration_job.SWITCH, "1")
    stored(0.1, 0.2)
    allocator, ((_, message),) = resolved(caplog, one_machine=False)
    assert allocator.measured is None
    assert not allocator.wants_calibration
    assert "`profile`" in message


# -- files that cannot be used -------------------------------------------------


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"format": "other"}']
)
def test_a_damaged_file_is_one_warning(caplog, content):
    path = stored(0.1, 0.2)
    path.write_bytes(content)
    allocator, log = resolved(caplog)
    assert allocator.measured is None
    warnings = [message for level, message in log if level == logging.WARNING]
    (warning,) = warnings
    assert codes_in(warning)[0] == "KVP117"
    assert str(path) in warning
    assert len(log) == 2


def test_a_file_without_permission_is_a_warning(caplog):
    path = stored(0.1, 0.2)
    path.unlink()
    path.mkdir()  # root can read every file, but no folder
    allocator, log = resolved(caplog)
    assert allocator.measured is None
    assert "KVP117" in log[0][1]


def test_a_file_of_another_model_is_a_warning(caplog):
    path = stored(0.1, 0.2)
    write_profile(make_profile([0.1, 0.2], config=LLAMA | {"vocab_size": 7}), path)
    allocator, log = resolved(caplog)
    assert allocator.measured is None
    assert codes_in(log[0][1]) == ("KVP117",)
    assert "vocab_size 7 there, 1000 here" in log[0][1]


def test_a_usable_file_next_to_a_damaged_one_is_used(caplog):
    stored(0.1, 0.2, model="a").write_text("{")
    stored(0.1, 0.3, model="b")
    allocator, log = resolved(caplog)
    assert allocator.measured.sensitivity == (0.1, 0.3)
    assert [level for level, _ in log] == [logging.WARNING, logging.INFO]


# -- writing -------------------------------------------------------------------


def test_readers_see_one_of_two_complete_files(tmp_path):
    path = tmp_path / "p.json"
    profiles = [make_profile([0.1, value]) for value in (0.2, 0.3)]
    write_profile(profiles[0], path)
    done = threading.Event()

    def rewrite() -> None:
        for number in range(300):
            write_profile(profiles[number % 2], path)
        done.set()

    writer = threading.Thread(target=rewrite)
    writer.start()
    while not done.is_set():
        assert read_profile(path) in profiles
    writer.join()
    assert os.listdir(tmp_path) == ["p.json"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "p.json"
    write_profile(make_profile([0.1, 0.2]), path)
    before = path.read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_profile(make_profile([0.1, 0.3]), path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["p.json"]


def test_a_pipe_is_written_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_profile(make_profile([0.1, 0.2]), pipe)
    reader.join()
    assert pipe.is_fifo()
    assert json.loads(read[0])["sensitivity"] == [0.1, 0.2]


def test_a_stored_profile_ends_a_remembered_failure():
    files = profile_cache.job_files("m", fingerprint())
    files.profile.parent.mkdir(parents=True)
    calibration_job.remember_failure(files, "no tokenizer")
    assert stored(0.1, 0.2) == files.profile
    assert calibration_job.remembered_failure(files) is None


def test_an_inline_profile_is_checked_like_a_file():
    content = make_profile([0.1, 0.2], config=LLAMA).model_dump(mode="json")
    allocator = parse_allocator({"name": "sensitivity", "profile": content})
    assert allocator.problems(2, 2) == []
    assert codes_in(allocator.problems(3, 2)[0]) == ("KVP116",)
    other = allocator.model_problems(lambda: fingerprint(vocab_size=7))
    assert codes_in(other[0]) == ("KVP116",)
    with pytest.raises(ValueError, match="1 sensitivities for 2 layers"):
        parse_allocator(
            {"name": "sensitivity", "profile": content | {"sensitivity": [0.1]}}
        )


def test_shipped_profiles_have_other_digests():
    names = {
        profile_cache.job_files("m", read_profile(path).fingerprint).profile
        for path in shipped_profiles()
    }
    assert len(names) == len(shipped_profiles())
