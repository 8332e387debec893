// Dot products of float32 and bfloat16 rows, and the kernels of the DCI tree.
//
// For one vector width every function adds the products of a row in the same order:
// equal rows get equal scores, bit for bit. bfloat16 elements are passed as their
// bits, std::uint16_t.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kvp/simd.hpp"

namespace kvp::index {

// Nodes in a panel: [dims][kPanel], so that one vector holds one dimension of
// several nodes. Panels come in pairs (kernels take two vectors at a time).
constexpr std::int64_t kPanel = 16;
constexpr std::int64_t kRowsAtOnce = 4;

// out[j] = query . rows[j] for four rows.
template <int W, typename Element>
KVP_INLINE void score_four(const float* query, std::int64_t dims,
                           const Element* const* rows, float* out) {
  using F = typename Vec<W>::F;
  F even[kRowsAtOnce] = {}, odd[kRowsAtOnce] = {};
  std::int64_t d = 0;
  F q, key;
  for (; d + 2 * W <= dims; d += 2 * W) {
    load<W>(query + d, q);
    for (int j = 0; j < kRowsAtOnce; ++j) {
      load<W>(rows[j] + d, key);
      even[j] += q * key;
    }
    load<W>(query + d + W, q);
    for (int j = 0; j < kRowsAtOnce; ++j) {
      load<W>(rows[j] + d + W, key);
      odd[j] += q * key;
    }
  }
  if (d + W <= dims) {
    load<W>(query + d, q);
    for (int j = 0; j < kRowsAtOnce; ++j) {
      load<W>(rows[j] + d, key);
      even[j] += q * key;
    }
    d += W;
  }
  if (d < dims) {
    // Padded with zeros to a whole vector: the compiler may use fused multiply-adds in one
    // inlined copy of a scalar loop and not in another.
    const auto rest = static_cast<std::size_t>(dims - d);
    float query_rest[W] = {};
    std::memcpy(query_rest, query + d, rest * sizeof(float));
    load<W>(query_rest, q);
    for (int j = 0; j < kRowsAtOnce; ++j) {
      Element row_rest[W] = {};
      std::memcpy(row_rest, rows[j] + d, rest * sizeof(Element));
      load<W>(row_rest, key);
      odd[j] += q * key;
    }
  }
  for (int j = 0; j < kRowsAtOnce; ++j) even[j] += odd[j];
  sum_lanes<W>(even, out);
}

// out[i] = query . (base + offsets[i]), or with base + i * stride if offsets is
// null. Listed rows may be anywhere, so they are prefetched.
template <int W, typename Element>
KVP_INLINE void score_rows_body(const float* query, std::int64_t dims,
                                const Element* base, const std::int64_t* offsets,
                                std::int64_t stride, std::int64_t n, float* out) {
  constexpr std::int64_t kAhead = 3 * kRowsAtOnce;
  constexpr std::int64_t kLine = 64 / sizeof(Element);
  for (std::int64_t i = 0; i < n; i += kRowsAtOnce) {
    const Element* rows[kRowsAtOnce];
    for (std::int64_t j = 0; j < kRowsAtOnce; ++j) {
      // The last group repeats its last row, so that every row takes the same path.
      const std::int64_t r = i + j < n ? i + j : n - 1;
      rows[j] = base + (offsets != nullptr ? offsets[r] : r * stride);
      if (offsets != nullptr && i + j + kAhead < n) {
        const Element* later = base + offsets[i + j + kAhead];
        for (std::int64_t d = 0; d < dims; d += kLine) {
          __builtin_prefetch(later + d);
        }
      }
    }
    float sums[kRowsAtOnce];
    score_four<W>(query, dims, rows, sums);
    for (std::int64_t j = 0; j < kRowsAtOnce && i + j < n; ++j) out[i + j] = sums[j];
  }
}

// For each of n rows: the node with the largest dot product, ties to the lower.
//
//   rows:   float32, row_stride elements apart
//   panels: [pairs of panels][dims][kPanel] as make_panels() writes them
//   bias:   [num_lanes], 0 for a node and -infinity for padding
//
// Four rows and two vectors of nodes share every load.
template <int W>
KVP_INLINE void nearest_body(const float* rows, std::int64_t row_stride, std::int64_t n,
                             std::int64_t dims, const float* panels, const float* bias,
                             std::int64_t num_lanes, std::int32_t* nearest) {
  using F = typename Vec<W>::F;
  using I = typename Vec<W>::I;
  I lane_numbers;
  for (int lane = 0; lane < W; ++lane) lane_numbers[lane] = lane;
  for (std::int64_t i = 0; i < n; i += kRowsAtOnce) {
    const float* row[kRowsAtOnce];
    F best[kRowsAtOnce];
    I where[kRowsAtOnce];
    for (int j = 0; j < kRowsAtOnce; ++j) {
      row[j] = rows + (i + j < n ? i + j : n - 1) * row_stride;
      best[j] = F{} - std::numeric_limits<float>::infinity();
      where[j] = I{};
    }
    for (std::int64_t lane = 0; lane < num_lanes; lane += 2 * W) {
      const std::int64_t next = lane + W;
      const float* left = panels + lane / kPanel * dims * kPanel + lane % kPanel;
      const float* right = panels + next / kPanel * dims * kPanel + next % kPanel;
      F sums[2][kRowsAtOnce], a, b;
      load<W>(bias + lane, a);
      load<W>(bias + next, b);
      for (int j = 0; j < kRowsAtOnce; ++j) sums[0][j] = a, sums[1][j] = b;
      for (std::int64_t d = 0; d < dims; ++d) {
        load<W>(left + d * kPanel, a);
        load<W>(right + d * kPanel, b);
        for (int j = 0; j < kRowsAtOnce; ++j) {
          sums[0][j] += a * row[j][d];
          sums[1][j] += b * row[j][d];
        }
      }
      for (int side = 0; side < 2; ++side) {
        const I numbers = lane_numbers + static_cast<std::int32_t>(lane + side * W);
        for (int j = 0; j < kRowsAtOnce; ++j) {
          const I better = sums[side][j] > best[j];
          best[j] = better ? sums[side][j] : best[j];
          where[j] = better ? numbers : where[j];
        }
      }
    }
    for (std::int64_t j = 0; j < kRowsAtOnce && i + j < n; ++j) {
      int first = 0;
      for (int lane = 1; lane < W; ++lane) {
        const float x = best[j][lane], y = best[j][first];
        if (x > y || (x == y && where[j][lane] < where[j][first])) first = lane;
      }
      nearest[i + j] = where[j][first];
    }
  }
}

// bounds[i] = min over composite indices of max over their simple indices of
// |raw + last * lift[i] - target|: prioritized DCI's lower bound on the distance
// (times c) from the query to child i.
//
//   raw: [composite * simple][stride]; last, targets: [composite * simple]
//
// Writes a multiple of W entries: up to stride, which is a multiple of kPanel.
template <int W>
KVP_INLINE void lower_bounds_body(const float* raw, std::int64_t stride,
                                  const float* lift, const float* last,
                                  const float* targets, std::int64_t composite,
                                  std::int64_t simple, std::int64_t n, float* bounds) {
  using F = typename Vec<W>::F;
  for (std::int64_t i = 0; i < n; i += W) {
    F lifts, value, least = F{} + std::numeric_limits<float>::infinity();
    load<W>(lift + i, lifts);
    for (std::int64_t c = 0; c < composite; ++c) {
      F largest = {};
      for (std::int64_t s = 0; s < simple; ++s) {
        const std::int64_t p = c * simple + s;
        load<W>(raw + p * stride + i, value);
        value += lifts * last[p] - targets[p];
        value = value < F{} ? -value : value;
        largest = value > largest ? value : largest;
      }
      least = largest < least ? largest : least;
    }
    std::memcpy(bounds + i, &least, sizeof least);
  }
}

struct Kernels {
  Simd simd;
  static constexpr auto tables();

  void (*score_f32)(const float*, std::int64_t, const float*, const std::int64_t*,
                    std::int64_t, std::int64_t, float*);
  void (*score_bf16)(const float*, std::int64_t, const std::uint16_t*,
                     const std::int64_t*, std::int64_t, std::int64_t, float*);
  void (*nearest)(const float*, std::int64_t, std::int64_t, std::int64_t, const float*,
                  const float*, std::int64_t, std::int32_t*);
  void (*lower_bounds)(const float*, std::int64_t, const float*, const float*,
                       const float*, std::int64_t, std::int64_t, std::int64_t, float*);

  void score(const float* query, std::int64_t dims, const float* base,
             const std::int64_t* offsets, std::int64_t stride, std::int64_t n,
             float* out) const {
    score_f32(query, dims, base, offsets, stride, n, out);
  }
  void score(const float* query, std::int64_t dims, const std::uint16_t* base,
             const std::int64_t* offsets, std::int64_t stride, std::int64_t n,
             float* out) const {
    score_bf16(query, dims, base, offsets, stride, n, out);
  }
};

// The four kernels for one width, compiled for TARGET.
#define KVP_KERNELS(NAME, SIMD, TARGET)                                               \
  namespace NAME {                                                                    \
  constexpr int kWidth = static_cast<int>(lanes_of(SIMD));                            \
  TARGET inline void score_f32(const float* q, std::int64_t dims, const float* base,  \
                               const std::int64_t* offsets, std::int64_t stride,      \
                               std::int64_t n, float* out) {                          \
    score_rows_body<kWidth>(q, dims, base, offsets, stride, n, out);                  \
  }                                                                                   \
  TARGET inline void score_bf16(const float* q, std::int64_t dims,                    \
                                const std::uint16_t* base,                            \
                                const std::int64_t* offsets, std::int64_t stride,     \
                                std::int64_t n, float* out) {                         \
    score_rows_body<kWidth>(q, dims, base, offsets, stride, n, out);                  \
  }                                                                                   \
  TARGET inline void nearest(const float* rows, std::int64_t stride, std::int64_t n,  \
                             std::int64_t dims, const float* panels,                  \
                             const float* bias, std::int64_t lanes,                   \
                             std::int32_t* out) {                                     \
    nearest_body<kWidth>(rows, stride, n, dims, panels, bias, lanes, out);            \
  }                                                                                   \
  TARGET inline void lower_bounds(const float* raw, std::int64_t stride,              \
                                  const float* lift, const float* last,               \
                                  const float* targets, std::int64_t composite,       \
                                  std::int64_t simple, std::int64_t n,                \
                                  float* bounds) {                                    \
    lower_bounds_body<kWidth>(raw, stride, lift, last, targets, composite, simple, n, \
                              bounds);                                                \
  }                                                                                   \
  inline constexpr Kernels table{SIMD, score_f32, score_bf16, nearest, lower_bounds}; \
  }

KVP_KERNELS(baseline, Simd::kBaseline, KVP_TARGET_BASELINE)
#if defined(KVP_X86)
KVP_KERNELS(avx2, Simd::kAvx2, KVP_TARGET_AVX2)
KVP_KERNELS(avx512, Simd::kAvx512, KVP_TARGET_AVX512)
#endif

#undef KVP_KERNELS

inline constexpr auto Kernels::tables() {
#if defined(KVP_X86)
  return std::array{&baseline::table, &avx2::table, &avx512::table};
#else
  return std::array{&baseline::table};
#endif
}

}  // namespace kvp::index
