// Rows that low-rank factors stand for, records of which lie one behind the other
// (factor_record.hpp; SeKV, equations 6 and 8).
//
// Plain pointers and sizes; arguments are trusted.
#pragma once

#include <cstring>
#include <vector>

#include "kvp/factor_record.hpp"
#include "kvp/page_copy.hpp"
#include "kvp/small_matrix.hpp"

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

  template <typename T>
  static T* at_least(std::vector<T>& buffer, Index size) {
    if (buffer.size() < static_cast<std::size_t>(size)) {
      buffer.resize(static_cast<std::size_t>(size));
    }
    return buffer.data();
  }
};

// Tokens whose rows are made together.
constexpr Index kTokensAtOnce = 64;

// out[c * rows + r] = in[r * cols + c].
inline void turn(const float* in, Index rows, Index cols, float* out) {
  transpose(in, rows, cols, out);
}
inline void turn(const BFloat16* in, Index rows, Index cols, BFloat16* out) {
  transpose(reinterpret_cast<const std::uint16_t*>(in), rows, cols,
            reinterpret_cast<std::uint16_t*>(out));
}

// Reads a record as float32: U, transposed if `by_token`, and diag(sigma) V^T. What
// pads rows is whatever was there: it ends up in columns that nobody reads.
template <typename Factor>
struct Opened {
  const float* left;    // [tokens, rank], or [rank, left_row] with columns of tokens
  const float* right;   // [rank, right_row]
  Index left_row, right_row;
  float* made;          // room for kTokensAtOnce tokens, either way round

  Opened(const Kernels& kernels, const Record<Factor>& shape, const Factor* record,
         bool by_token, Workspace& work) {
    const Index rank = shape.rank, tokens = shape.tokens;
    left_row = by_token ? row_step<float>(tokens) + kLine<float> : rank;
    right_row = row_step<float>(shape.head_dim);
    const Index left_size = by_token ? rank * left_row : padded<float>(tokens * rank);
    const Index made_size =
        (shape.head_dim + 2 * kLine<float>)*(kTokensAtOnce + 2 * kLine<float>);
    float* at = Workspace::at_least(
        work.floats, left_size + rank * right_row + made_size + tokens * rank);
    float* scaled = at + left_size;
    left = at;
    right = scaled;
    made = scaled + rank * right_row;
    const Factor* u = record + shape.left();
    if (by_token) {
      auto* turned = reinterpret_cast<Factor*>(made + made_size);
      turn(u, tokens, rank, turned);
      for (Index k = 0; k < rank; ++k) {
        kernels.widen(turned + k * tokens, tokens, 1.0f, at + k * left_row);
      }
    } else {
      kernels.widen(u, tokens * rank, 1.0f, at);
    }
    const Factor* v = record + shape.right();
    for (Index k = 0; k < rank; ++k) {
      float sigma;
      std::memcpy(&sigma, record + k * Record<Factor>::kPerFloat, sizeof sigma);
      kernels.widen(v + k * shape.head_dim, shape.head_dim, sigma,
                    scaled + k * right_row);
    }
  }
};

// Calls store(token, row) with every row of U diag(sigma) V^T, of type Element.
template <typename Element, typename Factor, typename Store>
void make_rows(const Kernels& kernels, const Record<Factor>& shape,
               const Factor* record, Workspace& work, const Store& store) {
  const Opened<Factor> open(kernels, shape, record, false, work);
  Element row[kMaxHeadDim];
  for (Index first = 0; first < shape.tokens; first += kTokensAtOnce) {
    const Index left = shape.tokens - first;
    const Index count = left < kTokensAtOnce ? left : kTokensAtOnce;
    kernels.multiply(Product<float>{
        open.left + first * open.left_row, open.left_row, 1, open.right, open.right_row,
        count, shape.rank, padded<float>(shape.head_dim), open.made, open.right_row});
    for (Index t = 0; t < count; ++t) {
      kernels.narrow(open.made + t * open.right_row, shape.head_dim, row);
      store(first + t, row);
    }
  }
}

// rows[t] = row t of U diag(sigma) V^T, for all tokens; [tokens, head_dim].
template <typename Element, typename Factor>
void reconstruct_rows(const Kernels& kernels, const Record<Factor>& shape,
                      const Factor* record, Element* rows, Workspace& work) {
  const auto bytes = static_cast<std::size_t>(shape.head_dim) * sizeof(Element);
  make_rows<Element>(kernels, shape, record, work, [&](Index t, const Element* row) {
    std::memcpy(rows + t * shape.head_dim, row, bytes);
  });
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
};

// The same into slots of pages. Where a page holds a column per token, tokens in slots
// side by side are made as columns: nothing is transposed.
//
// Cost: 2 * tokens * rank * head_dim floating-point operations (equation 22).
template <typename Element, typename Factor>
void reconstruct_pages(const Kernels& kernels, const Record<Factor>& shape,
                       const Factor* record, const PageTarget<Element>& to,
                       Workspace& work) {
  if (to.plane.kind != PlaneKind::kTransposed) {
    make_rows<Element>(kernels, shape, record, work, [&](Index t, const Element* row) {
      store_row(to.heap + to.pages[t] * to.page_stride, to.plane, to.slots[t],
                to.block_size, shape.head_dim, row);
    });
    return;
  }
  const Opened<Factor> open(kernels, shape, record, true, work);
  constexpr Index kMadeRow = kTokensAtOnce + kLine<float>;
  for (Index first = 0; first < shape.tokens;) {
    Index count = 1;
    while (count < kTokensAtOnce && first + count < shape.tokens &&
           to.pages[first + count] == to.pages[first] &&
           to.slots[first + count] == to.slots[first] + count) {
      ++count;
    }
    kernels.multiply(Product<float>{open.right, 1, open.right_row, open.left + first,
                                    open.left_row, shape.head_dim, shape.rank,
                                    padded<float>(count), open.made, kMadeRow});
    Element* column =
        to.heap + to.pages[first] * to.page_stride + to.plane.base + to.slots[first];
    for (Index d = 0; d < shape.head_dim; ++d) {
      kernels.narrow(open.made + d * kMadeRow, count, column + d * to.block_size);
    }
    first += count;
  }
}

}  // namespace kvp::svd
