// One index per request and layer: a tree (or exact scan) for each KV head, in one
// arena. Calls run in parallel over (request, head). Results do not depend on the number
// of threads.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "kvp/arena.hpp"
#include "kvp/brute_force.hpp"
#include "kvp/dci_tree.hpp"
#include "kvp/for_all.hpp"

namespace kvp::index {

// A key that cannot be indexed.
struct BadKey {
  std::int64_t head = -1;  // -1: all keys can be indexed
  std::int64_t slot = 0;
};

template <typename Tree>
class Forest {
 public:
  Forest(const Settings& settings, std::int64_t num_heads, const Kernels& kernels)
      : settings_(settings) {
    for (std::int64_t head = 0; head < num_heads; ++head) {
      trees_.emplace_back(arena_, settings, kernels, head);
    }
  }

  const Settings& settings() const { return settings_; }
  std::int64_t num_heads() const { return static_cast<std::int64_t>(trees_.size()); }
  std::int64_t num_keys() const { return trees_.front().num_keys(); }
  std::int64_t memory_bytes() const { return arena_.bytes(); }
  const Tree& tree(std::int64_t head) const {
    return trees_[static_cast<std::size_t>(head)];
  }

  // Adds n keys to every head. If a key cannot be indexed, changes nothing and returns the
  // first of these keys (by head, then slot).
  BadKey append(const std::vector<KeyView>& heads, std::int64_t n) {
    std::vector<std::int64_t> bad(heads.size(), -1);
    const Work work = Work::nanoseconds(num_heads() * trees_.front().append_ns(n));
    for_all(num_heads(), work, [&](std::int64_t head) {
      const auto at = static_cast<std::size_t>(head);
      float peak = 0.0f;
      measure_keys(heads[at], n, &peak, &bad[at]);
    });
    for (std::size_t head = 0; head < bad.size(); ++head) {
      if (bad[head] >= 0) return {static_cast<std::int64_t>(head), bad[head]};
    }
    for_all(num_heads(), work, [&](std::int64_t head) {
      std::int64_t unused = 0;
      trees_[static_cast<std::size_t>(head)].append(
          heads[static_cast<std::size_t>(head)], n, &unused);
    });
    return {};
  }

  // "head 2: ..." for the first head with a fault, or empty.
  std::string integrity(const std::vector<KeyView>& heads, bool by_page) const {
    std::vector<std::string> faults(heads.size());
    // A check reads and recomputes everything, as building does.
    const Work work =
        Work::nanoseconds(num_heads() * trees_.front().append_ns(num_keys()));
    for_all(num_heads(), work, [&](std::int64_t head) {
      const auto at = static_cast<std::size_t>(head);
      faults[at] = trees_[at].integrity(heads[at], by_page);
    });
    for (std::size_t head = 0; head < faults.size(); ++head) {
      if (trees_[head].num_keys() != num_keys()) return "heads differ in size";
      if (!faults[head].empty()) {
        return "head " + std::to_string(head) + ": " + faults[head];
      }
    }
    return "";
  }

 private:
  Settings settings_;
  Arena arena_;
  std::deque<Tree> trees_;  // trees hold pointers to the arena and do not move
};

// The pages that hold the best keys of the queries (algorithm 3). best[g] are those of
// query g, best first. The queries of a KV head share their pages (section 4.2). Pages are
// listed by the rank of their keys, then by query; at most max_pages.
template <typename Tree>
std::int64_t pages_of(const Tree& tree, std::int64_t page_size,
                      const std::vector<std::vector<Scored>>& best,
                      std::int64_t max_pages, std::int64_t* pages) {
  std::vector<bool> taken(static_cast<std::size_t>(tree.num_pages()));
  std::int64_t count = 0;
  for (std::size_t rank = 0;; ++rank) {
    bool any = false;
    for (const std::vector<Scored>& list : best) {
      if (rank >= list.size()) continue;
      any = true;
      const std::int64_t page = tree.place(list[rank].slot) / page_size;
      if (taken[static_cast<std::size_t>(page)]) continue;
      if (count == max_pages) return count;
      taken[static_cast<std::size_t>(page)] = true;
      pages[count++] = page;
    }
    if (!any) return count;
  }
}

}  // namespace kvp::index
