// Conversions of elements to and from float32, on the device.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kvp/elements.hpp"

namespace kvp::cuda {

__device__ inline float element_to_float(float value) { return value; }

__device__ inline float element_to_float(BFloat16 value) {
  return __uint_as_float(static_cast<std::uint32_t>(value.bits) << 16);
}

// The same as to_float() in elements.hpp.
__device__ inline float element_to_float(Float16 value) {
  const std::uint32_t sign = (value.bits & 0x8000u) << 16;
  const std::uint32_t rest = (value.bits & 0x7fffu) << 13;
  const bool finite = (value.bits & 0x7c00u) != 0x7c00u;
  const std::uint32_t magnitude =
      finite ? __float_as_uint(__uint_as_float(rest) * 0x1p112f) : rest | 0x7f800000u;
  return __uint_as_float(sign | magnitude);
}

// Rounds to the nearest element; ties go to the even one.
__device__ inline void store_element(float value, float* to) { *to = value; }

__device__ inline void store_element(float value, BFloat16* to) {
  const std::uint32_t bits = __float_as_uint(value);
  const std::uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  to->bits = static_cast<std::uint16_t>(value == value ? rounded : bits >> 16 | 0x40u);
}

}  // namespace kvp::cuda
