"""PEP 517 build backend: setuptools plus the build requirements of the extension.

The C++ extension needs torch's headers and CMake. Both are required only when the
extension is built, so this backend adds them at build time instead of listing them in
``pyproject.toml``: ``KVP_BUILD_EXTENSION=0 pip install .`` then downloads neither.

pip asks a backend for requirements only with build isolation. With
``--no-build-isolation`` the installed torch is used.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

# torch 2.11 is the first version with the stable ABI that the extension targets.
_TORCH = ["torch>=2.11", "numpy"]


def get_requires_for_build_wheel(
    config_settings: dict[str, Any] | None = None,
) -> list[str]:
    """Packages that pip installs into the isolated environment of a wheel build."""
    return build_meta.get_requires_for_build_wheel(config_settings) + _for_extension()


def get_requires_for_build_editable(
    config_settings: dict[str, Any] | None = None,
) -> list[str]:
    """As for wheels, for ``pip install -e``."""
    return (
        build_meta.get_requires_for_build_editable(config_settings) + _for_extension()
    )


def _for_extension() -> list[str]:
    if os.environ.get("KVP_BUILD_EXTENSION", "1") == "0":
        return []
    return _TORCH + ([] if shutil.which("cmake") else ["cmake>=3.18"])
