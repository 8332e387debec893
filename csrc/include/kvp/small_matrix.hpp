// Products and eigenvectors of matrices that fit the caches, for the widest vectors
// of the CPU: what svd.hpp and low_rank.hpp are made of.
//
// Bodies are written once, in the compiler's vector extension, and compiled for
// AVX-512, AVX2 and the target's baseline; select_kernels() picks at run time. Rows
// are padded to whole cache lines, so that no loop has a rest to treat apart. Every
// sum has one order of additions for a given CPU, whatever the number of threads.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kvp/convert_rows.hpp"
#include "kvp/factor_record.hpp"
#include "kvp/strip_product.hpp"
#include "kvp/vectors.hpp"

namespace kvp::svd {

// Elements of a cache line: what the columns of every matrix are padded to.
template <typename T>
constexpr Index kLine = 64 / static_cast<Index>(sizeof(T));

template <typename T>
constexpr Index padded(Index count) {
  return (count + kLine<T> - 1) / kLine<T> * kLine<T>;
}

// Elements from row to row. Not a multiple of 512 bytes, whose rows share cache sets.
template <typename T>
constexpr Index row_step(Index columns) {
  const Index size = padded<T>(columns);
  return size % (8 * kLine<T>) == 0 ? size + kLine<T> : size;
}

// c[i][j] = sum over k of a[i * a_row + k * a_step] * b[k * b_row + j], added to what
// is there if `add`. `cols` is padded; c may not overlap a and b.
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

// kRows rows and kVectors vectors of the result stay in registers.
template <typename T, int kBytes, int kRows, int kVectors>
KVP_ALWAYS_INLINE void multiply_tile(const Product<T>& x, Index i, Index j) {
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
KVP_ALWAYS_INLINE void multiply_rows(const Product<T>& x, Index i) {
  constexpr Index kStep = Lanes<T, kBytes>::kCount;
  Index j = 0;
  if (kRows == 1) {  // more columns at once make up for the rows
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
KVP_ALWAYS_INLINE void multiply_body(const Product<T>& x) {
  Index i = 0;
  for (; i + 4 <= x.rows; i += 4) multiply_rows<T, kBytes, 4>(x, i);
  for (; i < x.rows; ++i) multiply_rows<T, kBytes, 1>(x, i);
}

// A symmetric matrix and the buffers of its decomposition, all of `step` columns.
struct Symmetric {
  double* values;   // [size, step], all of it; overwritten
  Index size, step;
  double* basis;    // [size, step]; row i receives an eigenvector of the tridiagonal
  double* diagonal;  // [step]: then the eigenvalues, in the order of the rows of basis
  double* beside;  // [step]
  double* factor;  // [step], of the Householder reflections
  double* reflector;  // [step]
  double* update;  // [step]
  double* cosine;  // [step]
  double* sine;  // [step]
};

// Brings values to tridiagonal form: Householder reflections from the left column on,
// the k-th of which is left in row k, behind the diagonal.
template <int kBytes>
KVP_ALWAYS_INLINE void reduce_body(const Symmetric& m) {
  using V = typename Lanes<double, kBytes>::Type;
  constexpr Index kStep = Lanes<double, kBytes>::kCount;
  const Index cols = padded<double>(m.size);
  for (Index k = 0; k + 2 < m.size; ++k) {
    double* row = m.values + k * m.step;
    double rest = 0.0;
    for (Index j = k + 2; j < m.size; ++j) rest += row[j] * row[j];
    m.factor[k] = 0.0;
    m.beside[k] = row[k + 1];
    if (rest == 0.0) continue;
    const double first = row[k + 1], norm = std::sqrt(first * first + rest);
    const double image = first > 0.0 ? -norm : norm;  // no cancellation below
    const double factor = (image - first) / image, scale = 1.0 / (first - image);
    m.beside[k] = image;
    m.factor[k] = factor;
    row[k + 1] = 1.0;
    for (Index j = k + 2; j < m.size; ++j) row[j] *= scale;
    // v and w of A - v w^T - w v^T, zero in the columns that are done already.
    const Index from = (k + 1) / kLine<double> * kLine<double>;
    double* v = m.reflector;
    double* w = m.update;
    for (Index j = from; j < cols; ++j) v[j] = j > k && j < m.size ? row[j] : 0.0;
    multiply_body<double, kBytes>({v + k + 1, 0, 1, m.values + (k + 1) * m.step + from,
                                   m.step, 1, m.size - k - 1, cols - from, w + from,
                                   0});
    double along = 0.0;
    for (Index j = k + 1; j < m.size; ++j) along += w[j] * v[j];
    const double shift = 0.5 * factor * along;
    for (Index j = from; j < cols; ++j) {
      w[j] = j > k && j < m.size ? factor * (w[j] - shift * v[j]) : 0.0;
    }
    for (Index i = k + 1; i < m.size; ++i) {
      const double vi = v[i], wi = w[i];
      double* line = m.values + i * m.step;
      for (Index j = from; j < cols; j += kStep) {
        V value, left, right;
        std::memcpy(&value, line + j, kBytes);
        std::memcpy(&left, v + j, kBytes);
        std::memcpy(&right, w + j, kBytes);
        value -= right * vi + left * wi;
        std::memcpy(line + j, &value, kBytes);
      }
    }
  }
  for (Index k = 0; k < m.size; ++k) m.diagonal[k] = m.values[k * m.step + k];
  if (m.size > 1) m.beside[m.size - 2] = m.values[(m.size - 2) * m.step + m.size - 1];
  m.beside[m.size - 1] = 0.0;
}

// Applies the rotations of rows (i, i + 1), i from last - 1 down to first, to basis.
// A row that two rotations share stays in registers.
template <int kBytes, int kVectors>
KVP_ALWAYS_INLINE void rotate_columns(const Symmetric& m, Index first, Index last,
                                      Index j) {
  using V = typename Lanes<double, kBytes>::Type;
  constexpr Index kStep = Lanes<double, kBytes>::kCount;
  V carry[kVectors];
  std::memcpy(carry, m.basis + last * m.step + j, sizeof carry);
  for (Index i = last - 1; i >= first; --i) {
    const double c = m.cosine[i], s = m.sine[i];
    double* row = m.basis + i * m.step + j;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      V here;
      std::memcpy(&here, row + v * kStep, kBytes);
      const V above = here * s + carry[v] * c;
      carry[v] = here * c - carry[v] * s;
      std::memcpy(row + m.step + v * kStep, &above, kBytes);
    }
  }
  std::memcpy(m.basis + first * m.step + j, carry, sizeof carry);
}

template <int kBytes>
KVP_ALWAYS_INLINE void rotate_body(const Symmetric& m, Index first, Index last) {
  constexpr Index kStep = Lanes<double, kBytes>::kCount;
  const Index cols = padded<double>(m.size);
  Index j = 0;
  for (; j + 4 * kStep <= cols; j += 4 * kStep) {
    rotate_columns<kBytes, 4>(m, first, last, j);
  }
  for (; j < cols; j += kStep) rotate_columns<kBytes, 1>(m, first, last, j);
}

// Eigenvalues and eigenvectors of a tridiagonal matrix: QL with implicit shifts
// (Bowdler, Martin, Reinsch and Wilkinson 1968; EISPACK's tql2). What is next to the
// diagonal counts as zero below the rounding of the whole matrix: what is small in a
// Gram matrix is noise. False if it did not converge, which has not been seen.
template <int kBytes>
KVP_ALWAYS_INLINE bool diagonalize_body(const Symmetric& m) {
  constexpr int kMostSweeps = 60;
  double* d = m.diagonal;
  double* e = m.beside;
  double peak = 0.0;
  for (Index i = 0; i < m.size; ++i) {
    const double size = std::fabs(d[i]) + std::fabs(e[i]);
    peak = size > peak ? size : peak;
  }
  const double zero = peak * std::numeric_limits<double>::epsilon();
  for (Index l = 0; l < m.size; ++l) {
    for (int sweep = 0;; ++sweep) {
      Index end = l;
      while (end + 1 < m.size && std::fabs(e[end]) > zero) ++end;
      if (end == l) break;
      if (sweep == kMostSweeps) return false;
      double g = (d[l + 1] - d[l]) / (2.0 * e[l]);
      const double root = std::sqrt(g * g + 1.0);
      g = d[end] - d[l] + e[l] / (g + (g < 0.0 ? -root : root));
      double s = 1.0, c = 1.0, p = 0.0;
      Index i = end - 1;
      for (; i >= l; --i) {
        const double f = s * e[i], b = c * e[i];
        const double r = std::sqrt(f * f + g * g);
        e[i + 1] = r;
        if (r == 0.0) break;
        const double inverse = 1.0 / r;
        s = f * inverse;
        c = g * inverse;
        g = d[i + 1] - p;
        const double t = (d[i] - g) * s + 2.0 * c * b;
        p = s * t;
        d[i + 1] = g + p;
        g = c * t - b;
        m.cosine[i] = c;
        m.sine[i] = s;
      }
      if (i + 1 < end) rotate_body<kBytes>(m, i + 1, end);
      if (i >= l) {  // the matrix fell apart at i
        d[i + 1] -= p;
      } else {
        d[l] -= p;
        e[l] = g;
      }
      e[end] = 0.0;
    }
  }
  return true;
}

// All eigenvalues of a symmetric matrix, into `diagonal`, in no order; basis has the
// eigenvectors before restore_body().
//
// Cost: about 6 size^3 multiply-adds, and 1.7 size^2 / 2 square roots in a row.
template <int kBytes>
KVP_ALWAYS_INLINE bool decompose_body(const Symmetric& m) {
  reduce_body<kBytes>(m);
  for (Index i = 0; i < m.size; ++i) {
    std::memset(m.basis + i * m.step, 0,
                static_cast<std::size_t>(m.step) * sizeof(double));
    m.basis[i * m.step + i] = 1.0;
  }
  return diagonalize_body<kBytes>(m);
}

// Takes eigenvectors of the tridiagonal matrix, the columns of vectors [size, step],
// to those of the matrix that it came from. sums: [step].
template <int kBytes>
KVP_ALWAYS_INLINE void restore_body(const Symmetric& m, double* vectors, Index step,
                                    Index cols, double* sums) {
  using V = typename Lanes<double, kBytes>::Type;
  constexpr Index kStep = Lanes<double, kBytes>::kCount;
  for (Index k = m.size - 3; k >= 0; --k) {
    if (m.factor[k] == 0.0) continue;
    const double* v = m.values + k * m.step;
    multiply_body<double, kBytes>({v + k + 1, 0, 1, vectors + (k + 1) * step, step, 1,
                                   m.size - k - 1, cols, sums, 0});
    for (Index i = k + 1; i < m.size; ++i) {
      const double share = m.factor[k] * v[i];
      for (Index j = 0; j < cols; j += kStep) {
        V value, sum;
        std::memcpy(&value, vectors + i * step + j, kBytes);
        std::memcpy(&sum, sums + j, kBytes);
        value -= sum * share;
        std::memcpy(vectors + i * step + j, &value, kBytes);
      }
    }
  }
}

struct Kernels {
  Simd simd;
  void (*multiply_double)(const Product<double>&);
  bool (*decompose)(const Symmetric&);
  void (*restore)(const Symmetric&, double*, Index, Index, double*);
  void (*strips_float)(const StripProduct<float>&);
  void (*strips_half)(const StripProduct<BFloat16>&);
  void (*widen_half)(const BFloat16*, Index, Index, const float*, float*);

  // Most columns of a strip.
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

KVP_SMALL_KERNELS(baseline, Simd::kBaseline, )
#if defined(__x86_64__) && defined(__GNUC__)
KVP_SMALL_KERNELS(avx2, Simd::kAvx2, __attribute__((target("avx2,fma"))))
#define KVP_AVX512 "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"
KVP_SMALL_KERNELS(avx512, Simd::kAvx512, __attribute__((target(KVP_AVX512))))

// The same, but that sums become bfloat16 in one instruction.
namespace avx512bf16 {
__attribute__((target(KVP_AVX512 ",avx512bf16"))) inline void strips_half(
    const StripProduct<BFloat16>& x) {
  strip_body<Simd::kAvx512Bf16>(x);
}
inline constexpr Kernels with_strips(Kernels kernels) {
  kernels.simd = Simd::kAvx512Bf16;
  kernels.strips_half = strips_half;
  return kernels;
}
inline constexpr Kernels table = with_strips(avx512::table);
}  // namespace avx512bf16
#undef KVP_AVX512
#endif

#undef KVP_SMALL_KERNELS

inline bool can_run(const Kernels& kernels) {
#if defined(__x86_64__) && defined(__GNUC__)
  if (kernels.simd == Simd::kAvx512Bf16) {
    return supported(Simd::kAvx512Bf16) && can_run(avx512::table);
  }
  if (kernels.simd == Simd::kAvx512) {
    return supported(Simd::kAvx512) && supported(Simd::kAvx2) &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
  }
#endif
  return supported(kernels.simd);
}

inline const Kernels& select_kernels() {
#if defined(__x86_64__) && defined(__GNUC__)
  if (can_run(avx512bf16::table)) return avx512bf16::table;
  if (can_run(avx512::table)) return avx512::table;
  if (can_run(avx2::table)) return avx2::table;
#endif
  return baseline::table;
}

}  // namespace kvp::svd
