// A matrix product that writes each result once, to its final place and in its final
// type. low_rank.hpp reconstructs rows with it.
//
// A strip is a run of adjacent columns, at most a vector wide, so that a result leaves
// the registers once. The bodies are inlined into functions that are compiled for one
// vector width (matrix_kernels.hpp).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kvp/convert_rows.hpp"
#include "kvp/elements.hpp"
#include "kvp/simd.hpp"

namespace kvp::svd {

// Columns from .. from + count of a product; count is at most a vector's width.
struct Strip {
  std::int64_t from;
  std::int64_t to;  // see StripProduct
  std::int64_t count;
};

// out[row_to[i] + strip.to + j] = sum over k of
//     a[i * a_row + k * a_step] * b[k * b_row + strip.from + j]   for j < strip.count
//
// Reads b up to one vector past each `from`. All results must have distinct places.
template <typename Element>
struct StripProduct {
  const float* a;
  std::int64_t a_row, a_step;
  const float* b;
  std::int64_t b_row;
  std::int64_t rows, depth;
  const std::int64_t* row_to;  // [rows]
  const Strip* strips;         // [num_strips]
  std::int64_t num_strips;
  Element* out;
};

// Stores a strip of kRows rows. A strip shorter than a vector is stored in parts whose
// sizes are powers of two: the compiler knows these sizes, and the CPU predicts one
// branch per part instead of one per row.
template <Simd kSimd, int kRows, typename Element>
KVP_INLINE void store_strip(const Floats<kSimd> (&sums)[kRows],
                            const std::int64_t* row_to, std::int64_t count,
                            Element* to) {
  constexpr std::int64_t kLanes = lanes_of(kSimd);
  using Bits = std::conditional_t<std::is_same_v<Element, float>, float, std::uint16_t>;
  using Narrow = typename Lanes<Bits, kLanes* static_cast<int>(sizeof(Bits))>::Type;
  Narrow rows[kRows];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) narrow_lanes<kSimd>(sums[r], rows[r]);
  if (count == kLanes) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      std::memcpy(to + row_to[r], &rows[r], sizeof(Narrow));
    }
    return;
  }
  std::int64_t from = 0;
#pragma GCC unroll 4
  for (std::int64_t part = kLanes / 2; part > 0; part /= 2) {
    if (!(count & part)) continue;
    for (int r = 0; r < kRows; ++r) {
      std::memcpy(to + row_to[r] + from, reinterpret_cast<const Bits*>(&rows[r]) + from,
                  static_cast<std::size_t>(part) * sizeof(Bits));
    }
    from += part;
  }
}

// Whether strips are whole vectors that are stored next to each other.
template <int kStrips>
inline bool side_by_side(const Strip* strips, std::int64_t lanes) {
  for (int s = 0; s < kStrips; ++s) {
    if (strips[s].count != lanes || strips[s].to != strips[0].to + s * lanes) {
      return false;
    }
  }
  return kStrips > 1;
}

// kRows rows of kStrips strips. `joined`: the strips are next to each other.
template <Simd kSimd, int kRows, int kStrips, typename Element>
KVP_INLINE void strip_tile(const StripProduct<Element>& x, std::int64_t i,
                           const Strip* strips, bool joined) {
  using V = Floats<kSimd>;
  V sums[kStrips][kRows];
  for (int r = 0; r < kRows; ++r) {
    for (int s = 0; s < kStrips; ++s) sums[s][r] = V{};
  }
  const std::int64_t a_row = x.a_row;
  const float* a = x.a + i * a_row;
  const float* b = x.b;
  for (std::int64_t k = 0; k < x.depth; ++k, a += x.a_step, b += x.b_row) {
    V row[kStrips];
#pragma GCC unroll 4
    for (int s = 0; s < kStrips; ++s)
      std::memcpy(&row[s], b + strips[s].from, sizeof(V));
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int s = 0; s < kStrips; ++s) sums[s][r] += row[s] * a[r * a_row];
    }
  }
  if constexpr (kStrips > 1) {
    if (joined) {
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        Element* to = x.out + x.row_to[i + r] + strips[0].to;
#pragma GCC unroll 4
        for (int s = 0; s < kStrips; s += 2) {
          store_two<kSimd>(sums[s][r], sums[s + 1][r], to + s * lanes_of(kSimd));
        }
      }
      return;
    }
  }
#pragma GCC unroll 4
  for (int s = 0; s < kStrips; ++s) {
    store_strip<kSimd, kRows>(sums[s], x.row_to + i, strips[s].count,
                              x.out + strips[s].to);
  }
}

// kStrips strips of all rows, kRows at a time. The last group overlaps the one before
// it, which recomputes equal results: single rows would wait for every sum.
template <Simd kSimd, int kRows, int kStrips, typename Element>
KVP_INLINE void strip_column(const StripProduct<Element>& x, const Strip* strips) {
  const bool joined = side_by_side<kStrips>(strips, lanes_of(kSimd));
  if (x.rows < kRows) {
    for (std::int64_t i = 0; i < x.rows; ++i) {
      strip_tile<kSimd, 1, kStrips>(x, i, strips, joined);
    }
    return;
  }
  for (std::int64_t i = 0; i < x.rows; i += kRows) {
    strip_tile<kSimd, kRows, kStrips>(x, std::min(i, x.rows - kRows), strips, joined);
  }
}

// All strips from `first` on, at most kStrips (a power of two) at a time.
template <Simd kSimd, int kRows, int kStrips, typename Element>
KVP_INLINE void strip_columns(const StripProduct<Element>& x, std::int64_t first = 0) {
  for (; first + kStrips <= x.num_strips; first += kStrips) {
    strip_column<kSimd, kRows, kStrips>(x, x.strips + first);
  }
  if constexpr (kStrips > 1) {
    strip_columns<kSimd, kRows, kStrips / 2>(x, first);
  }
}

// The largest tiles that fit into the registers.
template <Simd kSimd, typename Element>
KVP_INLINE void strip_body(const StripProduct<Element>& x) {
  strip_columns<kSimd, 4, kSimd >= Simd::kAvx512 ? 4 : 2>(x, 0);
}

}  // namespace kvp::svd
