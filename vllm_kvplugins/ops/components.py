"""Gates on the components of low-rank factors.

Compiled if built, in torch otherwise; ``KVP_OPS`` overrides this (``extension.py``).
CPU only.
"""

from __future__ import annotations

import dataclasses

import torch

from vllm_kvplugins.ops import checks
from vllm_kvplugins.ops.dispatch import call_compiled
from vllm_kvplugins.ops.extension import compiled_for
from vllm_kvplugins.ops.svd import ROWS, LowRank, check_placement, pack_record

_OP = "keep_components"


def keep_components(low_rank: LowRank, gates: torch.Tensor, min_gate: float) -> LowRank:
    """Multiply singular values by gates and drop components with small gates.

    SeKV, equations 7 and 8 at deployment: each singular value is multiplied by its
    gate, and "components with negligible gates are dropped". The remaining components
    keep their order and need not be the first ones. Rows are copied; they have no
    gates. Does not modify its arguments.

    Args:
        low_rank: what ``truncated_svd`` returned.
        gates: float32 [n] in [0, 1], one per singular value, matrix by matrix.
        min_gate: components with a smaller gate are dropped; 0 to 1, 0 keeps all.

    Returns:
        New factors; a matrix without remaining components has rank 0 and stands for
        zeros.

    Raises:
        ValueError: a shape, dtype or number does not fit, or the factors are not
            sound.

    Cost: a copy of the remaining components, in parallel over matrices. In torch, a
        few calls per matrix.
    """
    check_placement(_OP, low_rank.factors.dtype, "factors", low_rank.factors)
    if compiled_for(low_rank.factors.device)[0]:
        factors, offsets, ranks = call_compiled(
            _OP,
            low_rank.factors,
            low_rank.offsets,
            low_rank.ranks,
            low_rank.tokens,
            low_rank.head_dim,
            gates.contiguous(),
            min_gate,
        )
    else:
        _check(low_rank, gates, min_gate)
        factors, offsets, ranks = _in_torch(low_rank, gates, min_gate)
    return dataclasses.replace(low_rank, factors=factors, offsets=offsets, ranks=ranks)


def _in_torch(
    low_rank: LowRank, gates: torch.Tensor, min_gate: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dtype = low_rank.factors.dtype
    packed = [torch.empty(0, dtype=dtype)]
    ranks = torch.zeros_like(low_rank.ranks)
    for matrix, gate in enumerate(gates.split(low_rank.ranks.clamp(min=0).tolist())):
        if int(low_rank.ranks[matrix]) == ROWS:
            ranks[matrix] = ROWS
            start, end = low_rank.offsets[matrix : matrix + 2].tolist()
            packed.append(low_rank.factors[start:end])
            continue
        kept = gate >= torch.tensor(min_gate, dtype=torch.float32)
        ranks[matrix] = kept.sum()
        sigma = low_rank.singular_values(matrix) * gate
        u, vt = low_rank.left(matrix)[:, kept], low_rank.right(matrix).t()[kept]
        packed.append(pack_record(u, sigma[kept], vt, dtype))
    sizes = torch.tensor([len(record) for record in packed])
    return torch.cat(packed), sizes.cumsum(0), ranks


def _check(low_rank: LowRank, gates: torch.Tensor, min_gate: float) -> None:
    """The checks of csrc/components.cpp."""
    if not 0 <= min_gate <= 1:
        checks.fail(_OP, f"min_gate must be 0 to 1, got {min_gate}")
    components = int(low_rank.ranks.clamp(min=0).sum())
    checks.check_vector(_OP, "gates", gates, components, torch.float32)
    wrong = (~((gates >= 0) & (gates <= 1))).nonzero()
    if len(wrong):
        i = int(wrong[0])
        checks.fail(_OP, f"gates[{i}] must be 0 to 1, got {float(gates[i]):g}")
