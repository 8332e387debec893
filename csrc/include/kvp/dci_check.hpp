// Verifies a DCI-tree against its definition. Part of dci_tree.hpp.
//
// Reads the keys again and recomputes everything in double precision with plain loops:
// kernels must not check their own results.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>

#include "kvp/dci_tree.hpp"

namespace kvp::index {

struct TreeChecker {
  const DciTree& tree;
  const KeyView& keys;
  bool by_page;
  std::string fault = {};
  std::vector<float> rows = {};  // [num_keys][head_dim], read from the view
  std::vector<float> norms2 = {};

  // Records the first fault; false if the condition does not hold.
  __attribute__((format(printf, 3, 4))) bool require(bool condition, const char* format,
                                                     ...) {
    if (condition || !fault.empty()) return condition;
    char text[256];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fault = text;
    return false;
  }

  long long num_keys() const { return tree.num_keys(); }
  std::int64_t dims() const { return tree.settings_.head_dim; }
  const float* key(std::int64_t slot) const { return rows.data() + slot * dims(); }

  std::string run() {
    const std::int64_t places =
        by_page ? tree.num_pages() * tree.settings_.page_size : tree.num_keys();
    if (!require(
            keys.num_places >= places, "the view has %lld places, the index needs %lld",
            static_cast<long long>(keys.num_places), static_cast<long long>(places))) {
      return fault;
    }
    // Structure first: the other checks use it to index.
    if (check_pages() && check_levels() && read_all() && check_norms() &&
        check_children() && check_parents() && check_means()) {
      check_projections();
    }
    return fault;
  }

  // Every key is in exactly one page, at the place that place() returns.
  bool check_pages() {
    const Chunks& pages = tree.pages();
    const std::int64_t size = tree.settings_.page_size;
    std::vector<char> seen(static_cast<std::size_t>(num_keys()));
    long long total = 0;
    for (std::int64_t page = 0; page < pages.size(); ++page) {
      const std::int32_t count = pages.count[page];
      if (!require(count >= 1 && count <= size, "page %lld holds %d keys of %lld",
                   static_cast<long long>(page), count, static_cast<long long>(size))) {
        return false;
      }
      total += count;
      for (std::int64_t i = 0; i < count; ++i) {
        const std::int32_t slot = pages.child[page * size + i];
        if (!require(slot >= 0 && slot < num_keys(), "page %lld lists slot %d",
                     static_cast<long long>(page), slot) ||
            !require(!seen[static_cast<std::size_t>(slot)], "slot %d is in two places",
                     slot) ||
            !require(tree.place_[slot] == page * size + i,
                     "slot %d is in place %lld, not %d", slot,
                     static_cast<long long>(page * size + i), tree.place_[slot])) {
          return false;
        }
        seen[static_cast<std::size_t>(slot)] = 1;
      }
    }
    return require(total == num_keys(), "pages hold %lld keys of %lld", total,
                   num_keys());
  }

  // Every level holds exactly the keys that were drawn for it, in order.
  bool check_levels() {
    for (std::size_t at = 0; at < tree.levels_.size(); ++at) {
      const Level& level = tree.levels_[at];
      std::int64_t point = 0;
      for (std::int64_t slot = 0; slot < num_keys(); ++slot) {
        if (tree.level_of(slot) < static_cast<std::int64_t>(at) + 2) continue;
        if (!require(point < level.size() && level.key[point] == slot,
                     "slot %lld is missing from level %zu",
                     static_cast<long long>(slot), at + 2)) {
          return false;
        }
        ++point;
      }
      if (!require(point == level.size(), "level %zu has keys not drawn for it",
                   at + 2)) {
        return false;
      }
    }
    return true;
  }

  bool read_all() {
    rows.resize(static_cast<std::size_t>(num_keys() * dims()));
    norms2.resize(static_cast<std::size_t>(num_keys()));
    for (std::int64_t slot = 0; slot < num_keys(); ++slot) {
      float* out = rows.data() + slot * dims();
      read_key(keys, keys.offset(by_page ? tree.place_[slot] : slot), out);
      norms2[static_cast<std::size_t>(slot)] = squared_norm(out, dims());
    }
    return true;
  }

  // c is the largest norm; copies of promoted keys equal the keys of the view.
  bool check_norms() {
    float peak = 0.0f;
    for (float norm2 : norms2) peak = std::max(peak, norm2);
    if (!require(peak == tree.c2_, "largest squared norm is %g, the tree has %g",
                 static_cast<double>(peak), static_cast<double>(tree.c2_))) {
      return false;
    }
    for (const Level& level : tree.levels_) {
      for (std::int64_t i = 0; i < level.size(); ++i) {
        const std::int32_t slot = level.key[i];
        const float norm2 = norms2[static_cast<std::size_t>(slot)];
        const float* row = tree.row(level, i);
        if (!require(
                std::equal(row, row + dims(), key(slot)) && level.norm2[i] == norm2,
                "the copy of slot %d differs from the key", slot) ||
            !require(row[dims()] == tree.lift(norm2), "lift of slot %d is stale",
                     slot)) {
          return false;
        }
      }
    }
    return true;
  }

  // Every point of a level is in exactly one chunk, which belongs to its parent. Chains of
  // chunks have no cycles.
  bool check_children() {
    for (std::size_t at = 0; at < tree.levels_.size(); ++at) {
      const Level& nodes = tree.levels_[at];
      const Level* below = at > 0 ? &tree.levels_[at - 1] : nullptr;
      const std::int64_t expected = below ? below->size() : tree.num_keys();
      const Chunks& chunks = nodes.chunks;
      long long chained = 0, children = 0;
      for (std::int64_t node = 0; node < nodes.size(); ++node) {
        long long own = 0;
        std::int32_t last = -1;
        for (std::int32_t c = nodes.first[node]; c >= 0; c = chunks.next[c]) {
          if (!require(c < chunks.size() && chunks.owner[c] == node &&
                           ++chained <= chunks.size(),
                       "chunk %d of level %zu is in a wrong chain", c, at + 2)) {
            return false;
          }
          for (std::int64_t i = 0; below != nullptr && i < chunks.count[c]; ++i) {
            const std::int32_t child = chunks.child[c * chunks.capacity + i];
            if (!require(child >= 0 && child < expected && below->parent[child] == node,
                         "point %d of level %zu is in a chunk of another node", child,
                         at + 1)) {
              return false;
            }
          }
          own += chunks.count[c];
          last = c;
        }
        children += own;
        if (!require(own == nodes.num_children[node] && last == nodes.last[node],
                     "node %lld of level %zu counts %d children, has %lld",
                     static_cast<long long>(node), at + 2, nodes.num_children[node],
                     own)) {
          return false;
        }
      }
      if (!require(chained == chunks.size() && children == expected,
                   "level %zu has %lld of %lld points below its nodes", at + 2,
                   children, static_cast<long long>(expected))) {
        return false;
      }
    }
    return true;
  }

  bool check_means() {
    if (!tree.settings_.by_mean) return true;
    const Level& nodes = tree.levels_.front();
    const Chunks& pages = tree.pages();
    const double scale = std::sqrt(static_cast<double>(tree.c2_));
    std::vector<double> mean(static_cast<std::size_t>(dims()));
    for (std::int64_t node = 0; node < nodes.size(); ++node) {
      std::fill(mean.begin(), mean.end(), 0.0);
      for (std::int32_t c = nodes.first[node]; c >= 0; c = pages.next[c]) {
        for (std::int64_t i = 0; i < pages.count[c]; ++i) {
          const float* member = key(pages.child[c * pages.capacity + i]);
          for (std::size_t d = 0; d < mean.size(); ++d) {
            mean[d] += static_cast<double>(member[d]) / nodes.num_children[node];
          }
        }
      }
      for (std::int64_t d = 0; d < dims(); ++d) {
        const double stored = nodes.mean[node * tree.row_stride_ + d];
        if (!require(nodes.members[node] == nodes.num_children[node] &&
                         std::fabs(stored - mean[static_cast<std::size_t>(d)]) <=
                             1e-4 * scale,
                     "mean of node %lld is wrong", static_cast<long long>(node))) {
          return false;
        }
      }
    }
    return true;
  }

  const Batch& batch_of(std::int64_t slot) const {
    return *std::upper_bound(
        tree.batches_.begin(), tree.batches_.end(), slot,
        [](std::int64_t value, const Batch& batch) { return value < batch.end; });
  }

  // <T_K(a), T_K(b)> c^2 for the c of a batch.
  double inner(std::int64_t a, std::int64_t b, const Batch& batch) const {
    const auto lift = [&](std::int64_t slot) {
      const float norm2 = norms2[static_cast<std::size_t>(slot)];
      return std::sqrt(static_cast<double>(std::max(batch.c2 - norm2, 0.0f)));
    };
    double sum = lift(a) * lift(b);
    for (std::int64_t d = 0; d < dims(); ++d) {
      sum += static_cast<double>(key(a)[d]) * static_cast<double>(key(b)[d]);
    }
    return sum;
  }

  // No node that existed when the parent was chosen is nearer than the parent.
  bool check_parent(std::int64_t slot, const Level& nodes, std::int64_t parent,
                    const Batch& batch) {
    const double chosen = inner(slot, nodes.key[parent], batch);
    for (std::int64_t i = 0; i < nodes.size() && nodes.key[i] < batch.end; ++i) {
      const double other = inner(slot, nodes.key[i], batch);
      if (!require(other <= chosen + 1e-5 * static_cast<double>(batch.c2),
                   "slot %lld has parent slot %d, but slot %d is nearer",
                   static_cast<long long>(slot), nodes.key[parent], nodes.key[i])) {
        return false;
      }
    }
    return require(nodes.key[parent] < batch.end,
                   "slot %lld has a parent that was added later",
                   static_cast<long long>(slot));
  }

  bool check_parents() {
    const Chunks& pages = tree.pages();
    for (std::int64_t slot = 0; slot < num_keys(); ++slot) {
      const std::int32_t node =
          pages.owner[tree.place_[slot] / tree.settings_.page_size];
      if (!check_parent(slot, tree.levels_[0], node, batch_of(slot))) return false;
    }
    for (std::size_t at = 0; at + 1 < tree.levels_.size(); ++at) {
      const Level& level = tree.levels_[at];
      for (std::int64_t i = 0; i < level.size(); ++i) {
        const std::int64_t chosen_at =
            std::max<std::int64_t>(level.key[i], level.attached_at - 1);
        if (!check_parent(level.key[i], tree.levels_[at + 1], level.parent[i],
                          batch_of(chosen_at))) {
          return false;
        }
      }
    }
    return true;
  }

  // Stored projections equal those of the keys, and are at most |T_K| c = c.
  bool check_projections() {
    for (std::size_t at = 0; at < tree.levels_.size(); ++at) {
      const Chunks& chunks = tree.levels_[at].chunks;
      for (std::int64_t c = 0; c < chunks.size(); ++c) {
        for (std::int64_t i = 0; i < chunks.count[c]; ++i) {
          const std::int32_t child = chunks.child[c * chunks.capacity + i];
          const std::int32_t slot = at > 0 ? tree.levels_[at - 1].key[child] : child;
          if (!check_projection(chunks, c, i, slot)) return false;
        }
      }
    }
    return true;
  }

  bool check_projection(const Chunks& chunks, std::int64_t c, std::int64_t i,
                        std::int32_t slot) {
    const float norm2 = norms2[static_cast<std::size_t>(slot)];
    const std::int64_t at = c * chunks.padded + i;
    const double scale = std::sqrt(static_cast<double>(tree.c2_));
    if (!require(chunks.norm2[at] == norm2 && chunks.lift[at] == tree.lift(norm2),
                 "norm or lift of slot %d in its chunk is stale", slot)) {
      return false;
    }
    for (std::int64_t p = 0; p < chunks.projections; ++p) {
      const float* u = tree.direction(p);
      double expected = 0.0;
      for (std::int64_t d = 0; d < dims(); ++d) {
        expected += static_cast<double>(u[d]) * static_cast<double>(key(slot)[d]);
      }
      const double stored =
          chunks.raw[(c * chunks.projections + p) * chunks.padded + i];
      const double whole =
          stored + static_cast<double>(tree.last_[p] * chunks.lift[at]);
      if (!require(std::fabs(stored - expected) <= 1e-5 * scale,
                   "projection %lld of slot %d is %g, not %g",
                   static_cast<long long>(p), slot, stored, expected) ||
          !require(std::fabs(whole) <= scale * (1.0 + 1e-4),
                   "projection %lld of slot %d exceeds the norm",
                   static_cast<long long>(p), slot)) {
        return false;
      }
    }
    return true;
  }
};

inline std::string DciTree::integrity(const KeyView& keys, bool by_page) const {
  return TreeChecker{*this, keys, by_page}.run();
}

}  // namespace kvp::index
