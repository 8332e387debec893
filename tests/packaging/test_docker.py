"""The Dockerfiles, checked line by line as far as possible without a Docker daemon."""

from __future__ import annotations

import fnmatch
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "docker").glob("Dockerfile.*"))
INSTRUCTIONS = {
    "ARG",
    "COPY",
    "ENTRYPOINT",
    "ENV",
    "EXPOSE",
    "FROM",
    "RUN",
    "WORKDIR",
}


@dataclass(frozen=True)
class Line:
    """One instruction of a Dockerfile, continuation lines joined."""

    name: str
    text: str


def lines(path: Path) -> list[Line]:
    """The instructions of a Dockerfile."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE)
    joined = text.replace("\\\n", " ")
    return [Line(*line.split(None, 1)) for line in joined.splitlines() if line.strip()]


@pytest.fixture(params=FILES, ids=lambda path: path.suffix[1:])
def dockerfile(request: pytest.FixtureRequest) -> list[Line]:
    return lines(request.param)


def test_there_is_one_for_each_device():
    assert [path.suffix for path in FILES] == [".cpu", ".cuda"]


def test_instructions_are_known_and_the_first_one_is_from(dockerfile):
    assert {line.name for line in dockerfile} <= INSTRUCTIONS
    assert dockerfile[0].name == "FROM"


def test_images_are_pinned(dockerfile):
    images = [line.text.split()[0] for line in dockerfile if line.name == "FROM"]
    for image in images:
        _, _, tag = image.partition(":")
        assert re.match(r"v?\d+\.\d+", tag), image


def test_the_vllm_image_is_of_a_supported_version():
    (image,) = re.findall(r"vllm-openai:v(\d+\.\d+)", FILES[1].read_text())
    compat = ROOT / "vllm_kvplugins" / "vllm_adapter" / "config" / "compat.py"
    known = re.search(r"KNOWN_VERSIONS[^=]*= \((.*?)\)", compat.read_text(), re.DOTALL)
    assert known is not None
    assert f'"{image}"' in known[1]


def test_shell_lines_can_be_parsed(dockerfile):
    for line in dockerfile:
        if line.name == "RUN":
            done = subprocess.run(["bash", "-n", "-c", line.text], capture_output=True)
            assert done.returncode == 0, (line.text, done.stderr)


def test_copied_paths_exist_and_stages_are_named(dockerfile):
    stages = {line.text.split()[-1] for line in dockerfile if " AS " in line.text}
    for line in dockerfile:
        if line.name != "COPY":
            continue
        parts = shlex.split(line.text)
        if parts[0].startswith("--from="):
            assert parts[0].removeprefix("--from=") in stages
        else:
            assert all((ROOT / source).exists() for source in parts[:-1])


def test_the_context_holds_all_that_the_build_reads():
    patterns = (ROOT / ".dockerignore").read_text().split()
    needed = ["setup.py", "pyproject.toml", "CMakeLists.txt", "scripts/_setup.sh"]
    needed += ["packaging/kvplugins_build.py", "csrc/extension.cmake"]
    for name in needed:
        assert (ROOT / name).exists()
        assert not any(fnmatch.fnmatch(name, pattern) for pattern in patterns), name


def test_compilers_and_cmake_are_installed_before_the_extension_is_built(dockerfile):
    installed: set[str] = set()
    for line in dockerfile:
        if line.name == "RUN" and "apt-get install" in line.text:
            command = line.text.partition("apt-get install")[2].partition("&&")[0]
            installed = {word for word in command.split() if not word.startswith("-")}
        if "--no-build-isolation" in line.text:
            assert {"cmake", "g++", "make"} <= installed
