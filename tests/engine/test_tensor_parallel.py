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
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """Ranks -> what happened under each policy, on one rank without any at last."""
    print("seed", SEED)
    folder: Path = tmp_path_factory.mktemp("parallel") / "model"
    model = write_tiny_model(folder, SEED, vocabulary=VOCABULARY, **SIZES)
    found = {}
    for ranks in (1, 2, 3):
        policies = [*POLICIES, None] if ranks == 1 else POLICIES
        arguments = {"model": str(model), "policies": policies, "ranks": ranks}
        scenario = "scenarios_parallel:on_ranks"
        found[ranks] = run_scenario(scenario, arguments, timeout=580)
    return found


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("ranks", [2, 3])
def test_tokens_and_blocks_are_those_of_one_rank(found: Any, ranks: int):
    for here, alone in zip(found[ranks], found[1], strict=False):
        assert here["tokens"] == alone["tokens"]
        assert here["left"] == alone["left"] == 0
        assert here["compactions"] == alone["compactions"]
        assert here["held"] == [0] * ranks


def test_policies_show_in_the_tokens(found: Any):
    """Else equal tokens would prove little."""
    *others, stock = found[1]
    assert all(other["compactions"] == 2 for other in others)
    assert all(other["tokens"] != stock["tokens"] for other in others)
