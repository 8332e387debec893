// Rows that low-rank factors stand for, records of which lie one behind the other
// (factor_record.hpp; SeKV, equations 6 and 8).
//
// Plain pointers and sizes; arguments are trusted.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "kvp/factor_record.hpp"
#include "kvp/matrix_kernels.hpp"
#include "kvp/page_copy.hpp"

namespace kvp::svd {

// Whether a component with this gate stays.
inline bool stays(float gate, float least) { return gate >= least; }

// Writes the record of the components that stay, in their order, each singular value
// times its gate (SeKV, equation 8). `out` has room for their record.
template <typename Factor>
void keep_components(const Record<Factor>& shape, const Factor* record,
                     const float* gates, float least, Factor* out) {
  Record<Factor> made{shape.tokens, shape.head_dim, 0};
  for (Index k = 0; k < shape.rank; ++k) made.rank += stays(gates[k], least);
  made.close(out);
  Index to = 0;
  for (Index k = 0; k < shape.rank; ++k) {
    if (!stays(gates[k], least)) continue;
    float sigma;
    std::memcpy(&sigma, record + k * Record<Factor>::kPerFloat, sizeof sigma);
    sigma *= gates[k];
    std::memcpy(out + to * Record<Factor>::kPerFloat, &sigma, sizeof sigma);
    for (Index t = 0; t < shape.tokens; ++t) {
      out[made.left() + t * made.rank + to] = record[shape.left() + t * shape.rank + k];
    }
    std::memcpy(out + made.right() + to * shape.head_dim,
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
  // From the beginning of a cache line on: vectors in two lines cost twice.
  float* lines(Index size) {
    void* at = at_least(floats, size + kLine<float>);
    std::size_t room = floats.size() * sizeof(float);
    return static_cast<float*>(std::align(64, sizeof(float), at, room));
  }
};

// out[c * rows + r] = in[r * cols + c].
inline void turn(const float* in, Index rows, Index cols, float* out) {
  transpose(in, rows, cols, out);
}
inline void turn(const BFloat16* in, Index rows, Index cols, BFloat16* out) {
  transpose(reinterpret_cast<const std::uint16_t*>(in), rows, cols,
            reinterpret_cast<std::uint16_t*>(out));
}

// Reads a record as float32: U, transposed if `by_token`, and diag(sigma) V^T. Behind
// either is a line of whatever was there, for columns that nobody reads.
template <typename Factor>
struct Opened {
  const float* left;   // [tokens, rank] or [rank, tokens]
  const float* right;  // [rank, head_dim]

  Opened(const Kernels& kernels, const Record<Factor>& shape, const Factor* record,
         bool by_token, Workspace& work) {
    const Index rank = shape.rank, tokens = shape.tokens;
    const Index left_size = padded<float>(tokens * rank) + kLine<float>;
    const Index right_size = rank * shape.head_dim + kLine<float>;
    float* at = work.lines(left_size + right_size + rank + tokens * rank);
    float* scaled = at + left_size;
    float* sigma = scaled + right_size;
    left = at;
    right = scaled;
    const Factor* u = record + shape.left();
    if (by_token) {
      auto* turned = reinterpret_cast<Factor*>(sigma + rank);
      turn(u, tokens, rank, turned);
      u = turned;
    }
    kernels.widen(u, 1, tokens * rank, nullptr, at);
    if (rank > 0)
      std::memcpy(sigma, record, static_cast<std::size_t>(rank) * sizeof(float));
    kernels.widen(record + shape.right(), rank, shape.head_dim, sigma, scaled);
  }
};

// Writes row t of U diag(sigma) V^T to to + place(t), for all tokens.
//
// Cost: 2 * tokens * rank * head_dim floating-point operations (equation 22).
template <typename Element, typename Factor, typename Place>
void make_rows(const Kernels& kernels, const Record<Factor>& shape,
               const Factor* record, Element* to, const Place& place, Workspace& work) {
  Index* places = Workspace::at_least(work.places, shape.tokens);
  for (Index t = 0; t < shape.tokens; ++t) places[t] = place(t);
  work.strips.clear();
  for (Index d = 0; d < shape.head_dim; d += kernels.lanes()) {
    work.strips.push_back({d, d, std::min(kernels.lanes(), shape.head_dim - d)});
  }
  const Opened<Factor> open(kernels, shape, record, false, work);
  kernels.multiply(StripProduct<Element>{
      open.left, shape.rank, 1, open.right, shape.head_dim, shape.tokens, shape.rank,
      places, work.strips.data(), static_cast<Index>(work.strips.size()), to});
}

// rows[t] = row t of U diag(sigma) V^T, for all tokens; [tokens, head_dim].
template <typename Element, typename Factor>
void reconstruct_rows(const Kernels& kernels, const Record<Factor>& shape,
                      const Factor* record, Element* rows, Workspace& work) {
  make_rows(
      kernels, shape, record, rows, [&](Index t) { return t * shape.head_dim; }, work);
}

// Pages that receive rows, and the half of them that does.
template <typename Element>
struct PageTarget {
  Element* heap;
  Index page_stride;
  Plane plane;
  Index block_size;
  const Index* pages;  // [tokens]
  const Index* slots;  // [tokens]

  Index page(Index token) const { return pages[token] * page_stride; }
  // Of rows and columns: where those of a token begin.
  Index place(Index token) const {
    const Index step = plane.kind == PlaneKind::kRows ? plane.slot_stride : 1;
    return page(token) + plane.base + slots[token] * step;
  }
};

// Pages that hold a column per token: tokens in slots side by side are made as columns,
// nothing is transposed. Strips end where a vector of the page does: the fewer parts
// there are to store, the better, even if a strip is computed in vain now and then.
template <typename Element, typename Factor>
void make_columns(const Kernels& kernels, const Record<Factor>& shape,
                  const Factor* record, const PageTarget<Element>& to,
                  Workspace& work) {
  Index* places = Workspace::at_least(work.places, shape.head_dim);
  for (Index d = 0; d < shape.head_dim; ++d) places[d] = d * to.block_size;
  work.strips.clear();
  for (Index first = 0; first < shape.tokens;) {
    const Index lane = to.slots[first] % kernels.lanes();
    const Index most = std::min(kernels.lanes() - lane, shape.tokens - first);
    Index count = 1;
    while (count < most && to.pages[first + count] == to.pages[first] &&
           to.slots[first + count] == to.slots[first] + count) {
      ++count;
    }
    work.strips.push_back({first, to.place(first), count});
    first += count;
  }
  const Opened<Factor> open(kernels, shape, record, true, work);
  kernels.multiply(
      StripProduct<Element>{open.right, 1, shape.head_dim, open.left, shape.tokens,
                            shape.head_dim, shape.rank, places, work.strips.data(),
                            static_cast<Index>(work.strips.size()), to.heap});
}

// The rows into slots of pages.
template <typename Element, typename Factor>
void reconstruct_pages(const Kernels& kernels, const Record<Factor>& shape,
                       const Factor* record, const PageTarget<Element>& to,
                       Workspace& work) {
  if (to.plane.kind == PlaneKind::kTransposed) {
    make_columns(kernels, shape, record, to, work);
    return;
  }
  if (to.plane.kind == PlaneKind::kRows) {
    make_rows(
        kernels, shape, record, to.heap, [&](Index t) { return to.place(t); }, work);
    return;
  }
  std::vector<Element> rows(static_cast<std::size_t>(shape.tokens * shape.head_dim));
  reconstruct_rows(kernels, shape, record, rows.data(), work);
  for (Index t = 0; t < shape.tokens; ++t) {
    store_row(to.heap + to.page(t), to.plane, to.slots[t], to.block_size,
              shape.head_dim, rows.data() + t * shape.head_dim);
  }
}

}  // namespace kvp::svd
