// Reconstruction of rows from low-rank factors, whose records lie one after the other
// (factor_record.hpp; SeKV, equations 6 and 8).
//
// Plain pointers and sizes; arguments are trusted.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include "kvp/factor_record.hpp"
#include "kvp/matrix_kernels.hpp"

namespace kvp::svd {

// Whether a component with this gate is kept.
inline bool is_kept(float gate, float min_gate) { return gate >= min_gate; }

// Writes a record of the kept components in their order, each singular value multiplied by
// its gate (SeKV, equation 8). Rows are copied. `out` has room for this record.
template <typename Factor>
void keep_components(const Record<Factor>& shape, const Factor* record,
                     const float* gates, float min_gate, Factor* out) {
  if (shape.holds_rows()) {
    std::copy(record, record + shape.elements(), out);
    return;
  }
  Record<Factor> kept{shape.tokens, shape.head_dim, 0};
  for (Index k = 0; k < shape.rank; ++k) kept.rank += is_kept(gates[k], min_gate);
  kept.clear_padding(out);
  Index to = 0;
  for (Index k = 0; k < shape.rank; ++k) {
    if (!is_kept(gates[k], min_gate)) continue;
    float sigma;
    std::memcpy(&sigma, record + k * Record<Factor>::kPerFloat, sizeof sigma);
    sigma *= gates[k];
    std::memcpy(out + to * Record<Factor>::kPerFloat, &sigma, sizeof sigma);
    for (Index t = 0; t < shape.tokens; ++t) {
      out[kept.left() + t * kept.rank + to] = record[shape.left() + t * shape.rank + k];
    }
    std::memcpy(out + kept.right() + to * shape.head_dim,
                record + shape.right() + k * shape.head_dim,
                static_cast<std::size_t>(shape.head_dim) * sizeof(Factor));
    ++to;
  }
}

// Buffers of one thread; they only grow.
struct Workspace {
  std::vector<double> doubles;
  std::vector<float> floats;
  std::vector<Index> places;
  std::vector<Strip> strips;

  template <typename T>
  static T* at_least(std::vector<T>& buffer, Index size) {
    if (buffer.size() < static_cast<std::size_t>(size)) {
      buffer.resize(static_cast<std::size_t>(size));
    }
    return buffer.data();
  }
  // Aligned to a cache line: a vector in two lines takes twice as long.
  float* lines(Index size) {
    void* at = at_least(floats, size + kLine<float>);
    std::size_t room = floats.size() * sizeof(float);
    return static_cast<float*>(std::align(64, sizeof(float), at, room));
  }
};

// Copies a row of either dtype to either dtype.
template <typename From, typename To>
void copy_row(const From* from, Index head_dim, To* to) {
  if constexpr (std::is_same_v<From, To>) {
    std::copy(from, from + head_dim, to);
  } else {
    for (Index d = 0; d < head_dim; ++d) to[d] = narrow(to_float(from[d]), to);
  }
}

// A record as float32: U and diag(sigma) V^T. A cache line of unspecified values
// follows each of them, because vectors may reach past the last column.
template <typename Factor>
struct WideFactors {
  const float* left;   // [tokens, rank]
  const float* right;  // [rank, head_dim]

  WideFactors(const Kernels& kernels, const Record<Factor>& shape, const Factor* record,
              Workspace& work) {
    const Index rank = shape.rank, tokens = shape.tokens;
    const Index left_size = padded<float>(tokens * rank) + kLine<float>;
    const Index right_size = rank * shape.head_dim + kLine<float>;
    float* at = work.lines(left_size + right_size + rank);
    float* scaled = at + left_size;
    float* sigma = scaled + right_size;
    left = at;
    right = scaled;
    kernels.widen(record + shape.left(), 1, tokens * rank, nullptr, at);
    if (rank > 0)
      std::memcpy(sigma, record, static_cast<std::size_t>(rank) * sizeof(float));
    kernels.widen(record + shape.right(), rank, shape.head_dim, sigma, scaled);
  }
};

// Writes row t of U diag(sigma) V^T to to + place(t), for all tokens. Rows are copied.
//
// Cost: 2 * tokens * rank * head_dim floating-point operations (equation 22).
template <typename Element, typename Factor, typename Place>
void make_rows(const Kernels& kernels, const Record<Factor>& shape,
               const Factor* record, Element* to, const Place& place, Workspace& work) {
  if (shape.holds_rows()) {
    for (Index t = 0; t < shape.tokens; ++t) {
      copy_row(record + t * shape.head_dim, shape.head_dim, to + place(t));
    }
    return;
  }
  Index* places = Workspace::at_least(work.places, shape.tokens);
  for (Index t = 0; t < shape.tokens; ++t) places[t] = place(t);
  work.strips.clear();
  for (Index d = 0; d < shape.head_dim; d += kernels.lanes()) {
    work.strips.push_back({d, d, std::min(kernels.lanes(), shape.head_dim - d)});
  }
  const WideFactors<Factor> wide(kernels, shape, record, work);
  kernels.multiply(StripProduct<Element>{
      wide.left, shape.rank, 1, wide.right, shape.head_dim, shape.tokens, shape.rank,
      places, work.strips.data(), static_cast<Index>(work.strips.size()), to});
}

// rows[t] = row t of U diag(sigma) V^T, for all tokens; [tokens, head_dim].
template <typename Element, typename Factor>
void reconstruct_rows(const Kernels& kernels, const Record<Factor>& shape,
                      const Factor* record, Element* rows, Workspace& work) {
  make_rows(
      kernels, shape, record, rows, [&](Index t) { return t * shape.head_dim; }, work);
}

}  // namespace kvp::svd
