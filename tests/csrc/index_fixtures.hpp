// Fixtures of the tests of the key index: random keys, layouts, searches.
// No framework: CHECK counts, report() returns the exit status.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "kvp/index_forest.hpp"

namespace index_test {

using namespace kvp::index;
using Index = std::int64_t;

inline constexpr unsigned kSeed = 20261121;
inline int failures = 0;
inline const char* current_case = "";

#define CHECK(condition)                                                            \
  do {                                                                              \
    if (!(condition)) {                                                             \
      std::printf("%s:%d: %s (case %s, seed %u)\n", __FILE__, __LINE__, #condition, \
                  current_case, kSeed);                                             \
      ++failures;                                                                   \
    }                                                                               \
  } while (0)

inline std::vector<float> clustered(Index n, Index dims, std::mt19937& random) {
  std::normal_distribution<float> normal;
  const Index clusters = std::max<Index>(n / 40, 1);
  std::vector<float> centres(static_cast<std::size_t>(clusters * dims));
  for (float& x : centres) x = normal(random);
  std::vector<float> keys(static_cast<std::size_t>(n * dims));
  for (Index i = 0; i < n; ++i) {
    const Index c = static_cast<Index>(random() % static_cast<unsigned>(clusters));
    for (Index d = 0; d < dims; ++d) {
      keys[i * dims + d] = centres[c * dims + d] + 0.4f * normal(random);
    }
  }
  return keys;
}

inline std::uint16_t narrow(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<std::uint16_t>(bits >> 16);
}

// Through stored bits: g++ 12 -O2 compiles `on ? kvp::widen(narrow(x)) : x` to x.
inline std::vector<float> round_all(const std::vector<float>& values) {
  std::vector<std::uint16_t> half;
  for (float x : values) half.push_back(narrow(x));
  std::vector<float> rounded;
  for (std::uint16_t x : half) rounded.push_back(kvp::widen(x));
  return rounded;
}

inline KeyView dense(const std::vector<float>& keys, Index dims) {
  KeyView view;
  view.base = keys.data();
  view.head_dim = view.slot_stride = dims;
  view.num_places = static_cast<Index>(keys.size()) / dims;
  view.slots_per_page = std::max<Index>(view.num_places, 1);
  return view;
}

inline KeyView after(KeyView view,
                     Index slots) {  // the keys of a dense view from a slot on
  view.base = static_cast<const float*>(view.base) + slots * view.slot_stride;
  view.num_places -= slots;
  return view;
}

// Keys in shuffled pages of 16, as rows or transposed, float32 or bfloat16.
struct Paged {
  std::vector<float> wide;
  std::vector<std::uint16_t> half;
  std::vector<Index> table;
  KeyView view;

  Paged(const std::vector<float>& keys, Index dims, bool transposed, bool bf16,
        std::mt19937& random) {
    constexpr Index kSlots = 16;
    const Index n = static_cast<Index>(keys.size()) / dims;
    const Index pages = (n + kSlots - 1) / kSlots;
    table.resize(static_cast<std::size_t>(pages));
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), random);
    view.head_dim = dims;
    view.slots_per_page = kSlots;
    view.page_stride = 2 * kSlots * dims;  // values follow the keys
    view.slot_stride = transposed ? 1 : dims;
    view.dim_stride = transposed ? kSlots : 1;
    view.table = table.data();
    view.num_places = pages * kSlots;
    wide.assign(static_cast<std::size_t>(pages * view.page_stride), 1e30f);
    for (Index i = 0; i < n; ++i) {
      for (Index d = 0; d < dims; ++d) {
        wide[view.offset(i) + d * view.dim_stride] = keys[i * dims + d];
      }
    }
    for (float x : wide) half.push_back(narrow(x));
    view.base = bf16 ? static_cast<const void*>(half.data()) : wide.data();
    view.type = bf16 ? ElementType::kBFloat16 : ElementType::kFloat32;
  }
};

inline Settings settings_for(Index dims, Index page_size, double promotion = 0.1) {
  Settings settings;
  settings.head_dim = dims;
  settings.page_size = page_size;
  settings.promotion = promotion;
  settings.composite = 2;
  settings.simple = 3;
  settings.seed = kSeed;
  settings.by_mean = page_size % 2 == 0;  // both kinds
  return settings;
}

template <typename Tree>
std::vector<Scored> search(const Tree& tree, const KeyView& keys, bool by_page,
                           const float* query, Index k, QueryOptions options = {}) {
  Scratch scratch;
  TopK top(k);
  const Index visits = tree.query(keys, by_page, query, options, scratch, top);
  CHECK(visits <= tree.num_keys());
  return top.sorted();
}

inline bool same(const std::vector<Scored>& a, const std::vector<Scored>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const Scored& x, const Scored& y) {
                      return x.slot == y.slot && x.score == y.score;
                    });
}

inline int report() {
  std::printf("%d failure(s)\n", failures);
  return failures != 0;
}

}  // namespace index_test
