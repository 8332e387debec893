"""Runs hypothesis' state machines for a number of operations."""

from __future__ import annotations

import os
import time

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

STEPS = 200  # of one sequence; hypothesis chooses the length
_BY_TIER = "100000" if os.environ.get("KVP_TEST_TIER") == "all" else "5000"
OPERATIONS = int(os.environ.get("KVP_TEST_OPERATIONS", _BY_TIER))


def run_machine(machine: type[RuleBasedStateMachine]) -> None:
    """Run sequences of rules until the requested number of operations is reached.

    Args:
        machine: counts its own ``operations`` (a class attribute) in an invariant.

    Raises:
        AssertionError: a rule or invariant failed; hypothesis prints the shortest
            sequence that fails. Or there were too few operations.
    """
    machine.operations = 0
    started, sequences = time.monotonic(), 0
    while machine.operations < OPERATIONS:
        before = machine.operations
        operations = max(1, (OPERATIONS - before) // STEPS)
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=operations,
                stateful_step_count=STEPS,
                deadline=None,
                database=None,
                print_blob=True,
                suppress_health_check=list(HealthCheck),
            ),
        )
        sequences += operations
        assert machine.operations > before, "the machine counts no operations"
    took = time.monotonic() - started
    print(f"{machine.operations} operations, {sequences} sequences, {took:.0f} s")
