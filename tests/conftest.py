"""Shared by all tests: import paths of helpers and oracles, test model, ops."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from pathlib import Path

import hypothesis
import pytest

# First: it replaces distutils, and warns if the standard one is already imported.
import setuptools  # noqa: F401

# No test may start a measurement of its model; tests of this feature allow it again.
os.environ["KVP_CALIBRATE"] = "0"
_TESTS = Path(__file__).parent
_HELPERS = _TESTS / "helpers"
sys.path[:0] = [str(_HELPERS), str(_HELPERS / "cpu_v2"), str(_TESTS / "oracles")]
# Last: names of benchmarks, such as "index", must not hide other modules.
sys.path.extend(map(str, sorted((_TESTS.parent / "benchmarks").glob("*/"))))
sys.path.append(str(_TESTS.parent / "scripts"))

from tiers import covering  # noqa: E402

# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile("full", deadline=None)
hypothesis.settings.register_profile("default tier", deadline=None, max_examples=40)

_LEFT_OUT = pytest.StashKey[int]()
# Each test of these runs an engine of its own, for minutes.
_INDEPENDENT = ("tests/engine/test_fuzz.py",)
_LONGEST = _INDEPENDENT
# Runner V2 is interpreted on a CPU and takes two to six times as long as V1.
_ON_V2 = ("test_compat_v2.py",)
_STRENGTHS = {"each_value": 1, "each_pair": 2}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all",
        action="store_true",
        help="run the full tier: tests marked slow, and random tests at full length",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--all"):  # for workers, and for what tests start
        os.environ["KVP_TEST_TIER"] = "all"
    is_full = os.environ.get("KVP_TEST_TIER") == "all"
    hypothesis.settings.load_profile("full" if is_full else "default tier")


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leave the full tier out, unless it is asked for. Deselected is not skipped."""
    items.sort(key=_start_order)
    if os.environ.get("KVP_TEST_TIER") == "all":
        return
    kept = _sampled([item for item in items if not in_full_tier_only(item)])
    left_out = [item for item in items if item not in kept]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item in kept]
    config.stash[_LEFT_OUT] = len(left_out)
    if (output := getattr(config, "workeroutput", None)) is not None:
        output["left_out"] = len(left_out)


def _start_order(item: pytest.Item) -> int:
    """Longest files first, so that workers end together; others keep their order."""
    file = item.nodeid.partition("::")[0]
    return _LONGEST.index(file) if file in _LONGEST else len(_LONGEST)


def in_full_tier_only(item: pytest.Item) -> bool:
    """Marked slow, or a whole engine on model runner V2, except in few files."""
    call = getattr(item, "callspec", None)
    v2 = call is not None and call.params.get("runner") == "V2"
    return (v2 and item.path.name not in _ON_V2) or _marked(item, "slow")


def _sampled(items: list[pytest.Item]) -> set[pytest.Item]:
    """The items without combinations that ``each_value`` and ``each_pair`` spare."""
    kept, grids = set(), defaultdict[tuple[str, int], list[pytest.Item]](list)
    for item in items:
        strength = next((s for n, s in _STRENGTHS.items() if _marked(item, n)), 0)
        if strength and hasattr(item, "callspec"):
            grids[item.nodeid.partition("[")[0], strength].append(item)
        else:
            kept.add(item)
    for (_, strength), grid in grids.items():
        chosen = covering([item.callspec.params for item in grid], strength)
        kept |= {grid[i] for i in chosen}
    return kept


def _marked(item: pytest.Item, name: str) -> bool:
    return item.get_closest_marker(name) is not None


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """Say which tier ran."""
    if os.environ.get("KVP_TEST_TIER") == "all":
        line = "full tier"
    else:
        count = config.stash.get(_LEFT_OUT, 0)
        line = f"default tier; {count} tests of the full tier were left out (--all)"
    terminalreporter.write_line(line)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    """Learn from a worker of pytest-xdist how many tests it left out: all the same."""
    output = getattr(node, "workeroutput", None) or {}
    node.config.stash[_LEFT_OUT] = output.get("left_out", 0)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Hand out files, whose tests share engines, or single tests that share none."""
    if config.getvalue("dist") == "no":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return nodeid if file in _INDEPENDENT else file

    return ByGroup(config, log)


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


@pytest.fixture
def front_end_log(monkeypatch) -> list[str]:
    """Warnings of the search for turns and tool loops; it has warned of nothing yet."""
    from vllm_kvplugins.log_throttle import LogThrottle
    from vllm_kvplugins.vllm_adapter.frontend import turn_search

    messages: list[str] = []
    monkeypatch.setattr(turn_search, "_throttle", LogThrottle())
    monkeypatch.setattr(
        turn_search.logger, "warning", lambda text, *args: messages.append(text % args)
    )
    return messages
