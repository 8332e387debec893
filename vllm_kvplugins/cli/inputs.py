"""Shared by subcommands that run a model: options, inputs, result files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_kvplugins.errors import KVPolicyError, coded

Model = Annotated[str, typer.Argument(help="Folder or Hugging Face ID.")]
Policy = Annotated[
    str, typer.Option("--policy", "--kv-policy", help="See `kvplugins list`.")
]
PolicyConfig = Annotated[
    str | None,
    typer.Option(
        "--policy-config",
        "--kv-policy-config",
        metavar="JSON",
        help="Settings of the policy, for example '{\"budget\": 512}'.",
    ),
]
PromptFile = Annotated[Path, typer.Option(metavar="F", help="Prompt as UTF-8 text.")]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=2, help="Context length; default: that of the model."
    ),
]
Dtype = Annotated[str, typer.Option(metavar="D", help="vLLM's dtype.")]
Verbose = Annotated[bool, typer.Option(help="Show the output of vLLM.")]


def load_tokenizer(model: str) -> Any:
    """Load the tokenizer of a model, without progress bars of transformers.

    Raises:
        KVPolicyError: there is no tokenizer.
    """
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        return AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError) as error:
        raise KVPolicyError(
            coded("KVP625", f"transformers finds no tokenizer for {model}: {error}")
        ) from error


def policy_request(policy: str, policy_config: str | None) -> dict[str, Any]:
    """The argument of ``parse_policy`` for these options, validated.

    Raises:
        KVPolicyError: unknown policy or setting, or not a JSON object.
    """
    from vllm_kvplugins.config import parse_options, parse_policy

    options = parse_options(policy_config) if policy_config is not None else {}
    request = {"name": policy, **options}
    parse_policy(request)
    return request


def read_prompt(path: Path) -> str:
    """Read the prompt.

    Raises:
        KVPolicyError: see ``read_text``.
    """
    return read_text(path, "prompt", "--prompt-file")


def read_chat(path: Path) -> list[dict[str, Any]]:
    """Read the messages of a chat: a JSON list, or an object with ``messages``.

    Raises:
        KVPolicyError: see ``read_text``; or the file holds no messages.
    """
    text = read_text(path, "chat", "--chat")
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        problem = f"it is not JSON: {error}"
    else:
        messages = content.get("messages") if isinstance(content, dict) else content
        if isinstance(messages, list) and messages and all(map(_is_message, messages)):
            return messages
        problem = "it holds no list of messages"
    raise KVPolicyError(
        coded(
            "KVP601",
            f"cannot read the chat file {path}: {problem}; write "
            '[{"role": "user", "content": "…"}, …]',
        )
    )


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and isinstance(item.get("role"), str)


def read_text(path: Path, role: str, option: str) -> str:
    """Read a text file of the user.

    Args:
        role: "prompt", "chat" or "document", for messages.
        option: that passed the path, for messages.

    Raises:
        KVPolicyError: the file is missing, not UTF-8, or empty.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise KVPolicyError(
            coded(
                "KVP601",
                f"cannot read the {role} file {path}: {error.strerror}; pass a text "
                f"file with {option}",
            )
        ) from error
    except UnicodeDecodeError as error:
        raise KVPolicyError(
            coded(
                "KVP601",
                f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); "
                "convert it first",
            )
        ) from error
    if not text.strip():
        raise KVPolicyError(
            coded("KVP601", f"the {role} file {path} is empty; pass a text file")
        )
    return text


def check_targets(*paths: Path | None) -> None:
    """Check before a long run that its results can be written.

    Raises:
        KVPolicyError: a folder is missing or read-only, a path is a folder, or
            two paths are equal.
    """
    given = [path for path in paths if path is not None]
    if len({path.resolve() for path in given}) < len(given):
        raise KVPolicyError(
            coded(
                "KVP602",
                f"two results would be written to {given[0]}; give different files",
            )
        )
    for path in given:
        folder = path.absolute().parent
        if not folder.is_dir():
            reason = f"the folder {folder} does not exist; create it"
        elif path.is_dir():
            reason = "it is a folder; name a file"
        elif not os.access(path if path.exists() else folder, os.W_OK):
            reason = "no permission; choose another path"
        else:
            continue
        raise KVPolicyError(coded("KVP602", f"cannot write {path}: {reason}"))


def write_text(path: Path, text: str) -> None:
    """Write a result.

    Raises:
        KVPolicyError: the file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise KVPolicyError(
            coded(
                "KVP602", f"cannot write {path}: {error.strerror}; choose another path"
            )
        ) from error
