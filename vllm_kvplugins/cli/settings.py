"""Describe settings of policies and allocators, and write them as JSON."""

from __future__ import annotations

import inspect
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from vllm_kvplugins.budgets import Budget


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting, as shown by ``kvplugins list``."""

    name: str
    type: str
    default: Any
    required: bool
    description: str

    def as_dict(self) -> dict[str, Any]:
        """Plain values for ``--json``."""
        return asdict(self)


def settings_of(cls: type[BaseModel]) -> list[Setting]:
    """The settings of a policy or allocator, in order of definition."""
    return [
        Setting(
            name=name,
            type=type_name(field),
            default=None if field.is_required() else as_json_value(_default(field)),
            required=field.is_required(),
            description=field.description or "",
        )
        for name, field in cls.model_fields.items()
    ]


def _default(field: FieldInfo) -> Any:
    return field.get_default(call_default_factory=True, validated_data={})


def written_settings(model: BaseModel) -> dict[str, Any]:
    """All settings of a validated policy, as a user would write them in JSON."""
    return {key: as_json_value(getattr(model, key)) for key in type(model).model_fields}


def as_json_value(value: Any) -> Any:
    """The value of a setting in the form that its parser takes."""
    if isinstance(value, Budget):
        if value.num_bytes is not None:
            return f"{value.num_bytes}B"
        return value.tokens if value.tokens is not None else value.fraction
    if isinstance(value, BaseModel):
        # an allocator, or the base of a wrapper policy: a name, or name and options
        name = getattr(type(value), "name", None)
        options = written_settings(value)
        if name is None:
            return options
        return {"name": name, **options} if options else name
    if isinstance(value, dict):
        return {key: as_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json_value(item) for item in value]
    return to_jsonable_python(value)


def type_name(field: FieldInfo) -> str:
    """The type of a field with its bounds, for example ``int, >= 1``."""
    return ", ".join([_plain_name(field.annotation), *_bounds(field)])


def _bounds(field: FieldInfo) -> list[str]:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "multiple_of": "multiple of"}
    return [
        f"{sign} {getattr(item, key):g}"
        for item in field.metadata
        for key, sign in signs.items()
        if getattr(item, key, None) is not None
    ]


def _plain_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        bounds = [x for part in arguments[1:] for x in _bounds(part)]
        return " ".join([_plain_name(arguments[0]), *bounds])
    if origin is Literal:
        return " | ".join(str(choice) for choice in arguments)
    if origin is Union or type(annotation).__name__ == "UnionType":
        return " | ".join(_plain_name(choice) for choice in arguments)
    if annotation is type(None):
        return "none"
    if origin is tuple and arguments[1:] == (Ellipsis,):
        return f"list[{_plain_name(arguments[0])}]"  # as users write it, in JSON
    if origin is not None:
        inner = ", ".join(_plain_name(choice) for choice in arguments)
        return f"{origin.__name__}[{inner}]"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " | ".join(str(choice.value) for choice in annotation)
    return str(getattr(annotation, "__name__", annotation))


def first_line(cls: type) -> str:
    """The first line of a class's docstring, without markup."""
    return (inspect.getdoc(cls) or "").partition("\n")[0].replace("``", "")
