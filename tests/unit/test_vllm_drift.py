"""The report about a vLLM that is not installed, read from its sources."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="install a vLLM (see scripts/)")

import check_vllm_drift as drift
from _vllm_source import Source

SCRIPT = Path(drift.__file__)


def installed() -> Path:
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parents[1]


def copy_with(folder: Path, changes: dict[str, list[tuple[str, str]] | None]) -> Path:
    """A tree like the installed one, with texts replaced in files; None: no file."""
    for name, replacements in changes.items():
        target = folder / "vllm"
        for part in ("", *Path(name).parent.parts):
            target = target / part if part else target
            origin = installed() / target.relative_to(folder)
            if target.is_symlink():
                target.unlink()
            if not target.exists():
                target.mkdir()
                for entry in origin.iterdir():
                    (target / entry.name).symlink_to(entry)
        file = folder / "vllm" / name
        text = file.read_text()
        file.unlink()
        for old, new in replacements or ():
            assert old in text, (name, old)
            text = text.replace(old, new)
        if replacements is not None:
            file.write_text(text)
    return folder


@pytest.mark.slow
def test_a_changed_vllm_is_reported_name_by_name(tmp_path):
    changes: dict[str, list[tuple[str, str]] | None] = {
        "v1/core/block_pool.py": [
            ("def touch(", "def touched("),
            ("self, ordered_blocks:", "self, all_blocks:"),
            ("self.null_block", "self.nothing"),
        ],
        "v1/core/kv_cache_manager.py": [("class KVCacheManager", "class CacheManager")],
        "v1/cudagraph_dispatcher.py": None,
        # a member of a base class in another file
        "v1/attention/backend.py": [("def get_cudagraph_support(", "def supports(")],
        "v1/core/sched/scheduler.py": [
            (
                "def _preempt_request(\n        self,",
                "def _preempt_request(\n        self, reason,",
            )
        ],
    }
    there = Source(installed())
    assert drift.gone(there) == []
    source = Source(copy_with(tmp_path, changes))
    gone = set(drift.gone(source))
    pool = "vllm.v1.core.block_pool:BlockPool"
    expected = {
        f"{pool} touch",
        f"{pool} free_blocks(ordered_blocks)",
        f"{pool} null_block",
        "vllm.v1.core.kv_cache_manager:KVCacheManager",
        "vllm.v1.cudagraph_dispatcher:CudagraphDispatcher",
    }
    builder = "vllm.v1.attention.backend:AttentionMetadataBuilder"
    assert gone == expected | {f"{builder} get_cudagraph_support"}
    (moved,) = (line for line in drift.changed(source, there) if "_preempt" in line)
    assert moved.endswith("_preempt_request: +reason")


def report(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_folder_without_vllm_is_an_error(tmp_path):
    assert report(str(tmp_path)).returncode == 2


def test_an_empty_vllm_lacks_everything(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("")
    done = report(str(tmp_path), "--json")
    assert done.returncode == 1, done.stderr
    lines = json.loads(done.stdout)["gone"]
    assert "vllm.engine.arg_utils:EngineArgs" in lines
