"""Reads histories from files: chat messages, and dialogues of LoCoMo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm_kvplugins.episodes.utterances import NotText, Utterance, utterances_of
from vllm_kvplugins.errors import KVPolicyError, coded

_SESSION = "session_"


def read_history(path: Path, dialogue: int | None = None) -> list[Utterance]:
    """Read a history from a JSON file.

    Args:
        path: a list of chat messages, or a file of LoCoMo.
        dialogue: index of a dialogue in a LoCoMo file; None for chat messages.

    Raises:
        KVPolicyError: the file cannot be read, has another format, or contains no text.
    """
    if dialogue is not None:
        dialogues = locomo_dialogues(path)
        if not 0 <= dialogue < len(dialogues):
            raise _unusable(
                f"{path} has no dialogue {dialogue}; choose one from 0 to "
                f"{len(dialogues) - 1}"
            )
        return dialogues[dialogue]
    content = _read_json(path)
    if _is_locomo(content):
        raise _unusable(
            f"{path} contains {len(content)} dialogues of LoCoMo; choose one with "
            f"--dialogue, from 0 to {len(content) - 1}"
        )
    if not isinstance(content, list):
        raise _unusable(
            f"{path} contains a {type(content).__name__}; give a list of chat messages"
        )
    try:
        history = utterances_of(content)
    except NotText as error:
        raise _unusable(f"{path}: {error}; give messages with text only") from error
    if not history:
        raise _unusable(f"all messages in {path} are empty; give messages with text")
    return history


def locomo_dialogues(path: Path) -> list[list[Utterance]]:
    """Read all dialogues of a LoCoMo file; a dialogue includes all its sessions.

    LoCoMo (Maharana et al., 2024). Captions of pictures are left out.

    Raises:
        KVPolicyError: the file cannot be read or has another format.
    """
    content = _read_json(path)
    if not _is_locomo(content):
        raise _unusable(f"{path} is not a LoCoMo file; give one, such as locomo10.json")
    return [locomo_utterances(item) for item in content]


def locomo_utterances(dialogue: dict[str, Any]) -> list[Utterance]:
    """Utterances of a LoCoMo dialogue, in the order of its sessions.

    Raises:
        KVPolicyError: the dialogue lacks a field.
    """
    try:
        sessions = {
            int(name.removeprefix(_SESSION)): turns
            for name, turns in dialogue["conversation"].items()
            if isinstance(turns, list)
        }
        utterances = [
            Utterance(turn["speaker"], turn["text"])
            for number in sorted(sessions)
            for turn in sessions[number]
        ]
        return [utterance for utterance in utterances if utterance.text.strip()]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _unusable(
            f"a LoCoMo dialogue lacks a field ({error!r}); use the published file"
        ) from error


def _is_locomo(content: Any) -> bool:
    return (
        isinstance(content, list)
        and bool(content)
        and all(isinstance(item, dict) and "conversation" in item for item in content)
    )


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _unusable(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise _unusable(f"{path} is not JSON in UTF-8: {error}") from error


def _unusable(reason: str) -> KVPolicyError:
    return KVPolicyError(coded("KVP508", reason))
