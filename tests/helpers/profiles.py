"""Sensitivity profiles with fixed values."""

from __future__ import annotations

from pathlib import Path

from vllm_kvplugins.budgets.sensitivity_profile import (
    DocumentSensitivity,
    MeasureSettings,
    SensitivityProfile,
    mean_sensitivity,
    write_profile,
)
from vllm_kvplugins.model_config import ConfigOnlyModel


def make_profile(
    *documents: list[float], config: dict | None = None
) -> SensitivityProfile:
    """A profile with these sensitivities, one list per document.

    Args:
        config: the model's; one with as many layers and else unlike any by default.
    """
    layers = len(documents[0])
    of_any = {
        "architectures": ["AnyForCausalLM"],
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
    }
    read = [
        DocumentSensitivity(
            name=f"{number}.txt", tokens=100, sha256="0" * 64, sensitivity=tuple(row)
        )
        for number, row in enumerate(documents)
    ]
    return SensitivityProfile(
        plugin="0",
        model="made$by$hand",
        fingerprint=ConfigOnlyModel("m", "", config or of_any).fingerprint(),
        settings=MeasureSettings(budget=64, sinks=4, dtype="float32"),
        documents=tuple(read),
        sensitivity=mean_sensitivity(read),
    )


def write_made(path: Path, *documents: list[float], config: dict | None = None) -> str:
    """The same profile as a file; returns its path."""
    write_profile(make_profile(*documents, config=config), path)
    return str(path)
