"""What the subcommands that run a model share: options, prompt, places for results."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_kvplugins.errors import KVPolicyError

Model = Annotated[str, typer.Argument(help="Folder or Hugging Face id.")]
Policy = Annotated[
    str, typer.Option("--policy", "--kv-policy", help="See `kvplugins list`.")
]
PolicyConfig = Annotated[
    str | None,
    typer.Option(
        "--policy-config",
        "--kv-policy-config",
        metavar="JSON",
        help="The policy's settings, such as '{\"budget\": 512}'.",
    ),
]
PromptFile = Annotated[
    Path, typer.Option(metavar="F", help="Text of the prompt, UTF-8.")
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(metavar="N", min=2, help="Context; default: the model's."),
]
Dtype = Annotated[str, typer.Option(metavar="D", help="vLLM's dtype.")]
Verbose = Annotated[bool, typer.Option(help="Show what vLLM prints.")]


def load_tokenizer(model: str) -> Any:
    """The model's tokenizer, without transformers' bars and notes.

    Raises:
        KVPolicyError: it has none here.
    """
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        return AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError) as error:
        raise KVPolicyError(
            f"transformers finds no tokenizer for {model}: {error}"
        ) from error


def policy_request(policy: str, policy_config: str | None) -> dict[str, Any]:
    """What ``parse_policy`` takes, and takes indeed.

    Raises:
        KVPolicyError: unknown policy or setting, or not a JSON object.
    """
    from vllm_kvplugins.config import parse_options, parse_policy

    options = parse_options(policy_config) if policy_config is not None else {}
    request = {"name": policy, **options}
    parse_policy(request)
    return request


def read_prompt(path: Path) -> str:
    """The prompt's text.

    Raises:
        KVPolicyError: as ``read_text``.
    """
    return read_text(path, "prompt", "--prompt-file")


def read_text(path: Path, what: str, option: str) -> str:
    """A text that the user gives.

    Args:
        what: it is for, for messages.
        option: the one that named it.

    Raises:
        KVPolicyError: no such file, not UTF-8, or nothing in it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise KVPolicyError(
            f"cannot read the {what} file {path}: {error.strerror}; pass a text file "
            f"with {option}"
        ) from error
    except UnicodeDecodeError as error:
        raise KVPolicyError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); "
            "convert it first"
        ) from error
    if not text.strip():
        raise KVPolicyError(f"the {what} file {path} is empty; write a {what} into it")
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
            f"two results would go to {given[0]}; give them different files"
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


def write_text(path: Path, text: str) -> None:
    """Write a result.

    Raises:
        KVPolicyError: it cannot be written there.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise KVPolicyError(
            f"cannot write {path}: {error.strerror}; choose another place"
        ) from error
