"""Fixtures of the engine tests."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="install a vLLM (see scripts/) to run engine tests")

TINY_SEED = 7


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a two-layer Llama with random weights; needs no download."""
    from tiny_model import write_tiny_model

    print("seed of the tiny model", TINY_SEED)
    folder: Path = tmp_path_factory.mktemp("tiny") / "model"
    return str(write_tiny_model(folder, TINY_SEED))
