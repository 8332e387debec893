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

// x = exp(x) for -60 <= x <= 0, with a relative error of at most 5e-6 (largest at -60).
// Below -60 it becomes exp(-60), so that no vote is zero. NaN stays NaN.
//
// F: float, or a vector of floats; U: unsigned integers of the same shape.
template <typename F, typename U>
KVP_INLINE void exp_in_place(F& x) {
  constexpr float kLog2E = 1.44269504f, kMagic = 12582912.0f;  // 1.5 * 2^23
  const F least = F{} - 60.0f;
  const F t = (x < least ? least : x) * kLog2E;
  const F shifted = t + kMagic;  // rounds to the nearest integer
  const F f = t - (shifted - kMagic);  // -0.5 to 0.5
  F p = F{} + 1.5403530e-4f;
  p = p * f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  U bits, exponent;
  std::memcpy(&bits, &p, sizeof bits);
  std::memcpy(&exponent, &shifted, sizeof exponent);
  bits += exponent << 23;
  std::memcpy(&x, &bits, sizeof x);
}

// Without branches and calls, so that the compiler vectorizes loops over it.
KVP_INLINE float exp_of_logit(float x) {
  exp_in_place<float, std::uint32_t>(x);
  return x;
}

}  // namespace kvp::index
