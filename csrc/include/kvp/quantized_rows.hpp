// Rows of keys or values in host memory, quantized to 8 or 4 bits per element, or as an
// fp8 cache has them.
//
// A row is divided into groups of consecutive channels (64 of 8 bits, 32 of 4 bits; the
// last group may be smaller). Each group has a step and a smallest multiple:
//
//     element = (code + zero) * step        code in [0, 2^bits)
//
//     row     [ codes of group 0 | codes of group 1 | ... | step, zero of each group ]
//     step    bfloat16, rounded up; 0 if all elements of the group are 0
//     zero    int16
//     8 bits  one byte per code
//     4 bits  byte i of a group of m has code i (low half) and code i + (m + 1) / 2
//
// All multiples of a step are on one grid through 0, so that zero is an integer and an
// element takes one rounding, which is the same for every vector width. The error of an
// element is at most half a step: (largest - smallest) / (2 * (2^bits - 1)), or 1/65534
// of the largest magnitude if that is more, and 1/128 of it for the rounding of the step.
// A group with an element that is not finite, or beyond 1e37, becomes NaN.
//
// A row of fp8 elements (e4m3 or e5m2) has one byte per element and no scale: an fp8 cache
// has one scale per layer, which its readers apply.
//
// ops/quantized_rows.py has the same in torch, bit for bit.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kvp/elements.hpp"
#include "kvp/simd.hpp"

namespace kvp {

constexpr std::int64_t kMaxGroup = 64;
constexpr float kMaxQuantized = 1e37f;
constexpr float kMaxMultiple = 32767.0f;

enum class Fp8 { kNone, kE4m3, kE5m2 };

// The format of a row.
struct QuantizedFormat {
  std::int64_t head_dim = 0;
  int bits = 8;  // or 4
  Fp8 fp8 = Fp8::kNone;

  constexpr std::int64_t group() const { return bits == 8 ? 64 : 32; }
  constexpr std::int64_t groups() const { return (head_dim + group() - 1) / group(); }
  constexpr std::int64_t code_bytes(std::int64_t elements) const {
    return bits == 8 ? elements : (elements + 1) / 2;
  }
  // Codes before the first step. Full groups have no unused bits.
  constexpr std::int64_t all_code_bytes() const { return code_bytes(head_dim); }
  constexpr std::int64_t row_bytes() const {
    return fp8 != Fp8::kNone ? head_dim : all_code_bytes() + 4 * groups();
  }
};

struct GroupScale {
  std::uint16_t step;  // bfloat16
  std::int16_t zero;
};

// The smallest bfloat16 that is not below a positive value; 0 for values that a
// processor may flush to zero.
inline std::uint16_t round_up_to_bfloat16(float value) {
  if (value < std::numeric_limits<float>::min()) return 0;
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<std::uint16_t>((bits + 0xffffu) >> 16);
}

// Rounds to the nearest integer, ties to even, for |value| < 2^22. Also without SSE4.1.
template <typename Float>
KVP_INLINE void round_to_integer(Float& value) {
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23
  value += kShift;
  value -= kShift;
}

// Quantizes `count` values, a multiple of W, of which the last repeat the others.
template <int W>
KVP_INLINE GroupScale quantize_group(const float* values, std::int64_t count,
                                     int levels, std::uint8_t* codes) {
  using F = typename Vec<W>::F;
  using I = typename Vec<W>::I;
  F low, high, x;
  load<W>(values, low);
  high = low;
  I usable = low <= kMaxQuantized;
  for (std::int64_t i = 0; i < count; i += W) {
    load<W>(values + i, x);
    usable &= (x <= kMaxQuantized) & (x >= -kMaxQuantized);  // false for NaN
    low = x < low ? x : low;
    high = x > high ? x : high;
  }
  float least = low[0], most = high[0];
  bool all_usable = true;
  for (int lane = 0; lane < W; ++lane) {
    least = std::min(least, low[lane]);
    most = std::max(most, high[lane]);
    all_usable = all_usable && usable[lane] != 0;
  }
  if (!all_usable) {
    std::memset(codes, 0, static_cast<std::size_t>(count));
    return {0x7fc0, 0};
  }
  const float by_range = (most - least) / static_cast<float>(levels);
  const float by_size = std::max(-least, most) / kMaxMultiple;
  const GroupScale found{round_up_to_bfloat16(std::max(by_range, by_size)), 0};
  if (found.step == 0) {
    std::memset(codes, 0, static_cast<std::size_t>(count));
    return found;
  }
  const float step = widen(found.step);
  float zero = least / step;
  round_to_integer(zero);
  for (std::int64_t i = 0; i < count; i += W) {
    load<W>(values + i, x);
    x /= step;
    round_to_integer(x);
    const I code = __builtin_convertvector(x - zero, I);
    for (int lane = 0; lane < W; ++lane) {
      codes[i + lane] = static_cast<std::uint8_t>(std::min(code[lane], levels));
    }
  }
  return {found.step, static_cast<std::int16_t>(zero)};
}

// row = the quantized values [head_dim].
template <int W>
KVP_INLINE void quantize_row_body(const QuantizedFormat& format, const float* values,
                                  std::uint8_t* row) {
  const int levels = (1 << format.bits) - 1;
  std::uint8_t* scales = row + format.all_code_bytes();
  for (std::int64_t first = 0; first < format.head_dim; first += format.group()) {
    const std::int64_t size = std::min(format.group(), format.head_dim - first);
    float padded[kMaxGroup];
    std::uint8_t codes[kMaxGroup];
    std::copy_n(values + first, size, padded);
    std::fill(padded + size, padded + format.group(), values[first]);
    const GroupScale scale = quantize_group<W>(padded, format.group(), levels, codes);
    const std::int64_t bytes = format.code_bytes(size);
    if (format.bits == 8) {
      std::memcpy(row, codes, static_cast<std::size_t>(bytes));
    } else {
      if (size % 2 != 0) codes[size] = 0;
      for (std::int64_t i = 0; i < bytes; ++i) {
        row[i] = static_cast<std::uint8_t>(codes[i] | codes[bytes + i] << 4);
      }
    }
    row += bytes;
    std::memcpy(scales, &scale, sizeof scale);
    scales += sizeof scale;
  }
}

// W unsigned bytes as integers.
template <int W>
KVP_INLINE void load_bytes(const std::uint8_t* from, typename Vec<W>::I& to) {
#if defined(KVP_X86)
  if constexpr (W >= 8) {  // GCC 12 emits many conversions and insertions
    using Bytes = const std::uint8_t[W];
    asm("vpmovzxbd %1, %0" : "=v"(to) : "m"(*reinterpret_cast<Bytes*>(from)));
    return;
  }
#endif
  typedef std::uint8_t Bytes __attribute__((vector_size(W)));
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  to = __builtin_convertvector(bytes, typename Vec<W>::I);
}

// out[i] = (code + zero) * step: one rounding.
template <int W>
KVP_INLINE void store_elements(const typename Vec<W>::I& code, std::int32_t zero,
                               float step, float* out) {
  const auto value = __builtin_convertvector(code + zero, typename Vec<W>::F) * step;
  std::memcpy(out, &value, sizeof value);
}

// out[0 .. format.group()) = a whole group.
template <int W>
KVP_INLINE void dequantize_group(int bits, const std::uint8_t* codes,
                                 const std::uint8_t* scales, float* out) {
  GroupScale scale;
  std::memcpy(&scale, scales, sizeof scale);
  const float step = widen(scale.step);
  typename Vec<W>::I code;
  if (bits == 8) {
    for (std::int64_t i = 0; i < 64; i += W) {
      load_bytes<W>(codes + i, code);
      store_elements<W>(code, scale.zero, step, out + i);
    }
    return;
  }
  for (std::int64_t i = 0; i < 16; i += W) {
    load_bytes<W>(codes + i, code);
    store_elements<W>(code & 15, scale.zero, step, out + i);
    store_elements<W>(code >> 4, scale.zero, step, out + 16 + i);
  }
}

// out [head_dim] = the values of a row.
template <int W>
KVP_INLINE void dequantize_row_body(const QuantizedFormat& format,
                                    const std::uint8_t* row, float* out) {
  const std::uint8_t* scales = row + format.all_code_bytes();
  std::int64_t left = format.head_dim;
  const std::int64_t group = format.group(), bytes = format.code_bytes(group);
  for (; left >= group; left -= group) {
    dequantize_group<W>(format.bits, row, scales, out);
    row += bytes, scales += sizeof(GroupScale), out += group;
  }
  if (left == 0) return;
  // A smaller group, copied to where the codes of a whole group would be.
  std::uint8_t codes[kMaxGroup] = {};
  float values[kMaxGroup];
  std::memcpy(codes, row, static_cast<std::size_t>(format.code_bytes(left)));
  dequantize_group<W>(format.bits, codes, scales, values);
  const std::int64_t half = format.bits == 8 ? left : format.code_bytes(left);
  std::copy_n(values, std::min(half, left), out);
  if (half < left) std::copy_n(values + 16, left - half, out + half);
}

// out = the values of W fp8 elements: exact, whether or not subnormals are flushed.
//
//            sign | exponent (bias) | mantissa    largest exponent
//   e4m3     1    | 4 (7)           | 3           NaN if the mantissa is full
//   e5m2     1    | 5 (15)          | 2           infinity or NaN
template <int W>
KVP_INLINE void widen_fp8(Fp8 type, const std::uint8_t* from, float* out) {
  using I = typename Vec<W>::I;
  using F = typename Vec<W>::F;
  I code;
  load_bytes<W>(from, code);
  const bool e4m3 = type == Fp8::kE4m3;
  const int mantissa = e4m3 ? 3 : 2, bias = e4m3 ? 7 : 15;
  const I magnitude = code & 0x7f;
  const I normal = (magnitude << (23 - mantissa)) + ((127 - bias) << 23);
  const F small = __builtin_convertvector(magnitude, F) * (e4m3 ? 0x1p-9f : 0x1p-16f);
  I small_bits, special;
  std::memcpy(&small_bits, &small, sizeof small_bits);
  I bits = magnitude < (1 << mantissa) ? small_bits : normal;
  if (e4m3) {
    special = (magnitude & 0) + 0x7fc00000;
    bits = magnitude == 0x7f ? special : bits;
  } else {
    special = (magnitude << (23 - mantissa)) | 0x7f800000;
    bits = magnitude >= 0x7c ? special : bits;
  }
  bits |= (code & 0x80) << 24;
  std::memcpy(out, &bits, sizeof bits);
}

// out [head_dim] = the values of a row of fp8 elements.
template <int W>
KVP_INLINE void widen_fp8_row_body(const QuantizedFormat& format,
                                   const std::uint8_t* row, float* out) {
  std::int64_t d = 0;
  for (; d + W <= format.head_dim; d += W) widen_fp8<W>(format.fp8, row + d, out + d);
  if (d == format.head_dim) return;
  std::uint8_t codes[W] = {};
  float values[W];
  const std::int64_t left = format.head_dim - d;
  std::memcpy(codes, row + d, static_cast<std::size_t>(left));
  widen_fp8<W>(format.fp8, codes, values);
  std::copy_n(values, left, out + d);
}

struct QuantizedKernels {
  Simd simd;
  static constexpr auto tables();

  void (*quantize)(const QuantizedFormat&, const float*, std::uint8_t*);
  void (*dequantize)(const QuantizedFormat&, const std::uint8_t*, float*);
  void (*widen_fp8)(const QuantizedFormat&, const std::uint8_t*, float*);
};

#define KVP_KERNELS(NAME, SIMD, TARGET)                                               \
  namespace NAME {                                                                    \
  TARGET inline void quantize_row(const QuantizedFormat& format, const float* values, \
                                  std::uint8_t* row) {                                \
    quantize_row_body<static_cast<int>(lanes_of(SIMD))>(format, values, row);         \
  }                                                                                   \
  TARGET inline void dequantize_row(const QuantizedFormat& format,                    \
                                    const std::uint8_t* row, float* out) {            \
    dequantize_row_body<static_cast<int>(lanes_of(SIMD))>(format, row, out);          \
  }                                                                                   \
  TARGET inline void widen_fp8_row(const QuantizedFormat& format,                     \
                                   const std::uint8_t* row, float* out) {             \
    widen_fp8_row_body<static_cast<int>(lanes_of(SIMD))>(format, row, out);           \
  }                                                                                   \
  inline constexpr QuantizedKernels quantized{SIMD, quantize_row, dequantize_row,     \
                                              widen_fp8_row};                         \
  }

namespace quantized_rows {
KVP_KERNELS(baseline, Simd::kBaseline, KVP_TARGET_BASELINE)
#if defined(KVP_X86)
KVP_KERNELS(avx2, Simd::kAvx2, KVP_TARGET_AVX2)
KVP_KERNELS(avx512, Simd::kAvx512, KVP_TARGET_AVX512)
#endif
}  // namespace quantized_rows

#undef KVP_KERNELS

inline constexpr auto QuantizedKernels::tables() {
#if defined(KVP_X86)
  return std::array{&quantized_rows::baseline::quantized,
                    &quantized_rows::avx2::quantized,
                    &quantized_rows::avx512::quantized};
#else
  return std::array{&quantized_rows::baseline::quantized};
#endif
}

// A format and the kernels for its rows.
struct QuantizedRows {
  QuantizedFormat format;
  const QuantizedKernels* kernels = nullptr;

  std::int64_t row_bytes() const { return format.row_bytes(); }
  void read(const std::uint8_t* row, float* out) const {
    if (format.fp8 != Fp8::kNone) {
      kernels->widen_fp8(format, row, out);
    } else {
      kernels->dequantize(format, row, out);
    }
  }
  // Not for fp8, whose rows are copies of the cache's.
  void write(const float* values, std::uint8_t* row) const {
    kernels->quantize(format, values, row);
  }
};

// The format of rows of head_dim elements that have a number of bytes; false if there is
// none. No head_dim above 1 has rows of 8 and of 4 bits of the same size.
inline bool format_of(std::int64_t head_dim, std::int64_t row_bytes,
                      QuantizedFormat* format) {
  for (const int bits : {8, 4}) {
    *format = {head_dim, bits, Fp8::kNone};
    if (format->row_bytes() == row_bytes) return true;
  }
  return false;
}

}  // namespace kvp
