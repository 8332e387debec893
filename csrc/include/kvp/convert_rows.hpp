// Rows of bfloat16 to float32 and back, a vector at a time.
//
// Bodies to be inlined into functions that are compiled for a CPU (small_matrix.hpp).
#pragma once

#include <cstdint>
#include <cstring>

#include "kvp/vectors.hpp"

namespace kvp::svd {

// T numbers in kBytes of vector.
template <typename T, int kBytes>
struct Lanes {
  typedef T Type __attribute__((vector_size(kBytes)));
  static constexpr std::int64_t kCount = kBytes / static_cast<int>(sizeof(T));
};

inline float narrow(float value, float*) { return value; }
inline BFloat16 narrow(float value, BFloat16*) {
  return {static_cast<std::uint16_t>(round_to_bfloat16(value))};
}

// out[i] = in[i] * scale.
template <int kBytes>
KVP_ALWAYS_INLINE void widen_body(const BFloat16* in, std::int64_t n, float scale,
                                  float* out) {
  using Floats = typename Lanes<float, kBytes>::Type;
  using Words = typename Lanes<std::uint32_t, kBytes>::Type;
  using Halves = typename Lanes<std::uint16_t, kBytes / 2>::Type;
  constexpr std::int64_t kLanes = Lanes<float, kBytes>::kCount;
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Halves half;
    std::memcpy(&half, in + i, sizeof half);
    const Words word = __builtin_convertvector(half, Words) << 16;
    Floats value;
    std::memcpy(&value, &word, sizeof value);
    value *= scale;
    std::memcpy(out + i, &value, sizeof value);
  }
  for (; i < n; ++i) out[i] = to_float(in[i]) * scale;
}

// out[i] = the nearest bfloat16, as round_to_bfloat16().
template <int kBytes>
KVP_ALWAYS_INLINE void narrow_body(const float* in, std::int64_t n, BFloat16* out) {
  using Floats = typename Lanes<float, kBytes>::Type;
  using Words = typename Lanes<std::uint32_t, kBytes>::Type;
  using Halves = typename Lanes<std::uint16_t, kBytes / 2>::Type;
  constexpr std::int64_t kLanes = Lanes<float, kBytes>::kCount;
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Floats value;
    Words bits;
    std::memcpy(&value, in + i, sizeof value);
    std::memcpy(&bits, in + i, sizeof bits);
    const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const Words kept = value == value ? rounded : (bits >> 16 | 0x40u);
    const Halves half = __builtin_convertvector(kept, Halves);
    std::memcpy(out + i, &half, sizeof half);
  }
  for (; i < n; ++i) out[i] = narrow(in[i], out);
}

}  // namespace kvp::svd
