// The exponential that a softmax needs: of logits at or below their peak.
#pragma once

#include <cstdint>
#include <cstring>

#include "kvp/elements.hpp"
#include "kvp/simd.hpp"

namespace kvp::index {

inline std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// exp(x) for -60 <= x <= 0, with a relative error of at most 5e-6 (largest at -60). Below
// -60 it returns exp(-60), so that no vote is zero. NaN stays NaN.
// Without branches and calls, so that the compiler vectorizes it.
inline float exp_of_logit(float x) {
  constexpr float kLog2E = 1.44269504f, kMagic = 12582912.0f;  // 1.5 * 2^23
  const float t = (x < -60.0f ? -60.0f : x) * kLog2E;
  const float shifted = t + kMagic;  // rounds to the nearest integer
  const float whole = shifted - kMagic;
  const float f = t - whole;  // -0.5 to 0.5
  float p = 1.5403530e-4f;
  p = p * f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  return from_bits(bits_of(p) + (bits_of(shifted) << 23));
}

// The same for W logits, in place.
template <int W>
KVP_INLINE void exp_of_logits(typename Vec<W>::F& x) {
  using F = typename Vec<W>::F;
  using U = typename Vec<W>::U;
  constexpr float kLog2E = 1.44269504f, kMagic = 12582912.0f;
  const F least = F{} - 60.0f;
  const F t = (x < least ? least : x) * kLog2E;
  const F shifted = t + kMagic;
  const F f = t - (shifted - kMagic);
  F p = F{} + 1.5403530e-4f;
  p = p * f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  x = reinterpret_cast<F>(reinterpret_cast<U>(p) +
                          (reinterpret_cast<U>(shifted) << 23));
}

}  // namespace kvp::index
