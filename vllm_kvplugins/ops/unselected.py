"""Biases of entries that stand for chunks of tokens, of which some are selected.

Compiled on CPUs if built, in torch otherwise; ``KVP_OPS`` overrides this
(``extension.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_kvplugins.ops.device import moved
from vllm_kvplugins.ops.dispatch import call_compiled
from vllm_kvplugins.ops.extension import compiled_for


@dataclass(frozen=True, slots=True, eq=False)
class ChunkRuns:
    """The entries of some requests: a run per KV head, one entry per full chunk.

    Attributes:
        starts, counts: int64 [requests * num_kv_heads], first entry and number of
            entries of each run, on the device of the entries.
        num_chunks: the most entries of a run.
        places: int64 [n], all entries in order, on the same device.
        used: int64 [n], where they are in [requests, num_kv_heads, num_chunks]; on the
            device that selects.
    """

    starts: torch.Tensor
    counts: torch.Tensor
    num_chunks: int
    places: torch.Tensor
    used: torch.Tensor

    @staticmethod
    def of(
        first: torch.Tensor,
        chunks: torch.Tensor,
        device: torch.device,
        selects_on: torch.device,
    ) -> ChunkRuns:
        """The runs of a step; the same in all layers.

        Args:
            first: int64 [requests, num_kv_heads], first entries; on the CPU.
            chunks: int64 [requests], entries of each run; on the CPU.
            device: of the entries.
            selects_on: the device that selects tokens.
        """
        requests, heads = first.shape
        most = int(chunks.max())
        column = torch.arange(most)
        inside = (column < chunks[:, None, None]).expand(requests, heads, most)
        return ChunkRuns(
            starts=moved(first.flatten(), device),
            counts=moved(chunks.repeat_interleave(heads), device),
            num_chunks=most,
            places=moved((first[..., None] + column)[inside], device),
            used=moved(inside.flatten().nonzero()[:, 0], selects_on),
        )


def write_unselected(
    bias: torch.Tensor,
    runs: ChunkRuns,
    token: torch.Tensor,
    slot_indices: torch.Tensor,
    counts: torch.Tensor,
    logs: torch.Tensor,
) -> None:
    """Write the logarithm of how many tokens of each chunk are not selected.

    Tokens behind the last full chunk count for none.

    Args:
        bias: float32 [entries], written within the runs.
        token: int64 [slot indices, num_kv_heads, width], selected tokens, distinct
            within a KV head; on the device that selects, as the following ones.
        slot_indices: int64 [requests], rows of ``token``.
        counts: int64 [requests], how many of ``width`` are in use.
        logs: float32 [chunk tokens + 1], the bias for each number of tokens; from
            :func:`logarithms`.

    Raises:
        ValueError: compiled only: a shape or dtype does not fit, or tokens are negative
            or not distinct.

    Cost: O(width + chunks) per KV head; in torch, nine calls.
    """
    if bias.device.type == "cpu" and compiled_for(bias.device)[0]:
        call_compiled(
            "unselected_bias",
            bias,
            token,
            slot_indices,
            counts,
            runs.starts,
            runs.counts,
            logs,
        )
        return
    own = unselected_logs(
        token.index_select(0, slot_indices), counts, runs.num_chunks, logs
    )
    own = own.flatten().index_select(0, runs.used)
    bias.index_copy_(0, runs.places, moved(own, bias.device))


def unselected_logs(
    selected: torch.Tensor, counts: torch.Tensor, num_chunks: int, logs: torch.Tensor
) -> torch.Tensor:
    """The biases of all chunks, float32 [requests, num_kv_heads, num_chunks], in torch.

    Args:
        selected: int64 [requests, num_kv_heads, width].
        counts, logs: see :func:`write_unselected`.
    """
    requests, heads, width = selected.shape
    size = len(logs) - 1
    column = torch.arange(width, device=selected.device)
    # Tokens without a full chunk, and unused columns, count for an extra one.
    chunk = (selected // size).clamp(max=num_chunks)
    chunk = chunk.where(column < counts[:, None, None], num_chunks)
    shape = requests, heads, num_chunks + 1
    left = torch.full(shape, size, dtype=torch.int64, device=selected.device)
    left.scatter_add_(2, chunk, left.new_full((), -1).expand(chunk.shape))
    return logs[left[:, :, :num_chunks]]


def logarithms(chunk_tokens: int, device: torch.device) -> torch.Tensor:
    """The logarithms of 0 (-inf) to ``chunk_tokens``, float32."""
    return moved(torch.arange(chunk_tokens + 1).float().log(), device)
