"""vLLM's KV cache manager with our block manager under random operations.

``KVP_TEST_OPERATIONS``: their number (100,000 by default; try 1,000,000).
"""

from __future__ import annotations

import pytest
from harness import run_scenario

pytestmark = pytest.mark.engine


def test_any_operations_leave_every_block_where_the_plan_says():
    counts = run_scenario("scenarios_stateful_blocks:any_operations", {}, timeout=3000)
    print(counts)
    least = counts["operations"] / 1000
    for event in (
        "admitted",
        "hits",
        "prefix hits",
        "refused",
        "compactions",
        "preempted",
        "preempted compacted",
        "aborted",
        "finished",
        "too large",
    ):
        assert counts[event] > least, f"hardly any {event}: {counts}"
