"""Layer views for tests, with defaults for fields that the test does not need."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from vllm_kvplugins.policies.base import LayerView


def make_layer_view(**given: Any) -> LayerView:
    """A view in which every field without a default that is not given is None.

    ``keys`` may be given instead of ``load_keys``.
    """
    if "keys" in given:
        keys = given.pop("keys")
        given["load_keys"] = lambda: keys
    required = (field for field in fields(LayerView) if field.default is MISSING)
    blank = {field.name: None for field in required}
    return LayerView(**{**blank, **given})
