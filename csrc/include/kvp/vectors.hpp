// Vector widths that the CPU may have, and elements of keys as float32.
//
// One source serves all widths; which one runs is decided when the program runs.
#pragma once

#include <cstdint>
#include <cstring>

namespace kvp {

constexpr std::int64_t kMaxHeadDim = 512;
// Multiply-adds below which work is not split among threads: about a millisecond.
// On idle cores less would pay, but on busy ones every region may wait for a thread
// that is not scheduled, tens of milliseconds.
constexpr std::int64_t kParallelWork = 1 << 24;

#if defined(__GNUC__)
#define KVP_ALWAYS_INLINE inline __attribute__((always_inline))
#else
#define KVP_ALWAYS_INLINE inline
#endif

// kAvx512Bf16 multiplies pairs of bfloat16 and adds up float32: bfloat16 keys only.
enum class Simd { kBaseline, kAvx2, kAvx512, kAvx512Bf16 };

inline bool supported(Simd simd) {
#if defined(__x86_64__) && defined(__GNUC__)
  if (simd == Simd::kAvx2) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  }
  if (simd == Simd::kAvx512) return __builtin_cpu_supports("avx512f");
  if (simd == Simd::kAvx512Bf16) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bf16");
  }
#endif
  return simd == Simd::kBaseline;
}

// The widest vectors of float32.
inline Simd best_simd() {
  if (supported(Simd::kAvx512)) return Simd::kAvx512;
  return supported(Simd::kAvx2) ? Simd::kAvx2 : Simd::kBaseline;
}

// Floats in a vector; 4 is what every 64-bit target has (SSE2, NEON).
constexpr std::int64_t lanes_of(Simd simd) {
  return simd >= Simd::kAvx512 ? 16 : simd == Simd::kAvx2 ? 8 : 4;
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

// The nearest bfloat16, of two the even one, as its bits.
inline std::uint32_t round_to_bfloat16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (value != value) return bits >> 16 | 0x40u;
  return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

}  // namespace kvp
