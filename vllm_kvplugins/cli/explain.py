"""``kvplugins explain``: run a prompt and show which tokens a policy keeps."""

from __future__ import annotations

import json
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
    Verbose,
    check_targets,
    policy_request,
    read_chat,
    read_prompt,
    write_text,
)
from vllm_kvplugins.errors import coded


def explain(
    model: Model,
    policy: Policy,
    json_path: Annotated[
        Path, typer.Option("--json", metavar="OUT.json", help="Where to write.")
    ],
    prompt_file: Annotated[
        Path | None, typer.Option(metavar="F", help="Prompt as UTF-8 text.")
    ] = None,
    chat: Annotated[
        Path | None,
        typer.Option(metavar="F.json", help="Messages of a chat, instead of a text."),
    ] = None,
    policy_config: PolicyConfig = None,
    html_path: Annotated[
        Path | None,
        typer.Option("--html", metavar="OUT.html", help="Also write an HTML page."),
    ] = None,
    max_model_len: MaxModelLen = None,
    dtype: Dtype = "auto",
    verbose: Verbose = False,
) -> None:
    """Run a prompt or a chat under a policy, and write what each KV head keeps.

    A chat passes vLLM's front end as on a server, which finds the ends of its turns.
    """
    with user_errors():
        request = policy_request(policy, policy_config)
        check_targets(json_path, html_path)
        prompt = _read(prompt_file, chat)
        with quiet_engine(verbose) as progress:
            from vllm_kvplugins.vllm_adapter.offline import explain as engine

            run = engine.explain(model, request, prompt, dtype, max_model_len, progress)
        document = build_document(
            model,
            request,
            run.prompt_token_ids,
            run.tokens,
            run.kept_positions,
        )
        write_text(json_path, json.dumps(document, ensure_ascii=False) + "\n")
        if html_path is not None:
            from vllm_kvplugins.cli.explain_html import render

            write_text(html_path, render(document))
    _print_summary(document, [path for path in (json_path, html_path) if path])


def _read(prompt_file: Path | None, chat: Path | None) -> str | list[dict[str, Any]]:
    if prompt_file is not None and chat is None:
        return read_prompt(prompt_file)
    if chat is not None and prompt_file is None:
        return read_chat(chat)
    message = coded("KVP603", "give either --prompt-file or --chat")
    raise typer.BadParameter(message, param_hint="--prompt-file / --chat")


def build_document(
    model: str,
    request: dict[str, Any],
    prompt_token_ids: list[int],
    tokens: list[str],
    kept_positions: list[list[list[int]]],
) -> dict[str, Any]:
    """The document that ``--json`` writes.

    Args:
        model: as named by the user.
        request: the policy, as an argument of ``parse_policy``.
        prompt_token_ids: the prompt.
        tokens: one string per token.
        kept_positions: per layer and KV head, ascending positions.

    Returns:
        Plain values. ``config`` contains all settings: ``{"name": policy, **config}``
        specifies the same policy.
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
