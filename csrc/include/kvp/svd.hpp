// Truncated singular value decompositions of small matrices (SeKV, equation 6).
//
// A matrix [tokens, head_dim] has at most head_dim singular values. They are computed
// from the Gram matrix of its smaller side, in double precision:
//
//   tokens <= head_dim    A A^T = U S^2 U^T,  V = A^T U / S
//   tokens >  head_dim    A^T A = V S^2 V^T,  U = A V / S
//
// Elements are at most float32, so their squares neither overflow nor vanish in double.
// A singular value keeps all digits that float32 holds; below zero_share() the rounding
// of the elements makes it meaningless anyway.
//
// If the random subspace for the requested eigenvectors (subspace_width) has at most half
// of all dimensions, the Gram matrix is first projected to it, with one power step (Halko,
// Martinsson and Tropp 2011, algorithm 4.4, on the Gram matrix): two to six times faster,
// and on the flattest spectra an error up to 4 % above the best possible.
//
// Results do not depend on the number of threads: one thread decomposes a matrix, and
// every matrix uses the same random numbers.
#pragma once

#include <algorithm>
#include <limits>
#include <numeric>

#include "kvp/low_rank.hpp"

namespace kvp::svd {

struct Options {
  Index max_rank;
  // Smallest rank that keeps this share of the squared Frobenius norm; 1: all.
  double energy;
};

// Keys or values of one span of one KV head.
template <typename Element>
struct Matrix {
  const Element* rows;
  Index tokens, head_dim, row_stride;
};

enum class Fault {
  kNone,
  kNotFinite,  // an element is NaN or infinite
  kTooLarge,  // the largest singular value is beyond float32
  kNoEigenvalue,  // the iteration did not converge
};

// Dimensions of the random subspace for `count` eigenvectors: eight more, or a quarter
// more if that is larger. With eight more, many eigenvectors of a flat spectrum would
// lose the last of them.
constexpr Index subspace_width(Index count) {
  return count + std::max<Index>(8, count / 4);
}

// Singular values up to this share of the largest count as zero: the usual rank
// tolerance for float32 matrices (numpy.linalg.matrix_rank).
inline double zero_share(Index tokens, Index head_dim) {
  return static_cast<double>(std::max(tokens, head_dim)) *
         static_cast<double>(std::numeric_limits<float>::epsilon());
}

// Numbers in [-1, 1) that depend only on their place (splitmix64).
inline double random_number(std::uint64_t place) {
  std::uint64_t x = (place + 1) * 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return static_cast<double>(static_cast<std::int64_t>(x ^ (x >> 31))) * 0x1p-63;
}

// Hands out the memory of a decomposition from one allocation.
struct Buffer {
  double* next;
  double* take(Index size) {
    double* taken = next;
    next += padded<double>(size);
    return taken;
  }
};

inline Symmetric take_symmetric(Buffer& buffer, double* values, Index size,
                                Index step) {
  Symmetric matrix{values,  size,    step,    buffer.take(size * step),
                   nullptr, nullptr, nullptr, nullptr,
                   nullptr, nullptr, nullptr};
  for (double** line :
       {&matrix.diagonal, &matrix.off_diagonal, &matrix.factor, &matrix.reflector,
        &matrix.update, &matrix.cosine, &matrix.sine}) {
    *line = buffer.take(step);
  }
  return matrix;
}

// Widens rows [first, first + count) of the matrix whose Gram matrix is computed. Its
// rows are tokens, or with `transposed` dimensions.
template <typename Element>
void widen(const Matrix<Element>& matrix, bool transposed, Index first, Index count,
           double* rows, Index step) {
  if (transposed) {
    for (Index t = 0; t < matrix.tokens; ++t) {
      const Element* row = matrix.rows + t * matrix.row_stride + first;
      for (Index i = 0; i < count; ++i) {
        rows[i * step + t] = static_cast<double>(to_float(row[i]));
      }
    }
    for (Index i = 0; i < count; ++i) {
      std::fill(rows + i * step + matrix.tokens, rows + (i + 1) * step, 0.0);
    }
    return;
  }
  for (Index i = 0; i < count; ++i) {
    const Element* row = matrix.rows + (first + i) * matrix.row_stride;
    for (Index d = 0; d < matrix.head_dim; ++d) {
      rows[i * step + d] = static_cast<double>(to_float(row[d]));
    }
    std::fill(rows + i * step + matrix.head_dim, rows + (i + 1) * step, 0.0);
  }
}

// gram += rows^T rows, from the cache line of the diagonal on.
inline void add_gram(const Kernels& kernels, const double* rows, Index step,
                     Index count, Index size, double* gram) {
  for (Index i = 0; i < size; i += kLine<double>) {
    const Index high = std::min(kLine<double>, size - i);
    kernels.multiply(Product<double>{rows + i, 1, step, rows + i, step, high, count,
                                     padded<double>(size) - i, gram + i * step + i,
                                     step, true});
  }
}

// Makes n rows [n, step] orthonormal. Rows that depend on earlier ones become zero. Two
// passes make the rows orthogonal to rounding.
inline void orthonormalize(double* rows, Index n, Index columns, Index step) {
  const auto dot = [&](const double* x, const double* y) {
    double sums[8] = {};
    for (Index j = 0; j < padded<double>(columns); j += 8) {
      for (int lane = 0; lane < 8; ++lane) sums[lane] += x[j + lane] * y[j + lane];
    }
    return ((sums[0] + sums[4]) + (sums[1] + sums[5])) +
           ((sums[2] + sums[6]) + (sums[3] + sums[7]));
  };
  for (Index i = 0; i < n; ++i) {
    double* row = rows + i * step;
    const double before = std::sqrt(dot(row, row));
    for (int pass = 0; pass < 2; ++pass) {
      for (Index k = 0; k < i; ++k) {
        const double share = dot(row, rows + k * step);
        for (Index j = 0; j < columns; ++j) row[j] -= share * rows[k * step + j];
      }
    }
    const double after = std::sqrt(dot(row, row));
    const double inverse = after > 1e-12 * before ? 1.0 / after : 0.0;
    for (Index j = 0; j < columns; ++j) row[j] *= inverse;
  }
}

// Eigenvalues, largest first, and their eigenvectors.
struct Eigen {
  double* values;  // [count]
  double* vectors;  // [size, step] with a column per eigenvalue
  Index count, step;
};

// The `count` largest of a symmetric matrix, which is overwritten. False if the
// iteration did not converge.
inline bool largest_eigenvectors(const Kernels& kernels, const Symmetric& matrix,
                                 Index count, Buffer& buffer, Eigen& out) {
  if (!kernels.decompose(matrix)) return false;
  out.count = count;
  out.step = row_step<double>(count);
  out.values = buffer.take(count);
  out.vectors = buffer.take(matrix.size * out.step);
  double* taken = buffer.take(matrix.size);  // 1 for rows of basis that are in `out`
  double* sums = buffer.take(out.step);
  std::fill(taken, taken + matrix.size, 0.0);
  std::fill(out.vectors, out.vectors + matrix.size * out.step, 0.0);
  for (Index i = 0; i < count; ++i) {
    Index best = -1;
    for (Index k = 0; k < matrix.size; ++k) {
      if (taken[k] != 0.0) continue;
      if (best < 0 || matrix.diagonal[k] > matrix.diagonal[best]) best = k;
    }
    taken[best] = 1.0;
    out.values[i] = matrix.diagonal[best];
    for (Index j = 0; j < matrix.size; ++j) {
      out.vectors[j * out.step + i] = matrix.basis[best * matrix.step + j];
    }
  }
  kernels.restore(matrix, out.vectors, out.step, padded<double>(count), sums);
  return true;
}

// The same for a Gram matrix, through a random subspace of `width` dimensions.
inline bool projected_eigenvectors(const Kernels& kernels, const double* gram,
                                   Index size, Index step, Index count, Index width,
                                   Buffer& buffer, Eigen& out) {
  double* rows = buffer.take(width * step);  // the subspace, a row per dimension
  double* image = buffer.take(width * step);
  for (Index i = 0; i < width; ++i) {
    for (Index j = 0; j < step; ++j) {
      image[i * step + j] =
          j < size ? random_number(static_cast<std::uint64_t>(i * size + j)) : 0.0;
    }
  }
  const Product<double> product{
      image, step, 1, gram, step, width, size, padded<double>(size), rows, step};
  for (int round = 0; round < 2; ++round) {
    if (round > 0) std::copy(rows, rows + width * step, image);
    std::fill(rows, rows + width * step, 0.0);
    kernels.multiply(product);
    orthonormalize(rows, width, size, step);
  }
  // The eigenvectors of rows gram rows^T, transformed back.
  kernels.multiply(Product<double>{rows, step, 1, gram, step, width, size,
                                   padded<double>(size), image, step});
  const Index narrow_step = row_step<double>(width);
  double* transposed = buffer.take(size * narrow_step);
  std::fill(transposed, transposed + size * narrow_step, 0.0);
  for (Index i = 0; i < width; ++i) {
    for (Index j = 0; j < size; ++j)
      transposed[j * narrow_step + i] = rows[i * step + j];
  }
  double* small = buffer.take(width * narrow_step);
  kernels.multiply(Product<double>{image, step, 1, transposed, narrow_step, width, size,
                                   padded<double>(width), small, narrow_step});
  for (Index i = 0; i < width; ++i) {  // rounding left it slightly asymmetric
    for (Index j = 0; j < i; ++j)
      small[i * narrow_step + j] = small[j * narrow_step + i];
  }
  Eigen inner{};
  const Symmetric projected = take_symmetric(buffer, small, width, narrow_step);
  if (!largest_eigenvectors(kernels, projected, count, buffer, inner)) return false;
  out = {inner.values, buffer.take(size * inner.step), count, inner.step};
  kernels.multiply(Product<double>{transposed, narrow_step, 1, inner.vectors,
                                   inner.step, size, width, padded<double>(count),
                                   out.vectors, out.step});
  return true;
}

// The rank to keep. The eigenvalues are squares of singular values, largest first.
inline Index kept_rank(const double* values, Index count, double total,
                       double zero_below, double energy) {
  Index rank = 0;
  while (rank < count && values[rank] > 0.0 &&
         std::sqrt(values[rank]) > zero_below * std::sqrt(values[0]) &&
         static_cast<float>(std::sqrt(values[rank])) > 0.0f) {
    ++rank;
  }
  if (energy >= 1.0) return rank;
  double sum = 0.0;
  for (Index k = 0; k < rank; ++k) {
    sum += values[k];
    if (sum >= energy * total) return k + 1;
  }
  return rank;
}

// Stores the rows of a matrix as a record.
template <typename Element, typename Factor>
void store_rows(const Matrix<Element>& matrix, Factor* record, Fault& fault) {
  fault = Fault::kNone;
  const Record<Factor> shape{matrix.tokens, matrix.head_dim, kRows};
  for (Index t = 0; t < matrix.tokens; ++t) {
    const Element* row = matrix.rows + t * matrix.row_stride;
    for (Index d = 0; d < matrix.head_dim; ++d) {
      if (!std::isfinite(to_float(row[d]))) fault = Fault::kNotFinite;
    }
    copy_row(row, matrix.head_dim, record + t * matrix.head_dim);
  }
  shape.clear_padding(record);
}

// Rows of the longer side that are processed at a time.
constexpr Index kRowsAtOnce = 64;

// Decomposes a matrix into a record (factor_record.hpp) and returns its rank: at most
// min(tokens, head_dim, max_rank), 0 for a matrix of zeros or without rows. The record
// must have room for the largest possible rank.
//
// Cost, with m the smaller and n the larger side: m^2 n / 2 + rank m n multiply-adds,
// plus the eigenvectors: 6 m^3, or 3 m^2 w if the subspace has w <= m / 2 dimensions.
template <typename Element, typename Factor>
Index decompose(const Kernels& kernels, const Matrix<Element>& matrix,
                const Options& options, Factor* record, Workspace& work, Fault& fault) {
  fault = Fault::kNone;
  const bool transposed = matrix.tokens <= matrix.head_dim;
  const Index size = transposed ? matrix.tokens : matrix.head_dim;
  const Index length = transposed ? matrix.head_dim : matrix.tokens;
  const Index count = std::min(size, options.max_rank);
  if (count == 0) return 0;
  const Index width = std::min(size, subspace_width(count));
  const bool project = 2 * width <= size;
  const Index step = row_step<double>(size);
  // Either way takes less than two Symmetric with their eigenvectors.
  const Index size_needed = 8 * size * step + 64 * step + 2 * kRowsAtOnce * step;
  Buffer buffer{Workspace::at_least(work.doubles, size_needed)};
  double* gram = buffer.take(size * step);
  double* rows = buffer.take(kRowsAtOnce * step);
  std::fill(gram, gram + size * step, 0.0);
  const auto each_part = [&](const auto& body) {
    for (Index first = 0; first < length; first += kRowsAtOnce) {
      const Index part = std::min(kRowsAtOnce, length - first);
      widen(matrix, transposed, first, part, rows, step);
      body(first, part);
    }
  };
  each_part(
      [&](Index, Index part) { add_gram(kernels, rows, step, part, size, gram); });
  double total = 0.0;
  for (Index i = 0; i < size; ++i) {
    total += gram[i * step + i];
    for (Index j = 0; j < i; ++j) gram[i * step + j] = gram[j * step + i];
  }
  if (!std::isfinite(total)) {
    fault = Fault::kNotFinite;
    return 0;
  }
  Eigen eigen{};
  const bool converged =
      project ? projected_eigenvectors(kernels, gram, size, step, count, width, buffer,
                                       eigen)
              : largest_eigenvectors(kernels, take_symmetric(buffer, gram, size, step),
                                     count, buffer, eigen);
  if (!converged || !std::isfinite(eigen.values[0])) {
    fault = Fault::kNoEigenvalue;
    return 0;
  }
  if (!std::isfinite(static_cast<float>(std::sqrt(eigen.values[0])))) {
    fault = Fault::kTooLarge;
    return 0;
  }
  const Record<Factor> shape{
      matrix.tokens, matrix.head_dim,
      kept_rank(eigen.values, count, total, zero_share(matrix.tokens, matrix.head_dim),
                options.energy)};
  double inverse[kMaxHeadDim];
  for (Index k = 0; k < shape.rank; ++k) {
    const double sigma = std::sqrt(eigen.values[k]);
    const auto value = static_cast<float>(sigma);
    std::memcpy(reinterpret_cast<char*>(record) + k * 4, &value, sizeof value);
    inverse[k] = 1.0 / sigma;
  }
  shape.clear_padding(record);
  Factor* u = record + shape.left();
  Factor* v = record + shape.right();
  // The factor of the shorter side, then that of the longer.
  const Index rank = shape.rank;
  const auto store = [&](Factor* to, Index at, double value) {
    to[at] = narrow(static_cast<float>(value), to);
  };
  for (Index i = 0; i < size; ++i) {
    for (Index k = 0; k < rank; ++k) {
      const double value = eigen.vectors[i * eigen.step + k];
      transposed ? store(u, i * rank + k, value)
                 : store(v, k * matrix.head_dim + i, value);
    }
  }
  double* projected_rows = buffer.take(kRowsAtOnce * eigen.step);
  each_part([&](Index first, Index part) {
    kernels.multiply(Product<double>{rows, step, 1, eigen.vectors, eigen.step, part,
                                     size, padded<double>(rank), projected_rows,
                                     eigen.step});
    for (Index i = 0; i < part; ++i) {
      for (Index k = 0; k < rank; ++k) {
        const double value = projected_rows[i * eigen.step + k] * inverse[k];
        transposed ? store(v, k * matrix.head_dim + first + i, value)
                   : store(u, (first + i) * rank + k, value);
      }
    }
  });
  return rank;
}

}  // namespace kvp::svd
