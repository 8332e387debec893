// Eigenvectors of symmetric matrices that fit into the caches.
//
// Bodies are compiled in matrix_kernels.hpp.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>

#include "kvp/small_matrix.hpp"

namespace kvp::svd {

// A symmetric matrix and the buffers of its decomposition, all of `step` columns.
struct Symmetric {
  double* values;   // [size, step], both triangles; overwritten
  Index size, step;
  double* basis;  // [size, step]; row i becomes an eigenvector of the tridiagonal form
  double*
      diagonal;  // [step]; becomes the eigenvalues, in the order of the rows of basis
  double* off_diagonal;  // [step]
  double* factor;  // [step], of the Householder reflections
  double* reflector;  // [step]
  double* update;  // [step]
  double* cosine;  // [step]
  double* sine;  // [step]
};

// Brings values to tridiagonal form by Householder reflections, from the first column
// on. Reflection k stays in row k, to the right of the diagonal.
template <int kBytes>
KVP_INLINE void reduce_body(const Symmetric& m) {
  using V = typename Lanes<double, kBytes>::Type;
  constexpr Index kStep = Lanes<double, kBytes>::kCount;
  const Index cols = padded<double>(m.size);
  for (Index k = 0; k + 2 < m.size; ++k) {
    double* row = m.values + k * m.step;
    double rest = 0.0;
    for (Index j = k + 2; j < m.size; ++j) rest += row[j] * row[j];
    m.factor[k] = 0.0;
    m.off_diagonal[k] = row[k + 1];
    if (rest == 0.0) continue;
    const double first = row[k + 1], norm = std::sqrt(first * first + rest);
    const double image = first > 0.0 ? -norm : norm;  // no cancellation below
    const double factor = (image - first) / image, scale = 1.0 / (first - image);
    m.off_diagonal[k] = image;
    m.factor[k] = factor;
    row[k + 1] = 1.0;
    for (Index j = k + 2; j < m.size; ++j) row[j] *= scale;
    // v and w of A - v w^T - w v^T; zero in the columns that are done.
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
  if (m.size > 1)
    m.off_diagonal[m.size - 2] = m.values[(m.size - 2) * m.step + m.size - 1];
  m.off_diagonal[m.size - 1] = 0.0;
}

// Applies the rotations of rows (i, i + 1), i from last - 1 down to first, to basis.
// A row that two rotations share stays in registers.
template <int kBytes, int kVectors>
KVP_INLINE void rotate_columns(const Symmetric& m, Index first, Index last, Index j) {
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
KVP_INLINE void rotate_body(const Symmetric& m, Index first, Index last) {
  constexpr Index kStep = Lanes<double, kBytes>::kCount;
  const Index cols = padded<double>(m.size);
  Index j = 0;
  for (; j + 4 * kStep <= cols; j += 4 * kStep) {
    rotate_columns<kBytes, 4>(m, first, last, j);
  }
  for (; j < cols; j += kStep) rotate_columns<kBytes, 1>(m, first, last, j);
}

// Eigenvalues and eigenvectors of a tridiagonal matrix: QL with implicit shifts
// (Bowdler, Martin, Reinsch and Wilkinson 1968; EISPACK's tql2). Off-diagonal elements
// below the rounding error of the whole matrix count as zero: small elements of a Gram
// matrix are noise. False if it did not converge, which has never been observed.
template <int kBytes>
KVP_INLINE bool diagonalize_body(const Symmetric& m) {
  constexpr int kMaxSweeps = 60;
  double* d = m.diagonal;
  double* e = m.off_diagonal;
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
      if (sweep == kMaxSweeps) return false;
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
      if (i >= l) {  // the matrix splits at i
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

// Writes all eigenvalues of a symmetric matrix to `diagonal`, in no order, and the
// eigenvectors of its tridiagonal form to `basis`; restore_body() transforms them.
//
// Cost: about 6 size^3 multiply-adds, and 1.7 size^2 / 2 square roots in a row.
template <int kBytes>
KVP_INLINE bool decompose_body(const Symmetric& m) {
  reduce_body<kBytes>(m);
  for (Index i = 0; i < m.size; ++i) {
    std::memset(m.basis + i * m.step, 0,
                static_cast<std::size_t>(m.step) * sizeof(double));
    m.basis[i * m.step + i] = 1.0;
  }
  return diagonalize_body<kBytes>(m);
}

// Transforms eigenvectors of the tridiagonal form, the columns of vectors [size, step],
// to eigenvectors of the original matrix. sums: [step], scratch.
template <int kBytes>
KVP_INLINE void restore_body(const Symmetric& m, double* vectors, Index step,
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

}  // namespace kvp::svd
