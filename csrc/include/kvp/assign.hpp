// The nearest prototype of each key, and means over the clusters.
//
// vllm_kvplugins/ops/clusters.py (in_torch) defines the results. Plain pointers, no
// allocation; arguments are trusted. Results do not depend on the number of threads:
// every key is processed independently, and cluster sums are sums of integers.
//
// The assignment is a matrix product whose result is never stored. A panel holds one
// vector of prototypes. The sums of a group of keys with a panel stay in registers, and
// only the best lane so far is kept.
//
// If the CPU multiplies bfloat16 (kAvx512Bf16), bfloat16 keys are multiplied with
// prototypes rounded to bfloat16: one word holds a pair of elements, sums are float32.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "kvp/elements.hpp"
#include "kvp/simd.hpp"

#if defined(KVP_X86)
#include <immintrin.h>
#endif

namespace kvp {

// The level that runs for keys of type Element. Only bfloat16 keys have a version that
// multiplies pairs of bfloat16.
template <typename Element>
Simd assign_simd() {
  constexpr bool kPairs = std::is_same_v<Element, BFloat16>;
  return selected_simd(kPairs ? Simd::kAvx512Bf16 : Simd::kAvx512);
}

// Rows of a panel that hold elements: one per dimension, or one per pair.
constexpr std::int64_t rows_of(Simd simd, std::int64_t head_dim) {
  return simd == Simd::kAvx512Bf16 ? (head_dim + 1) / 2 : head_dim;
}

// Upper bound of the floats that pack_prototypes writes.
inline std::int64_t packed_size(Simd simd, std::int64_t num_prototypes,
                                std::int64_t head_dim) {
  const std::int64_t lanes = lanes_of(simd);
  return (num_prototypes + lanes - 1) / lanes * lanes * (rows_of(simd, head_dim) + 1);
}

// Row r of a panel for one prototype: an element, or a pair in one word.
inline float packed_element(Simd simd, const float* row, std::int64_t r,
                            std::int64_t head_dim) {
  if (simd != Simd::kAvx512Bf16) return row[r];
  const float odd = 2 * r + 1 < head_dim ? row[2 * r + 1] : 0.0f;
  return from_bits(round_to_bfloat16(odd) << 16 | round_to_bfloat16(row[2 * r]));
}

// Packs the prototypes that exist (are not a row of zeros) into panels.
//
//   panel: [1 + rows_of(head_dim), lanes]. Row 0 is the start of each lane's sum: 0, or
//          -inf for a lane without a prototype. The elements follow.
//   order: number of the prototype in each lane, ascending
//
// Returns the number of packed prototypes.
inline std::int64_t pack_prototypes(Simd simd, const float* prototypes,
                                    std::int64_t num_prototypes, std::int64_t head_dim,
                                    float* panels, std::int64_t* order) {
  const std::int64_t lanes = lanes_of(simd), rows = rows_of(simd, head_dim);
  std::int64_t count = 0;
  for (std::int64_t p = 0; p < num_prototypes; ++p) {
    const float* row = prototypes + p * head_dim;
    bool exists = false;
    for (std::int64_t d = 0; d < head_dim; ++d) exists |= row[d] != 0.0f;
    if (!exists) continue;
    float* lane = panels + count / lanes * lanes * (rows + 1) + count % lanes;
    lane[0] = 0.0f;
    for (std::int64_t r = 0; r < rows; ++r) {
      lane[(r + 1) * lanes] = packed_element(simd, row, r, head_dim);
    }
    order[count++] = p;
  }
  for (std::int64_t at = count; at % lanes != 0; ++at) {
    float* lane = panels + at / lanes * lanes * (rows + 1) + at % lanes;
    lane[0] = -std::numeric_limits<float>::infinity();
    for (std::int64_t r = 0; r < rows; ++r) lane[(r + 1) * lanes] = 0.0f;
  }
  return count;
}

// Keys of one KV head, and their packed prototypes.
template <typename Element>
struct Assignment {
  const Element* keys;  // slot t at keys + t * key_stride, elements contiguous
  std::int64_t num_slots;
  std::int64_t key_stride;
  std::int64_t head_dim;  // at most kMaxHeadDim
  const float* panels;
  const std::int64_t* order;
  std::int64_t num_packed;
};

// Assigns the keys of [first, first + kKeys) that exist. Must be inlined into a function
// that is compiled for vectors of kLanes floats.
template <int kLanes, int kKeys, typename Element>
KVP_INLINE void assign_group(const Assignment<Element>& work, std::int64_t first,
                             std::int64_t* clusters) {
  typedef float Floats __attribute__((vector_size(kLanes * 4)));
  typedef std::int32_t Ints __attribute__((vector_size(kLanes * 4)));
  const std::int64_t left = work.num_slots - first;
  const std::int64_t count = left < kKeys ? left : kKeys;
  // One cache line more than a power of two: otherwise rows would share cache sets.
  constexpr std::int64_t kStride = kMaxHeadDim + 16;
  float wide[kKeys * kStride];
  for (std::int64_t i = 0; i < kKeys; ++i) {
    // An incomplete group repeats its last key.
    const std::int64_t slot = first + (i < count ? i : count - 1);
    const Element* key = work.keys + slot * work.key_stride;
    for (std::int64_t d = 0; d < work.head_dim; ++d) {
      wide[i * kStride + d] = to_float(key[d]);
    }
  }
  Floats best[kKeys];
  Ints at[kKeys];
  for (int i = 0; i < kKeys; ++i) {
    best[i] = Floats{} - std::numeric_limits<float>::infinity();
    at[i] = Ints{};
  }
  const std::int64_t num_panels = (work.num_packed + kLanes - 1) / kLanes;
  const float* panel = work.panels;
  for (std::int64_t p = 0; p < num_panels; ++p) {
    Floats row, sums[kKeys];
    std::memcpy(&row, panel, sizeof row);
#pragma GCC unroll 32
    for (int i = 0; i < kKeys; ++i) sums[i] = row;
    for (std::int64_t d = 0; d < work.head_dim; ++d) {
      std::memcpy(&row, panel + (d + 1) * kLanes, sizeof row);
#pragma GCC unroll 32
      for (int i = 0; i < kKeys; ++i) sums[i] += row * wide[i * kStride + d];
    }
#pragma GCC unroll 32
    for (int i = 0; i < kKeys; ++i) {
      const Ints better = sums[i] > best[i];
      best[i] = better ? sums[i] : best[i];
      at[i] = better ? Ints{} + static_cast<std::int32_t>(p) : at[i];
    }
    panel += (work.head_dim + 1) * kLanes;
  }
  for (std::int64_t i = 0; i < count; ++i) {
    // The lower of equal lanes wins; a reduction by halves without branches.
    float largest[kLanes];
    std::int32_t reached[kLanes];
    std::memcpy(largest, &best[i], sizeof largest);
    std::memcpy(reached, &at[i], sizeof reached);
    for (int lane = 0; lane < kLanes; ++lane) {
      reached[lane] = reached[lane] * kLanes + lane;
    }
    for (int half = kLanes / 2; half > 0; half /= 2) {
      for (int lane = 0; lane < half; ++lane) {
        const float left = largest[lane], right = largest[lane + half];
        const std::int32_t low = reached[lane], high = reached[lane + half];
        const bool take = (right > left) | ((right == left) & (high < low));
        largest[lane] = take ? right : left;
        reached[lane] = take ? high : low;
      }
    }
    clusters[first + i] = work.num_packed > 0 ? work.order[reached[0]] : 0;
  }
}

// Keys per group: their sums leave a few vector registers for everything else.
constexpr int keys_of(Simd simd) {
  if (simd == Simd::kAvx512Bf16) return 8;  // times three panels
  return simd == Simd::kAvx512 ? 24 : simd == Simd::kAvx2 ? 12 : 8;
}

template <typename Element>
void assign_group_baseline(const Assignment<Element>& work, std::int64_t first,
                           std::int64_t* clusters) {
  assign_group<lanes_of(Simd::kBaseline), keys_of(Simd::kBaseline)>(work, first,
                                                                    clusters);
}

#if defined(KVP_X86)
template <typename Element>
KVP_TARGET_AVX2 void assign_group_avx2(const Assignment<Element>& work,
                                       std::int64_t first, std::int64_t* clusters) {
  assign_group<lanes_of(Simd::kAvx2), keys_of(Simd::kAvx2)>(work, first, clusters);
}

template <typename Element>
KVP_TARGET_AVX512 void assign_group_avx512(const Assignment<Element>& work,
                                           std::int64_t first, std::int64_t* clusters) {
  assign_group<lanes_of(Simd::kAvx512), keys_of(Simd::kAvx512)>(work, first, clusters);
}

// GCC warns about undefined vectors inside its own intrinsics (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

// A group of keys as pairs; per lane the largest sum and the panel that reached it.
struct Bf16Group {
  static constexpr int kKeys = keys_of(Simd::kAvx512Bf16);
  // One cache line more than a power of two: otherwise rows would share cache sets.
  static constexpr std::int64_t kStride = kMaxHeadDim / 2 + 16;
  std::int32_t pairs[kKeys * kStride];
  __m512 best[kKeys];
  __m512i at[kKeys];
};

// Compares a group with kPanels panels; `number` is that of the first.
template <int kPanels>
KVP_TARGET_AVX512_BF16 KVP_INLINE void compare_bf16(Bf16Group& group,
                                                    const float* panel,
                                                    std::int64_t rows,
                                                    std::int64_t number) {
  constexpr int kKeys = Bf16Group::kKeys;
  const std::int64_t size = (rows + 1) * lanes_of(Simd::kAvx512Bf16);
  __m512 sums[kPanels][kKeys];
#pragma GCC unroll 32
  for (int j = 0; j < kPanels; ++j) {
    const __m512 start = _mm512_loadu_ps(panel + j * size);
#pragma GCC unroll 32
    for (int i = 0; i < kKeys; ++i) sums[j][i] = start;
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    __m512bh row[kPanels];
#pragma GCC unroll 32
    for (int j = 0; j < kPanels; ++j) {
      row[j] = (__m512bh)_mm512_loadu_ps(panel + j * size + (r + 1) * 16);
    }
#pragma GCC unroll 32
    for (int i = 0; i < kKeys; ++i) {
      const auto key =
          (__m512bh)_mm512_set1_epi32(group.pairs[i * Bf16Group::kStride + r]);
#pragma GCC unroll 32
      for (int j = 0; j < kPanels; ++j) {
        sums[j][i] = _mm512_dpbf16_ps(sums[j][i], row[j], key);
      }
    }
  }
#pragma GCC unroll 32
  for (int i = 0; i < kKeys; ++i) {
    __m512 best = group.best[i];
    __m512i at = group.at[i];
#pragma GCC unroll 32
    for (int j = 0; j < kPanels; ++j) {
      const __mmask16 better = _mm512_cmp_ps_mask(sums[j][i], best, _CMP_GT_OQ);
      best = _mm512_mask_mov_ps(best, better, sums[j][i]);
      at = _mm512_mask_set1_epi32(at, better, static_cast<int>(number) + j);
    }
    group.best[i] = best;
    group.at[i] = at;
  }
}

// Like assign_group, for pairs of bfloat16. The instruction treats subnormal elements as
// zeros and adds the upper product of a pair first.
KVP_TARGET_AVX512_BF16 inline void assign_group_bf16(const Assignment<BFloat16>& work,
                                                     std::int64_t first,
                                                     std::int64_t* clusters) {
  constexpr int kKeys = Bf16Group::kKeys, kPanels = 3;
  constexpr std::int64_t kLanes = lanes_of(Simd::kAvx512Bf16);
  const std::int64_t left = work.num_slots - first;
  const std::int64_t count = left < kKeys ? left : kKeys;
  const std::int64_t rows = rows_of(Simd::kAvx512Bf16, work.head_dim);
  Bf16Group group;
  for (std::int64_t i = 0; i < kKeys; ++i) {
    // An incomplete group repeats its last key.
    const std::int64_t slot = first + (i < count ? i : count - 1);
    std::int32_t* pairs = group.pairs + i * Bf16Group::kStride;
    if (rows > 0) pairs[rows - 1] = 0;
    std::memcpy(pairs, work.keys + slot * work.key_stride,
                static_cast<std::size_t>(work.head_dim) * sizeof(BFloat16));
    group.best[i] = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    group.at[i] = _mm512_setzero_si512();
  }
  const std::int64_t num_panels = (work.num_packed + kLanes - 1) / kLanes;
  const std::int64_t size = (rows + 1) * kLanes;
  std::int64_t p = 0;
  for (; p + kPanels <= num_panels; p += kPanels) {
    compare_bf16<kPanels>(group, work.panels + p * size, rows, p);
  }
  for (; p < num_panels; ++p) {
    compare_bf16<1>(group, work.panels + p * size, rows, p);
  }
  const __m512i lane_numbers =
      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (std::int64_t i = 0; i < count; ++i) {
    // The lower of equal lanes wins.
    const __m512 largest = _mm512_set1_ps(_mm512_reduce_max_ps(group.best[i]));
    const __mmask16 good = _mm512_cmp_ps_mask(group.best[i], largest, _CMP_EQ_OQ);
    const __m512i reached =
        _mm512_add_epi32(_mm512_slli_epi32(group.at[i], 4), lane_numbers);
    const int lane = _mm512_mask_reduce_min_epi32(good, reached);
    clusters[first + i] = work.num_packed > 0 ? work.order[lane] : 0;
  }
}

#pragma GCC diagnostic pop
#endif

// clusters[t] = the prototype with the largest dot product with key t (for unit
// prototypes: the largest cosine), rows of zeros excluded. Ties go to the lower; 0 if all
// are zeros. The prototypes must be packed for the same `simd`.
//
// Inside a parallel region its threads share the keys and do not wait for each other at
// the end. Outside one, the caller's thread processes all keys.
template <typename Element>
void assign_to_prototypes(Simd simd, const Assignment<Element>& work,
                          std::int64_t* clusters) {
  auto* assign = assign_group_baseline<Element>;
#if defined(KVP_X86)
  if (simd == Simd::kAvx2) assign = assign_group_avx2<Element>;
  if (simd == Simd::kAvx512) assign = assign_group_avx512<Element>;
  if constexpr (std::is_same_v<Element, BFloat16>) {
    if (simd == Simd::kAvx512Bf16) assign = assign_group_bf16;
  }
#endif
  const std::int64_t step = keys_of(simd);
  const std::int64_t groups = (work.num_slots + step - 1) / step;
#pragma omp for schedule(dynamic, 8) nowait
  for (std::int64_t group = 0; group < groups; ++group) {
    assign(work, group * step, clusters);
  }
}

// means[t] = mean of the values of t's cluster, for one row of values.
//
// Sums are sums of integers, exact in any order. Their unit is a power of two such that
// num_values times the largest value fits into 62 bits. sums, sizes and of_cluster are
// scratch of num_clusters entries each. means may alias values.
inline void cluster_mean(const float* values, const std::int64_t* clusters,
                         std::int64_t num_values, std::int64_t num_clusters,
                         std::int64_t* sums, std::int64_t* sizes, float* of_cluster,
                         float* means) {
  float peak = 0.0f;
  for (std::int64_t t = 0; t < num_values; ++t) {
    const float size = std::fabs(values[t]);
    peak = size > peak ? size : peak;
  }
  int exponent = 0;
  std::frexp(static_cast<double>(peak), &exponent);
  int bits = 62;
  for (std::int64_t rest = num_values; rest > 0; rest >>= 1) --bits;
  const double unit = std::ldexp(1.0, exponent - bits);
  const double per_unit = 1.0 / unit;  // exact: a power of two
  for (std::int64_t c = 0; c < num_clusters; ++c) sums[c] = sizes[c] = 0;
  for (std::int64_t t = 0; t < num_values; ++t) {
    // Ties to even, as torch.round does.
    sums[clusters[t]] += std::llrint(static_cast<double>(values[t]) * per_unit);
    sizes[clusters[t]] += 1;
  }
  for (std::int64_t c = 0; c < num_clusters; ++c) {
    const auto size = static_cast<double>(sizes[c] > 0 ? sizes[c] : 1);
    of_cluster[c] = static_cast<float>(static_cast<double>(sums[c]) / size * unit);
  }
  for (std::int64_t t = 0; t < num_values; ++t) means[t] = of_cluster[clusters[t]];
}

}  // namespace kvp
