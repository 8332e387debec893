"""Low-rank factors of spans of keys and values, and their reconstruction.

SeKV keeps a span's keys and values in host memory as truncated singular value
decompositions, and reconstructs its tokens when a query needs them. Compiled if built,
in torch otherwise; ``KVP_OPS`` overrides this. Decompositions run on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from vllm_kvplugins.ops import checks
from vllm_kvplugins.ops.dispatch import call_compiled
from vllm_kvplugins.ops.extension import compiled_for

# The rank of a record that holds the rows of its matrix.
ROWS = -1


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """Truncated decompositions of many matrices, packed one after the other.

    The record of a matrix is one run of elements: its singular values as float32 (two
    elements each in bfloat16 records), U [tokens, rank], V^T [rank, head_dim], and in
    bfloat16 records a padding element if the number is odd. A float32 record has the
    ``rank * (tokens + head_dim + 1)`` elements of SeKV's equation 18; a bfloat16 record
    has up to ``rank + 1`` more. A record with the rank ``ROWS`` holds the rows of its
    matrix instead, exactly.

    To move the records, for example to an arena or a GPU, replace ``factors``. bfloat16
    factors must begin at an even element of their storage. The other tensors stay on
    the CPU.

    Args:
        factors: float32 or bfloat16 [elements], all records.
        offsets: int64 [matrices + 1], the begin of each record, and the end.
        ranks: int64 [matrices]; ``ROWS`` where the record holds rows.
        tokens: int64 [matrices], rows of each matrix.
        head_dim: columns of every matrix.
    """

    factors: torch.Tensor
    offsets: torch.Tensor
    ranks: torch.Tensor
    tokens: torch.Tensor
    head_dim: int

    def __len__(self) -> int:
        return len(self.ranks)

    @property
    def nbytes(self) -> int:
        """Bytes of the records, without the index tensors."""
        return int(self.factors.numel() * self.factors.itemsize)

    def rows(self, matrix: int) -> torch.Tensor:
        """[tokens, head_dim], a view; only of records with the rank ``ROWS``."""
        assert int(self.ranks[matrix]) == ROWS, "the record holds factors"
        start, tokens = int(self.offsets[matrix]), int(self.tokens[matrix])
        end = start + tokens * self.head_dim
        return self.factors[start:end].view(tokens, self.head_dim)

    def _rank(self, matrix: int) -> int:
        rank = int(self.ranks[matrix])
        assert rank != ROWS, "the record holds rows"
        return rank

    def singular_values(self, matrix: int) -> torch.Tensor:
        """float32 [rank], a view that may be written to. Descending, unless gates have
        been multiplied into them."""
        rank, start = self._rank(matrix), int(self.offsets[matrix])
        wide = 4 // self.factors.itemsize
        return self.factors[start : start + rank * wide].view(torch.float32)

    def left(self, matrix: int) -> torch.Tensor:
        """U, [tokens, rank] with orthonormal columns, a view."""
        rank, tokens = self._rank(matrix), int(self.tokens[matrix])
        start = int(self.offsets[matrix]) + rank * (4 // self.factors.itemsize)
        return self.factors[start : start + tokens * rank].view(tokens, rank)

    def right(self, matrix: int) -> torch.Tensor:
        """V, [head_dim, rank] with orthonormal columns, a view."""
        rank, tokens = self._rank(matrix), int(self.tokens[matrix])
        start = int(self.offsets[matrix]) + rank * (4 // self.factors.itemsize)
        start += tokens * rank
        end = start + rank * self.head_dim
        return self.factors[start:end].view(rank, self.head_dim).t()


def truncated_svd(
    rows: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    max_rank: int = 32,
    energy: float = 1.0,
    dtype: torch.dtype | None = None,
    rows_if_smaller: bool = False,
) -> LowRank:
    """The largest singular values of every span of every plane, and their vectors.

    SeKV, equation 6: ``K_S = sum_i sigma_i u_i v_i^T``. Matrix ``plane * len(starts)
    + span`` is ``rows[plane, starts[span] : starts[span] + lengths[span]]``. Singular
    values up to ``max(length, head_dim) * 2^-23`` of the largest count as zero: a
    matrix of zeros has rank 0. Results do not depend on the number of threads.

    Differs from the paper: instead of a randomized decomposition of the rows, it
    computes eigenvectors of the Gram matrix of the smaller side in double precision. If
    a subspace of ``max_rank + max(8, max_rank / 4)`` dimensions has at most half the
    dimensions of the smaller side, these eigenvectors come from a randomized method (on
    the Gram matrix, one power step, a fixed seed). Its error is up to 4 % above the
    best possible on rows without structure, and about 1 % with a decaying spectrum. The
    learned gates of equation 7 are applied by ``keep_components``.

    Args:
        rows: float32 or bfloat16 [planes, tokens, head_dim], keys or values; a plane
            is one KV head of one layer. Rows are contiguous.
        starts, lengths: int64 [spans], runs of tokens, the same in all planes.
        max_rank: R; the rank is at most ``min(length, head_dim, max_rank)``.
        energy: in (0, 1]; the rank is the smallest that keeps this share of the
            squared Frobenius norm. 1 keeps all up to ``max_rank``.
        dtype: dtype of U and V, float32 or bfloat16; by default that of ``rows``.
        rows_if_smaller: store the rows of spans whose factors of the largest possible
            rank take no fewer elements. Nothing is decomposed there, and nothing lost.

    Returns:
        The factors, by matrix. In float32 the columns are orthonormal to ``1e-4`` for
        the smallest singular values, and far better for the others.

    Raises:
        ValueError: a shape, dtype, span or setting does not fit, or a span holds NaN,
            infinities, or values so large that a singular value exceeds float32.

    Cost: with m the smaller and n the larger of length and head_dim, ``m^2 n / 2 +
        rank m n`` multiply-adds, and about ``6 m^3`` dependent ones for the
        eigenvectors. In parallel over matrices. In torch, one batched
        ``torch.linalg.svd`` in float64 per length.
    """
    op = "truncated_svd"
    dtype = dtype or rows.dtype
    check_placement(op, dtype, "rows", rows)
    if compiled_for(rows.device)[0]:
        factors, offsets, ranks = call_compiled(
            op,
            rows,
            starts.contiguous(),
            lengths.contiguous(),
            max_rank,
            energy,
            dtype == torch.bfloat16,
            rows_if_smaller,
        )
    else:
        _check_spans(rows, starts, lengths, max_rank, energy)
        factors, offsets, ranks = _svd_in_torch(
            rows, starts, lengths, max_rank, energy, dtype, rows_if_smaller
        )
    return LowRank(
        factors, offsets, ranks, lengths.repeat(len(rows)), int(rows.shape[2])
    )


def reconstruct(
    low_rank: LowRank, which: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Rows of ``U diag(sigma) V^T`` of some matrices, one matrix after the other.

    SeKV, equation 8, with gates that ``keep_components`` has multiplied into the
    singular values.

    Args:
        low_rank: result of :func:`truncated_svd`.
        which: int64 [n], matrices; may repeat.
        dtype: dtype of the result, float32 or bfloat16; by default that of the factors.

    Returns:
        [sum of their tokens, head_dim]. On CPUs with AVX512-BF16 values below 2^-126
        are 0.

    Raises:
        ValueError: a matrix does not exist, or its record is invalid.

    Cost: ``2 * tokens * rank * head_dim`` float32 operations each (equation 22). On
        CUDA one launch, and a copy of the list of work.
    """
    op = "reconstruct"
    dtype = dtype or low_rank.factors.dtype
    check_placement(op, dtype, "factors", low_rank.factors)
    if compiled_for(low_rank.factors.device)[0]:
        return call_compiled(
            op,
            low_rank.factors,
            low_rank.offsets,
            low_rank.ranks,
            low_rank.tokens,
            low_rank.head_dim,
            which.contiguous(),
            dtype == torch.bfloat16,
        )
    checks.check_vector(op, "which", which)
    checks.check_range(op, "which", which, "matrix", len(low_rank))
    made = [_rows(low_rank, matrix).to(dtype) for matrix in which.tolist()]
    nothing = low_rank.factors.new_empty(0, low_rank.head_dim, dtype=dtype)
    return torch.cat([nothing, *made])


def _rows(low_rank: LowRank, matrix: int) -> torch.Tensor:
    if int(low_rank.ranks[matrix]) == ROWS:
        return low_rank.rows(matrix)
    scaled = low_rank.left(matrix).float() * low_rank.singular_values(matrix)
    return scaled @ low_rank.right(matrix).float().t()


def _svd_in_torch(
    rows: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    max_rank: int,
    energy: float,
    dtype: torch.dtype,
    rows_if_smaller: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Decomposes spans of equal length together."""
    planes, _, head_dim = rows.shape
    records: dict[int, torch.Tensor] = {}
    ranks = torch.zeros(planes * len(starts), dtype=torch.int64)
    for length in lengths.unique().tolist():
        spans = (lengths == length).nonzero()[:, 0]
        tokens = starts[spans, None] + torch.arange(length)
        wide = rows[:, tokens].double()  # [planes, spans, length, head_dim]
        if not wide.isfinite().all():
            plane, span = (~wide.isfinite()).nonzero()[0, :2].tolist()
            _refuse(int(spans[span]), plane, "holds NaN or infinities")
        if rows_if_smaller and not _factors_are_smaller(
            length, head_dim, max_rank, dtype
        ):
            for plane in range(planes):
                for i, span in enumerate(spans.tolist()):
                    matrix = plane * len(starts) + span
                    ranks[matrix] = ROWS
                    records[matrix] = _padded([rows[plane, tokens[i]].to(dtype)], dtype)
            continue
        u, sigma, vt = torch.linalg.svd(wide, full_matrices=False)
        if length and (sigma[..., 0] > torch.finfo(torch.float32).max).any():
            large = sigma[..., 0] > torch.finfo(torch.float32).max
            plane, span = large.nonzero()[0].tolist()
            _refuse(int(spans[span]), plane, "has a singular value beyond float32")
        kept = _kept_ranks(sigma, max(length, head_dim), max_rank, energy)
        for plane in range(planes):
            for i, span in enumerate(spans.tolist()):
                matrix, rank = plane * len(starts) + span, int(kept[plane, i])
                ranks[matrix] = rank
                records[matrix] = pack_record(
                    u[plane, i, :, :rank],
                    sigma[plane, i, :rank],
                    vt[plane, i, :rank],
                    dtype,
                )
    packed = [records[matrix] for matrix in range(len(ranks))]
    sizes = torch.tensor([0] + [len(record) for record in packed])
    return torch.cat([torch.empty(0, dtype=dtype), *packed]), sizes.cumsum(0), ranks


def _kept_ranks(
    sigma: torch.Tensor, longer: int, max_rank: int, energy: float
) -> torch.Tensor:
    """int64 [planes, spans] of singular values [planes, spans, all of them]."""
    share = longer * torch.finfo(torch.float32).eps
    kept = ((sigma > share * sigma[..., :1]) & (sigma.float() > 0)).sum(-1)
    if energy < 1:
        squares = sigma.square()
        missing = squares.cumsum(-1) < energy * squares.sum(-1, keepdim=True)
        kept = kept.minimum(missing.sum(-1) + 1)
    return kept.clamp(max=max_rank)


def pack_record(
    u: torch.Tensor, sigma: torch.Tensor, vt: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The record of one matrix, see :class:`LowRank`."""
    return _padded([sigma.float().view(dtype), u.to(dtype), vt.to(dtype)], dtype)


def _padded(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    flat = torch.cat([part.flatten() for part in parts])
    missing = -len(flat) % (4 // dtype.itemsize)
    return torch.cat([flat, torch.zeros(missing, dtype=dtype)])


def _factors_are_smaller(
    tokens: int, head_dim: int, max_rank: int, dtype: torch.dtype
) -> bool:
    """Whether factors of the largest possible rank take fewer elements than rows."""
    wide = int(4 // dtype.itemsize)

    def elements(count: int) -> int:
        return -(-count // wide) * wide

    rank = min(tokens, head_dim, max_rank)
    factors = elements(rank * (wide + tokens + head_dim))
    return factors < elements(tokens * head_dim)


def check_placement(
    op: str, dtype: torch.dtype, name: str, tensor: torch.Tensor
) -> None:
    """Raise ValueError unless device and dtype are supported.

    Reconstructions run on any device, other ops on the CPU.
    """
    if tensor.device.type != "cpu" and op != "reconstruct":
        checks.fail(op, f"{name} must be on the CPU, got {tensor.device}")
    if dtype not in checks.FACTOR_DTYPES:
        checks.fail(
            op, f"dtype must be float32 or bfloat16, got {checks.names_of([dtype])}"
        )


def _check_spans(
    rows: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    max_rank: int,
    energy: float,
) -> None:
    """The checks of csrc/svd.cpp."""
    op = "truncated_svd"
    checks.check_dim(op, "rows", rows, 3)
    if not 1 <= rows.shape[2] <= checks.MAX_HEAD_DIM:
        checks.fail(
            op, f"head_dim must be 1 to {checks.MAX_HEAD_DIM}, got {rows.shape[2]}"
        )
    if rows.shape[2] > 1 and rows.stride(2) != 1:
        checks.fail(op, "the elements of a row must be contiguous")
    checks.check_vector(op, "starts", starts)
    checks.check_vector(op, "lengths", lengths, len(starts))
    wrong = (starts < 0) | (lengths < 0) | (starts + lengths > rows.shape[1])
    if wrong.any():
        i = int(wrong.nonzero()[0])
        checks.fail(
            op,
            f"span {i} is {int(lengths[i])} tokens from {int(starts[i])}, but there "
            f"are tokens 0 to {rows.shape[1] - 1}",
        )
    if max_rank < 1:
        checks.fail(op, f"max_rank must be positive, got {max_rank}")
    if not 0 < energy <= 1:
        checks.fail(op, f"energy must be above 0 and at most 1, got {energy}")
    checks.check_dtype(op, "rows", rows, *checks.FACTOR_DTYPES)


def _refuse(span: int, plane: int, problem: str) -> NoReturn:
    checks.fail("truncated_svd", f"span {span} of plane {plane} {problem}")
