"""One run with drafts, next to the same run without them."""

from __future__ import annotations

from typing import Any

from harness import run_scenario

LENGTHS = [40, 130, 300, 410, 555, 700]


def speculate(
    model: str,
    policy: dict[str, Any],
    seed: int,
    environment: dict[str, str | None] | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """Run ``scenarios_speculation:speculate``.

    Args:
        environment: of ``run_scenario``.
        arguments: of the scenario, other than the defaults.
    """
    print("seed", seed)
    defaults = {"lengths": LENGTHS, "max_tokens": 120, "max_model_len": 4096}
    run: dict[str, Any] = run_scenario(
        "scenarios_speculation:speculate",
        {"model": model, "policy": policy, "seed": seed} | defaults | arguments,
        environment,
        timeout=580,
    )
    print({key: run[key] for key in ("drafts", "accepted", "compactions")})
    return run


def check_changes_nothing(run: dict[str, Any]) -> None:
    """Tokens are those without drafts, blocks are as planned, and nothing stays."""
    for kind in ("together", "alone"):
        assert run[kind] == run["plain"], kind
    check_blocks(run)


def check_blocks(run: dict[str, Any]) -> None:
    """Blocks are as planned, and nothing stays."""
    for request, (most, bound) in run["held"].items():
        assert most <= bound, f"{request} held {most} blocks, {bound} are planned"
    assert run["tracked"] == run["held_blocks"] == 0
