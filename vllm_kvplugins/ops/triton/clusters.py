"""``assign_and_average`` for GPUs.

Correctness is tested in Triton's interpreter; it has never been timed.

Two kernels: the first finds the nearest prototypes and sums the values of each
cluster, the second looks up the means. Sums are sums of integers, as in
``scoring.cluster_mean``, so the order of the atomic additions does not matter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_SLOTS = 64
_PROTOTYPES = 32


def assign_and_average(
    keys: torch.Tensor,
    prototypes: torch.Tensor,
    values: torch.Tensor,
    valid: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`vllm_kvplugins.ops.clusters.assign_and_average`.

    Args:
        keys: float32, float16 or bfloat16. Products are float32.

    Cost: three launches and a handful of torch calls; no host sync.
    """
    heads, slots, head_dim = keys.shape
    count = prototypes.shape[1]
    prototypes, values = prototypes.contiguous(), values.contiguous()
    if valid is not None:
        values = values.masked_fill(~valid, 0)
    means = torch.empty_like(values)
    clusters = torch.empty(heads, slots, dtype=torch.int64, device=keys.device)
    if keys.numel() == 0:
        return means, clusters
    tables = torch.zeros(2, heads, count + 1, dtype=torch.int64, device=keys.device)
    unit = _units(values)
    grid = (triton.cdiv(slots, _SLOTS), heads)
    _assign[grid](
        keys,
        *keys.stride(),
        prototypes,
        values,
        values if valid is None else valid.contiguous().view(torch.uint8),
        1 / unit,
        clusters,
        tables[0],
        tables[1],
        slots,
        count,
        head_dim,
        HAS_VALID=valid is not None,
        SLOTS=_SLOTS,
        PROTOTYPES=_PROTOTYPES,
        DIMS=max(triton.next_power_of_2(head_dim), 16),
    )
    _look_up[grid](
        clusters, tables[0], tables[1], unit, means, slots, count, SLOTS=_SLOTS
    )
    return means, clusters


def _units(values: torch.Tensor) -> torch.Tensor:
    """float64 [H]: a power of two such that n of the largest value fit 62 bits."""
    bits = 62 - values.shape[1].bit_length()
    _, exponent = torch.frexp(values.abs().amax(dim=1).double())
    return torch.exp2(exponent.double() - bits)


@triton.jit
def _assign(
    keys,
    key_head_stride,
    key_slot_stride,
    key_dim_stride,
    prototypes,
    values,
    valid,
    per_unit,
    clusters,
    sums,
    sizes,
    slots,
    count,
    head_dim,
    HAS_VALID: tl.constexpr,
    SLOTS: tl.constexpr,
    PROTOTYPES: tl.constexpr,
    DIMS: tl.constexpr,
):
    """One program: SLOTS slots of one head, all prototypes."""
    head = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    dim = tl.arange(0, DIMS)
    at = head * slots + slot
    token = slot < slots
    if HAS_VALID:
        token &= tl.load(valid + at, mask=slot < slots, other=0) != 0
    key = tl.load(
        keys
        + head * key_head_stride
        + slot[:, None] * key_slot_stride
        + dim[None, :] * key_dim_stride,
        mask=token[:, None] & (dim < head_dim)[None, :],
        other=0.0,
    ).to(tl.float32)

    best = tl.full([SLOTS], -float("inf"), tl.float32)
    nearest = tl.zeros([SLOTS], tl.int64)
    for first in range(0, count, PROTOTYPES):
        p = first + tl.arange(0, PROTOTYPES)
        row = tl.load(
            prototypes + (head * count + p)[:, None] * head_dim + dim[None, :],
            mask=(p < count)[:, None] & (dim < head_dim)[None, :],
            other=0.0,
        )
        exists = tl.max(tl.abs(row), axis=1) > 0
        cosine = tl.dot(key, tl.trans(row), input_precision="ieee")
        cosine = tl.where(exists[None, :], cosine, -float("inf"))
        highest = tl.max(cosine, axis=1)
        # The first prototype that reaches it. argmax may return any of them.
        reached = tl.where(cosine == highest[:, None], p[None, :], count)
        better = highest > best
        nearest = tl.where(better, tl.min(reached, axis=1).to(tl.int64), nearest)
        best = tl.where(better, highest, best)
    nearest = tl.where(token, nearest, count)
    tl.store(clusters + at, nearest, mask=slot < slots)

    value = tl.load(values + at, mask=token, other=0.0).to(tl.float64)
    whole = value * tl.load(per_unit + head)
    # Rounds ties to even. From 2**51 on, a float32 in these units is an integer.
    magic = 6755399441055744.0
    rounded = (whole + magic) - magic
    whole = tl.where(tl.abs(whole) < 2251799813685248.0, rounded, whole)
    table = head * (count + 1) + nearest
    tl.atomic_add(sums + table, whole.to(tl.int64), mask=token)
    tl.atomic_add(sizes + table, tl.full([SLOTS], 1, tl.int64), mask=token)


@triton.jit
def _look_up(clusters, sums, sizes, unit, means, slots, count, SLOTS: tl.constexpr):
    head = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    in_range = slot < slots
    at = head * slots + slot
    table = head * (count + 1) + tl.load(clusters + at, mask=in_range, other=0)
    total = tl.load(sums + table, mask=in_range, other=0).to(tl.float64)
    size = tl.load(sizes + table, mask=in_range, other=1).to(tl.float64)
    # Slots without a token have size 0: avoid 0 / 0.
    mean = total / tl.where(size > 0, size, 1.0) * tl.load(unit + head)
    tl.store(means + at, mean.to(tl.float32), mask=in_range)
