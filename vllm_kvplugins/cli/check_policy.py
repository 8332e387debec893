"""``kvplugins check-policy``: does a policy of one's own keep the contract?"""

from __future__ import annotations

import typer
from rich.markup import escape

from vllm_kvplugins.cli.console import out, user_errors
from vllm_kvplugins.cli.inputs import Policy, PolicyConfig, policy_request


def check_policy(policy: Policy, policy_config: PolicyConfig = None) -> None:
    """Score made-up caches with a policy: no model, no vLLM, a few seconds."""
    with user_errors():
        request = policy_request(policy, policy_config)
        from vllm_kvplugins.config import parse_policy
        from vllm_kvplugins.testing import contract_check

        made = parse_policy(request)
        found = contract_check.check_contract(made)
        took_ms = None if found else contract_check.score_ms(made)
    console = out()
    for shape in contract_check.SHAPES:
        problems = [f.problem for f in found if f.shape == shape.name]
        mark = "[red]problem[/]" if problems else "[green]ok[/]"
        console.print(f"{mark}  {shape.name}")
        for problem in problems:
            console.print(f"  - {escape(problem)}", soft_wrap=True)
    if took_ms is None:
        raise typer.Exit(1)
    console.print(
        f"{contract_check.LARGE.name}: {took_ms:.1f} ms per layer on this machine's CPU"
    )
