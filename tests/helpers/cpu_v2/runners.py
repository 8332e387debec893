"""Runs ``scenarios_runners`` on a chosen model runner, scheduler and vLLM."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from harness import engine_environment, run_scenario

# For tests that do not choose a runner themselves.
CHOSEN = os.environ.get("KVP_TEST_RUNNER", "V1")
FULL = {"name": "full"}
SNAPKV = {"name": "snapkv", "budget": 128, "window": 16}
KVZIP = {"name": "kvzip", "budget": 128, "chunk": 200}
# The last policy runs its own tokens through the model.
POLICIES = [None, FULL, SNAPKV, KVZIP]
NAMES = [policy["name"] for policy in POLICIES if policy is not None]


def environment(
    runner: str, asynchronous: bool, vllm_folder: Path | None = None
) -> dict[str, str | None]:
    """Environment of a process that uses model runner ``V1`` or ``V2``.

    Args:
        asynchronous: switch on what vLLM's CPU platform switches off.
        vllm_folder: holds the ``vllm`` package to import; None = the installed.
    """
    path = engine_environment()["PYTHONPATH"]
    if vllm_folder is not None:
        path = os.pathsep.join([str(vllm_folder), path])
    interpreted = runner == "V2"
    return {
        "PYTHONPATH": path,
        # nothing else runs our Triton kernel on a CPU
        "KVP_TEST_KERNEL": os.environ.get("KVP_TEST_KERNEL") if interpreted else None,
        # unset, vLLM chooses runner V1 on a CPU
        "VLLM_USE_V2_MODEL_RUNNER": "1" if interpreted else None,
        "TRITON_INTERPRET": "1" if interpreted else None,
        "KVP_TEST_ASYNC": "1" if asynchronous else None,
    }


def run(
    model: str,
    runner: str,
    asynchronous: bool,
    more: tuple[str, ...] = (),
    vllm_folder: Path | None = None,
) -> dict[str, Any]:
    """Results of ``generate`` under each of ``POLICIES``, and of more scenarios."""
    return run_scenario(
        "scenarios_runners:several",
        {"model": model, "policies": POLICIES, "more": list(more)},
        environment(runner, asynchronous, vllm_folder),
    )


def check_generated(results: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check tokens against another runner, full against stock, and freed blocks against
    the plan.
    """
    stock, full, snapkv, kvzip = results["generate"]
    reference = expected["generate"]
    assert stock["tokens"] == reference[0]["tokens"]
    assert full["tokens"] == stock["tokens"]
    assert snapkv["tokens"] == reference[2]["tokens"]
    assert kvzip["tokens"] == reference[3]["tokens"]
    assert full["freed"] == full["compactions"] == 0
    # 128 tokens of 32 stay. long: 10 blocks, zone 4, frees 6. odd: 14 full blocks and
    # 3 tokens, so 4 more blocks stay, frees 10. short: frees nothing.
    assert snapkv["freed"] == kvzip["freed"] == 6 + 10
    assert snapkv["compactions"] == kvzip["compactions"] == 2
    assert full["left"] == snapkv["left"] == kvzip["left"] == 0
