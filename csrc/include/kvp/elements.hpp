// Element types of keys and values, their conversions to float32, and limits that
// kernels share.
#pragma once

#include <cstdint>
#include <cstring>

namespace kvp {

constexpr std::int64_t kMaxHeadDim = 512;

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
  // The exponent bias is 15 in float16 and 127 in float32. The product also normalizes
  // values that are subnormal in float16.
  const float magnitude = from_bits(rest) * 0x1p112f;
  std::uint32_t bits;
  std::memcpy(&bits, &magnitude, sizeof bits);
  const bool finite = (value.bits & 0x7c00u) != 0x7c00u;
  return from_bits(sign | (finite ? bits : rest | 0x7f800000u));
}

// The bits of the nearest bfloat16; ties go to the even one.
inline std::uint32_t round_to_bfloat16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (value != value) return bits >> 16 | 0x40u;
  return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

// out[i] = the bits of the nearest float32 or bfloat16, by their size.
inline void narrow_row(const float* values, std::int64_t n, std::uint32_t* out) {
  std::memcpy(out, values, static_cast<std::size_t>(n) * sizeof(float));
}

inline void narrow_row(const float* values, std::int64_t n, std::uint16_t* out) {
  for (std::int64_t i = 0; i < n; ++i) {
    out[i] = static_cast<std::uint16_t>(round_to_bfloat16(values[i]));
  }
}

}  // namespace kvp
