// The keys that point away from their chunk (ProtoKV, equation 10), and sums of the other
// keys of each chunk (equation 11).
//
// scoring/prototypes.py (irregularity, find_irregular, regular_prototypes) defines the
// results. Plain pointers, no allocation; arguments are trusted. Results do not depend on
// the number of threads: every chunk is processed independently.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>

#include "kvp/elements.hpp"
#include "kvp/simd.hpp"

namespace kvp {

// Chunks of one KV head: key t of chunk c at keys + (c * length + t) * stride.
template <typename Element>
struct Chunks {
  const Element* keys;
  std::int64_t count;
  std::int64_t length;
  std::int64_t stride;
  std::int64_t head_dim;  // at most kMaxHeadDim
};

// wide[d] = key[d], padded with zeros to whole vectors.
template <int kLanes, typename Element>
KVP_INLINE void widen(const Element* key, std::int64_t size, float* wide) {
  for (std::int64_t d = 0; d < size; ++d) wide[d] = to_float(key[d]);
  for (std::int64_t d = size; d % kLanes != 0; ++d) wide[d] = 0.0f;
}

// Sum of the lanes of a vector in memory, by pairs: faster and more precise.
template <int kLanes>
KVP_INLINE float sum_lanes(const void* vector) {
  float parts[kLanes];
  std::memcpy(parts, vector, sizeof parts);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) parts[lane] += parts[lane + half];
  }
  return parts[0];
}

// Writes delta[t] of the keys of chunk c, and the sum of its keys. A key or mean of zeros
// has cosine 0. If all keys are equal, delta is 0. Must be inlined into a function that is
// compiled for vectors of kLanes floats. head_dim is that of `all`; the loops over it
// unroll if the caller passes a constant.
template <int kLanes, typename Element>
KVP_INLINE void chunk_deltas(const Chunks<Element>& all, const std::int64_t head_dim,
                             std::int64_t c, float* delta, float* sum) {
  typedef float Floats __attribute__((vector_size(kLanes * 4)));
  const std::int64_t vectors = (head_dim + kLanes - 1) / kLanes;
  const Element* first = all.keys + c * all.length * all.stride;
  const float length = static_cast<float>(all.length);
  Floats mean[kMaxHeadDim / kLanes], direction[kMaxHeadDim / kLanes];
  Floats key;
  float wide[kMaxHeadDim];
  for (std::int64_t v = 0; v < vectors; ++v) mean[v] = Floats{};
  for (std::int64_t t = 0; t < all.length; ++t) {
    widen<kLanes>(first + t * all.stride, head_dim, wide);
    for (std::int64_t v = 0; v < vectors; ++v) {
      std::memcpy(&key, wide + v * kLanes, sizeof key);
      mean[v] += key;
    }
  }
  std::memcpy(sum, mean, static_cast<std::size_t>(head_dim) * sizeof(float));
  Floats squares = {};
  for (std::int64_t v = 0; v < vectors; ++v) {
    mean[v] /= length;
    squares += mean[v] * mean[v];
  }
  const float mean_norm = std::sqrt(sum_lanes<kLanes>(&squares));
  for (std::int64_t v = 0; v < vectors; ++v) direction[v] = mean[v] / mean_norm;
  Floats offs = {};
  for (std::int64_t t = 0; t < all.length; ++t) {
    widen<kLanes>(first + t * all.stride, head_dim, wide);
    Floats apart = {};
    squares = Floats{};
    for (std::int64_t v = 0; v < vectors; ++v) {
      std::memcpy(&key, wide + v * kLanes, sizeof key);
      const Floats off = key - mean[v];
      offs += off * off;
      squares += key * key;
    }
    const float norm = std::sqrt(sum_lanes<kLanes>(&squares));
    const float per_norm = 1.0f / norm;
    // 1 - cos as half the squared distance of unit vectors, which keeps its digits if
    // they are nearly parallel.
    for (std::int64_t v = 0; v < vectors; ++v) {
      std::memcpy(&key, wide + v * kLanes, sizeof key);
      const Floats off = key * per_norm - direction[v];
      apart += off * off;
    }
    const bool directed = norm > 0.0f && mean_norm > 0.0f;
    delta[t] = directed ? sum_lanes<kLanes>(&apart) / 2 : 1.0f;
  }
  const float spread = std::sqrt(sum_lanes<kLanes>(&offs) / length);
  for (std::int64_t t = 0; t < all.length; ++t) {
    delta[t] = spread > 0.0f ? delta[t] / spread : 0.0f;
  }
}

// The common head sizes get loops of their own.
template <int kLanes, typename Element>
KVP_INLINE void chunk_deltas(const Chunks<Element>& all, std::int64_t c, float* delta,
                             float* sum) {
  if (all.head_dim == 64) {
    chunk_deltas<kLanes>(all, 64, c, delta, sum);
  } else if (all.head_dim == 128) {
    chunk_deltas<kLanes>(all, 128, c, delta, sum);
  } else {
    chunk_deltas<kLanes>(all, all.head_dim, c, delta, sum);
  }
}

template <typename Element>
void chunk_deltas_baseline(const Chunks<Element>& all, std::int64_t c, float* delta,
                           float* sum) {
  chunk_deltas<4>(all, c, delta, sum);
}

#if defined(KVP_X86)
template <typename Element>
KVP_TARGET_AVX2 void chunk_deltas_avx2(const Chunks<Element>& all, std::int64_t c,
                                       float* delta, float* sum) {
  chunk_deltas<8>(all, c, delta, sum);
}

template <typename Element>
KVP_TARGET_AVX512 void chunk_deltas_avx512(const Chunks<Element>& all, std::int64_t c,
                                           float* delta, float* sum) {
  chunk_deltas<16>(all, c, delta, sum);
}
#endif

// Writes delta[c * length + t] and sums[c * head_dim + d] for all chunks of a head. Inside
// a parallel region its threads share the chunks and do not wait for each other at the
// end. Outside one, the caller's thread processes all chunks.
template <typename Element>
void irregularity(Simd simd, const Chunks<Element>& all, float* delta, float* sums) {
  auto* deltas = chunk_deltas_baseline<Element>;
#if defined(KVP_X86)
  if (simd == Simd::kAvx2) deltas = chunk_deltas_avx2<Element>;
  if (simd == Simd::kAvx512) deltas = chunk_deltas_avx512<Element>;
#endif
#pragma omp for schedule(dynamic, 8) nowait
  for (std::int64_t c = 0; c < all.count; ++c) {
    deltas(all, c, delta + c * all.length, sums + c * all.head_dim);
  }
}

// Marks the `count` largest of n deltas and lists their slots in ascending order. Ties go
// to the lower slot. No delta may be NaN. `order` is scratch of n entries.
inline void find_irregular(const float* delta, std::int64_t n, std::int64_t count,
                           std::int64_t* order, bool* irregular, std::int64_t* slots) {
  std::iota(order, order + n, std::int64_t{0});
  const auto before = [delta](std::int64_t a, std::int64_t b) {
    return delta[a] > delta[b] || (delta[a] == delta[b] && a < b);
  };
  if (count < n) std::nth_element(order, order + count, order + n, before);
  std::fill(irregular, irregular + n, false);
  for (std::int64_t i = 0; i < count; ++i) irregular[order[i]] = true;
  std::copy(order, order + count, slots);
  std::sort(slots, slots + count);
}

// Removes the irregular keys from the sums that irregularity() wrote, by summing their
// chunks again.
template <typename Element>
void sum_regular(const Chunks<Element>& all, const bool* irregular, float* sums) {
  const std::int64_t size = all.head_dim;
  for (std::int64_t c = 0; c < all.count; ++c) {
    const bool* here = irregular + c * all.length;
    if (std::none_of(here, here + all.length, [](bool x) { return x; })) continue;
    float sum[kMaxHeadDim] = {};
    for (std::int64_t t = 0; t < all.length; ++t) {
      if (here[t]) continue;
      const Element* key = all.keys + (c * all.length + t) * all.stride;
      for (std::int64_t d = 0; d < size; ++d) sum[d] += to_float(key[d]);
    }
    std::copy(sum, sum + size, sums + c * size);
  }
}

}  // namespace kvp
