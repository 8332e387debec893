"""The sdist and the wheel, built in isolation, installed and served.

The default tier installs the wheel into a new environment that borrows vLLM from the
test environment through a ``.pth`` file. The full tier installs vLLM as well.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import pytest
import test_docker
from live_server import metric, post, serving

ROOT = Path(__file__).parents[2]
# Git files that a source distribution does not need.
_NOT_IN_SDIST = {".gitignore"}
DOCKERFILE = ROOT / "docker" / "Dockerfile.cpu"
_PACKED = (
    *("*.py", "*.json", "*.safetensors", "*.txt", "py.typed"),
    *("*.html", "*.css", "*.js"),
)
_FETCHED = "vllm:kv_policy_fetched_tokens_total"


def run(
    *command: str | Path, cwd: Path = ROOT, timeout: float = 900, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command; its output is in the assertion if it fails."""
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def succeed(*command: str | Path, **more) -> str:
    done = run(*command, **more)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive."""
    out = tmp_path_factory.mktemp("sdist")
    build = "import sys, kvplugins_build as b; b.build_sdist(sys.argv[1])"
    succeed(sys.executable, "-c", build, out, PYTHONPATH=str(ROOT / "packaging"))
    (archive,) = out.glob("*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the sdist, with build isolation.

    The constraint keeps pip from downloading CUDA libraries of several GB.
    """
    out = tmp_path_factory.mktemp("wheel")
    constraints = out / "constraints.txt"
    constraints.write_text(f"torch=={metadata.version('torch')}\n")
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", out, sdist)
    settings = {
        "PIP_CONSTRAINT": str(constraints),
        "PIP_BUILD_CONSTRAINT": str(constraints),
        "PIP_NO_COMPILE": "0",  # means --no-compile; the build reads few files
    }
    succeed(*pip, cwd=out, KVP_CUDA="OFF", **settings)
    (path,) = out.glob("*.whl")
    return path


def test_the_sdist_holds_every_file_of_the_repository(sdist):
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: nothing to compare with")
    tracked = set(succeed("git", "ls-files").splitlines()) - _NOT_IN_SDIST
    with tarfile.open(sdist) as packed:
        held = {name.partition("/")[2] for name in packed.getnames()}
    assert tracked <= held


def test_the_wheel_holds_the_extension_and_the_data_files(wheel):
    assert re.fullmatch(r"vllm_kvplugins-[\d.]+-py3-none-linux_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
    assert "vllm_kvplugins/_C.abi.so" in names
    package = ROOT / "vllm_kvplugins"
    data = {
        str(path.relative_to(ROOT))
        for pattern in _PACKED
        for path in package.rglob(pattern)
    }
    assert data <= names
    outside = {name.split("/")[0] for name in names} - {"vllm_kvplugins"}
    assert all(name.endswith(".dist-info") for name in outside), outside


def build_without_isolation(out: Path, sdist: Path, **environment: str):
    pip = ("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", out)
    return run(sys.executable, *pip, sdist, cwd=out, **environment)


def test_a_build_without_a_compiler_fails_with_the_reason(sdist, tmp_path):
    done = build_without_isolation(tmp_path, sdist, CXX="/nowhere/c++")
    assert done.returncode != 0
    assert "the C++ extension could not be built" in done.stdout + done.stderr
    assert "KVP_BUILD_EXTENSION=0" in done.stdout + done.stderr
    assert not list(tmp_path.glob("*.whl"))


def test_the_extension_can_be_left_out(sdist, tmp_path):
    done = build_without_isolation(tmp_path, sdist, KVP_BUILD_EXTENSION="0")
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.whl")
    assert path.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(path) as packed:
        assert not [name for name in packed.namelist() if name.endswith(".so")]


@pytest.mark.parametrize("name", ["KVP_BUILD_EXTENSION", "KVP_BUILD"])
def test_an_unknown_build_setting_is_refused(sdist, tmp_path, name):
    done = build_without_isolation(tmp_path, sdist, **{name: "require"})
    assert done.returncode != 0
    assert "KVP_BUILD_EXTENSION" in done.stdout + done.stderr


def borrowed_environment(folder: Path, wheel: Path) -> Path:
    """A new environment with the wheel, and vLLM of this interpreter's environment."""
    succeed(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    install = ("pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    succeed(sys.executable, "-m", *install)
    site = succeed(python, "-c", "import sysconfig as s; print(s.get_path('purelib'))")
    # Behind the environment's own packages, so that the wheel comes first.
    Path(site.strip(), "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def own_environment(folder: Path, wheel: Path) -> Path:
    """A new environment made by the steps of docker/Dockerfile.cpu, with the wheel."""
    steps = [line for line in test_docker.lines(DOCKERFILE) if line.name == "RUN"]
    assert "apt-get" in steps[0].text
    for step in steps[1:]:
        command = step.text.replace("/opt/vllm", str(folder)).replace("/src", str(ROOT))
        settings = {"KVP_VENV": str(folder), "KVP_DEVICE": "cpu"}
        succeed("bash", "-c", command, KVP_PYTHON=sys.executable, **settings)
    pip = (folder / "bin" / "pip", "install", "--no-deps", "--force-reinstall")
    succeed(*pip, wheel)
    return folder / "bin" / "python"


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param(borrowed_environment, id="borrowed-vllm"),
        pytest.param(own_environment, id="own-vllm", marks=pytest.mark.slow),
    ],
)
def test_the_installed_wheel_serves_icecache(environment, wheel, model_path, tmp_path):
    python = environment(tmp_path / "venv", wheel)
    where = "import vllm_kvplugins as p; print(p.__file__)"
    assert str(tmp_path) in succeed(python, "-c", where, cwd=tmp_path)
    checks = doctor(python, tmp_path)
    assert checks["compiled ops"]["status"] == "ok", checks["compiled ops"]
    assert str(tmp_path) in checks["compiled ops"]["detail"]
    assert checks["plugin entry point"]["status"] == "ok"
    assert checks["vllm serve"]["status"] == "ok"
    with served(python, model_path, tmp_path) as base:
        before = metric(base, _FETCHED)
        answer = ask(base, "The sky is blue. " * 120 + "What colour is the sky?")
        assert answer.strip()
        assert metric(base, _FETCHED) > before


def doctor(python: Path, cwd: Path) -> dict[str, dict[str, str]]:
    """The report of ``kvplugins doctor``, by the name of the check."""
    command = (python, "-m", "vllm_kvplugins.cli", "doctor", "--json")
    report = json.loads(succeed(*command, cwd=cwd))
    return {check["name"]: check for check in report["checks"]}


@contextmanager
def served(python: Path, model: str, cwd: Path) -> Iterator[str]:
    """The address of a server with icecache, until the block ends."""
    settings = '{"budget": 64, "sinks": 4, "window": 32, "skip_layers": 0}'
    policy = ("--kv-policy", "icecache", "--kv-policy-config", settings)
    with serving(python, model, cwd, "--max-model-len", "2048", *policy) as base:
        yield base


def ask(base: str, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    answer = post(base, "/v1/chat/completions", messages=messages, max_tokens=8)
    return str(answer["choices"][0]["message"]["content"])
