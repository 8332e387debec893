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

// out[r][i] = in[r][i] * scales[r], or in[r][i] without scales; rows of `cols` numbers
// without gaps.
template <int kBytes>
KVP_ALWAYS_INLINE void widen_body(const BFloat16* in, std::int64_t rows,
                                  std::int64_t cols, const float* scales, float* out) {
  using Floats = typename Lanes<float, kBytes>::Type;
  using Words = typename Lanes<std::uint32_t, kBytes>::Type;
  using Halves = typename Lanes<std::uint16_t, kBytes / 2>::Type;
  constexpr std::int64_t kLanes = Lanes<float, kBytes>::kCount;
  for (std::int64_t r = 0; r < rows; ++r, in += cols, out += cols) {
    const float scale = scales == nullptr ? 1.0f : scales[r];
    std::int64_t i = 0;
    for (; i + kLanes <= cols; i += kLanes) {
      Halves half;
      std::memcpy(&half, in + i, sizeof half);
      const Words word = __builtin_convertvector(half, Words) << 16;
      Floats value;
      std::memcpy(&value, &word, sizeof value);
      value *= scale;
      std::memcpy(out + i, &value, sizeof value);
    }
    for (; i < cols; ++i) out[i] = to_float(in[i]) * scale;
  }
}

// The nearest bfloat16 of each, as round_to_bfloat16(); or all as they are.
template <int kBytes>
KVP_ALWAYS_INLINE void narrow_lanes(
    const typename Lanes<float, kBytes>::Type& value,
    typename Lanes<std::uint16_t, kBytes / 2>::Type& half) {
  typename Lanes<std::uint32_t, kBytes>::Type bits;
  std::memcpy(&bits, &value, sizeof bits);
  const auto rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const auto kept = value == value ? rounded : (bits >> 16 | 0x40u);
  half = __builtin_convertvector(kept, typename Lanes<std::uint16_t, kBytes / 2>::Type);
}
template <int kBytes>
KVP_ALWAYS_INLINE void narrow_lanes(const typename Lanes<float, kBytes>::Type& value,
                                    typename Lanes<float, kBytes>::Type& same) {
  same = value;
}

}  // namespace kvp::svd
