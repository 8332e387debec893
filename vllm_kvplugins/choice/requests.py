"""What a policy is chosen for: a model, its requests, and the memory for them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from vllm_kvplugins.model_config import ConfigOnlyModel
from vllm_kvplugins.model_memory import ModelMemory


class Workload(StrEnum):
    """What requests look like; decides which scores count."""

    CHAT = "chat"
    DOCUMENT = "document"
    AGENT = "agent"


@dataclass(frozen=True, slots=True)
class Request:
    """A model, its requests, and the memory for them; sizes in bytes.

    Attributes:
        host_memory: limit of what policies keep on the host; None: no limit.
        token_bytes: keys and values of one token, in the layers that a policy manages.
        other_bytes: what layers that vLLM manages hold of each request.
        longest: tokens of the longest request that the server accepts; 0: that of a
            prompt and its answer.
        notes: what limits the figures for this model.
    """

    model: str
    prompt_tokens: int
    answer_tokens: int
    concurrency: int
    memory: int
    host_memory: int | None
    token_bytes: int
    block_size: int
    dtype: str = "bfloat16"
    other_bytes: int = 0
    longest: int = 0
    notes: tuple[str, ...] = ()

    def bytes_of(self, tokens: float) -> int:
        """Bytes of this many tokens, in whole blocks."""
        blocks = -(-int(tokens) // self.block_size)
        return blocks * self.block_size * self.token_bytes

    @property
    def stock_request(self) -> int:
        """A request without a policy, at its end."""
        tokens = self.prompt_tokens + self.answer_tokens
        return self.bytes_of(tokens) + self.other_bytes

    @property
    def longest_request(self) -> int:
        """The longest request without a policy; vLLM starts only if the pool holds
        it."""
        tokens = max(self.longest, self.prompt_tokens + self.answer_tokens)
        return self.bytes_of(tokens) + self.other_bytes

    @property
    def usable(self) -> int:
        """The pool without the block that vLLM never allocates."""
        return self.memory - self.bytes_of(1)

    def decoding(self, device_share: float) -> int:
        """A request that keeps a share of its prompt, at the end of its answer.

        One block more, as the newest tokens of a prompt stay in their block.
        """
        kept = self.bytes_of(device_share * self.prompt_tokens) + self.other_bytes
        return kept + self.bytes_of(self.answer_tokens) + self.bytes_of(1)


def request_for(
    config: ConfigOnlyModel,
    *,
    prompt_tokens: int,
    answer_tokens: int,
    concurrency: int,
    memory: int,
    host_memory: int | None,
    block_size: int,
    element_bytes: int | None = None,
    longest: int = 0,
    notes: tuple[str, ...] = (),
) -> Request:
    """The request for a model, with the sizes of its cache.

    Args:
        config: its dtype is that of keys and values, unless ``element_bytes`` is given.
        element_bytes: of one element of the cache.

    Raises:
        KVPolicyError: see ``ModelMemory.of``.
    """
    sizes = ModelMemory.of(config, block_size)
    geometry = sizes.geometry
    scale = 1.0
    if element_bytes is not None and geometry.element_bytes:
        scale = element_bytes / geometry.element_bytes
    return Request(
        model=config.model,
        prompt_tokens=prompt_tokens,
        answer_tokens=answer_tokens,
        concurrency=concurrency,
        memory=memory,
        host_memory=host_memory,
        token_bytes=int(sizes.block_bytes * scale) // geometry.block_size,
        block_size=geometry.block_size,
        dtype=config.dtype.removeprefix("torch."),
        other_bytes=int(sizes.other_bytes(prompt_tokens + answer_tokens) * scale),
        longest=longest,
        notes=notes,
    )
