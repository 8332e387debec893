// Pages for tests: every order of elements, random contents, gaps between pages.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "kvp/page_copy.hpp"

namespace page_test {

using Index = std::int64_t;
using Indices = std::vector<Index>;
using Offsets = std::vector<std::int32_t>;

struct Tables {
  Offsets keys, values;
};

enum class Order { kNatural, kInterleaved, kTransposedKeys, kShuffled };
constexpr Order kOrders[] = {Order::kNatural, Order::kInterleaved,
                             Order::kTransposedKeys, Order::kShuffled};

inline Tables make_tables(Order order, Index block_size, Index head_dim,
                          std::mt19937& random) {
  const Index half = block_size * head_dim;
  Offsets all(static_cast<std::size_t>(2 * half));
  std::iota(all.begin(), all.end(), 0);
  if (order == Order::kShuffled) std::shuffle(all.begin(), all.end(), random);
  Tables tables{{all.begin(), all.begin() + half}, {all.begin() + half, all.end()}};
  for (Index s = 0; s < block_size; ++s) {
    for (Index d = 0; d < head_dim; ++d) {
      const Index at = s * head_dim + d;
      if (order == Order::kTransposedKeys) {
        tables.keys[at] = static_cast<std::int32_t>(d * block_size + s);
      } else if (order == Order::kInterleaved) {
        tables.keys[at] = static_cast<std::int32_t>(2 * s * head_dim + d);
        tables.values[at] = static_cast<std::int32_t>((2 * s + 1) * head_dim + d);
      }
    }
  }
  return tables;
}

template <typename Element>
std::vector<Element> random_elements(Index n, std::mt19937& random) {
  std::vector<Element> out(static_cast<std::size_t>(n));
  for (Element& x : out) x = static_cast<Element>(random());
  return out;
}

// A heap with a gap after each page, and distinct places in it.
template <typename Element>
struct Fixture {
  Index block_size, head_dim, num_pages = 7, n, stride;
  Tables tables;
  kvp::PageLayout layout;
  std::vector<Element> heap;
  Indices pages, slots;  // 2 * n distinct places

  Fixture(Order order, Index block_size_, Index head_dim_, Index n_,
          std::mt19937& random, Index gap = 3)
      : block_size(block_size_),
        head_dim(head_dim_),
        n(n_),
        tables(make_tables(order, block_size_, head_dim_, random)),
        layout(kvp::make_layout(tables.keys.data(), tables.values.data(), block_size_,
                                head_dim_)) {
    stride = layout.page_elems() + gap;
    heap = random_elements<Element>(num_pages * stride, random);
    Indices places(static_cast<std::size_t>(num_pages * block_size));
    std::iota(places.begin(), places.end(), 0);
    std::shuffle(places.begin(), places.end(), random);
    for (Index i = 0; i < 2 * n; ++i) {
      pages.push_back(places[i] / block_size);
      slots.push_back(places[i] % block_size);
    }
  }

  kvp::PagedKV<Element> paged(Element* pages_) const {
    return {pages_, num_pages, stride, layout};
  }
  // The pages as const.
  kvp::PagedKV<const Element> source(const Element* pages_) const {
    return {pages_, num_pages, stride, layout};
  }
  // The first n places, and the n places after them.
  kvp::TokenSlots tokens() const { return {pages.data(), slots.data(), n}; }
  kvp::TokenSlots others() const { return {pages.data() + n, slots.data() + n, n}; }

  Element& at(std::vector<Element>& data, const Offsets& table, Index i, Index d) {
    return data[pages[i] * stride + table[slots[i] * head_dim + d]];
  }
};

}  // namespace page_test
