// Products of matrices that fit into the caches.
//
// Rows are padded to whole cache lines, so loops have no remainder. On a given CPU every
// sum has one order of additions, for any number of threads. matrix_kernels.hpp compiles
// the bodies.
#pragma once

#include <cstdint>
#include <cstring>

#include "kvp/convert_rows.hpp"
#include "kvp/elements.hpp"
#include "kvp/factor_record.hpp"
#include "kvp/simd.hpp"

namespace kvp::svd {

// Elements per cache line. The columns of every matrix are padded to a multiple.
template <typename T>
constexpr Index kLine = 64 / static_cast<Index>(sizeof(T));

template <typename T>
constexpr Index padded(Index count) {
  return (count + kLine<T> - 1) / kLine<T> * kLine<T>;
}

// Elements from row to row. Never a multiple of 512 bytes: such rows share cache sets.
template <typename T>
constexpr Index row_step(Index columns) {
  const Index size = padded<T>(columns);
  return size % (8 * kLine<T>) == 0 ? size + kLine<T> : size;
}

// c[i][j] = sum over k of a[i * a_row + k * a_step] * b[k * b_row + j]; with `add` the
// sum is added to c[i][j]. `cols` is padded. c must not overlap a or b.
template <typename T>
struct Product {
  const T* a;
  Index a_row, a_step;
  const T* b;
  Index b_row;
  Index rows, depth, cols;
  T* c;
  Index c_row;
  bool add = false;
};

// kRows x kVectors vectors of the result stay in registers.
template <typename T, int kBytes, int kRows, int kVectors>
KVP_INLINE void multiply_tile(const Product<T>& x, Index i, Index j) {
  using V = typename Lanes<T, kBytes>::Type;
  constexpr Index kStep = Lanes<T, kBytes>::kCount;
  V sums[kRows][kVectors];
  T* out = x.c + i * x.c_row + j;
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v] = V{};
      if (x.add) std::memcpy(&sums[r][v], out + r * x.c_row + v * kStep, kBytes);
    }
  }
  const T* a = x.a + i * x.a_row;
  const T* b = x.b + j;
  for (Index k = 0; k < x.depth; ++k, a += x.a_step, b += x.b_row) {
    V row[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) std::memcpy(&row[v], b + v * kStep, kBytes);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[r][v] += row[v] * a[r * x.a_row];
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      std::memcpy(out + r * x.c_row + v * kStep, &sums[r][v], kBytes);
    }
  }
}

template <typename T, int kBytes, int kRows>
KVP_INLINE void multiply_rows(const Product<T>& x, Index i) {
  constexpr Index kStep = Lanes<T, kBytes>::kCount;
  Index j = 0;
  if (kRows == 1) {  // more columns at once, because there is one row
    for (; j + 4 * kStep <= x.cols; j += 4 * kStep) {
      multiply_tile<T, kBytes, kRows, 4>(x, i, j);
    }
  }
  for (; j + 2 * kStep <= x.cols; j += 2 * kStep) {
    multiply_tile<T, kBytes, kRows, 2>(x, i, j);
  }
  if (j < x.cols) multiply_tile<T, kBytes, kRows, 1>(x, i, j);
}

template <typename T, int kBytes>
KVP_INLINE void multiply_body(const Product<T>& x) {
  Index i = 0;
  for (; i + 4 <= x.rows; i += 4) multiply_rows<T, kBytes, 4>(x, i);
  for (; i < x.rows; ++i) multiply_rows<T, kBytes, 1>(x, i);
}

}  // namespace kvp::svd
