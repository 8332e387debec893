"""``kvplugins check-policy``: test a policy against the contract."""

from __future__ import annotations

import typer
from rich.markup import escape

from vllm_kvplugins.cli.console import out, user_errors
from vllm_kvplugins.cli.inputs import Policy, PolicyConfig, policy_request


def check_policy(policy: Policy, policy_config: PolicyConfig = None) -> None:
    """Test a policy on synthetic caches: no model, no vLLM, a few seconds."""
    with user_errors():
        request = policy_request(policy, policy_config)
        from vllm_kvplugins.config import parse_policy
        from vllm_kvplugins.testing import contract_check

        parsed = parse_policy(request)
        findings = contract_check.check_contract(parsed)
        score_ms = None if findings else contract_check.score_ms(parsed)
    console = out()
    for shape in contract_check.SHAPES:
        problems = [f.problem for f in findings if f.shape == shape.name]
        mark = "[red]problem[/]" if problems else "[green]ok[/]"
        console.print(f"{mark}  {shape.name}")
        for problem in problems:
            console.print(f"  - {escape(problem)}", soft_wrap=True)
    if score_ms is None:
        raise typer.Exit(1)
    console.print(
        f"{contract_check.LARGE.name}: {score_ms:.1f} ms per layer on this CPU"
    )
