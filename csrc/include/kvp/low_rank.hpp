// Low-rank factors of many small matrices, packed one behind the other, and the rows
// that they stand for (SeKV, equations 6 and 8).
//
// One matrix is the keys (or values) of one span of one KV head: [tokens, head_dim].
// Its record is one run of elements, so that a span travels with one copy:
//
//   float32    [ rank singular values | U: tokens * rank | V^T: rank * head_dim ]
//   bfloat16   the same; a singular value stays float32 and takes two elements, and
//              an odd number of elements is filled up by one
//
// That is rank * (tokens + head_dim + 1) elements: equation 18. bfloat16 records have
// up to rank + 1 elements more.
//
// Plain pointers and sizes; arguments are trusted.
#pragma once

#include <cstring>
#include <vector>

#include "kvp/page_copy.hpp"
#include "kvp/small_matrix.hpp"

namespace kvp::svd {

inline float narrow(float value, float*) { return value; }
inline BFloat16 narrow(float value, BFloat16*) {
  return {static_cast<std::uint16_t>(round_to_bfloat16(value))};
}

// Where the parts of a record lie.
template <typename Factor>
struct Record {
  Index tokens, head_dim, rank;

  static constexpr Index kPerFloat = 4 / static_cast<Index>(sizeof(Factor));

  Index left() const { return rank * kPerFloat; }
  Index right() const { return left() + tokens * rank; }
  Index elements() const {
    const Index all = right() + rank * head_dim;
    return (all + kPerFloat - 1) / kPerFloat * kPerFloat;
  }
};

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

// Reads a record as float32: U diag(sigma), transposed if `by_token`, and V^T.
template <typename Factor>
struct Opened {
  const float* left;    // [tokens, rank], or [rank, left_row] with columns of tokens
  const float* right;   // [rank, right_row], padded with zeros
  Index left_row, right_row;
  float* made;          // room for kTokensAtOnce tokens, either way round

  Opened(const Record<Factor>& shape, const Factor* record, bool by_token,
         Workspace& work) {
    const Index rank = shape.rank;
    left_row = by_token ? row_step<float>(shape.tokens) + kLine<float> : rank;
    right_row = row_step<float>(shape.head_dim);
    const Index left_size = by_token ? rank * left_row : shape.tokens * rank;
    const Index made_size =
        (shape.head_dim + kLine<float>) * (kTokensAtOnce + kLine<float>);
    float* at = Workspace::at_least(
        work.floats, left_size + rank * right_row + rank + 2 * made_size);
    float* right_at = at + left_size;
    float* sigma = right_at + rank * right_row;
    left = at;
    right = right_at;
    made = sigma + rank;
    if (rank > 0) {
      std::memcpy(sigma, record, static_cast<std::size_t>(rank) * sizeof(float));
    }
    const Factor* u = record + shape.left();
    if (by_token) std::memset(at, 0, static_cast<std::size_t>(left_size) * 4);
    for (Index t = 0; t < shape.tokens; ++t) {
      for (Index k = 0; k < rank; ++k) {
        at[by_token ? k * left_row + t : t * rank + k] =
            to_float(u[t * rank + k]) * sigma[k];
      }
    }
    const Factor* v = record + shape.right();
    for (Index k = 0; k < rank; ++k) {
      float* row = right_at + k * right_row;
      for (Index d = 0; d < shape.head_dim; ++d) {
        row[d] = to_float(v[k * shape.head_dim + d]);
      }
      for (Index d = shape.head_dim; d < right_row; ++d) row[d] = 0.0f;
    }
  }
};

// Calls store(token, row) with every row of U diag(sigma) V^T, of type Element.
template <typename Element, typename Factor, typename Store>
void make_rows(const Kernels& kernels, const Record<Factor>& shape,
               const Factor* record, Workspace& work, const Store& store) {
  const Opened<Factor> open(shape, record, false, work);
  Element row[kMaxHeadDim];
  for (Index first = 0; first < shape.tokens; first += kTokensAtOnce) {
    const Index left = shape.tokens - first;
    const Index count = left < kTokensAtOnce ? left : kTokensAtOnce;
    kernels.multiply(Product<float>{open.left + first * open.left_row, open.left_row,
                                    1, open.right, open.right_row, count, shape.rank,
                                    padded<float>(shape.head_dim), open.made,
                                    open.right_row});
    for (Index t = 0; t < count; ++t) {
      const float* made = open.made + t * open.right_row;
      for (Index d = 0; d < shape.head_dim; ++d) row[d] = narrow(made[d], row);
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
  const Opened<Factor> open(shape, record, true, work);
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
    Element* column = to.heap + to.pages[first] * to.page_stride + to.plane.base +
                      to.slots[first];
    for (Index d = 0; d < shape.head_dim; ++d) {
      const float* made = open.made + d * kMadeRow;
      Element* out = column + d * to.block_size;
      for (Index t = 0; t < count; ++t) out[t] = narrow(made[t], out);
    }
    first += count;
  }
}

}  // namespace kvp::svd
