"""Two and three tensor-parallel ranks give the same answers as one rank.

Ranks are processes connected by gloo. Each rank selects tokens for its own KV heads
without communication. With equal pages per head the selection equals that of one rank;
allocators that compare heads compare those of their rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import run_scenario
from policy_settings import configure
from scenarios_parallel import VOCABULARY
from tiny_model import write_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SEED = 7
SETTINGS = {"budget": 96, "window": 16, "skip_layers": 0, "allocator": "uniform"}
SETTINGS |= {"local_window": 32, "least_span": 4, "span_tokens": 8}
POLICIES = [configure(name, SETTINGS) for name in ("snapkv", "quest", "sekv")]
SIZES = {"heads": 12, "kv_heads": 6, "hidden": 192, "inner": 384}


@pytest.fixture(scope="module")
def reports(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[int, list[dict[str, Any]]]:
    """Ranks -> results per policy; the last one is stock vLLM."""
    print("seed", SEED)
    folder: Path = tmp_path_factory.mktemp("parallel") / "model"
    model = write_tiny_model(folder, SEED, vocabulary=VOCABULARY, **SIZES)
    reports = {}
    for ranks in (1, 2, 3):
        policies = [*POLICIES, None] if ranks == 1 else POLICIES
        arguments = {"model": str(model), "policies": policies, "ranks": ranks}
        scenario = "scenarios_parallel:on_ranks"
        reports[ranks] = run_scenario(scenario, arguments, timeout=580)
    return reports


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("ranks", [2, 3])
def test_tokens_and_blocks_are_those_of_one_rank(reports: Any, ranks: int):
    for parallel, single in zip(reports[ranks], reports[1], strict=False):
        assert parallel["tokens"] == single["tokens"]
        assert parallel["left"] == single["left"] == 0
        assert parallel["compactions"] == single["compactions"]
        assert parallel["held"] == [0] * ranks


def test_policies_show_in_the_tokens(reports: Any):
    """Policies change tokens; otherwise equal tokens would prove little."""
    *others, stock = reports[1]
    assert all(other["compactions"] == 2 for other in others)
    assert all(other["tokens"] != stock["tokens"] for other in others)
