"""vLLM 0.33 on the CPU gives the tokens and blocks of 0.32.

``vllm_overlay`` makes it from the wheel for CUDA.
``KVP_VLLM_033_WHEEL`` names the wheel; without it pip downloads it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import runners
from harness import run_scenario
from vllm_overlay import VERSION, NoOverlay, write_overlay

pytestmark = [pytest.mark.engine, pytest.mark.slow]

WHEEL = "KVP_VLLM_033_WHEEL"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("orjson", reason="vLLM 0.33 imports it; extra full-tests")
    wheel_path = os.environ.get(WHEEL)
    if wheel_path:
        assert Path(wheel_path).is_file(), f"{WHEEL}={wheel_path} is not a file"
        return Path(wheel_path)
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    try:
        done = subprocess.run(
            [*pip, "--dest", str(folder), f"vllm=={VERSION}"],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"downloading vllm {VERSION} took too long; set {WHEEL}")
    wheels = list(folder.glob("vllm-*.whl"))
    if not wheels:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        pytest.skip(f"no vllm {VERSION} wheel ({last}); set {WHEEL} to one")
    return wheels[0]


@pytest.fixture(scope="module")
def overlay(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``vllm`` 0.33 that runs on the CPU."""
    try:
        return write_overlay(wheel, tmp_path_factory.mktemp("overlay"))
    except NoOverlay as problem:
        pytest.skip(str(problem))


@pytest.fixture(scope="module")
def on_032(tiny_model: str) -> dict[str, Any]:
    return runners.run(tiny_model, "V1", False)


def test_every_seam_is_there(overlay: Path):
    facts = run_scenario(
        "scenarios_runners:seams", {}, runners.environment("V1", False, overlay)
    )
    assert facts == {"vllm": VERSION, "problems": []}


@pytest.mark.proves(
    policy=runners.NAMES,
    vllm=VERSION,
    runner="runner",
    asynchronous="asynchronous",
)
@pytest.mark.parametrize(
    ("runner", "asynchronous"), [("V1", False), ("V2", True)], ids=["V1", "V2-async"]
)
def test_same_tokens_and_blocks_as_on_032(
    tiny_model: str,
    overlay: Path,
    on_032: dict[str, Any],
    runner: str,
    asynchronous: bool,
):
    result = runners.run(tiny_model, runner, asynchronous, vllm_folder=overlay)
    assert {each["facts"]["vllm"] for each in result["generate"]} == {VERSION}
    assert {result["facts"]["vllm"] for result in on_032["generate"]} != {VERSION}
    runners.check_generated(result, on_032)
