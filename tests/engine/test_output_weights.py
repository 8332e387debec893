"""Policies that ask for output projections get those of the loaded model."""

from __future__ import annotations

import pytest
from harness import run_scenario

pytestmark = pytest.mark.engine


def test_weights_are_those_of_the_checkpoint(tiny_model):
    """vLLM packs them for the CPU and removes the original."""
    found = run_scenario(
        "scenarios_tiny:output_weights",
        {"model": tiny_model, "policy": {"name": "criticalkv", "budget": 128}},
    )
    assert len(found["errors"]) == found["layers"] > 1
    assert max(found["errors"]) < 1e-6 * max(found["largest"], 1)
    assert len(found["heads"]) == 3
