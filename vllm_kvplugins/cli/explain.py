"""``kvplugins explain``: which tokens of a prompt a policy keeps, really run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from vllm_kvplugins.cli.console import out, quiet_engine, user_errors
from vllm_kvplugins.errors import KVPolicyError


def explain(
    model: Annotated[str, typer.Argument(help="Folder or Hugging Face id.")],
    policy: Annotated[
        str, typer.Option("--policy", "--kv-policy", help="See `kvplugins list`.")
    ],
    prompt_file: Annotated[
        Path, typer.Option(metavar="F", help="Text of the prompt, UTF-8.")
    ],
    json_path: Annotated[
        Path, typer.Option("--json", metavar="OUT.json", help="Where to write.")
    ],
    policy_config: Annotated[
        str | None,
        typer.Option(
            "--policy-config",
            "--kv-policy-config",
            metavar="JSON",
            help="The policy's settings, such as '{\"budget\": 512}'.",
        ),
    ] = None,
    html_path: Annotated[
        Path | None,
        typer.Option("--html", metavar="OUT.html", help="A page to look at."),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(metavar="N", min=2, help="Context; default: the model's."),
    ] = None,
    dtype: Annotated[str, typer.Option(metavar="D", help="vLLM's dtype.")] = "auto",
    verbose: Annotated[bool, typer.Option(help="Show what vLLM prints.")] = False,
) -> None:
    """Run a prompt through vLLM under a policy and write what each KV head kept."""
    with user_errors():
        request = _request(policy, policy_config)
        check_targets(json_path, html_path)
        prompt = read_prompt(prompt_file)
        with quiet_engine(verbose) as progress:
            from vllm_kvplugins.vllm_adapter import explain as engine

            found = engine.explain(
                model, request, prompt, dtype, max_model_len, progress
            )
        document = build_document(
            model, request, found.prompt_token_ids, found.tokens, found.kept_positions
        )
        _write(json_path, json.dumps(document, ensure_ascii=False) + "\n")
        if html_path is not None:
            from vllm_kvplugins.cli.explain_html import render

            _write(html_path, render(document))
    _print_summary(document, [path for path in (json_path, html_path) if path])


def build_document(
    model: str,
    request: dict[str, Any],
    prompt_token_ids: list[int],
    tokens: list[str],
    kept_positions: list[list[list[int]]],
) -> dict[str, Any]:
    """What ``--json`` writes.

    Args:
        model: as the user named it.
        request: the policy as ``parse_policy`` takes it.
        prompt_token_ids: the prompt.
        tokens: one string per token.
        kept_positions: per layer, per KV head: ascending positions.

    Returns:
        A mapping of plain values; ``config`` holds all settings, so that
        ``{"name": policy, **config}`` asks for the same policy again.
    """
    from vllm_kvplugins.cli.settings import written_settings
    from vllm_kvplugins.config import parse_policy

    policy = parse_policy(request)
    return {
        "model": model,
        "policy": policy.name,
        "config": written_settings(policy),
        "prompt_token_ids": prompt_token_ids,
        "tokens": tokens,
        "layers": [
            {"layer": layer, "kv_heads": [{"kept_positions": kept} for kept in heads]}
            for layer, heads in enumerate(kept_positions)
        ],
    }


def read_prompt(path: Path) -> str:
    """The prompt's text.

    Raises:
        KVPolicyError: no such file, not UTF-8, or nothing in it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise KVPolicyError(
            f"cannot read the prompt file {path}: {error.strerror}; pass a text file "
            "with --prompt-file"
        ) from error
    except UnicodeDecodeError as error:
        raise KVPolicyError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); "
            "convert it first"
        ) from error
    if not text.strip():
        raise KVPolicyError(f"the prompt file {path} is empty; write a prompt into it")
    return text


def check_targets(*paths: Path | None) -> None:
    """Find out before the long run whether the results can be written.

    Raises:
        KVPolicyError: a folder is missing or read-only, a path is a folder, or
            two paths are the same.
    """
    given = [path for path in paths if path is not None]
    if len({path.resolve() for path in given}) < len(given):
        raise KVPolicyError(
            f"--json and --html both name {given[0]}; give them different files"
        )
    for path in given:
        folder = path.absolute().parent
        if not folder.is_dir():
            reason = f"the folder {folder} does not exist; create it"
        elif path.is_dir():
            reason = "it is a folder; name a file"
        elif not os.access(path if path.exists() else folder, os.W_OK):
            reason = "no permission; choose another place"
        else:
            continue
        raise KVPolicyError(f"cannot write {path}: {reason}")


def _request(policy: str, policy_config: str | None) -> dict[str, Any]:
    from vllm_kvplugins.config import parse_options, parse_policy

    options = parse_options(policy_config) if policy_config is not None else {}
    request = {"name": policy, **options}
    parse_policy(request)
    return request


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise KVPolicyError(
            f"cannot write {path}: {error.strerror}; choose another place"
        ) from error


def _print_summary(document: dict[str, Any], paths: list[Path]) -> None:
    counts = [
        len(head["kept_positions"])
        for layer in document["layers"]
        for head in layer["kv_heads"]
    ]
    tokens = len(document["tokens"])
    mean = sum(counts) / len(counts)
    heads = len(counts) // len(document["layers"])
    console = out()
    console.print(
        f"[bold]{escape(document['policy'])}[/]  {tokens} prompt tokens, "
        f"{len(document['layers'])} layers × {heads} KV heads"
    )
    console.print(
        f"kept per head: mean {mean:.1f} ({mean / tokens:.1%}), "
        f"least {min(counts)}, most {max(counts)}"
    )
    for path in paths:
        console.print(f"wrote {escape(str(path))}", soft_wrap=True)
