// Divides keys into pages of sixteen similar ones.
//
// Halves a set of keys again and again, each time at the median along the direction in
// which the keys vary most, until sixteen are left. All pages are full, so a page is one
// block of codes. Deterministic: the direction starts at the axis of largest variance, and
// equal projections are ordered by row.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "kvp/code_kernels.hpp"

namespace kvp::index {

class PageDivider {
 public:
  // Orders rows [n][dims] such that each run of sixteen is a page. n is a multiple of
  // sixteen. order[i] is a row in [0, n).
  //
  // Cost: about 6 * n * dims * log2(n / 16) multiply-adds.
  void divide(const float* rows, std::int64_t n, std::int64_t dims,
              std::vector<std::int32_t>& order) {
    rows_ = rows;
    dims_ = dims;
    order.resize(static_cast<std::size_t>(n));
    std::iota(order.begin(), order.end(), 0);
    split(order.data(), n);
  }

 private:
  static constexpr int kIterations = 2;

  struct Projected {
    float value;
    std::int32_t row;
  };

  const float* row(std::int32_t i) const { return rows_ + i * dims_; }

  void split(std::int32_t* order, std::int64_t n) {
    if (n <= kCodeBlock) return;
    find_direction(order, n);
    std::vector<Projected> along(static_cast<std::size_t>(n));
    for (std::int64_t i = 0; i < n; ++i) {
      along[static_cast<std::size_t>(i)] = {dot(row(order[i])), order[i]};
    }
    const std::int64_t blocks = n / kCodeBlock, left = blocks / 2 * kCodeBlock;
    std::nth_element(along.begin(), along.begin() + left, along.end(),
                     [](const Projected& a, const Projected& b) {
                       return a.value < b.value ||
                              (a.value == b.value && a.row < b.row);
                     });
    // Rows keep their order within each half, so that the result does not depend on how
    // nth_element arranges them.
    std::sort(along.begin(), along.begin() + left,
              [](const Projected& a, const Projected& b) { return a.row < b.row; });
    std::sort(along.begin() + left, along.end(),
              [](const Projected& a, const Projected& b) { return a.row < b.row; });
    for (std::int64_t i = 0; i < n; ++i)
      order[i] = along[static_cast<std::size_t>(i)].row;
    along = {};
    split(order, left);
    split(order + left, n - left);
  }

  // Mean of the set, and a few power iterations of its covariance.
  void find_direction(const std::int32_t* order, std::int64_t n) {
    const auto dims = static_cast<std::size_t>(dims_);
    mean_.assign(dims, 0.0f);
    direction_.assign(dims, 0.0f);
    next_.assign(dims, 0.0f);
    for (std::int64_t i = 0; i < n; ++i) {
      const float* key = row(order[i]);
      for (std::size_t d = 0; d < dims; ++d) mean_[d] += key[d];
    }
    for (float& x : mean_) x /= static_cast<float>(n);
    for (std::int64_t i = 0; i < n; ++i) {
      const float* key = row(order[i]);
      for (std::size_t d = 0; d < dims; ++d) {
        next_[d] += (key[d] - mean_[d]) * (key[d] - mean_[d]);
      }
    }
    const auto widest = std::max_element(next_.begin(), next_.end()) - next_.begin();
    direction_[static_cast<std::size_t>(widest)] = 1.0f;
    for (int iteration = 0; iteration < kIterations; ++iteration) {
      const float offset = dot(mean_.data());
      next_.assign(dims, 0.0f);
      for (std::int64_t i = 0; i < n; ++i) {
        const float* key = row(order[i]);
        const float weight = dot(key) - offset;
        for (std::size_t d = 0; d < dims; ++d) next_[d] += weight * (key[d] - mean_[d]);
      }
      float square = 0.0f;
      for (const float x : next_) square += x * x;
      if (!(square > 0.0f && std::isfinite(square))) return;
      const float inverse = 1.0f / std::sqrt(square);
      for (std::size_t d = 0; d < dims; ++d) direction_[d] = next_[d] * inverse;
    }
  }

  // Eight independent sums, in a fixed order.
  float dot(const float* key) const {
    float sums[8] = {};
    std::int64_t d = 0;
    for (; d + 8 <= dims_; d += 8) {
      for (int lane = 0; lane < 8; ++lane) {
        sums[lane] += direction_[static_cast<std::size_t>(d + lane)] * key[d + lane];
      }
    }
    for (; d < dims_; ++d) sums[0] += direction_[static_cast<std::size_t>(d)] * key[d];
    float sum = 0.0f;
    for (const float part : sums) sum += part;
    return sum;
  }

  const float* rows_ = nullptr;
  std::int64_t dims_ = 0;
  std::vector<float> mean_, direction_, next_;
};

}  // namespace kvp::index
