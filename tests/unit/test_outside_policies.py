"""Policies of other packages, such as the one in docs/adding-a-policy.md."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from vllm_kvplugins.errors import codes_in
from vllm_kvplugins.policies.registry import ENTRY_POINTS

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-policy.md"


def block(language: str, named: str) -> str:
    """The listing of the page that starts with the name of a file."""
    for document in re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.S):
        if document.startswith(f"# my_policy/{named}"):
            return str(document)
    raise AssertionError(f"{PAGE} has no listing of {named}")


def install(folder: Path, module: str, entries: dict[str, str]) -> None:
    """The files of an installed package: its module and its metadata."""
    (folder / "my_policy.py").write_text(module)
    about = folder / "my_policy-0.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: my-policy\nVersion: 0.1\n"
    )
    lines = [f"{name} = {value}" for name, value in entries.items()]
    (about / "entry_points.txt").write_text(
        "\n".join([f"[{ENTRY_POINTS}]", *lines, ""])
    )


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), str(PAGE.parents[1])])
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def documented(tmp_path) -> tuple[Path, dict[str, str]]:
    project = tomllib.loads(block("toml", "pyproject.toml"))
    entries = project["project"]["entry-points"][ENTRY_POINTS]
    install(tmp_path, block("python", "my_policy.py"), entries)
    return tmp_path, entries


def test_the_test_in_the_guide_passes(documented):
    folder, _ = documented
    (folder / "test_my_policy.py").write_text(block("py", "test_my_policy.py"))
    done = run(folder, "-m", "pytest", "-q", "--noconftest", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_the_documented_package_is_listed_with_its_settings(documented):
    folder, entries = documented
    done = run(folder, "-m", "vllm_kvplugins.cli", "list", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    listed = {entry["name"]: entry for entry in document["policies"]}
    (name,) = entries
    assert "recent" in {setting["name"] for setting in listed[name]["settings"]}
    assert document["broken"] == []


@pytest.mark.slow
def test_vllm_takes_its_name_and_settings(documented):
    folder, entries = documented
    (name,) = entries
    code = (
        "from vllm_kvplugins.config import parse_policy;"
        f"policy = parse_policy({{'name': '{name}', 'budget': 64, 'recent': 3}});"
        "assert policy.minimum_budget_tokens == 4 and not policy.problems()"
    )
    done = run(folder, "-c", code)
    assert done.returncode == 0, done.stderr


def test_the_documented_policy_keeps_the_contract(documented):
    folder, entries = documented
    (name,) = entries
    done = run(folder, "-m", "vllm_kvplugins.cli", "check-policy", "--policy", name)
    assert done.returncode == 0, done.stdout + done.stderr


OLD_HOOK = """
from typing import ClassVar
from vllm_kvplugins.policies import Compressor
class Toy(Compressor):
    name: ClassVar[str] = 'toy'
    summary: ClassVar[str] = 'looks at each step, by the name of an earlier version'
    @property
    def observes(self):
        return 1
"""
# name: class in a module of this name, the module, code of the refusal
BROKEN = {
    "no_such_class": ("Missing", "", "KVP103"),
    "import_fails": ("Toy", "raise OSError('no disk')", "KVP103"),
    "not_a_policy": ("Toy", "class Toy: name = 'not_a_policy'", "KVP104"),
    "another_name": (
        "Toy",
        "from vllm_kvplugins.policies.snapkv import SnapKV as Toy",
        "KVP105",
    ),
    "toy": ("Toy", OLD_HOOK, "KVP106"),
}


def test_policies_that_cannot_be_loaded_are_named_and_the_others_work(tmp_path):
    install(tmp_path, "", {name: f"{name}:{cls}" for name, (cls, *_) in BROKEN.items()})
    for name, (_, module, _) in BROKEN.items():
        (tmp_path / f"{name}.py").write_text(module)
    done = run(tmp_path, "-m", "vllm_kvplugins.cli", "list", "--json")
    assert done.returncode == 0, done.stderr
    listed = json.loads(done.stdout)
    broken = {entry["name"]: codes_in(entry["problem"]) for entry in listed["broken"]}
    assert broken == {name: (code,) for name, (*_, code) in BROKEN.items()}
    assert "snapkv" in {entry["name"] for entry in listed["policies"]}
    shown = run(tmp_path, "-m", "vllm_kvplugins.cli", "list")
    doctor = "from vllm_kvplugins.cli.checks import other_policies as c; print(c())"
    checked = run(tmp_path, "-c", doctor).stdout
    for name, (*_, code) in BROKEN.items():
        assert name in shown.stdout
        assert code in checked


def test_a_policy_without_a_score_is_refused_before_it_runs(tmp_path):
    module = (
        "from typing import ClassVar\n"
        "from vllm_kvplugins.policies import Compressor\n"
        "class Toy(Compressor):\n"
        "    name: ClassVar[str] = 'toy'\n"
        "    summary: ClassVar[str] = 'nothing'\n"
    )
    install(tmp_path, module, {"toy": "my_policy:Toy"})
    code = "from vllm_kvplugins.config import parse_policy; parse_policy('toy')"
    done = run(tmp_path, "-c", code)
    assert done.returncode
    assert "KVP108" in codes_in(done.stderr)


@pytest.mark.slow
def test_a_name_of_ours_stays_ours(tmp_path):
    install(tmp_path, "raise OSError", {"snapkv": "my_policy:Toy"})
    code = (
        "from vllm_kvplugins.policies import get_policy_class as g; print(g('snapkv'))"
    )
    assert "vllm_kvplugins.policies.snapkv.SnapKV" in run(tmp_path, "-c", code).stdout


@pytest.mark.slow
def test_an_unknown_name_says_where_others_belong(tmp_path):
    code = "from vllm_kvplugins.policies import get_policy_class as g; g('mine')"
    assert ENTRY_POINTS in run(tmp_path, "-c", code).stderr
