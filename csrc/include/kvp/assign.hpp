// Which prototype is nearest to each key, and means over the clusters found.
//
// Semantics are those of vllm_kvplugins: prototypes.assign_to_prototypes and
// scoring.cluster_mean. Plain pointers, no allocation, all arguments trusted.
// Results do not depend on the number of threads: every key is worked on alone,
// and cluster sums are of integers.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace kvp {

// Keys that are scored together, so that a prototype read serves all of them.
constexpr std::int64_t kKeysAtOnce = 8;
constexpr std::int64_t kMaxHeadDim = 512;
// Multiply-adds below which a parallel region costs more than it saves.
constexpr std::int64_t kParallelWork = 1 << 18;

struct BFloat16 {
  std::uint16_t bits;
};

inline float to_float(float value) { return value; }

inline float to_float(BFloat16 value) {
  const std::uint32_t bits = static_cast<std::uint32_t>(value.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

// Dot product in eight partial sums, which the compiler can keep in one vector.
inline float dot(const float* left, const float* right, std::int64_t size) {
  float parts[8] = {};
  std::int64_t d = 0;
  for (; d + 8 <= size; d += 8) {
    for (int lane = 0; lane < 8; ++lane) {
      parts[lane] += left[d + lane] * right[d + lane];
    }
  }
  float sum = ((parts[0] + parts[4]) + (parts[1] + parts[5])) +
              ((parts[2] + parts[6]) + (parts[3] + parts[7]));
  for (; d < size; ++d) sum += left[d] * right[d];
  return sum;
}

// exists[p] = whether prototype p is not a row of zeros.
inline void find_prototypes(const float* prototypes, std::int64_t num_prototypes,
                            std::int64_t head_dim, bool* exists) {
  for (std::int64_t p = 0; p < num_prototypes; ++p) {
    const float* row = prototypes + p * head_dim;
    exists[p] = false;
    for (std::int64_t d = 0; d < head_dim; ++d) exists[p] |= row[d] != 0.0f;
  }
}

// clusters[t] = the existing prototype with the largest dot product with key t
// (of unit prototypes: the largest cosine); ties to the lower, 0 if none exist.
//
// One KV head. Keys lie key_stride elements apart, their elements side by side;
// prototypes are [num_prototypes, head_dim] without gaps. head_dim is at most
// kMaxHeadDim.
template <typename Element>
inline void assign_to_prototypes(const Element* keys, std::int64_t num_slots,
                                 std::int64_t key_stride,
                                 const float* prototypes, const bool* exists,
                                 std::int64_t num_prototypes,
                                 std::int64_t head_dim,
                                 std::int64_t* clusters) {
  const std::int64_t groups = (num_slots + kKeysAtOnce - 1) / kKeysAtOnce;
  [[maybe_unused]] const bool parallel =
      num_slots * num_prototypes * head_dim >= kParallelWork;
#pragma omp parallel for schedule(static) if (parallel)
  for (std::int64_t group = 0; group < groups; ++group) {
    const std::int64_t first = group * kKeysAtOnce;
    const std::int64_t left = num_slots - first;
    const std::int64_t count = left < kKeysAtOnce ? left : kKeysAtOnce;
    float wide[kKeysAtOnce * kMaxHeadDim];
    float best[kKeysAtOnce];
    for (std::int64_t i = 0; i < count; ++i) {
      const Element* key = keys + (first + i) * key_stride;
      for (std::int64_t d = 0; d < head_dim; ++d) {
        wide[i * head_dim + d] = to_float(key[d]);
      }
      best[i] = -std::numeric_limits<float>::infinity();
      clusters[first + i] = 0;
    }
    for (std::int64_t p = 0; p < num_prototypes; ++p) {
      if (!exists[p]) continue;
      for (std::int64_t i = 0; i < count; ++i) {
        const float similarity =
            dot(wide + i * head_dim, prototypes + p * head_dim, head_dim);
        if (similarity > best[i]) {
          best[i] = similarity;
          clusters[first + i] = p;
        }
      }
    }
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
  double peak = 0.0;
  for (std::int64_t t = 0; t < num_values; ++t) {
    peak = std::fmax(peak, std::fabs(static_cast<double>(values[t])));
  }
  int exponent = 0;
  std::frexp(peak, &exponent);
  int bits = 62;
  for (std::int64_t rest = num_values; rest > 0; rest >>= 1) --bits;
  const double unit = std::ldexp(1.0, exponent - bits);
  for (std::int64_t c = 0; c < num_clusters; ++c) sums[c] = sizes[c] = 0;
  for (std::int64_t t = 0; t < num_values; ++t) {
    // Ties to even, as torch.round does.
    sums[clusters[t]] +=
        static_cast<std::int64_t>(std::nearbyint(values[t] / unit));
    sizes[clusters[t]] += 1;
  }
  for (std::int64_t t = 0; t < num_values; ++t) {
    const std::int64_t c = clusters[t];
    means[t] = static_cast<float>(static_cast<double>(sums[c]) /
                                  static_cast<double>(sizes[c]) * unit);
  }
}

}  // namespace kvp
