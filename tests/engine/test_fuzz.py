"""Random traffic leaks no block or request and changes no token.

Half of the requests hold the part that they have in common as shared prefix.

40 rounds, 500 in the full tier.

``scenarios_fuzz`` checks the invariants after every step and round, in the engine's
process. The pool is little larger than the longest request, so requests are preempted,
also after a compaction.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from harness import INTERPRETED, run_scenario

pytestmark = pytest.mark.engine

SEED = 20261121
_ALL = os.environ.get("KVP_TEST_TIER") == "all"
ROUNDS = (100 if INTERPRETED else 500) if _ALL else 40
BLOCKS = 26
SNAPKV: dict[str, Any] = {"name": "snapkv", "budget": 96, "window": 16}


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(SNAPKV, id="snapkv"),
        pytest.param(
            SNAPKV | {"allocator": "cross-layer"},
            id="cross-layer",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"name": "streaming-llm", "budget": 96, "allocator": "pyramid"},
            id="streaming-llm-pyramid",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            SNAPKV
            | {"decode_budget": 64, "fold_blocks": 1, "allocator": "cross-layer"},
            id="decode-compaction",
            marks=pytest.mark.slow,
        ),
        pytest.param({"name": "full"}, id="full", marks=pytest.mark.slow),
    ],
)
def test_random_traffic_leaks_nothing_and_changes_no_token(tiny_model, policy):
    print("seed", SEED)
    arguments = {
        "model": tiny_model,
        "policy": policy,
        "seed": SEED,
        "rounds": ROUNDS,
        "blocks": BLOCKS,
        "shares": policy["name"] != "full",
    }
    counts = run_scenario("scenarios_fuzz:fuzz", arguments, timeout=550)
    print(counts)
    for event in ("requests", "aborts", "hits", "preemptions", "compared"):
        assert counts[event] > ROUNDS / 25, (
            f"hardly any {event} in {ROUNDS} rounds: {counts}"
        )
    assert counts["differed"] == 0, counts
    assert counts["close"] <= counts["compared"] / 20, "too many near ties to tell"
    assert (counts["shared"] > ROUNDS / 25) == arguments["shares"], counts
    if policy["name"] == "full":
        assert counts["compactions"] == 0
    else:
        assert counts["compactions"] > ROUNDS / 5, counts
        assert counts["preempted_compacted"] > ROUNDS / 50, counts
