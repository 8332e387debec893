"""Reads the shape of a model's KV cache from its ``config.json``, without its weights.

Model families use different field names. We try the names in vLLM's order. Imports
neither vLLM nor torch.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pydantic import BaseModel, ConfigDict

from vllm_kvplugins.errors import KVPolicyError, coded
from vllm_kvplugins.other_layers import OtherLayers

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_KV_HEADS = (
    "n_head_kv",
    "num_kv_heads",
    "num_key_value_heads",
    "multi_query_group_num",
    "num_attention_groups",
)
_HEAD_DIM = ("head_dim", "hidden_size_per_head", "attention_head_dim")
# Each of these fields marks layers that keep a state instead of a KV cache.
_STATE_LAYERS = (
    "attn_layer_period",
    "full_attention_interval",
    "hybrid_override_pattern",
    "layers_block_type",
    "linear_num_key_heads",
    "mamba_d_state",
    "ssm_cfg",
)
# Attention types of layers, by the names of transformers.
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
ATTENTION_TYPES = (FULL, SLIDING, CHUNKED)
# Layers that keep one state of fixed size: Mamba, linear attention, convolutions.
STATE = "recurrent_state"
# Caches of a layer, by the names that configurations have for it.
_CACHES: dict[str, tuple[str, ...]] = {
    "attention": (FULL,),
    "*": (FULL,),
    "mamba": (STATE,),
    "M": (STATE,),
    "linear_attention": (STATE,),
    "conv": (STATE,),
    "hybrid": (FULL, STATE),
    "mlp": (),
    "-": (),
    "moe": (),
    "E": (),
}
# One layer of so many has full attention, the last one. These are defaults of the
# configuration classes, which older files of the models rely on.
_PATTERNS = {
    "cohere2": 4,
    "gemma2": 2,
    "gemma3_text": 6,
    "gpt_oss": 2,
    "llama4_text": 4,
    "qwen3_next": 4,
    "qwen3_5_text": 4,
    "qwen3_5_moe_text": 4,
}
_LINEAR = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def groups_of(types: Sequence[str]) -> dict[str, int]:
    """Number of KV cache groups of each attention type in vLLM.

    All layers of a group share one block table, and a block belongs to one group at a
    time. vLLM makes groups of equal layer counts (``kv_cache_utils``): with 3 full and
    15 windowed layers, one group for the full ones and five for the others. Layers of
    one type count as equal here. The scheduler refuses to start if vLLM makes several
    groups of full layers after all.

    Args:
        types: attention type of each layer.
    """
    size = layers_per_group(types)
    return {kind: -(-count // size) for kind, count in Counter(types).items()}


def layers_per_group(types: Sequence[str]) -> int:
    """Layers whose keys and values one block of vLLM's pool has room for.

    A group with fewer layers leaves the rest of its blocks empty.
    """
    counts = Counter(types).values()
    # vLLM pads a group rather than double the number of groups.
    return max(counts) if max(counts) < 1.5 * min(counts) else min(counts)


def other_layers(text: Any, types: Sequence[str], state_blocks: int = 3) -> OtherLayers:
    """The KV cache groups of the layers that a policy leaves to vLLM.

    Args:
        text: configuration of the language model, with its fields as attributes.
        types: type of each cache.
        state_blocks: blocks of a request in each group of recurrent layers; vLLM needs
            up to three with a prefix cache, and one without.
    """
    groups = groups_of(types)
    windows, chunks = groups.get(SLIDING, 0), groups.get(CHUNKED, 0)
    return OtherLayers(
        windows={text.sliding_window: windows} if windows else {},
        chunks={text.attention_chunk_size: chunks} if chunks else {},
        state_blocks=state_blocks * groups.get(STATE, 0),
    )


def layer_types(text: Any, num_layers: int) -> tuple[str, ...]:
    """Type of each cache, in the order of the layers.

    A policy manages the caches of type ``FULL``. The worker compares the result with
    the loaded layers. A layer with attention and Mamba has two caches, and a layer that
    is only an MLP has none.

    Args:
        text: configuration of the language model, with its fields as attributes.
        num_layers: 0 if the configuration has no number, but lists the layers.

    Returns:
        ``STATE``, or names as in ``layer_types`` of ``config.json``. A type whose width
        is missing or 0 counts as ``FULL``, because vLLM then builds full attention.
    """
    window = getattr(text, "sliding_window", None)
    if getattr(text, "use_sliding_window", None) is False:
        window = None
    chunk = getattr(text, "attention_chunk_size", None)
    model_type = getattr(text, "model_type", None) or ""
    pattern = getattr(text, "sliding_window_pattern", None) or _PATTERNS.get(model_type)
    local = SLIDING if window else CHUNKED if chunk else FULL
    if model_type in _LINEAR:
        local = STATE
    given = _given_types(text, num_layers)
    if given:
        types = tuple(
            kind
            for name in given[: num_layers or None]
            for kind in _CACHES.get(name, (name,))
        )
    elif pattern:
        types = tuple(
            local if (layer + 1) % pattern else FULL for layer in range(num_layers)
        )
    else:
        types = (local,) * num_layers
    without_width = {
        kind for kind, width in ((SLIDING, window), (CHUNKED, chunk)) if not width
    }
    return tuple(FULL if kind in without_width else kind for kind in types)


def _given_types(text: Any, num_layers: int) -> Sequence[str]:
    """What a configuration says about the type of each layer; empty if nothing."""
    if getattr(text, "model_type", None) == "falcon_h1":
        return ("hybrid",) * num_layers
    for field in ("layers_block_type", "layer_types", "hybrid_override_pattern"):
        if given := getattr(text, field, None):
            return tuple(given)
    attention: Sequence[int] | None = getattr(text, "full_attn_idxs", None)  # LFM2
    if period := getattr(text, "attn_layer_period", None):  # Jamba
        attention = range(getattr(text, "attn_layer_offset", 0), num_layers, period)
    elif period := getattr(text, "full_attention_interval", None):  # Qwen3-Next
        attention = range(period - 1, num_layers, period)
    if attention is None:
        return ()
    return tuple(FULL if i in attention else "mamba" for i in range(num_layers))


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Shape of the keys and values of one token, over all ranks."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of the keys and values of one token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_bytes


class ModelFingerprint(BaseModel):
    """Identifies a model's architecture and sizes.

    Models that differ only in their weights, such as a base model and its fine-tuned
    versions, have the same fingerprint. None: the configuration lacks the field.

    Attributes:
        rope: base, type and scaling, by their names in the configuration.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    architecture: str | None
    num_layers: int
    num_heads: int | None
    num_kv_heads: int
    head_dim: int
    hidden_size: int | None
    vocab_size: int | None
    rope: dict[str, Any] | None

    def __hash__(self) -> int:
        # Without rope, which is a dict. vLLM hashes policies, with their profiles.
        return hash((self.architecture, self.num_layers, self.hidden_size))

    def differences(self, other: ModelFingerprint) -> list[str]:
        """Fields that differ; fields that one of the two lacks are ignored."""
        pairs = [
            (name, getattr(self, name), getattr(other, name))
            for name in type(self).model_fields
        ]
        return [
            f"{name} {own_value!r} there, {other_value!r} here"
            for name, own_value, other_value in pairs
            if own_value is not None
            and other_value is not None
            and own_value != other_value
        ]


@dataclass(frozen=True)
class ConfigOnlyModel:
    """Stands in for vLLM's ``ModelConfig`` where only ``config.json`` is available.

    Has the attributes that the checks at start-up read. Defaults of the model's class
    are unknown here: only values in the file count.

    Attributes:
        model: name or path, as given by the user.
        dtype: in the form in which vLLM's configuration prints it, ``torch.bfloat16``.
        config: content of the file.
    """

    model: str
    dtype: str
    config: dict[str, Any]
    runner_type: str = "generate"

    @cached_property
    def text(self) -> dict[str, Any]:
        """Configuration of the language model, also within a multimodal model."""
        nested = self.config.get("text_config")
        return nested if isinstance(nested, dict) else self.config

    @cached_property
    def hf_text_config(self) -> SimpleNamespace:
        return SimpleNamespace(**self.text)

    @property
    def use_mla(self) -> bool:
        return self.text.get("kv_lora_rank") is not None

    def get_sliding_window(self) -> int | None:
        """Width of the sliding window; None if there is none or it is disabled."""
        if self.text.get("use_sliding_window") is False:
            return None
        window: int | None = self.text.get("sliding_window")
        return window

    @property
    def is_hybrid(self) -> bool:
        if STATE in self.layer_types:
            return True
        if _given_types(self.hf_text_config, 1):
            return False
        return any(self.text.get(key) is not None for key in _STATE_LAYERS)

    @property
    def is_attention_free(self) -> bool:
        return "state_size" in self.text and self._first(_HEADS) is None

    @property
    def is_encoder_decoder(self) -> bool:
        return bool(self.config.get("is_encoder_decoder"))

    @property
    def max_positions(self) -> int | None:
        """Maximum number of positions, before scaling of RoPE."""
        return self._first(("max_position_embeddings", "n_positions", "seq_length"))

    @property
    def layer_types(self) -> tuple[str, ...]:
        """See :func:`layer_types`; empty if the file tells nothing about layers."""
        return layer_types(self.hf_text_config, self._first(_LAYERS) or 0)

    def layer_problems(self) -> list[str]:
        """Reasons for which the engine refuses the layers, as far as the file shows."""
        problems = []
        inner = self.text.get("attn_config")
        nested = isinstance(inner, dict) and bool(inner.get("alibi"))
        if nested or self.text.get("alibi") or self.text.get("model_type") == "bloom":
            problems.append(
                coded(
                    "KVP016",
                    f"{self.model} uses ALiBi; serve this model without a policy",
                )
            )
        if shared := self.text.get("num_kv_shared_layers"):
            problems.append(
                coded(
                    "KVP018",
                    f"{shared} layers of {self.model} share the KV cache of other "
                    "layers; serve this model without a policy",
                )
            )
        return problems

    def cache_shape(self) -> CacheShape:
        """Number of layers and KV heads, and the head size.

        Raises:
            KVPolicyError: the file lacks one of them, or they differ between layers.
        """
        if self.text.get("block_configs"):
            raise KVPolicyError(
                coded(
                    "KVP629",
                    f"layers of {self.model} have different attention shapes "
                    "(block_configs), which is not supported; use another model",
                )
            )
        layers, heads = self._first(_LAYERS), self._first(_HEADS)
        layers = layers or len(_given_types(self.hf_text_config, 0))
        head_dim = self._first(_HEAD_DIM)
        if head_dim is None and heads and (hidden := self._first(_HIDDEN)):
            head_dim = hidden // heads
        kv_heads = self._kv_heads(heads)
        sizes = {_LAYERS[0]: layers, _KV_HEADS[2]: kv_heads, _HEAD_DIM[0]: head_dim}
        missing = [name for name, value in sizes.items() if not value]
        if not layers or not kv_heads or not head_dim:
            raise KVPolicyError(
                coded(
                    "KVP629",
                    f"config.json of {self.model} does not contain "
                    f"{', '.join(missing)}; use a model that generates text",
                )
            )
        return CacheShape(layers, kv_heads, head_dim)

    def fingerprint(self) -> ModelFingerprint:
        """The model's fingerprint.

        Raises:
            KVPolicyError: see ``cache_shape``.
        """
        shape = self.cache_shape()
        architectures = self.config.get("architectures") or [None]
        return ModelFingerprint(
            architecture=architectures[0],
            num_layers=shape.num_layers,
            num_heads=self._first(_HEADS),
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            hidden_size=self._first(_HIDDEN),
            vocab_size=self._first(("vocab_size",)),
            rope=self._rope(),
        )

    def _rope(self) -> dict[str, Any] | None:
        """RoPE parameters in the form of transformers 5, also from older files."""
        raw = self.text.get("rope_parameters")
        if not isinstance(raw, dict):
            raw = dict(self.text.get("rope_scaling") or {})
            if "rope_theta" in self.text:
                raw["rope_theta"] = self.text["rope_theta"]
        parameters = {key: value for key, value in raw.items() if value is not None}
        if "type" in parameters:
            parameters.setdefault("rope_type", parameters.pop("type"))
        return {"rope_type": "default"} | parameters if parameters else None

    def _kv_heads(self, heads: int | None) -> int | None:
        """Number of KV heads; by default, the number of query heads."""
        if self.text.get("multi_query") and not self.text.get(
            "new_decoder_architecture"
        ):
            return 1
        inner = self.text.get("attn_config")
        if isinstance(inner, dict) and isinstance(inner.get("kv_n_heads"), int):
            return int(inner["kv_n_heads"])
        return self._first(_KV_HEADS) or heads

    def _first(self, names: tuple[str, ...]) -> int | None:
        """The first positive number under one of these names."""
        for name in names:
            value = self.text.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        return None


def read_model_config(model: str, dtype: str) -> ConfigOnlyModel:
    """Read a model's ``config.json`` without downloading anything.

    Args:
        model: a folder, the file itself, or a model ID in the Hugging Face cache.
        dtype: dtype of keys and values, such as ``bfloat16``.

    Raises:
        KVPolicyError: the file does not exist or does not contain a JSON object.
    """
    path = _config_path(model)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise KVPolicyError(
            coded(
                "KVP628",
                f"cannot read {path}: {error}; give a model's folder or config.json",
            )
        ) from error
    if not isinstance(config, dict):
        raise KVPolicyError(
            coded(
                "KVP628",
                f"{path} contains a {type(config).__name__} instead of a JSON object; "
                "give a model's folder or config.json",
            )
        )
    return ConfigOnlyModel(model, f"torch.{dtype}", config)


def weights_bytes(model: str) -> int | None:
    """Bytes of a model's files with weights.

    Args:
        model: as for ``read_model_config``.

    Returns:
        None if they are not on this machine.
    """
    files = _weight_files(model)
    return sum(path.stat().st_size for path in files) if files else None


def float32_bytes(model: str) -> int | None:
    """Bytes that a model's weights take in float32.

    Args:
        model: as for ``read_model_config``; its weights are not quantized.

    Returns:
        None if they are not on this machine. Files other than safetensors count as
        if they had 16-bit weights.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is damaged.
    """
    files = _weight_files(model)
    return 4 * sum(map(_num_weights, files)) if files else None


def _weight_files(model: str) -> list[Path]:
    """Files with weights; empty if they are not on this machine."""
    try:
        folder = _config_path(model).parent
    except KVPolicyError:
        return []
    for pattern in ("model*.safetensors", "*.safetensors", "*.bin"):
        if files := list(folder.glob(pattern)):
            return files
    return []


def _num_weights(path: Path) -> int:
    if path.suffix != ".safetensors":
        return path.stat().st_size // 2
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    tensors = (entry for name, entry in header.items() if name != "__metadata__")
    return sum(math.prod(entry["shape"]) for entry in tensors)


def _config_path(model: str) -> Path:
    path = Path(model).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        if (path / "config.json").is_file():
            return path / "config.json"
        raise KVPolicyError(
            coded(
                "KVP628",
                f"the folder {model} has no config.json; give a folder with a model in "
                "Hugging Face format",
            )
        )
    cached = _cached_config(model)
    if cached is None:
        raise KVPolicyError(
            coded(
                "KVP628",
                f"no config.json for {model!r}: it is neither a folder nor in the "
                f"Hugging Face cache; run `hf download {model} config.json`, or give "
                "a folder",
            )
        )
    return Path(cached)


def _cached_config(model: str) -> str | None:
    try:
        from huggingface_hub import try_to_load_from_cache
    except ModuleNotFoundError:
        return None
    try:
        path = try_to_load_from_cache(model, "config.json")
    except ValueError:  # not a valid model ID
        return None
    return path if isinstance(path, str) else None
