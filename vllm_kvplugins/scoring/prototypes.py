"""Semantic prototypes of keys (ProtoKV).

All functions process KV heads as a batch and slots in tiles. Arithmetic is float32, or
float64 for float64 keys. ``assign_to_prototypes`` and ``cluster_mean`` take most of the
time; ``ops.clusters`` fuses them.

Shapes: H KV heads, n slots, D head_dim, k chunks, u buckets, P prototypes. The
prototype of an empty bucket and the key of a slot without a token are zeros, which do
not change sums.
"""

from __future__ import annotations

import functools

import torch

from vllm_kvplugins.scoring.attention_votes import slot_tiles
from vllm_kvplugins.scoring.selection import keep_top

# Divides the size of a tile. Chunks are read several times and should stay in the
# processor's cache.
_COPIES = 16


def irregularity(
    keys: torch.Tensor, num_chunks: int, valid: torch.Tensor | None = None
) -> torch.Tensor:
    """Cosine distance of each key to the mean of its chunk, per spread of the chunk.

    ProtoKV, equation 10. ``1 - cos`` is computed as half the squared distance of unit
    vectors, which is precise for nearly parallel keys. If all keys of a chunk are
    equal, the equation divides zero by zero; the result is then 0. A zero key and a
    zero mean have cosine 0.

    Args:
        keys: [H, n, D], any float type.
        num_chunks: k; chunks have ``n // k`` slots and start at slot 0.
        valid: bool [H, n], slots that hold a token; None: all. The keys of other slots
            are 0.

    Returns:
        [H, k * (n // k)]; larger means less regular, -inf where there is no token. The
        last ``n % k`` slots belong to no chunk and are left out.
    """
    num_heads, num_slots, head_dim = keys.shape
    length = num_slots // num_chunks
    delta = torch.empty(
        num_heads, num_chunks, length, dtype=_wide(keys), device=keys.device
    )
    for tile in slot_tiles(num_chunks, _COPIES * num_heads * length * head_dim):
        chunks = _chunks(keys, tile, length)
        member = None if valid is None else _chunks(valid, tile, length)
        delta[:, tile] = _deltas(chunks, member)
    return delta.view(num_heads, num_chunks * length)


def _deltas(chunks: torch.Tensor, member: torch.Tensor | None) -> torch.Tensor:
    """Equation 10 for whole chunks; see ``irregularity``.

    Args:
        chunks: [H, chunks, length, D], 0 where there is no token.
        member: bool [H, chunks, length], slots that hold a token; None: all.

    Returns:
        [H, chunks, length].
    """
    if member is None:
        size = chunks.new_full((1, 1, 1, 1), chunks.shape[2])
    else:
        size = member.unsqueeze(3).sum(dim=2, keepdim=True).clamp(min=1)
    mean = chunks.sum(dim=2, keepdim=True) / size
    off = chunks - mean
    if member is not None:
        off *= member.unsqueeze(3)
    spread = torch.linalg.vector_norm(off, dim=(2, 3)) / size[:, :, 0, 0].sqrt()
    apart = torch.div(chunks, _norms(chunks), out=off).sub_(mean / _norms(mean))
    # Zero vectors have no direction; their distance is NaN here.
    dissimilarity = (_norms(apart)[..., 0].square() / 2).nan_to_num_(nan=1.0)
    spread = spread.unsqueeze(2)
    ratio = torch.where(spread > 0, dissimilarity / spread, 0.0)
    return ratio if member is None else ratio.masked_fill_(~member, -torch.inf)


def find_irregular(delta: torch.Tensor, count: int) -> torch.Tensor:
    """Mark the ``count`` most irregular slots of every head (section 4.1).

    Args:
        delta: [H, m], from :func:`irregularity`.
        count: p; if there are fewer slots, all are marked.

    Returns:
        bool [H, m]; ties go to the lower slot.
    """
    count = min(count, delta.shape[1])
    return keep_top(delta, torch.full((delta.shape[0],), count, device=delta.device))


def regular_prototypes(
    keys: torch.Tensor, irregular: torch.Tensor, num_chunks: int
) -> torch.Tensor:
    """Direction of the sum of the regular keys of each chunk (equation 11).

    Args:
        keys: [H, n, D].
        irregular: bool [H, k * (n // k)].
        num_chunks: k.

    Returns:
        [H, k, D], unit vectors; 0 for a chunk without regular keys.
    """
    num_heads, num_slots, head_dim = keys.shape
    length = num_slots // num_chunks
    regular = irregular.logical_not().view(num_heads, num_chunks, 1, length)
    sums = torch.empty(
        num_heads, num_chunks, head_dim, dtype=_wide(keys), device=keys.device
    )
    for tile in slot_tiles(num_chunks, num_heads * length * head_dim):
        chunks = _chunks(keys, tile, length)
        sums[:, tile] = (regular[:, tile].to(chunks.dtype) @ chunks).squeeze(2)
    return directions(sums)


def hash_buckets(
    keys: torch.Tensor, bits: int, num_buckets: int, gamma: float, seed: int
) -> torch.Tensor:
    """Buckets from the signs of random Fourier features (equations 12 to 14).

    Leaves out the factor ``sqrt(2 / r)`` of equation 12, which does not change signs.
    The paper gives no value for ``gamma``. It is relative to 1 / (root mean square norm
    of the nonzero keys of a head), because norms differ by model, layer and head.

    Args:
        keys: [H, m, D].
        bits: r, 1 to 62.
        num_buckets: u.
        gamma: standard deviation of the projections; a larger one separates more keys.
        seed: of W and b, which all layers and heads share.

    Returns:
        int64 [H, m], each in ``[0, num_buckets)``.
    """
    num_heads, num_slots, head_dim = keys.shape
    weight, phase, place = _fourier_weights(
        bits, head_dim, seed, _wide(keys), keys.device
    )
    norms = torch.linalg.vector_norm(keys, dim=-1, dtype=_wide(keys))
    scale = (norms.square().sum(dim=-1) / norms.count_nonzero(dim=-1)).sqrt()
    weight = weight * (gamma / torch.where(scale > 0, scale, 1.0))[:, None, None]
    buckets = torch.empty(num_heads, num_slots, dtype=torch.int64, device=keys.device)
    for tile in slot_tiles(num_slots, num_heads * (head_dim + bits)):
        angles = keys[:, tile].to(_wide(keys)) @ weight + phase
        code = torch.where(angles.cos() > 0, place, 0).sum(dim=-1)
        buckets[:, tile] = code if num_buckets == 1 << bits else code % num_buckets
    return buckets


def bucket_prototypes(
    keys: torch.Tensor, buckets: torch.Tensor, num_buckets: int
) -> torch.Tensor:
    """Direction of the sum of the keys of each bucket (equation 15).

    Adds keys as a product with one-hot rows, so that the order of additions does not
    depend on the device.

    Args:
        keys: [H, m, D].
        buckets: int64 [H, m].
        num_buckets: u.

    Returns:
        [H, u, D], unit vectors; 0 for an empty bucket.
    """
    num_heads, num_slots, head_dim = keys.shape
    wide = _wide(keys)
    sums = torch.zeros(num_heads, num_buckets, head_dim, dtype=wide, device=keys.device)
    every = torch.arange(num_buckets, device=keys.device)
    for tile in slot_tiles(num_slots, num_heads * (head_dim + num_buckets)):
        member = (buckets[:, tile, None] == every).to(wide)
        sums += member.transpose(1, 2) @ keys[:, tile].to(wide)
    return directions(sums)


def assign_to_prototypes(keys: torch.Tensor, prototypes: torch.Tensor) -> torch.Tensor:
    """Index of the prototype with the highest cosine to each key (equation 17).

    Keys are not normalized, because their norm does not change the order of cosines.
    Ties go to the lower prototype; for a zero key, all prototypes are equal.

    Args:
        keys: [H, n, D], any float type and strides.
        prototypes: [H, P, D], unit or zero vectors, float32 or float64. Zero vectors
            are chosen only if there are no others.

    Returns:
        int64 [H, n], each in ``[0, P)``.

    Cost: O(H * n * P * D); memory for the similarities of one tile of slots.
    """
    num_heads, num_slots, head_dim = keys.shape
    absent = (prototypes == 0).all(dim=-1).unsqueeze(1)
    bias = torch.zeros_like(absent, dtype=prototypes.dtype)
    bias.masked_fill_(absent, -torch.inf)
    columns = prototypes.transpose(1, 2).contiguous()
    clusters = torch.empty(num_heads, num_slots, dtype=torch.int64, device=keys.device)
    per_slot = num_heads * (prototypes.shape[1] + head_dim)
    for tile in slot_tiles(num_slots, per_slot):
        similarity = torch.baddbmm(bias, keys[:, tile].to(columns.dtype), columns)
        clusters[:, tile] = similarity.argmax(dim=-1)
    return clusters


def _wide(keys: torch.Tensor) -> torch.dtype:
    return torch.promote_types(keys.dtype, torch.float32)


def _chunks(tensor: torch.Tensor, tile: slice, length: int) -> torch.Tensor:
    """Chunks of a tile: [H, chunks, length, ...]; floats in the wide type."""
    part = tensor[:, tile.start * length : tile.stop * length]
    part = part.to(_wide(part)) if part.is_floating_point() else part
    return part.unflatten(1, (-1, length))


def _norms(vectors: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)


def directions(vectors: torch.Tensor) -> torch.Tensor:
    """Unit vectors along the last dimension; 0 for zero vectors."""
    norms = _norms(vectors)
    return torch.where(norms > 0, vectors / norms, 0.0)


@functools.lru_cache(maxsize=16)
def _fourier_weights(
    bits: int, head_dim: int, seed: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """W^T [D, r] from N(0, 1), b [r] from [0, 2 pi), and powers of two [r].

    Drawn on the CPU. All layers share the result; do not change it.
    """
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(bits, head_dim, generator=generator, dtype=torch.float64)
    phase = torch.rand(bits, generator=generator, dtype=torch.float64) * 2 * torch.pi
    place = 2 ** torch.arange(bits - 1, -1, -1, device=device)
    return weight.T.to(device, dtype), phase.to(device, dtype), place
