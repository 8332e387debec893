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

// `collect` and `narrow` may read as many floats behind the last score of a row, and write as
// many entries behind the last result.
constexpr std::int64_t kPadding = 8;

// Arguments of RankKernels::collect.
struct CollectRun {
  const float* scores;  // [group][stride]
  std::int64_t stride, n, group;
  const float* thresholds;  // [group]
  std::int32_t* slots;  // room for n + kPadding
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

// Copies the scores that reach the threshold, in order, to `out`, which has room for them
// and kPadding more, and may be `scores`. Returns their number.
inline std::int64_t narrow_baseline(const float* scores, std::int64_t n,
                                    float threshold, float* out) {
  std::int64_t found = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const float score = scores[i];
    if (score >= threshold) out[found++] = score;
  }
  return found;
}

#if defined(KVP_X86)

// lanes[mask] lists the bits that are set in mask, from the lowest on.
struct SetBits {
  std::uint8_t lanes[256][8] = {};

  constexpr SetBits() {
    for (unsigned mask = 0; mask < 256; ++mask) {
      int found = 0;
      for (unsigned lane = 0; lane < 8; ++lane) {
        if (mask & (1u << lane)) lanes[mask][found++] = static_cast<std::uint8_t>(lane);
      }
    }
  }
};

alignas(64) inline constexpr SetBits kSetBits;

// The lanes of a mask, packed; what follows the last one has no meaning.
KVP_TARGET_AVX2 inline __m256i packed_lanes(unsigned mask) {
  const auto* lanes = reinterpret_cast<const __m128i*>(kSetBits.lanes[mask]);
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(lanes));
}

// Lanes of eight that are before the end, if `left` are.
inline unsigned lanes_before_end(std::int64_t left) {
  return left < 8 ? (1u << left) - 1u : 0xffu;
}

KVP_TARGET_AVX2 inline std::int64_t narrow_avx2(const float* scores, std::int64_t n,
                                                float threshold, float* out) {
  const __m256 least = _mm256_set1_ps(threshold);
  std::int64_t found = 0;
  for (std::int64_t i = 0; i < n; i += 8) {
    const __m256 eight = _mm256_loadu_ps(scores + i);
    const unsigned mask =
        lanes_before_end(n - i) & static_cast<unsigned>(_mm256_movemask_ps(
                                      _mm256_cmp_ps(eight, least, _CMP_GE_OQ)));
    _mm256_storeu_ps(out + found, _mm256_permutevar8x32_ps(eight, packed_lanes(mask)));
    found += __builtin_popcount(mask);
  }
  return found;
}

KVP_TARGET_AVX2 inline std::int64_t collect_avx2(const CollectRun& run) {
  std::int64_t found = 0;
  for (std::int64_t g = 0; g < run.group; ++g) run.counts[g] = 0;
  for (std::int64_t i = 0; i < run.n; i += 8) {
    const unsigned valid = lanes_before_end(run.n - i);
    unsigned any = 0;
    for (std::int64_t g = 0; g < run.group; ++g) {
      const __m256 scores = _mm256_loadu_ps(run.scores + g * run.stride + i);
      const __m256 threshold = _mm256_set1_ps(run.thresholds[g]);
      const unsigned mask = valid & static_cast<unsigned>(_mm256_movemask_ps(
                                        _mm256_cmp_ps(scores, threshold, _CMP_GE_OQ)));
      run.counts[g] += __builtin_popcount(mask);
      any |= mask;
    }
    const __m256i slots = _mm256_add_epi32(
        packed_lanes(any), _mm256_set1_epi32(static_cast<std::int32_t>(i)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(run.slots + found), slots);
    found += __builtin_popcount(any);
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
  std::int64_t (*narrow)(const float* scores, std::int64_t n, float threshold,
                         float* out);
  static constexpr auto tables();
};

namespace ranking {

#define KVP_RANK_KERNELS(NAME, SIMD, TARGET, COLLECT, NARROW)                       \
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
  inline constexpr RankKernels table{SIMD, range, count, rank, COLLECT, NARROW};    \
  }

KVP_RANK_KERNELS(baseline, Simd::kBaseline, KVP_TARGET_BASELINE, collect_baseline,
                 narrow_baseline)
#if defined(KVP_X86)
KVP_RANK_KERNELS(avx2, Simd::kAvx2, KVP_TARGET_AVX2, collect_avx2, narrow_avx2)
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
// Args: scores: [n + kPadding]; narrowed: for the few scores that are left after some steps.
inline float threshold_of(const RankKernels& kernels, const float* scores,
                          std::int64_t n, std::int64_t rank,
                          std::vector<float>& narrowed) {
  constexpr int kSteps = 24;
  constexpr std::int64_t kMany = 512;
  if (rank >= n) return -std::numeric_limits<float>::infinity();
  const ScoreRange range = kernels.range(scores, n);
  float low = range.least, high = range.most;
  if (kernels.count(scores, n, high) >= rank) return high;
  for (int step = 0; step < kSteps; ++step) {
    const float middle = 0.5f * low + 0.5f * high;
    const std::int64_t count = kernels.count(scores, n, middle);
    if (count < rank) {
      high = middle;
      continue;
    }
    low = middle;
    if (count <= rank + rank / 8) break;
    if (n > kMany && count < n / 4) {
      // Scores below `low` do not matter any more.
      float* left = at_least(narrowed, n + kPadding);
      n = kernels.narrow(scores, n, low, left);
      scores = left;
    }
  }
  return low;
}

}  // namespace kvp::index
