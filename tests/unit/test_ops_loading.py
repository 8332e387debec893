"""The compiled extension: found, refused when broken, optional."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import page_ops
import pytest
from test_ops import a_kv, assert_same_bits, ids
from tiers import tiered

from vllm_kvplugins import ops
from vllm_kvplugins.errors import codes_in
from vllm_kvplugins.ops import extension


class TestLoading:
    @pytest.fixture(autouse=True)
    def _fresh(self):
        extension.load_extension.cache_clear()
        yield
        extension.load_extension.cache_clear()

    def test_torch_by_request(self, monkeypatch):
        monkeypatch.setenv("KVP_OPS", "torch")
        assert ops.backend_in_use() == "torch: KVP_OPS=torch"

    def test_unknown_request(self, monkeypatch):
        monkeypatch.setenv("KVP_OPS", "fast")
        with pytest.raises(ValueError, match="'fast'") as caught:
            ops.backend_in_use()
        assert codes_in(str(caught.value)) == ("KVP400",)

    def test_unknown_vector_instructions(self, monkeypatch):
        monkeypatch.delenv("KVP_OPS", raising=False)
        monkeypatch.setenv("KVP_SIMD", "mmx")
        with pytest.raises(ValueError, match="'mmx'") as caught:
            ops.backend_in_use()
        assert codes_in(str(caught.value)) == ("KVP402",)

    def test_missing_library_is_normal(self, monkeypatch, tmp_path):
        monkeypatch.setattr(extension, "EXTENSION_PATH", tmp_path / "_C.abi.so")
        monkeypatch.delenv("KVP_OPS", raising=False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert ops.backend_in_use() == "torch: _C.abi.so has not been built"
        monkeypatch.setenv("KVP_OPS", "compiled")
        with pytest.raises(RuntimeError) as caught:
            ops.gather_tokens(a_kv(), ids(0), ids(0))
        assert codes_in(str(caught.value)) == ("KVP401",)

    def test_broken_library_warns_and_falls_back(self, monkeypatch, tmp_path):
        broken = tmp_path / "_C.abi.so"
        broken.write_bytes(b"not a library")
        monkeypatch.setattr(extension, "EXTENSION_PATH", broken)
        monkeypatch.delenv("KVP_OPS", raising=False)
        with pytest.warns(RuntimeWarning, match=r"cannot be used: .*_C.abi.so"):
            keys, _ = ops.gather_tokens(a_kv(), ids(1), ids(2))
        assert_same_bits(keys, page_ops.gather_tokens(a_kv(), ids(1), ids(2))[0])
        info = ops.extension_info()
        assert not info["loaded"]
        assert "cannot be used" in info["reason"]

    def test_library_of_another_version_is_refused(self, monkeypatch):
        if not extension.EXTENSION_PATH.exists():
            pytest.skip("the extension has not been built")
        built_for = extension.OPS_VERSION
        monkeypatch.setattr(extension, "OPS_VERSION", "0")
        message = f"ops version {built_for}, this package needs 0"
        with pytest.warns(RuntimeWarning, match=message):
            assert extension.load_extension().reason

    def test_no_kernels_for_other_devices(self, monkeypatch):
        monkeypatch.delenv("KVP_OPS", raising=False)
        assert ops.backend_in_use("meta").startswith("torch: ")

    def test_info_of_a_loaded_library(self):
        info = ops.extension_info()
        if not info["loaded"]:
            pytest.skip(f"no compiled ops: {info['reason']}")
        assert info["build_type"]
        assert info["cuda"] in (True, False)
        assert info["simd"] in ("avx512_bf16", "avx512", "avx2", "baseline")
        assert Path(info["path"]).exists()

    def test_library_does_not_link_python(self):
        if not extension.EXTENSION_PATH.exists():
            pytest.skip("the extension has not been built")
        if shutil.which("readelf") is None:
            pytest.skip("no readelf")
        dynamic = subprocess.run(
            ["readelf", "-d", str(extension.EXTENSION_PATH)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert "NEEDED" in dynamic
        assert "libpython" not in dynamic
        assert "libtorch_python" not in dynamic
        assert "RUNPATH" not in dynamic


@pytest.mark.parametrize("limit", tiered(extension.SIMD_LEVELS, ("baseline", "avx2")))
def test_an_environment_variable_limits_vector_instructions(limit):
    """In its own process, because the choice is made once."""
    if reason := extension.load_extension().reason:
        pytest.skip(f"no compiled ops: {reason}")
    supported = extension.load_extension().facts["simd"]
    levels = extension.SIMD_LEVELS
    expected = levels[min(levels.index(limit), levels.index(supported))]
    code = "from vllm_kvplugins import ops; print(ops.extension_info()['simd'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "KVP_SIMD": limit},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == expected


def test_ops_do_not_import_vllm():
    code = "import sys, vllm_kvplugins.ops; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
