"""Layer views for tests, with defaults for fields that the test does not need."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from vllm_kvplugins.policies.base import LayerView


def make_layer_view(**given: Any) -> LayerView:
    """A view in which every field that is not given is None."""
    blank = {field.name: None for field in fields(LayerView)}
    return LayerView(**{**blank, **given})
