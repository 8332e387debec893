// Blocked transpose of a small row-major matrix, for pages whose keys are
// stored [head_dim, block_size].
//
// Tiles are transposed in registers by log2(width) rounds of interleaving. The compiler's
// vector extension works on every target's baseline (SSE2, NEON) with one source, unlike
// intrinsics.
#pragma once

#include <cstdint>
#include <cstring>

namespace kvp {

// out[c * rows + r] = in[r * cols + c] for a rectangle, element by element.
template <typename Element>
inline void transpose_scalar(const Element* in, std::int64_t rows, std::int64_t cols,
                             std::int64_t row_begin, std::int64_t row_end,
                             std::int64_t col_begin, std::int64_t col_end,
                             Element* out) {
  for (std::int64_t c = col_begin; c < col_end; ++c) {
    for (std::int64_t r = row_begin; r < row_end; ++r) {
      out[c * rows + r] = in[r * cols + c];
    }
  }
}

#if defined(__GNUC__) && defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define KVP_VECTOR_TRANSPOSE 1
#endif
#endif

#ifdef KVP_VECTOR_TRANSPOSE

// 16-byte vectors: the widest that every 64-bit target has.
typedef std::uint16_t U16x8 __attribute__((vector_size(16)));
typedef std::uint32_t U32x4 __attribute__((vector_size(16)));

template <typename Element>
struct TileTraits {
  static constexpr bool kSupported = false;
};

template <>
struct TileTraits<std::uint16_t> {
  static constexpr bool kSupported = true;
  static constexpr int kWidth = 8;
  using Vector = U16x8;
  static Vector low(Vector a, Vector b) {
    return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
  }
  static Vector high(Vector a, Vector b) {
    return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
  }
};

template <>
struct TileTraits<std::uint32_t> {
  static constexpr bool kSupported = true;
  static constexpr int kWidth = 4;
  using Vector = U32x4;
  static Vector low(Vector a, Vector b) {
    return __builtin_shufflevector(a, b, 0, 4, 1, 5);
  }
  static Vector high(Vector a, Vector b) {
    return __builtin_shufflevector(a, b, 2, 6, 3, 7);
  }
};

// Transposes a width x width tile held in registers.
//
// Interleaving row i with row i + width/2 moves the top bit of the row number to the bottom
// of the column number. After log2(width) rounds row and column numbers are exchanged.
template <typename Element>
inline void transpose_tile(const Element* in, std::int64_t in_stride, Element* out,
                           std::int64_t out_stride) {
  using Traits = TileTraits<Element>;
  using Vector = typename Traits::Vector;
  constexpr int kWidth = Traits::kWidth;
  constexpr int kHalf = kWidth / 2;
  Vector tile[kWidth];
  for (int i = 0; i < kWidth; ++i) {
    std::memcpy(&tile[i], in + i * in_stride, sizeof(Vector));
  }
  for (int round = 1; round < kWidth; round *= 2) {
    Vector next[kWidth];
    for (int i = 0; i < kHalf; ++i) {
      next[2 * i] = Traits::low(tile[i], tile[i + kHalf]);
      next[2 * i + 1] = Traits::high(tile[i], tile[i + kHalf]);
    }
    for (int i = 0; i < kWidth; ++i) tile[i] = next[i];
  }
  for (int i = 0; i < kWidth; ++i) {
    std::memcpy(out + i * out_stride, &tile[i], sizeof(Vector));
  }
}

#endif  // KVP_VECTOR_TRANSPOSE

// out[c * out_stride + r] = in[r * cols + c], for rows that fill a part of a wider matrix.
template <typename Element>
inline void transpose_into(const Element* in, std::int64_t rows, std::int64_t cols,
                           Element* out, std::int64_t out_stride) {
  std::int64_t full_rows = 0, full_cols = 0;
#ifdef KVP_VECTOR_TRANSPOSE
  if constexpr (TileTraits<Element>::kSupported) {
    constexpr std::int64_t kWidth = TileTraits<Element>::kWidth;
    full_rows = rows - rows % kWidth;
    full_cols = cols - cols % kWidth;
    for (std::int64_t c = 0; c < full_cols; c += kWidth) {
      for (std::int64_t r = 0; r < full_rows; r += kWidth) {
        transpose_tile(in + r * cols + c, cols, out + c * out_stride + r, out_stride);
      }
    }
  }
#endif
  for (std::int64_t c = 0; c < cols; ++c) {
    for (std::int64_t r = c < full_cols ? full_rows : 0; r < rows; ++r) {
      out[c * out_stride + r] = in[r * cols + c];
    }
  }
}

// out[c * rows + r] = in[r * cols + c].
template <typename Element>
inline void transpose(const Element* in, std::int64_t rows, std::int64_t cols,
                      Element* out) {
#ifdef KVP_VECTOR_TRANSPOSE
  if constexpr (TileTraits<Element>::kSupported) {
    constexpr std::int64_t kWidth = TileTraits<Element>::kWidth;
    const std::int64_t full_rows = rows - rows % kWidth;
    const std::int64_t full_cols = cols - cols % kWidth;
    // Columns in the outer loop: every output row is finished before the next, so that the
    // stores, which are slower than the loads, are sequential.
    for (std::int64_t c = 0; c < full_cols; c += kWidth) {
      for (std::int64_t r = 0; r < full_rows; r += kWidth) {
        transpose_tile(in + r * cols + c, cols, out + c * rows + r, rows);
      }
    }
    transpose_scalar(in, rows, cols, full_rows, rows, 0, full_cols, out);
    transpose_scalar(in, rows, cols, 0, rows, full_cols, cols, out);
    return;
  }
#endif
  transpose_scalar(in, rows, cols, 0, rows, 0, cols, out);
}

}  // namespace kvp
