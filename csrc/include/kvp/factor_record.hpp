// The record of a low-rank matrix, or of its rows.
//
// One matrix is the keys (or values) of one span of one KV head: [tokens, head_dim].
// Its record is one run of elements, so that a span travels with one copy:
//
//   float32    [ rank singular values | U: tokens * rank | V^T: rank * head_dim ]
//   bfloat16   the same, but a singular value is a float32 in two elements, and one
//              element pads an odd number of elements
//
// That is rank * (tokens + head_dim + 1) elements: equation 18. bfloat16 records have
// up to rank + 1 elements more.
//
// Where factors would be no smaller than the rows, the record has the rank kRows and
// holds tokens * head_dim elements: the rows, and in bfloat16 the padding element.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kvp::svd {

using Index = std::int64_t;

constexpr Index kRows = -1;

// The shape of a record, and the offsets of its parts.
template <typename Factor>
struct Record {
  Index tokens, head_dim, rank;

  static constexpr Index kPerFloat = 4 / static_cast<Index>(sizeof(Factor));

  bool holds_rows() const { return rank == kRows; }
  // Singular values; rows have none.
  Index components() const { return holds_rows() ? 0 : rank; }
  Index left() const { return rank * kPerFloat; }
  Index right() const { return left() + tokens * rank; }
  Index used() const {
    return holds_rows() ? tokens * head_dim : right() + rank * head_dim;
  }
  Index elements() const { return (used() + kPerFloat - 1) / kPerFloat * kPerFloat; }

  // Zeroes the padding element, so that equal records have equal bytes.
  void clear_padding(Factor* record) const {
    if (elements() > used()) record[elements() - 1] = Factor{};
  }
};

// The shape of the smallest record: factors of the largest possible rank if they are
// smaller than the rows.
template <typename Factor>
Record<Factor> smallest_record(Index tokens, Index head_dim, Index max_rank) {
  const Record<Factor> factors{tokens, head_dim,
                               std::min(std::min(tokens, head_dim), max_rank)};
  const Record<Factor> rows{tokens, head_dim, kRows};
  return factors.elements() < rows.elements() ? factors : rows;
}

}  // namespace kvp::svd
