// The best of many scores: a threshold, the scores that reach it, and their order.
//
// All versions return the same results, bit for bit: they compare, and add only integers.
// None is wider than AVX2: of sixteen lanes, g++ 12 makes scalar code.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "kvp/index_common.hpp"
#include "kvp/simd.hpp"

#if defined(KVP_X86)
#include <immintrin.h>
#endif

namespace kvp::index {

struct ScoreRange {
  float least, most;
};

// `collect` may read as many floats behind the last score of a row.
constexpr std::int64_t kPadding = 8;

// Arguments of RankKernels::collect.
struct CollectRun {
  const float* scores;  // [group][stride]
  std::int64_t stride, n, group;
  const float* thresholds;  // [group]
  std::int32_t* slots;  // room for n
  std::int64_t* counts;  // [group]
};

template <int W>
KVP_INLINE ScoreRange range_body(const float* scores, std::int64_t n) {
  using F = typename Vec<W>::F;
  float least = scores[0], most = scores[0];
  std::int64_t i = 0;
  if (n >= W) {
    F v, low, high;
    load<W>(scores, low);
    high = low;
    for (i = W; i + W <= n; i += W) {
      load<W>(scores + i, v);
      low = v < low ? v : low;
      high = v > high ? v : high;
    }
    for (int lane = 0; lane < W; ++lane) {
      least = low[lane] < least ? low[lane] : least;
      most = high[lane] > most ? high[lane] : most;
    }
  }
  for (; i < n; ++i) {
    least = scores[i] < least ? scores[i] : least;
    most = scores[i] > most ? scores[i] : most;
  }
  return {least, most};
}

// Number of scores that reach a threshold.
template <int W>
KVP_INLINE std::int64_t count_body(const float* scores, std::int64_t n,
                                   float threshold) {
  using I = typename Vec<W>::I;
  typename Vec<W>::F even, odd;
  I in_even = {}, in_odd = {};
  std::int64_t i = 0;
  for (; i + 2 * W <= n; i += 2 * W) {
    load<W>(scores + i, even);
    load<W>(scores + i + W, odd);
    in_even -= reinterpret_cast<I>(even >= threshold);
    in_odd -= reinterpret_cast<I>(odd >= threshold);
  }
  in_even += in_odd;
  std::int64_t count = 0;
  for (int lane = 0; lane < W; ++lane) count += in_even[lane];
  for (; i < n; ++i) count += scores[i] >= threshold;
  return count;
}

// ranks[i] = number of scores that come before scores[i]: larger ones, and equal ones with
// a smaller index. Cost: n * n comparisons, W at a time.
template <int W>
KVP_INLINE void rank_body(const float* scores, std::int64_t n, std::int32_t* ranks) {
  using F = typename Vec<W>::F;
  using I = typename Vec<W>::I;
  for (std::int64_t first = 0; first < n; first += W) {
    const std::int64_t left = n - first, own = left < W ? left : W;
    float padded[W] = {};
    std::memcpy(padded, scores + first, static_cast<std::size_t>(own) * sizeof(float));
    F mine;
    load<W>(padded, mine);
    I before = {}, lane;
    for (int i = 0; i < W; ++i) lane[i] = i;
    for (std::int64_t j = 0; j < first; ++j) {
      before -= reinterpret_cast<I>(scores[j] >= mine);
    }
    for (std::int64_t j = first; j < first + own; ++j) {
      const I earlier = static_cast<std::int32_t>(j - first) < lane;
      before -= reinterpret_cast<I>(scores[j] > mine) |
                (reinterpret_cast<I>(scores[j] == mine) & earlier);
    }
    for (std::int64_t j = first + own; j < n; ++j) {
      before -= reinterpret_cast<I>(scores[j] > mine);
    }
    std::memcpy(ranks + first, &before, static_cast<std::size_t>(own) * sizeof(*ranks));
  }
}

// Writes the slots, in order, whose score reaches the threshold of any query, and counts
// those of each query. Returns the number of slots.
inline std::int64_t collect_baseline(const CollectRun& run) {
  std::int64_t found = 0;
  for (std::int64_t g = 0; g < run.group; ++g) run.counts[g] = 0;
  for (std::int64_t i = 0; i < run.n; ++i) {
    bool any = false;
    for (std::int64_t g = 0; g < run.group; ++g) {
      const bool reaches = run.scores[g * run.stride + i] >= run.thresholds[g];
      run.counts[g] += reaches;
      any = any || reaches;
    }
    run.slots[found] = static_cast<std::int32_t>(i);
    found += any;
  }
  return found;
}

#if defined(KVP_X86)

KVP_TARGET_AVX2 inline std::int64_t collect_avx2(const CollectRun& run) {
  std::int64_t found = 0;
  for (std::int64_t g = 0; g < run.group; ++g) run.counts[g] = 0;
  for (std::int64_t i = 0; i < run.n; i += 8) {
    // Lanes behind the last key do not count.
    const std::int64_t left = run.n - i;
    const unsigned valid = left < 8 ? (1u << left) - 1u : 0xffu;
    unsigned any = 0;
    for (std::int64_t g = 0; g < run.group; ++g) {
      const __m256 scores = _mm256_loadu_ps(run.scores + g * run.stride + i);
      const __m256 threshold = _mm256_set1_ps(run.thresholds[g]);
      const unsigned mask = valid & static_cast<unsigned>(_mm256_movemask_ps(
                                        _mm256_cmp_ps(scores, threshold, _CMP_GE_OQ)));
      run.counts[g] += __builtin_popcount(mask);
      any |= mask;
    }
    for (; any != 0; any &= any - 1) {
      run.slots[found++] = static_cast<std::int32_t>(i) + __builtin_ctz(any);
    }
  }
  return found;
}

#endif  // KVP_X86

struct RankKernels {
  Simd simd;
  ScoreRange (*range)(const float* scores, std::int64_t n);  // n >= 1
  std::int64_t (*count)(const float* scores, std::int64_t n, float threshold);
  void (*rank)(const float* scores, std::int64_t n, std::int32_t* ranks);
  std::int64_t (*collect)(const CollectRun&);
  static constexpr auto tables();
};

namespace ranking {

#define KVP_RANK_KERNELS(NAME, SIMD, TARGET, COLLECT)                               \
  namespace NAME {                                                                  \
  TARGET inline ScoreRange range(const float* scores, std::int64_t n) {             \
    return range_body<lanes_of(SIMD)>(scores, n);                                   \
  }                                                                                 \
  TARGET inline std::int64_t count(const float* scores, std::int64_t n,             \
                                   float threshold) {                               \
    return count_body<lanes_of(SIMD)>(scores, n, threshold);                        \
  }                                                                                 \
  TARGET inline void rank(const float* scores, std::int64_t n, std::int32_t* out) { \
    rank_body<lanes_of(SIMD)>(scores, n, out);                                      \
  }                                                                                 \
  inline constexpr RankKernels table{SIMD, range, count, rank, COLLECT};            \
  }

KVP_RANK_KERNELS(baseline, Simd::kBaseline, KVP_TARGET_BASELINE, collect_baseline)
#if defined(KVP_X86)
KVP_RANK_KERNELS(avx2, Simd::kAvx2, KVP_TARGET_AVX2, collect_avx2)
#endif

#undef KVP_RANK_KERNELS

}  // namespace ranking

inline constexpr auto RankKernels::tables() {
#if defined(KVP_X86)
  return std::array{&ranking::baseline::table, &ranking::avx2::table};
#else
  return std::array{&ranking::baseline::table};
#endif
}

// A threshold that at least `rank` scores reach, and if scores differ, at most an eighth
// more. Bisects the range of the scores without branches that depend on single scores.
//
// Args: scores: [n + kPadding]; room: memory for n slots; narrowed: for the few scores that
// are left after some steps.
inline float threshold_of(const RankKernels& kernels, const float* scores,
                          std::int64_t n, std::int64_t rank, std::int32_t* room,
                          std::vector<float>& narrowed) {
  constexpr int kSteps = 24;
  constexpr std::int64_t kMany = 512;
  if (rank >= n) return -std::numeric_limits<float>::infinity();
  const ScoreRange range = kernels.range(scores, n);
  float low = range.least, high = range.most;
  if (kernels.count(scores, n, high) >= rank) return high;
  for (int step = 0; step < kSteps; ++step) {
    const float middle = 0.5f * low + 0.5f * high;
    std::int64_t count = kernels.count(scores, n, middle);
    if (count < rank) {
      high = middle;
      continue;
    }
    low = middle;
    if (count <= rank + rank / 8) break;
    if (n > kMany && count < n / 4) {
      // Scores below `low` do not matter any more.
      kernels.collect({scores, n, n, 1, &low, room, &count});
      float* left = at_least(narrowed, count + kPadding);
      for (std::int64_t i = 0; i < count; ++i) left[i] = scores[room[i]];
      scores = left;
      n = count;
    }
  }
  return low;
}

}  // namespace kvp::index
