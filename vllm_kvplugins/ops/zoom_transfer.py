"""The zoom of a step for entries on a GPU: copies factors, not tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_kvplugins.ops.device import moved, staging
from vllm_kvplugins.ops.svd import LowRank, reconstruct
from vllm_kvplugins.ops.zoom import ZoomEntries, ZoomRegions, choose_spans


def fetch_spans(
    entries: ZoomEntries,
    regions: ZoomRegions,
    places: torch.Tensor,
    places_there: torch.Tensor,
    gates: torch.Tensor,
    factors: Sequence[LowRank],
) -> tuple[int, int]:
    """:func:`~vllm_kvplugins.ops.zoom.zoom_spans` for entries on another device.

    The host chooses. The factors of new spans are copied to the device at once (SeKV,
    equation 20) and multiplied there. The host does not wait.

    Args:
        entries: with ``bias_there``.
        regions: regions of the requests.
        places, places_there: ``regions.places``, on the CPU and on the device of the
            entries; the same for all layers of a step.
        gates: float32, on the CPU; see ``zoom_spans``.
        factors: per request, on the CPU.

    Returns:
        The number of tokens reconstructed and the number of zoomed tokens, over all KV
        heads.

    Raises:
        ValueError: an argument does not fit.
    """
    new_spans, slots, zoomed = choose_spans(entries.bias, entries.owner, regions, gates)
    device = entries.keys.device
    if slots.numel():
        packed = pack(factors, new_spans, device)
        on_device = LowRank(
            packed.factors.to(device, non_blocking=True),
            packed.offsets,
            packed.ranks,
            packed.tokens,
            packed.head_dim,
        )
        matrices = torch.arange(len(packed))
        rows = reconstruct(on_device, matrices, entries.keys.dtype)
        keys, values = rows.split(len(slots))
        at = moved(slots, device)
        entries.keys.index_copy_(0, at, keys)
        entries.values.index_copy_(0, at, values)
    assert entries.bias_there is not None, "entries are on the CPU"
    bias = moved(entries.bias[places], device)
    entries.bias_there.index_copy_(0, places_there, bias)
    return slots.numel(), zoomed


def pack(
    factors: Sequence[LowRank], new_spans: torch.Tensor, device: torch.device
) -> LowRank:
    """The factors of some spans' keys, then of their values, in one host buffer.

    Args:
        factors: per request, of all spans' keys and then of all values.
        new_spans: int64 [2, n], request and span, from :func:`choose_spans`; not empty.
        device: the device they will be copied to.
    """
    records, ranks, tokens = [], [], []
    for value in (0, 1):
        for request, span in new_spans.t().tolist():
            own = factors[request]
            matrix = span + value * (len(own) // 2)
            start, stop = own.offsets[matrix : matrix + 2].tolist()
            records.append(own.factors[start:stop])
            ranks.append(own.ranks[matrix])
            tokens.append(own.tokens[matrix])
    lengths = torch.tensor([0] + [len(record) for record in records])
    dtype = records[0].dtype
    memory = staging(int(lengths.sum()), dtype=dtype, device=device)
    torch.cat(records, out=memory)
    # Not of the first request: a request without factors has no head_dim.
    head_dim = factors[int(new_spans[0, 0])].head_dim
    return LowRank(
        memory, lengths.cumsum(0), torch.stack(ranks), torch.stack(tokens), head_dim
    )
