// Rows of bfloat16 to float32 and back, a vector at a time.
//
// The bodies are inlined into functions that are compiled for one vector width
// (matrix_kernels.hpp). Intrinsics cannot be inlined that way, so this uses assembler.
#pragma once

#include <cstdint>
#include <cstring>

#include "kvp/elements.hpp"
#include "kvp/simd.hpp"

namespace kvp::svd {

// A vector of kBytes of T.
template <typename T, int kBytes>
struct Lanes {
  typedef T Type __attribute__((vector_size(kBytes)));
  static constexpr std::int64_t kCount = kBytes / static_cast<int>(sizeof(T));
};

template <Simd kSimd>
inline constexpr int kBytesOf = static_cast<int>(lanes_of(kSimd)) * 4;
template <Simd kSimd>
using Floats = typename Lanes<float, kBytesOf<kSimd>>::Type;
template <Simd kSimd>
using Words = typename Lanes<std::uint32_t, kBytesOf<kSimd>>::Type;
// As many numbers of half the size.
template <Simd kSimd>
using Halves = typename Lanes<std::uint16_t, kBytesOf<kSimd> / 2>::Type;

inline float narrow(float value, float*) { return value; }
inline BFloat16 narrow(float value, BFloat16*) {
  return {static_cast<std::uint16_t>(round_to_bfloat16(value))};
}

// Each number in the lower half of a word.
template <Simd kSimd>
KVP_INLINE void widen_lanes(const Halves<kSimd>& half, Words<kSimd>& words) {
#if defined(__x86_64__)
  if constexpr (kSimd >=
                Simd::kAvx512) {  // GCC 12 emits two conversions and an insertion
    asm("vpmovzxwd %1, %0" : "=v"(words) : "vm"(half));
    return;
  }
#endif
  words = __builtin_convertvector(half, Words<kSimd>);
}

// out[r][i] = in[r][i] * scales[r], or in[r][i] without scales; rows of `cols` numbers
// without gaps.
template <Simd kSimd>
KVP_INLINE void widen_body(const BFloat16* in, std::int64_t rows, std::int64_t cols,
                           const float* scales, float* out) {
  constexpr std::int64_t kLanes = lanes_of(kSimd);
  for (std::int64_t r = 0; r < rows; ++r, in += cols, out += cols) {
    const float scale = scales == nullptr ? 1.0f : scales[r];
    std::int64_t i = 0;
    for (; i + kLanes <= cols; i += kLanes) {
      Halves<kSimd> half;
      std::memcpy(&half, in + i, sizeof half);
      Words<kSimd> word;
      widen_lanes<kSimd>(half, word);
      word <<= 16;
      Floats<kSimd> value;
      std::memcpy(&value, &word, sizeof value);
      value *= scale;
      std::memcpy(out + i, &value, sizeof value);
    }
    for (; i < cols; ++i) out[i] = to_float(in[i]) * scale;
  }
}

// The nearest bfloat16 of each value, as round_to_bfloat16(), except that kAvx512Bf16
// flushes values below 2^-126 to zero. Floats stay unchanged.
template <Simd kSimd>
KVP_INLINE void narrow_lanes(const Floats<kSimd>& value, Halves<kSimd>& half) {
#if defined(__x86_64__)
  if constexpr (kSimd == Simd::kAvx512Bf16) {
    asm("vcvtneps2bf16 %1, %0" : "=v"(half) : "v"(value));
    return;
  }
#endif
  Words<kSimd> bits;
  std::memcpy(&bits, &value, sizeof bits);
  const auto rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const auto kept = value == value ? rounded : (bits >> 16 | 0x40u);
  half = __builtin_convertvector(kept, Halves<kSimd>);
}
template <Simd kSimd>
KVP_INLINE void narrow_lanes(const Floats<kSimd>& value, Floats<kSimd>& same) {
  same = value;
}

// Stores two vectors next to each other. Stores of whole cache lines are fastest.
template <Simd kSimd>
KVP_INLINE void store_two(const Floats<kSimd>& first, const Floats<kSimd>& second,
                          BFloat16* to) {
  Halves<kSimd> halves[2];
#if defined(__x86_64__)
  if constexpr (kSimd == Simd::kAvx512Bf16) {
    Words<kSimd> both;
    asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(both) : "v"(first), "v"(second));
    std::memcpy(to, &both, sizeof both);
    return;
  }
#endif
  narrow_lanes<kSimd>(first, halves[0]);
  narrow_lanes<kSimd>(second, halves[1]);
  std::memcpy(to, halves, sizeof halves);
}
template <Simd kSimd>
KVP_INLINE void store_two(const Floats<kSimd>& first, const Floats<kSimd>& second,
                          float* to) {
  std::memcpy(to, &first, sizeof first);
  std::memcpy(to + lanes_of(kSimd), &second, sizeof second);
}

}  // namespace kvp::svd
