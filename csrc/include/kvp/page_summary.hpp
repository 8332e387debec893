// What a search knows of a page before it reads the page.
//
// A summary has the mean of the keys and their variance in each dimension, both as codes.
// It estimates the largest product of a query q with a key of the page:
//
//     q . mean + kDeviations * sqrt(sum of q[d]^2 * variance[d])
//
// The mean alone misses pages with one good key among others. The second term finds more in
// fewer pages (docs/research/key-index.md).
//
// Variances are of (key[d] - mean[d]) / width[d], with the widths of the space of keys, so
// that large keys do not overflow.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kvp/arena.hpp"
#include "kvp/code_kernels.hpp"
#include "kvp/index_common.hpp"
#include "kvp/key_codes.hpp"

namespace kvp::index {

// Arguments of SummaryKernels::estimate.
struct EstimateRun {
  float* scores;  // [n] of the means; become estimates
  const float* squares;  // [n] scores of the variances
  std::int64_t n;  // a multiple of kCodeBlock
  float step;  // of scores
  float square_step, square_offset;  // of squares
  float weight;  // of the spread
};

inline void estimate_baseline(const EstimateRun& run) {
  for (std::int64_t i = 0; i < run.n; ++i) {
    // Rounding can make a small variance negative.
    const float square = run.square_step * run.squares[i] + run.square_offset;
    const float spread = std::sqrt(square > 0.0f ? square : 0.0f);
    run.scores[i] = run.step * run.scores[i] + run.weight * spread;
  }
}

#if defined(KVP_X86)

// Without fused multiply-adds, so that it returns what the baseline returns.
KVP_TARGET_AVX2_WITHOUT_FMA inline void estimate_avx2(const EstimateRun& run) {
  const __m256 step = _mm256_set1_ps(run.step), zero = _mm256_setzero_ps();
  const __m256 square_step = _mm256_set1_ps(run.square_step);
  const __m256 square_offset = _mm256_set1_ps(run.square_offset);
  const __m256 weight = _mm256_set1_ps(run.weight);
  for (std::int64_t i = 0; i < run.n; i += 8) {
    const __m256 square = _mm256_add_ps(
        _mm256_mul_ps(square_step, _mm256_loadu_ps(run.squares + i)), square_offset);
    const __m256 spread = _mm256_sqrt_ps(_mm256_max_ps(square, zero));
    const __m256 mean = _mm256_mul_ps(step, _mm256_loadu_ps(run.scores + i));
    _mm256_storeu_ps(run.scores + i,
                     _mm256_add_ps(mean, _mm256_mul_ps(weight, spread)));
  }
}

#endif  // KVP_X86

struct SummaryKernels {
  Simd simd;
  void (*estimate)(const EstimateRun&);
  static constexpr auto tables();
};

namespace summarizing {
inline constexpr SummaryKernels baseline{Simd::kBaseline, estimate_baseline};
#if defined(KVP_X86)
inline constexpr SummaryKernels avx2{Simd::kAvx2, estimate_avx2};
#endif
}  // namespace summarizing

inline constexpr auto SummaryKernels::tables() {
#if defined(KVP_X86)
  return std::array{&summarizing::baseline, &summarizing::avx2};
#else
  return std::array{&summarizing::baseline};
#endif
}

// The spaces in which means and variances are coded.
struct SummarySpaces {
  const CodeSpace& keys;
  const CodeSpace& variances;
};

// Encodes what summaries need of queries [group][dims] that are encoded already.
inline void encode_squares(const SummarySpaces& spaces, const float* queries,
                           std::int64_t group, CodeScratch& scratch) {
  const std::int64_t dims = spaces.keys.dims();
  float* squared = at_least(scratch.squared, group * dims);
  for (std::int64_t g = 0; g < group; ++g) {
    const float step = scratch.queries.steps[static_cast<std::size_t>(g)];
    const float inverse = step > 0.0f ? 1.0f / step : 0.0f;
    for (std::int64_t d = 0; d < dims; ++d) {
      const float scaled = queries[g * dims + d] * spaces.keys.width(d) * inverse;
      squared[g * dims + d] = scaled * scaled;
    }
  }
  encode_queries(spaces.variances, squared, group, scratch.squares);
}

// Summaries of pages, or of groups of sixteen pages.
class PageSummaries {
 public:
  explicit PageSummaries(Arena& arena) : means_(arena), variances_(arena) {}

  std::int64_t size() const { return means_.size(); }
  std::int64_t blocks() const { return means_.blocks(); }

  // Summary `at`, at most size(), becomes these rows [dims].
  void put(const SummarySpaces& spaces, std::int64_t at, const float* mean,
           const float* variance) {
    means_.put(spaces.keys, at, mean);
    variances_.put(spaces.variances, at, variance);
  }

  // The mean and the variance of summary `at`, as their codes say.
  void get(const SummarySpaces& spaces, std::int64_t at, float* mean,
           float* variance) const {
    means_.decode(spaces.keys, at, mean);
    variances_.decode(spaces.variances, at, variance);
    for (std::int64_t d = 0; d < spaces.keys.dims(); ++d) {
      mean[d] += spaces.keys.center()[d];
      variance[d] = std::max(variance[d] + spaces.variances.center()[d], 0.0f);
    }
  }

  // scratch.scores [group][stride] = estimates of the summaries in the listed blocks, or in
  // all without a list.
  void score(const CodeKernels& code_kernels, const SummaryKernels& kernels,
             std::int64_t group, const std::int32_t* list, std::int64_t count,
             CodeScratch& scratch) const {
    const std::int64_t stride = scratch.stride = count * kCodeBlock;
    float* scores = at_least(scratch.scores, group * stride);
    float* squares = at_least(scratch.spreads, group * stride);
    const std::uint8_t** memory = at_least(scratch.memory, count);
    means_.point(list, count, memory);
    code_kernels.score(
        means_.run(scratch.queries, group, memory, count, scores, stride));
    variances_.point(list, count, memory);
    code_kernels.score(
        variances_.run(scratch.squares, group, memory, count, squares, stride));
    for (std::int64_t g = 0; g < group; ++g) {
      const auto at = static_cast<std::size_t>(g);
      kernels.estimate({scores + g * stride, squares + g * stride, stride,
                        scratch.queries.steps[at], scratch.squares.steps[at],
                        scratch.squares.offsets[at],
                        kDeviations * scratch.queries.steps[at]});
    }
  }

 private:
  static constexpr float kDeviations = 3.0f;

  KeyCodes means_, variances_;
};

// Mean and variance of the rows [n][dims] of a page.
inline void measure_page(const CodeSpace& space, const float* rows, std::int64_t n,
                         float* mean, float* variance) {
  constexpr float kMostDeviations = 1e6f;  // so that no square overflows
  const std::int64_t dims = space.dims();
  const float share = 1.0f / static_cast<float>(n);
  std::fill_n(mean, dims, 0.0f);
  std::fill_n(variance, dims, 0.0f);
  for (std::int64_t i = 0; i < n; ++i) {
    for (std::int64_t d = 0; d < dims; ++d) mean[d] += share * rows[i * dims + d];
  }
  for (std::int64_t i = 0; i < n; ++i) {
    for (std::int64_t d = 0; d < dims; ++d) {
      const float off = (rows[i * dims + d] - mean[d]) * space.inverse_widths()[d];
      const float bounded = std::min(std::fabs(off), kMostDeviations);
      variance[d] += share * (bounded * bounded);
    }
  }
}

}  // namespace kvp::index
