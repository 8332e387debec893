// Exact top-k by scanning all keys: the oracle of the tree, and the baseline that every
// index must beat. Pages are runs of page_size slots in the order of arrival.
#pragma once

#include <cstdint>
#include <string>

#include "kvp/arena.hpp"
#include "kvp/index_common.hpp"
#include "kvp/key_view.hpp"
#include "kvp/top_k.hpp"

namespace kvp::index {

// Keys of one KV head. Holds only their number.
class BruteForce {
 public:
  // Keys that are scored before the best are selected: their scores stay in L1.
  static constexpr std::int64_t kBlock = 256;

  BruteForce(Arena& /*arena*/, const Settings& settings, const Kernels& kernels,
             std::int64_t /*head*/)
      : settings_(settings), kernels_(&kernels) {}

  const Kernels& kernels() const { return *kernels_; }
  std::int64_t num_keys() const { return num_keys_; }
  std::int64_t num_pages() const {
    return (num_keys_ + settings_.page_size - 1) / settings_.page_size;
  }
  std::int64_t place(std::int64_t slot) const { return slot; }

  // Adds the keys at slots [0, n) of the view; false if one cannot be indexed.
  bool append(const KeyView& keys, std::int64_t n, std::int64_t* bad_slot) {
    float peak = 0.0f;
    if (!measure_keys(keys, n, &peak, bad_slot)) return false;
    num_keys_ += n;
    return true;
  }

  // Cost: one dot product per key; the options are ignored.
  std::int64_t query(const KeyView& keys, bool /*by_page*/, const float* query,
                     const QueryOptions& /*options*/, Scratch& scratch,
                     TopK& top) const {
    float* scores = at_least(scratch.scores, kBlock);
    float* rows = at_least(scratch.rows, kBlock * settings_.head_dim);
    for (std::int64_t first = 0; first < num_keys_; first += kBlock) {
      const std::int64_t left = num_keys_ - first;
      const std::int64_t n = left < kBlock ? left : kBlock;
      score_run(*kernels_, keys, query, 1, first, n, rows, scores, n);
      top.push_all(scores, nullptr, static_cast<std::int32_t>(first), n);
    }
    return num_keys_;
  }

  // 4K and 32K keys: 182 and 1115 us (docs/research/key-index.md, the CPU with AVX2).
  std::int64_t query_ns(const QueryOptions& /*options*/) const {
    return rows_ns(num_keys_, settings_.head_dim, 35);
  }
  std::int64_t append_ns(std::int64_t n) const {
    return rows_ns(n, settings_.head_dim, 25);
  }

  std::string integrity(const KeyView& keys, bool /*by_page*/) const {
    return keys.num_places < num_keys_ ? "the view has fewer keys than the index" : "";
  }

 private:
  Settings settings_;
  const Kernels* kernels_;
  std::int64_t num_keys_ = 0;
};

}  // namespace kvp::index
