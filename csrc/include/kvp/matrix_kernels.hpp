// Products, eigenvectors and conversions that svd.hpp and low_rank.hpp call, compiled
// for every vector width (simd.hpp).
#pragma once

#include <array>

#include "kvp/convert_rows.hpp"
#include "kvp/elements.hpp"
#include "kvp/small_matrix.hpp"
#include "kvp/strip_product.hpp"
#include "kvp/symmetric.hpp"

namespace kvp::svd {

struct Kernels {
  Simd simd;
  static constexpr auto tables();

  void (*multiply_double)(const Product<double>&);
  bool (*decompose)(const Symmetric&);
  void (*restore)(const Symmetric&, double*, Index, Index, double*);
  void (*strips_float)(const StripProduct<float>&);
  void (*strips_half)(const StripProduct<BFloat16>&);
  void (*widen_half)(const BFloat16*, Index, Index, const float*, float*);

  // Columns of the widest strip.
  Index lanes() const { return lanes_of(simd); }

  void multiply(const Product<double>& x) const { multiply_double(x); }
  void multiply(const StripProduct<float>& x) const { strips_float(x); }
  void multiply(const StripProduct<BFloat16>& x) const { strips_half(x); }

  // out[r][i] = in[r][i] * scales[r]; without scales, in[r][i].
  void widen(const BFloat16* in, Index rows, Index cols, const float* scales,
             float* out) const {
    widen_half(in, rows, cols, scales, out);
  }
  void widen(const float* in, Index rows, Index cols, const float* scales,
             float* out) const {
    for (Index r = 0; r < rows; ++r, in += cols, out += cols) {
      const float scale = scales == nullptr ? 1.0f : scales[r];
      for (Index i = 0; i < cols; ++i) out[i] = in[i] * scale;
    }
  }
};

#define KVP_SMALL_KERNELS(NAME, SIMD, TARGET)                                       \
  namespace NAME {                                                                  \
  constexpr int kBytes = static_cast<int>(lanes_of(SIMD)) * 4;                      \
  TARGET inline void multiply_double(const Product<double>& x) {                    \
    multiply_body<double, kBytes>(x);                                               \
  }                                                                                 \
  TARGET inline bool decompose(const Symmetric& m) {                                \
    return decompose_body<kBytes>(m);                                               \
  }                                                                                 \
  TARGET inline void restore(const Symmetric& m, double* vectors, Index step,       \
                             Index cols, double* sums) {                            \
    restore_body<kBytes>(m, vectors, step, cols, sums);                             \
  }                                                                                 \
  TARGET inline void strips_float(const StripProduct<float>& x) {                   \
    strip_body<SIMD>(x);                                                            \
  }                                                                                 \
  TARGET inline void strips_half(const StripProduct<BFloat16>& x) {                 \
    strip_body<SIMD>(x);                                                            \
  }                                                                                 \
  TARGET inline void widen(const BFloat16* in, Index rows, Index cols,              \
                           const float* scales, float* out) {                       \
    widen_body<SIMD>(in, rows, cols, scales, out);                                  \
  }                                                                                 \
  inline constexpr Kernels table{SIMD,         multiply_double, decompose, restore, \
                                 strips_float, strips_half,     widen};             \
  }

KVP_SMALL_KERNELS(baseline, Simd::kBaseline, KVP_TARGET_BASELINE)
#if defined(KVP_X86)
KVP_SMALL_KERNELS(avx2, Simd::kAvx2, KVP_TARGET_AVX2)
KVP_SMALL_KERNELS(avx512, Simd::kAvx512, KVP_TARGET_AVX512)

// The kernels of avx512, except that sums become bfloat16 in one instruction.
namespace avx512bf16 {
KVP_TARGET_AVX512_BF16 inline void strips_half(const StripProduct<BFloat16>& x) {
  strip_body<Simd::kAvx512Bf16>(x);
}
inline constexpr Kernels with_strips(Kernels kernels) {
  kernels.simd = Simd::kAvx512Bf16;
  kernels.strips_half = strips_half;
  return kernels;
}
inline constexpr Kernels table = with_strips(avx512::table);
}  // namespace avx512bf16
#endif

#undef KVP_SMALL_KERNELS

inline constexpr auto Kernels::tables() {
#if defined(KVP_X86)
  return std::array{&baseline::table, &avx2::table, &avx512::table, &avx512bf16::table};
#else
  return std::array{&baseline::table};
#endif
}

}  // namespace kvp::svd
