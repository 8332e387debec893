"""Blocks of the layers that a policy leaves to vLLM: windows, chunks, states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class OtherLayers:
    """KV cache groups of layers without full attention, and what each holds.

    Attributes:
        windows: number of groups per width of a sliding window, in tokens.
        chunks: number of groups per width of an attention chunk, in tokens.
        state_blocks: blocks of all recurrent states of a request, however long it is.
    """

    windows: Mapping[int, int] = field(default_factory=dict)
    chunks: Mapping[int, int] = field(default_factory=dict)
    state_blocks: int = 0

    def blocks(self, tokens: int, in_flight: int, block_size: int) -> int:
        """Blocks that these layers of one request hold at most.

        Args:
            tokens: of the request so far.
            in_flight: largest number of tokens that one step computes for it: 1 while
                decoding, the chunk of a prompt before. A window covers all of them.
            block_size: tokens per block.
        """
        blocks = self.state_blocks
        for width, groups in self.windows.items():
            # A window may begin inside of a block.
            held = min(width - 1 + in_flight, tokens)
            covered = -(-held // block_size) + 1
            blocks += groups * min(covered, -(-tokens // block_size))
        for width, groups in self.chunks.items():
            held = min(width + in_flight, tokens)
            blocks += groups * -(-held // block_size)
        return blocks
