// Which prototype is nearest to each key, and means over the clusters found.
//
// Semantics are those of vllm_kvplugins/ops/torch_clusters.py. Plain pointers, no
// allocation, all arguments trusted. Results do not depend on the number of
// threads: every key is worked on alone, and cluster sums are of integers.
//
// The assignment is a matrix product whose result is never stored: prototypes
// are packed a vector side by side (a panel), a group of keys stays in registers
// against one panel, and only the best lane so far is kept. One source serves
// three vector widths; which one runs is decided when the program runs.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace kvp {

constexpr std::int64_t kMaxHeadDim = 512;
// Multiply-adds below which a parallel region costs more than it saves.
constexpr std::int64_t kParallelWork = 1 << 20;

enum class Simd { kBaseline, kAvx2, kAvx512 };

inline bool supported(Simd simd) {
#if defined(__x86_64__) && defined(__GNUC__)
  if (simd == Simd::kAvx2) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  }
  if (simd == Simd::kAvx512) return __builtin_cpu_supports("avx512f");
#endif
  return simd == Simd::kBaseline;
}

inline Simd best_simd() {
  if (supported(Simd::kAvx512)) return Simd::kAvx512;
  return supported(Simd::kAvx2) ? Simd::kAvx2 : Simd::kBaseline;
}

// Floats in a vector; 4 is what every 64-bit target has (SSE2, NEON).
constexpr std::int64_t lanes_of(Simd simd) {
  return simd == Simd::kAvx512 ? 16 : simd == Simd::kAvx2 ? 8 : 4;
}

struct BFloat16 {
  std::uint16_t bits;
};

struct Float16 {
  std::uint16_t bits;
};

inline float from_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float to_float(float value) { return value; }

inline float to_float(BFloat16 value) {
  return from_bits(static_cast<std::uint32_t>(value.bits) << 16);
}

inline float to_float(Float16 value) {
  const std::uint32_t sign = (value.bits & 0x8000u) << 16;
  const std::uint32_t rest = (value.bits & 0x7fffu) << 13;
  // Exponents are biased by 15 there and by 127 here; the product also
  // normalises what is subnormal there.
  const float magnitude = from_bits(rest) * 0x1p112f;
  std::uint32_t bits;
  std::memcpy(&bits, &magnitude, sizeof bits);
  const bool finite = (value.bits & 0x7c00u) != 0x7c00u;
  return from_bits(sign | (finite ? bits : rest | 0x7f800000u));
}

// Floats that pack_prototypes writes at most.
inline std::int64_t packed_size(Simd simd, std::int64_t num_prototypes,
                                std::int64_t head_dim) {
  const std::int64_t lanes = lanes_of(simd);
  return (num_prototypes + lanes - 1) / lanes * lanes * (head_dim + 1);
}

// Packs the prototypes that exist (are not a row of zeros) into panels.
//
//   panel: [1 + head_dim, lanes], first what lanes start from: 0, or -inf where
//          there is no prototype any more; then their elements
//   order: which prototype is packed where, ascending
//
// Returns how many exist.
inline std::int64_t pack_prototypes(Simd simd, const float* prototypes,
                                    std::int64_t num_prototypes,
                                    std::int64_t head_dim, float* panels,
                                    std::int64_t* order) {
  const std::int64_t lanes = lanes_of(simd);
  std::int64_t count = 0;
  for (std::int64_t p = 0; p < num_prototypes; ++p) {
    const float* row = prototypes + p * head_dim;
    bool exists = false;
    for (std::int64_t d = 0; d < head_dim; ++d) exists |= row[d] != 0.0f;
    if (!exists) continue;
    float* lane = panels + count / lanes * lanes * (head_dim + 1) + count % lanes;
    lane[0] = 0.0f;
    for (std::int64_t d = 0; d < head_dim; ++d) lane[(d + 1) * lanes] = row[d];
    order[count++] = p;
  }
  for (std::int64_t at = count; at % lanes != 0; ++at) {
    float* lane = panels + at / lanes * lanes * (head_dim + 1) + at % lanes;
    lane[0] = -std::numeric_limits<float>::infinity();
    for (std::int64_t d = 0; d < head_dim; ++d) lane[(d + 1) * lanes] = 0.0f;
  }
  return count;
}

// Keys of one KV head, and their packed prototypes.
template <typename Element>
struct Assignment {
  const Element* keys;  // slot t at keys + t * key_stride, elements side by side
  std::int64_t num_slots;
  std::int64_t key_stride;
  std::int64_t head_dim;  // at most kMaxHeadDim
  const float* panels;
  const std::int64_t* order;
  std::int64_t num_packed;
};

#if defined(__GNUC__)
#define KVP_ALWAYS_INLINE inline __attribute__((always_inline))
#else
#define KVP_ALWAYS_INLINE inline
#endif

// Assigns the keys [first, first + kKeys), as far as they exist. Must be inlined
// into a function that is compiled for vectors of kLanes floats.
template <int kLanes, int kKeys, typename Element>
KVP_ALWAYS_INLINE void assign_group(const Assignment<Element>& work,
                                    std::int64_t first, std::int64_t* clusters) {
  typedef float Floats __attribute__((vector_size(kLanes * 4)));
  typedef std::int32_t Ints __attribute__((vector_size(kLanes * 4)));
  const std::int64_t left = work.num_slots - first;
  const std::int64_t count = left < kKeys ? left : kKeys;
  // Rows a line apart from a power of two, which would share cache sets.
  constexpr std::int64_t kStride = kMaxHeadDim + 16;
  float wide[kKeys * kStride];
  for (std::int64_t i = 0; i < kKeys; ++i) {
    // A group that is not full repeats its last key.
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
    // The lower of equally good lanes wins, by halves and without branches.
    float most[kLanes];
    std::int32_t found[kLanes];
    std::memcpy(most, &best[i], sizeof most);
    std::memcpy(found, &at[i], sizeof found);
    for (int lane = 0; lane < kLanes; ++lane) {
      found[lane] = found[lane] * kLanes + lane;
    }
    for (int half = kLanes / 2; half > 0; half /= 2) {
      for (int lane = 0; lane < half; ++lane) {
        const float left = most[lane], right = most[lane + half];
        const std::int32_t low = found[lane], high = found[lane + half];
        const bool take = (right > left) | ((right == left) & (high < low));
        most[lane] = take ? right : left;
        found[lane] = take ? high : low;
      }
    }
    clusters[first + i] = work.num_packed > 0 ? work.order[found[0]] : 0;
  }
}

// Keys per group: as many sums as leave a few vector registers for the rest.
constexpr int keys_of(Simd simd) {
  return simd == Simd::kAvx512 ? 24 : simd == Simd::kAvx2 ? 12 : 8;
}

template <typename Element>
void assign_group_baseline(const Assignment<Element>& work, std::int64_t first,
                           std::int64_t* clusters) {
  assign_group<lanes_of(Simd::kBaseline), keys_of(Simd::kBaseline)>(work, first,
                                                                    clusters);
}

#if defined(__x86_64__) && defined(__GNUC__)
template <typename Element>
__attribute__((target("avx2,fma"))) void assign_group_avx2(
    const Assignment<Element>& work, std::int64_t first,
    std::int64_t* clusters) {
  assign_group<lanes_of(Simd::kAvx2), keys_of(Simd::kAvx2)>(work, first,
                                                            clusters);
}

template <typename Element>
__attribute__((target("avx512f"))) void assign_group_avx512(
    const Assignment<Element>& work, std::int64_t first,
    std::int64_t* clusters) {
  assign_group<lanes_of(Simd::kAvx512), keys_of(Simd::kAvx512)>(work, first,
                                                                clusters);
}
#endif

// clusters[t] = the existing prototype with the largest dot product with key t
// (of unit prototypes: the largest cosine); ties to the lower, 0 if none exist.
// The prototypes must have been packed for the same `simd`.
template <typename Element>
void assign_to_prototypes(Simd simd, const Assignment<Element>& work,
                          std::int64_t* clusters) {
  auto* assign = assign_group_baseline<Element>;
#if defined(__x86_64__) && defined(__GNUC__)
  if (simd == Simd::kAvx2) assign = assign_group_avx2<Element>;
  if (simd == Simd::kAvx512) assign = assign_group_avx512<Element>;
#endif
  const std::int64_t step = keys_of(simd);
  const std::int64_t groups = (work.num_slots + step - 1) / step;
  [[maybe_unused]] const bool parallel =
      work.num_slots * work.num_packed * work.head_dim >= kParallelWork;
#pragma omp parallel for schedule(static) if (parallel)
  for (std::int64_t group = 0; group < groups; ++group) {
    assign(work, group * step, clusters);
  }
}

// means[t] = mean of the values of t's cluster, for one row of values.
//
// Sums are of integers in units of a power of two such that num_values of the
// largest fit 62 bits: exact, in any order. sums and sizes are scratch of
// num_clusters entries each; means may be values.
inline void cluster_mean(const float* values, const std::int64_t* clusters,
                         std::int64_t num_values, std::int64_t num_clusters,
                         std::int64_t* sums, std::int64_t* sizes,
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
  for (std::int64_t t = 0; t < num_values; ++t) {
    const std::int64_t c = clusters[t];
    means[t] = static_cast<float>(static_cast<double>(sums[c]) /
                                  static_cast<double>(sizes[c]) * unit);
  }
}

}  // namespace kvp
