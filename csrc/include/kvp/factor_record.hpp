// The record of a low-rank matrix.
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
#pragma once

#include <cstdint>

namespace kvp::svd {

using Index = std::int64_t;

// The shape of a record, and the offsets of its parts.
template <typename Factor>
struct Record {
  Index tokens, head_dim, rank;

  static constexpr Index kPerFloat = 4 / static_cast<Index>(sizeof(Factor));

  Index left() const { return rank * kPerFloat; }
  Index right() const { return left() + tokens * rank; }
  Index elements() const {
    const Index all = right() + rank * head_dim;
    return (all + kPerFloat - 1) / kPerFloat * kPerFloat;
  }

  // Zeroes the padding element, so that equal records have equal bytes.
  void clear_padding(Factor* record) const {
    if (elements() > right() + rank * head_dim) record[elements() - 1] = Factor{};
  }
};

}  // namespace kvp::svd
