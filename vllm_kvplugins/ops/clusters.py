"""ProtoKV's clustering: the nearest prototype of every key, and means per cluster.

Runs the compiled version if the device has one, else a Triton kernel on CUDA, and torch
otherwise. ``KVP_OPS=torch`` (``extension.py``) forces the torch version.
"""

from __future__ import annotations

import torch

from vllm_kvplugins.ops import checks
from vllm_kvplugins.ops.dispatch import call_compiled
from vllm_kvplugins.ops.extension import (
    compiled_for,
    load_extension,
    torch_by_request,
    triton_for,
)
from vllm_kvplugins.scoring import attention_votes
from vllm_kvplugins.scoring import prototypes as proto

_OP = "assign_and_average"


def assign_and_average(
    keys: torch.Tensor,
    prototypes: torch.Tensor,
    values: torch.Tensor,
    valid: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cluster keys by cosine and replace each value by its cluster's mean.

    ProtoKV, equations 17 and 18. Of equally near prototypes the lower one is taken.
    Means are bitwise equal within a cluster and do not depend on the order of
    additions.

    Products are float32 (float64 for float64 keys), except for bfloat16 keys on CPUs
    with AVX-512 BF16. There prototypes are rounded to bfloat16, and a key may join one
    whose cosine is smaller by up to twice the error of a bfloat16 product in torch.

    Args:
        keys: [H, n, D], any float type and strides.
        prototypes: [H, P, D], P >= 1, float32 (float64 for float64 keys); unit rows,
            or zero rows, which attract no key unless all rows are zero.
        values: float32 [H, n], finite where valid.
        valid: bool [H, n], slots that hold a token; None = all are.

    Returns:
        float32 [H, n], the means, 0 where invalid; int64 [H, n], the clusters in
        ``[0, P)``, P where invalid. Invalid keys are ignored.

    Raises:
        ValueError: a shape or dtype does not fit.

    Cost: O(H * n * P * D). Only the torch version writes similarities to memory, one
        tile of slots at a time.
    """
    backend = backend_for(keys.device, keys.dtype, keys.shape[-1])
    if backend == "compiled":
        if keys.stride(-1) != 1:
            keys = keys.contiguous()
        means, clusters = call_compiled(
            _OP,
            keys,
            prototypes.contiguous(),
            values.contiguous(),
            None if valid is None else valid.contiguous(),
        )
        return means, clusters
    _check(keys, prototypes, values, valid)
    if backend == "triton":
        from vllm_kvplugins.ops.triton import clusters as in_triton

        return in_triton.assign_and_average(keys, prototypes, values, valid)
    return in_torch(keys, prototypes, values, valid)


def chunk_prototypes(
    keys: torch.Tensor,
    num_chunks: int,
    count: int,
    valid: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prototypes of chunks without their irregular keys, and the slots of those keys.

    ProtoKV, equations 10 and 11. Compiled on the CPU if all slots are valid, in torch
    otherwise.

    Args:
        keys: [H, n, D], any float type and strides.
        num_chunks: k; chunks are ``n // k`` slots long and start at slot 0.
        count: number of irregular keys per head, at most all keys.
        valid: bool [H, n], None = all are valid; other slots have zero keys.

    Returns:
        float32 (float64 for float64 keys) [H, k, D], unit rows, zero where a
        chunk has no regular key; int64 [H, count], ascending, ties to the lower.

    Cost: three passes over the keys. The compiled version writes only the result and
        one number per slot to memory.
    """
    count = min(count, keys.shape[1] // num_chunks * num_chunks)
    backend = backend_for(keys.device, keys.dtype, keys.shape[2])
    if backend == "compiled" and keys.device.type == "cpu" and valid is None:
        keys = keys if keys.stride(2) == 1 else keys.contiguous()
        sums, slots = call_compiled("chunk_prototypes", keys, num_chunks, count)
        return proto.directions(sums), slots
    return chunks_in_torch(keys, num_chunks, count, valid)


def chunks_in_torch(
    keys: torch.Tensor,
    num_chunks: int,
    count: int,
    valid: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``chunk_prototypes`` in torch; the oracle of the compiled one."""
    delta = proto.irregularity(keys, num_chunks, valid)
    irregular = proto.find_irregular(delta, count)
    slots = irregular.nonzero()[:, 1].view(keys.shape[0], count)
    return proto.regular_prototypes(keys, irregular, num_chunks), slots


def in_torch(
    keys: torch.Tensor,
    prototypes: torch.Tensor,
    values: torch.Tensor,
    valid: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``assign_and_average`` in torch; the oracle of the others."""
    clusters = proto.assign_to_prototypes(keys, prototypes)
    unassigned = prototypes.shape[1]
    if valid is not None:
        clusters = clusters.masked_fill(~valid, unassigned)
        values = values.masked_fill(~valid, 0)
    if clusters.shape[1] == 0:
        return values.clone(), clusters
    return attention_votes.cluster_mean(values, clusters, unassigned + 1), clusters


def backend_for(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """``compiled``, ``triton`` or ``torch``, for keys like these.

    Raises:
        ValueError, RuntimeError: ``KVP_OPS`` is wrong or cannot be honoured.
    """
    if dtype not in checks.KEY_DTYPES or head_dim > checks.MAX_HEAD_DIM:
        return "torch"
    if device.type == "cpu":
        return "compiled" if compiled_for(device)[0] else "torch"
    if device.type != "cuda" or torch_by_request():
        return "torch"
    if load_extension().has_cuda:
        return "compiled"
    return "triton" if triton_for(device) else "torch"


def _check(
    keys: torch.Tensor,
    prototypes: torch.Tensor,
    values: torch.Tensor,
    valid: torch.Tensor | None,
) -> None:
    """The checks of csrc/assign_check.hpp."""
    checks.check_dim(_OP, "keys", keys, 3)
    checks.check_dim(_OP, "prototypes", prototypes, 3)
    heads, slots, head_dim = keys.shape
    count = prototypes.shape[1]
    _check_like("prototypes", prototypes, keys, (heads, count, head_dim))
    _check_like("values", values, keys, (heads, slots))
    if count == 0:
        checks.fail(_OP, "there must be at least one prototype")
    wide = torch.promote_types(keys.dtype, torch.float32)
    checks.check_dtype(_OP, "prototypes", prototypes, wide)
    checks.check_dtype(_OP, "values", values, torch.float32)
    if valid is not None:
        _check_like("valid", valid, keys, (heads, slots))
        checks.check_dtype(_OP, "valid", valid, torch.bool)


def _check_like(
    name: str, tensor: torch.Tensor, keys: torch.Tensor, shape: tuple[int, ...]
) -> None:
    checks.check_shape(_OP, name, tensor, shape)
    checks.check_device(_OP, name, tensor, keys, "the keys")
