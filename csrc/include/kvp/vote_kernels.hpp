// The exponentials of a vote: one softmax per query over the keys that were scored.
//
// Sums have eight parts in a fixed order, so AVX2 and AVX-512 give the same results.
// Without AVX2 they may differ in the last bit, because products are rounded.
#pragma once

#include <array>
#include <cstdint>

#include "kvp/exponential.hpp"
#include "kvp/simd.hpp"

namespace kvp::index {

// values[i] becomes exp(scale * (values[i] - peak)). Returns their sum.
template <int W>
KVP_INLINE float exponentials_body(float* values, std::int64_t n, float scale,
                                   float peak) {
  using F = typename Vec<W>::F;
  constexpr int kParts = 8;
  F sums[kParts / W] = {};
  std::int64_t i = 0;
  for (; i + kParts <= n; i += kParts) {
    for (int part = 0; part < kParts / W; ++part) {
      F v;
      load<W>(values + i + part * W, v);
      v = scale * (v - peak);
      exp_in_place<F, typename Vec<W>::U>(v);
      std::memcpy(values + i + part * W, &v, sizeof v);
      sums[part] += v;
    }
  }
  float parts[kParts];
  std::memcpy(parts, sums, sizeof parts);
  for (; i < n; ++i) {
    values[i] = exp_of_logit(scale * (values[i] - peak));
    parts[0] += values[i];
  }
  float sum = 0.0f;
  for (const float part : parts) sum += part;
  return sum;
}

struct VoteKernels {
  Simd simd;
  float (*exponentials)(float* values, std::int64_t n, float scale, float peak);
  static constexpr auto tables();
};

namespace voting {

#define KVP_VOTE_KERNELS(NAME, SIMD, TARGET)                                   \
  namespace NAME {                                                             \
  TARGET inline float exponentials(float* values, std::int64_t n, float scale, \
                                   float peak) {                               \
    return exponentials_body<lanes_of(SIMD)>(values, n, scale, peak);          \
  }                                                                            \
  inline constexpr VoteKernels table{SIMD, exponentials};                      \
  }

KVP_VOTE_KERNELS(baseline, Simd::kBaseline, KVP_TARGET_BASELINE)
#if defined(KVP_X86)
KVP_VOTE_KERNELS(avx2, Simd::kAvx2, KVP_TARGET_AVX2)
#endif

#undef KVP_VOTE_KERNELS

}  // namespace voting

inline constexpr auto VoteKernels::tables() {
#if defined(KVP_X86)
  return std::array{&voting::baseline::table, &voting::avx2::table};
#else
  return std::array{&voting::baseline::table};
#endif
}

}  // namespace kvp::index
