"""Bytes of a recurrent layer's state, from ``config.json``.

The sizes are those of vLLM (``mamba_utils``), on one rank and without speculative
decoding. A layer stores the last inputs of its convolution, in the dtype of the cache,
and its recurrent state. If the configuration does not name its dtype, vLLM takes
float32 on CPUs with AVX512-BF16, whose kernels need it, and the dtype of the cache
elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FLOAT32_BYTES = 4
_CPU_INFO = Path("/proc/cpuinfo")
_ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class StateShape:
    """Elements of one layer's state for one request.

    Attributes:
        convolution: last inputs of the convolution.
        recurrent: state of the recurrence; 0: the layer has none.
    """

    convolution: int
    recurrent: int = 0

    def num_bytes(self, element_bytes: int, recurrent_dtype: str | None) -> int:
        """Bytes of the state.

        Args:
            element_bytes: of an element of the KV cache.
            recurrent_dtype: in the model's configuration; None: not given.
        """
        default = _FLOAT32_BYTES if _cpu_widens_states() else element_bytes
        recurrent = _ELEMENT_BYTES.get(recurrent_dtype or "", default)
        return self.convolution * element_bytes + self.recurrent * recurrent


@functools.cache
def _cpu_widens_states() -> bool:
    """Whether this CPU has AVX512-BF16."""
    return _CPU_INFO.exists() and "avx512_bf16" in _CPU_INFO.read_text().split()


def state_bytes(text: Mapping[str, Any], element_bytes: int) -> int | None:
    """Bytes of one recurrent layer's state for one request.

    Args:
        text: configuration of the language model.
        element_bytes: of an element of the KV cache.

    Returns:
        None if the configuration has none of the known sets of fields.
    """
    for shape_of in _SHAPES:
        try:
            shape = shape_of(text)
        except (KeyError, TypeError):
            continue
        dtype = text.get("mamba_ssm_cache_dtype") or text.get("mamba_ssm_dtype")
        return shape.num_bytes(element_bytes, dtype)
    return None


def _gated_delta_net(text: Mapping[str, Any]) -> StateShape:
    """Qwen3-Next, Qwen3.5, OLMo-Hybrid."""
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    values = text["linear_num_value_heads"] * text["linear_value_head_dim"]
    return StateShape(
        (2 * keys + values) * (text["linear_conv_kernel_dim"] - 1),
        values * text["linear_key_head_dim"],
    )


def _mamba2(
    heads: str, head_dim: str, state: str, groups: str, kernel: str
) -> Callable[[Mapping[str, Any]], StateShape]:
    """Mamba-2, under the names that a family of models uses."""

    def shape(text: Mapping[str, Any]) -> StateShape:
        inner = text[heads] * text[head_dim]
        mixed = inner + 2 * text[groups] * text[state]
        return StateShape(mixed * (text[kernel] - 1), inner * text[state])

    return shape


def _mamba1(text: Mapping[str, Any]) -> StateShape:
    """Jamba."""
    inner = text["mamba_expand"] * text["hidden_size"]
    return StateShape(inner * (text["mamba_d_conv"] - 1), inner * text["mamba_d_state"])


def _short_convolution(text: Mapping[str, Any]) -> StateShape:
    """LFM2."""
    width = text.get("conv_dim") or text["hidden_size"]
    return StateShape(width * (text["conv_L_cache"] - 1))


# The first whose fields a configuration has.
_SHAPES = (
    _gated_delta_net,
    # Granite-4, Falcon-H1, Bamba
    _mamba2(
        "mamba_n_heads",
        "mamba_d_head",
        "mamba_d_state",
        "mamba_n_groups",
        "mamba_d_conv",
    ),
    # Zamba2
    _mamba2(
        "n_mamba_heads",
        "mamba_headdim",
        "mamba_d_state",
        "mamba_ngroups",
        "mamba_d_conv",
    ),
    # Nemotron-H
    _mamba2(
        "mamba_num_heads",
        "mamba_head_dim",
        "ssm_state_size",
        "n_groups",
        "conv_kernel",
    ),
    _short_convolution,
    _mamba1,
)
