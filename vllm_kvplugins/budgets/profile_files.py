"""JSON files with what a command measured on a model. Needs no torch."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from vllm_kvplugins.calibration_job import replace_text
from vllm_kvplugins.errors import KVPolicyError, coded

Content = TypeVar("Content", bound=BaseModel)


def write_as_json(content: BaseModel, path: Path) -> None:
    """Write a file for ``read_as``. Readers see the old file or the new one.

    Raises:
        OSError: the file cannot be written.
    """
    text = json.dumps(content.model_dump(mode="json"), indent=1) + "\n"
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")  # a device or a pipe
    else:
        replace_text(path, text)


def read_as(kind: type[Content], path: Path, name: str, remedy: str) -> Content:
    """Read a file that ``write_as_json`` wrote.

    Args:
        kind: class of the content.
        name: of this kind of file, for messages.
        remedy: how to make one, for messages.

    Raises:
        KVPolicyError: the file cannot be read or is not of this kind and version.
    """
    try:
        return kind.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        reason = f"cannot read the {name} {path}: {error.strerror}"
    except ValidationError as error:
        reason = f"{path} is not a valid {name} ({_details(error)})"
    except ValueError as error:
        reason = f"{path} is not a {name} ({error})"
    raise KVPolicyError(coded("KVP114", f"{reason}; {remedy}"))


def _details(error: ValidationError) -> str:
    return "; ".join(
        ": ".join([".".join(map(str, item["loc"])), item["msg"]]).removeprefix(": ")
        for item in error.errors()
    )


def shipped(folder: str) -> list[Path]:
    """Paths of the files in a folder of this package, by name."""
    return sorted((Path(str(resources.files(__package__))) / folder).glob("*.json"))
