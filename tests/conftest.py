"""Shared by all tests: import paths of helpers and oracles, test model, ops."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# First: it replaces distutils, and complains if somebody has the standard one already.
import setuptools  # noqa: F401

_TESTS = Path(__file__).parent
sys.path[:0] = [str(_TESTS / "helpers"), str(_TESTS / "oracles")]
# Last: names of benchmarks, such as "index", must hide nobody else's.
sys.path.extend(map(str, sorted((_TESTS.parent / "benchmarks").glob("*/"))))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all",
        action="store_true",
        help="run the full tier: tests marked slow, and random tests at full length",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--all"):  # for workers, and for what tests start
        os.environ["KVP_TEST_TIER"] = "all"


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leave the full tier out, unless it is asked for. Deselected is not skipped."""
    if os.environ.get("KVP_TEST_TIER") == "all":
        return
    left_out = [item for item in items if in_full_tier_only(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not in_full_tier_only(item)]


def in_full_tier_only(item: pytest.Item) -> bool:
    """Marked slow, or a whole engine on model runner V2, which is interpreted."""
    call = getattr(item, "callspec", None)
    v2 = call is not None and call.params.get("runner") == "V2"
    return v2 or item.get_closest_marker("slow") is not None


@pytest.fixture(scope="session")
def model_path() -> str:
    """Folder of the real model; engine tests that need one are skipped without."""
    path = os.environ.get("KVP_TEST_MODEL")
    if not path:
        pytest.skip(
            "set KVP_TEST_MODEL to a folder with a small Llama-like model, "
            "for example SmolLM2-135M-Instruct"
        )
    assert (Path(path) / "config.json").is_file(), (
        f"KVP_TEST_MODEL={path} holds no config.json"
    )
    return path


@pytest.fixture
def compiled(monkeypatch):
    """The compiled ops, or skip."""
    from vllm_kvplugins.ops import dispatch

    if reason := dispatch.load_extension().reason:
        pytest.skip(f"no compiled ops: {reason}")
    monkeypatch.setenv("KVP_OPS", "compiled")


@pytest.fixture(params=["compiled", "torch"])
def backend(request, monkeypatch):
    """Runs a test with each implementation of the ops."""
    if request.param == "compiled":
        request.getfixturevalue("compiled")
    monkeypatch.setenv("KVP_OPS", request.param)
    return request.param
