"""Histories from files: chat messages, and the dialogues of LoCoMo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm_kvplugins.episodes.utterances import NotText, Utterance, utterances_of
from vllm_kvplugins.errors import KVPolicyError

_SESSION = "session_"


def read_history(path: Path, dialogue: int | None = None) -> list[Utterance]:
    """A history from a JSON file.

    Args:
        path: a list of chat messages; or a file of LoCoMo.
        dialogue: which one of a LoCoMo file, from 0; None: chat messages.

    Raises:
        KVPolicyError: the file cannot be read, is something else, or has no text.
    """
    if dialogue is not None:
        dialogues = locomo_dialogues(path)
        if not 0 <= dialogue < len(dialogues):
            raise KVPolicyError(
                f"{path} has no dialogue {dialogue}; choose one from 0 to "
                f"{len(dialogues) - 1}"
            )
        return dialogues[dialogue]
    found = _json(path)
    if _is_locomo(found):
        raise KVPolicyError(
            f"{path} holds {len(found)} dialogues of LoCoMo; choose one with "
            f"--dialogue, from 0 to {len(found) - 1}"
        )
    if not isinstance(found, list):
        raise KVPolicyError(f"{path} holds no list of chat messages")
    try:
        history = utterances_of(found)
    except NotText as error:
        raise KVPolicyError(f"{path} cannot be used: {error}") from error
    if not history:
        raise KVPolicyError(f"{path} has no text in its messages")
    return history


def locomo_dialogues(path: Path) -> list[list[Utterance]]:
    """Dialogues of a LoCoMo file, each over all its sessions.

    LoCoMo (Maharana et al., 2024). What is said of pictures is left out.

    Raises:
        KVPolicyError: the file cannot be read, or is something else.
    """
    found = _json(path)
    if not _is_locomo(found):
        raise KVPolicyError(f"{path} is not a file of LoCoMo's dialogues")
    return [locomo_utterances(item) for item in found]


def locomo_utterances(dialogue: dict[str, Any]) -> list[Utterance]:
    """What is said in one dialogue of LoCoMo, session by session.

    Raises:
        KVPolicyError: it lacks a part of what LoCoMo's dialogues hold.
    """
    try:
        spoken = dialogue["conversation"]
        names = [name for name, said in spoken.items() if isinstance(said, list)]
        names.sort(key=lambda name: int(name.removeprefix(_SESSION)))
        turns = [turn for name in names for turn in spoken[name]]
        told = [Utterance(turn["speaker"], turn["text"]) for turn in turns]
        return [said for said in told if said.text.strip()]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise KVPolicyError(
            f"a dialogue lacks a part of what LoCoMo's have ({error!r})"
        ) from error


def _is_locomo(found: Any) -> bool:
    return (
        isinstance(found, list)
        and bool(found)
        and all(isinstance(item, dict) and "conversation" in item for item in found)
    )


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise KVPolicyError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise KVPolicyError(f"{path} is not JSON in UTF-8: {error}") from error
