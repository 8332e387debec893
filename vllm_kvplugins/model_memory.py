"""KV memory of a model, by who manages it: the policy or vLLM.

Needs ``config.json`` alone; imports neither vLLM nor torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vllm_kvplugins.errors import KVPolicyError, coded
from vllm_kvplugins.model_config import (
    FULL,
    STATE,
    CacheShape,
    ConfigOnlyModel,
    layers_per_group,
    other_layers,
)
from vllm_kvplugins.other_layers import OtherLayers
from vllm_kvplugins.plan.geometry import Geometry
from vllm_kvplugins.recurrent_states import state_bytes

# Longer than any window.
_LONG = 1 << 40
_ELEMENT_BYTES = {"torch.bfloat16": 2, "torch.float16": 2, "torch.float32": 4}


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Sizes of a model's KV cache in vLLM's pool.

    All groups of layers take blocks of equal size from one pool.

    Attributes:
        shape: of one token in all layers.
        geometry: of the layers that a policy manages.
        others: the layers that vLLM manages.
        block_bytes: of one block of the pool.
    """

    shape: CacheShape
    geometry: Geometry
    others: OtherLayers
    block_bytes: int

    @classmethod
    def of(cls, model: ConfigOnlyModel, block_size: int) -> ModelMemory:
        """Sizes of a model.

        Args:
            model: its dtype is bfloat16, float16 or float32.
            block_size: tokens per block. vLLM enlarges the blocks of a model with
                recurrent layers to a multiple of it, until the keys and values of one
                layer need as many bytes as one state.

        Raises:
            KVPolicyError: see ``ConfigOnlyModel.cache_shape``; or the size of the
                recurrent states is unknown.
        """
        shape, types = model.cache_shape(), model.layer_types
        element_bytes = _ELEMENT_BYTES[model.dtype]
        if STATE in types:
            layer = replace(shape, num_layers=1).bytes_per_token(element_bytes)
            tokens = -(-_state_bytes(model, element_bytes) // layer)
            block_size *= -(-tokens // block_size)
        managed = replace(shape, num_layers=types.count(FULL))
        in_block = replace(shape, num_layers=layers_per_group(types))
        return cls(
            shape,
            Geometry(
                block_size=block_size,
                num_layers=managed.num_layers,
                num_kv_heads=shape.num_kv_heads,
                kv_bytes_per_token=managed.bytes_per_token(element_bytes),
                head_dim=shape.head_dim,
                element_bytes=element_bytes,
            ),
            other_layers(model.hf_text_config, types),
            block_size * in_block.bytes_per_token(element_bytes),
        )

    @property
    def page_bytes(self) -> int:
        """Keys and values of one block's tokens in one layer and KV head."""
        geometry = self.geometry
        heads = geometry.num_layers * geometry.num_kv_heads
        return geometry.block_size * geometry.kv_bytes_per_token // heads

    def other_bytes(self, tokens: int = _LONG) -> int:
        """Bytes that vLLM's layers of one decoding request hold at most."""
        blocks = self.others.blocks(tokens, 1, self.geometry.block_size)
        return blocks * self.block_bytes

    def managed_bytes(self, tokens: int) -> int:
        """Bytes of the policy's layers of one request, before anything is freed."""
        return -(-tokens // self.geometry.block_size) * self.block_bytes

    def managed_share(self, tokens: int) -> float:
        """Share of one request's bytes that a policy can free parts of."""
        managed = self.managed_bytes(tokens)
        return managed / (managed + self.other_bytes(tokens))

    def half_tokens(self) -> int:
        """Length from which on the policy's layers hold half of a request's bytes.

        Below it, a request saves less than half of its memory even if a policy freed
        everything. 0 without other layers.
        """
        blocks = self.other_bytes() // self.block_bytes
        return blocks * self.geometry.block_size


def _state_bytes(model: ConfigOnlyModel, element_bytes: int) -> int:
    state = state_bytes(model.text, element_bytes)
    if state is None:
        raise KVPolicyError(
            coded(
                "KVP629",
                f"config.json of {model.model} does not contain the sizes of its "
                "recurrent layers under any name that is known here; the engine "
                "computes them: start it, and read block_size in its log",
            )
        )
    return state
