// Divides keys into pages of sixteen similar ones.
//
// Halves a set of keys again and again, each time at the median along the direction in
// which the keys vary most, until sixteen are left. All pages are full, so a page is one
// block of codes. Pages whose keys are stored together are halved once more: eight keys are
// more alike than sixteen, and enough for a copy.
//
// Deterministic: the direction starts at the axis of largest variance, equal projections are
// ordered by row, and all versions of the kernels add eight sums in the same order, without
// fused multiply-adds.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "kvp/code_kernels.hpp"

#if defined(KVP_X86)
#define KVP_TARGET_AVX2_WITHOUT_FMA __attribute__((target("avx2")))
#endif

namespace kvp::index {

// Keys that are stored next to each other and copied at once: half a page.
constexpr std::int64_t kStoredKeys = 8;

// Some rows [..][dims] of a matrix; dims is a multiple of eight.
struct RowSet {
  const float* rows;
  const std::int32_t* order;  // [n], which rows
  std::int64_t n, dims;

  KVP_INLINE const float* row(std::int64_t i) const { return rows + order[i] * dims; }
};

constexpr int kDivideLanes = 8;

// sums[d] += row[d], squares[d] += row[d] ^ 2.
KVP_INLINE void moments_body(const RowSet& set, float* sums, float* squares) {
  Vec<kDivideLanes>::F x, sum, square;
  for (std::int64_t i = 0; i < set.n; ++i) {
    const float* row = set.row(i);
    for (std::int64_t d = 0; d < set.dims; d += kDivideLanes) {
      load<kDivideLanes>(row + d, x);
      load<kDivideLanes>(sums + d, sum);
      load<kDivideLanes>(squares + d, square);
      sum += x;
      square += x * x;
      std::memcpy(sums + d, &sum, sizeof sum);
      std::memcpy(squares + d, &square, sizeof square);
    }
  }
}

// out[i] = direction . row i.
KVP_INLINE void project_body(const RowSet& set, const float* direction, float* out) {
  Vec<kDivideLanes>::F x, along;
  for (std::int64_t i = 0; i < set.n; ++i) {
    const float* row = set.row(i);
    Vec<kDivideLanes>::F sum = {};
    for (std::int64_t d = 0; d < set.dims; d += kDivideLanes) {
      load<kDivideLanes>(row + d, x);
      load<kDivideLanes>(direction + d, along);
      sum += x * along;
    }
    out[i] = ((sum[0] + sum[4]) + (sum[1] + sum[5])) +
             ((sum[2] + sum[6]) + (sum[3] + sum[7]));
  }
}

// sums[d] += weights[i] * row i[d].
KVP_INLINE void accumulate_body(const RowSet& set, const float* weights, float* sums) {
  Vec<kDivideLanes>::F x, sum;
  for (std::int64_t i = 0; i < set.n; ++i) {
    const float* row = set.row(i);
    for (std::int64_t d = 0; d < set.dims; d += kDivideLanes) {
      load<kDivideLanes>(row + d, x);
      load<kDivideLanes>(sums + d, sum);
      sum += weights[i] * x;
      std::memcpy(sums + d, &sum, sizeof sum);
    }
  }
}

struct DivideKernels {
  Simd simd;
  void (*moments)(const RowSet&, float* sums, float* squares);
  void (*project)(const RowSet&, const float* direction, float* out);
  void (*accumulate)(const RowSet&, const float* weights, float* sums);
  static constexpr auto tables();
};

namespace dividing {

#define KVP_DIVIDE_KERNELS(NAME, SIMD, TARGET)                                        \
  namespace NAME {                                                                    \
  TARGET inline void moments(const RowSet& set, float* sums, float* squares) {        \
    moments_body(set, sums, squares);                                                 \
  }                                                                                   \
  TARGET inline void project(const RowSet& set, const float* direction, float* out) { \
    project_body(set, direction, out);                                                \
  }                                                                                   \
  TARGET inline void accumulate(const RowSet& set, const float* weights,              \
                                float* sums) {                                        \
    accumulate_body(set, weights, sums);                                              \
  }                                                                                   \
  inline constexpr DivideKernels table{SIMD, moments, project, accumulate};           \
  }

KVP_DIVIDE_KERNELS(baseline, Simd::kBaseline, KVP_TARGET_BASELINE)
#if defined(KVP_X86)
KVP_DIVIDE_KERNELS(avx2, Simd::kAvx2, KVP_TARGET_AVX2_WITHOUT_FMA)
#endif

#undef KVP_DIVIDE_KERNELS

}  // namespace dividing

inline constexpr auto DivideKernels::tables() {
#if defined(KVP_X86)
  return std::array{&dividing::baseline::table, &dividing::avx2::table};
#else
  return std::array{&dividing::baseline::table};
#endif
}

class PageDivider {
 public:
  explicit PageDivider(const DivideKernels& kernels = select_kernels<DivideKernels>())
      : kernels_(kernels) {}

  // Orders rows [n][dims] such that each run of sixteen is a page, and each run of `smallest`
  // rows is ascending and has similar keys. n is a multiple of sixteen, dims of eight.
  // order[i] is a row in [0, n).
  //
  // Args: smallest: 16, or 8 (kStoredKeys).
  //
  // Cost: about 5 * n * dims * log2(n / 16) multiply-adds.
  void divide(const float* rows, std::int64_t n, std::int64_t dims,
              std::vector<std::int32_t>& order, std::int64_t smallest = kCodeBlock) {
    smallest_ = smallest;
    rows_ = rows;
    dims_ = dims;
    order.resize(static_cast<std::size_t>(n));
    std::iota(order.begin(), order.end(), 0);
    along_.resize(order.size());
    ranked_.resize(order.size());
    upper_.resize(order.size());
    split(order.data(), n);
  }

 private:
  static constexpr int kIterations = 2;

  struct Projected {
    float value;
    std::int32_t row;
    bool operator<(const Projected& other) const {
      return value < other.value || (value == other.value && row < other.row);
    }
  };

  void split(std::int32_t* order, std::int64_t n) {
    if (n <= smallest_) return;
    const RowSet set{rows_, order, n, dims_};
    find_direction(set);
    kernels_.project(set, direction_.data(), along_.data());
    for (std::int64_t i = 0; i < n; ++i) {
      ranked_[static_cast<std::size_t>(i)] = {along_[static_cast<std::size_t>(i)],
                                              order[i]};
    }
    // Blocks of codes stay whole.
    const std::int64_t unit = n > kCodeBlock ? kCodeBlock : smallest_;
    const std::int64_t left = n / unit / 2 * unit;
    std::nth_element(ranked_.begin(), ranked_.begin() + left, ranked_.begin() + n);
    const Projected first_right = ranked_[static_cast<std::size_t>(left)];
    // Rows keep their order within each half.
    std::int64_t lower = 0, upper = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int32_t row = order[i];
      const bool is_left =
          Projected{along_[static_cast<std::size_t>(i)], row} < first_right;
      order[lower] = row;
      upper_[static_cast<std::size_t>(upper)] = row;
      lower += is_left;
      upper += !is_left;
    }
    std::copy_n(upper_.begin(), upper, order + left);
    split(order, left);
    split(order + left, n - left);
  }

  // A few power iterations of the covariance of the set.
  void find_direction(const RowSet& set) {
    const auto dims = static_cast<std::size_t>(dims_);
    mean_.assign(dims, 0.0f);
    next_.assign(dims, 0.0f);
    kernels_.moments(set, mean_.data(), next_.data());
    const float share = 1.0f / static_cast<float>(set.n);
    for (std::size_t d = 0; d < dims; ++d) {
      mean_[d] *= share;
      next_[d] = next_[d] * share - mean_[d] * mean_[d];
    }
    const auto widest = static_cast<std::size_t>(
        std::max_element(next_.begin(), next_.end()) - next_.begin());
    direction_.assign(dims, 0.0f);
    direction_[widest] = 1.0f;
    for (int iteration = 0; iteration < kIterations; ++iteration) {
      if (iteration == 0) {
        for (std::int64_t i = 0; i < set.n; ++i) {
          along_[static_cast<std::size_t>(i)] = set.row(i)[widest];
        }
      } else {
        kernels_.project(set, direction_.data(), along_.data());
      }
      // Weights add up to zero, so the mean need not be subtracted from the rows.
      float offset = 0.0f;
      for (std::size_t d = 0; d < dims; ++d) offset += direction_[d] * mean_[d];
      for (std::int64_t i = 0; i < set.n; ++i) {
        along_[static_cast<std::size_t>(i)] -= offset;
      }
      next_.assign(dims, 0.0f);
      kernels_.accumulate(set, along_.data(), next_.data());
      float square = 0.0f;
      for (const float x : next_) square += x * x;
      if (!(square > 0.0f && std::isfinite(square))) return;
      const float inverse = 1.0f / std::sqrt(square);
      for (std::size_t d = 0; d < dims; ++d) direction_[d] = next_[d] * inverse;
    }
  }

  const DivideKernels& kernels_;
  const float* rows_ = nullptr;
  std::int64_t dims_ = 0, smallest_ = kCodeBlock;
  std::vector<float> mean_, direction_, next_, along_;
  std::vector<Projected> ranked_;
  std::vector<std::int32_t> upper_;
};

}  // namespace kvp::index
