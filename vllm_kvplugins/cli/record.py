"""``kvplugins research record``: write what retrieval fetches in each decode step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from vllm_kvplugins.cli.console import out, quiet_engine, user_errors
from vllm_kvplugins.cli.inputs import (
    Dtype,
    MaxModelLen,
    Model,
    Policy,
    PolicyConfig,
    PromptFile,
    Verbose,
    check_targets,
    policy_request,
    read_prompt,
    write_text,
)
from vllm_kvplugins.engine.recorded_run import RecordedRun, lines_of
from vllm_kvplugins.errors import KVPolicyError, coded


def record(
    model: Model,
    policy: Policy,
    prompt_file: PromptFile,
    max_tokens: Annotated[
        int,
        typer.Option(metavar="N", min=2, help="Maximum number of generated tokens."),
    ],
    run_path: Annotated[
        Path, typer.Option("--out", metavar="RUN.jsonl", help="Where to write.")
    ],
    policy_config: PolicyConfig = None,
    max_model_len: MaxModelLen = None,
    dtype: Dtype = "auto",
    verbose: Verbose = False,
) -> None:
    """Generate with vLLM under a retrieval policy; write what each step fetches.

    Slower than serving: every step also scans all offloaded tokens.
    """
    with user_errors():
        request = policy_request(policy, policy_config)
        config = _settings(request)
        check_targets(run_path)
        prompt = read_prompt(prompt_file)
        with quiet_engine(verbose) as progress:
            from vllm_kvplugins.vllm_adapter.offline import record as engine

            run = engine.record(
                model,
                request,
                config,
                prompt,
                max_tokens,
                dtype,
                max_model_len,
                progress,
            )
        write_text(run_path, "".join(lines_of(run)))
    _print_summary(run, run_path)


def _settings(request: dict[str, Any]) -> dict[str, Any]:
    """All settings of the policy.

    Raises:
        KVPolicyError: the policy never fetches.
    """
    from vllm_kvplugins.cli.settings import written_settings
    from vllm_kvplugins.config import parse_policy
    from vllm_kvplugins.policies.registry import available_policies

    policy = parse_policy(request)
    if policy.retrieval is None:
        others = [name for name in available_policies() if _fetches(name)]
        raise KVPolicyError(
            coded(
                "KVP604",
                f"{policy.name} fetches nothing, so there is nothing to record; these "
                f"policies fetch: {', '.join(others)}. `kvplugins explain` shows what "
                f"{policy.name} keeps",
            )
        )
    return written_settings(policy)


def _fetches(name: str) -> bool:
    from vllm_kvplugins.config import parse_policy

    try:
        return parse_policy(name).retrieval is not None
    except KVPolicyError:  # no default settings, or it cannot be loaded
        return False


def _print_summary(run: RecordedRun, path: Path) -> None:
    header, fetches = run.header, run.fetches
    hot = sum(fetch.hot_tokens for fetch in fetches)
    fetched = sum(fetch.fetched_tokens for fetch in fetches)
    mass = sum(fetch.mass_covered_share for fetch in fetches) / len(fetches)
    steps = 1 + max(fetch.step for fetch in fetches)
    layers = len({fetch.layer for fetch in fetches})
    copied = sum(fetch.copied_bytes for fetch in fetches) / steps / 1024
    console = out()
    console.print(
        f"[bold]{escape(header.policy)}[/]  {header.prompt_tokens} prompt tokens, "
        f"{header.generated_tokens} generated"
    )
    console.print(
        f"{steps} steps fetched, in {layers} of {header.num_layers} layers: "
        f"{fetched / hot:.1%} of the hot slots, {copied:.1f} KiB per step"
    )
    console.print(f"mass covered: {mass:.1%} of the attention over offloaded tokens")
    console.print(f"wrote {escape(str(path))}", soft_wrap=True)
