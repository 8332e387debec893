// Settings, options and per-thread scratch of the tree and the exact scan. Both
// implement the same calls (see Forest in index_forest.hpp):
//
//   append(keys, n)                    true, or false and nothing changed
//   query(keys, by_page, q, options, scratch, top)   keys looked at
//   num_keys(), num_pages(), place(slot), integrity(keys, by_page)
//   query_ns(options), append_ns(n)    about how long these calls take
//
// Slots number the keys in the order of arrival, from 0. A place is page * page_size +
// slot in page: where the index assigns the key. Keys are read through a KeyView, indexed
// by slot or, with by_page, by place.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kvp/dot_products.hpp"

namespace kvp::index {

struct Settings {
  std::int64_t head_dim = 0;
  std::int64_t page_size = 0;
  // Tree only: promotion ratio r, composite and simple indices per node, seed.
  double promotion = 0.0;
  std::int64_t composite = 0;
  std::int64_t simple = 0;
  std::uint64_t seed = 0;
  bool by_mean = false;  // nodes of level 2 are ranked by the mean of their keys
  // Codes only: keys that are divided into pages together, a multiple of sixteen, and
  // number of keys below which all are scanned.
  std::int64_t segment = 2048;
  std::int64_t flat_keys = 4096;
  // Keys and values are stored in the order of rows. Segments are then not merged, so that
  // a key moves once, and each half of a page has similar keys.
  bool stores_pages = false;

  std::int64_t projections() const { return composite * simple; }
};

struct QueryOptions {
  std::int64_t max_visits = 0;  // keys to visit per query; 0: all keys,
  // whatever visit_ratio is
  double visit_ratio = 1.0;  // share of a node's keys to visit, by bound
  std::int64_t count = 0;  // keys that the caller takes of a vote
};

// Buffers of a search by codes, see code_index.hpp.
struct CodeScratch {
  std::vector<std::int8_t> queries;  // [group][quads * 4]
  std::vector<std::int32_t> biases;  // [group]
  std::vector<float> steps, offsets;  // [group], see encode_queries
  std::vector<float> scores, sample, thresholds;
  std::vector<std::int64_t> counts;
  std::vector<const std::uint8_t*> memory;  // of the blocks that are scored
  std::vector<std::int32_t> groups, blocks, found, slots, candidates, ranks;
  std::int64_t stride = 0, scored = 0;
};

// Buffers of one thread; they only grow.
struct Scratch {
  CodeScratch codes;
  std::vector<float> rows, scores, query, targets, bounds;
  std::vector<std::int64_t> offsets;
  std::vector<std::int32_t> slots, nodes;
  std::int64_t visits = 0;
};

template <typename T>
T* at_least(std::vector<T>& buffer, std::int64_t size) {
  if (buffer.size() < static_cast<std::size_t>(size)) {
    buffer.resize(static_cast<std::size_t>(size));
  }
  return buffer.data();
}

// Nanoseconds that an operation on `rows` rows takes, if rows of 64 elements take
// ns_per_row.
constexpr std::int64_t rows_ns(std::int64_t rows, std::int64_t head_dim,
                               std::int64_t ns_per_row) {
  return rows * head_dim * ns_per_row / 64;
}

constexpr std::int64_t round_up(std::int64_t value, std::int64_t step) {
  return (value + step - 1) / step * step;
}

}  // namespace kvp::index
