// The DCI-tree of IceCache (multi-level dynamic continuous indexing) over the
// keys of one KV head: sections 3.3 and 4.1 of the paper, appendix B, algorithms
// 2 to 4. This header holds the structure; dci_build.hpp adds keys,
// dci_query.hpp searches, dci_check.hpp verifies.
//
//   level 3 (top)        o              o           promoted keys
//                      / | \          / | \         children: nearest parent
//   level 2           o  o  o        o  o  o        r * n promoted keys: the nodes
//                    /|\ ...                        leaf pages: keys of a node
//   level 1         .......................         all n keys, once each
//
// A key's level is drawn from a hash of (seed, head, slot), so it does not depend on how
// the keys were split over calls. The nearest parent is the one with the largest inner
// product of the transformed keys
//
//   T_K(k) = [k / c, sqrt(1 - |k|^2 / c^2)]                              (eq. 2)
//
// c is the largest norm so far, exactly. The tree stores parts that do not depend on c:
// keys, norms, and <u, k> for the directions u. The last coordinate of T_K times c (the
// "lift") depends on c and is recomputed for every key when c grows: O(n) per new maximum.
// Query bounds therefore always use the current c. The order of results never depends on
// c: with eq. 3, <T_Q(q), T_K(k)> = <q, k> / (|q| c). A parent is chosen once, when its
// key arrives: the nearest under the c of that time among the nodes of that time. A key
// never moves to another page.
//
// Differs from the paper: a promoted key stays at every level below as well, so every key
// has exactly one page. The first key is always promoted, so level 2 exists. Parents are
// searched exactly instead of through the tree. With Settings::by_mean a search ranks the
// nodes of level 2 by the mean of their keys, which represents them better than their
// promoted key.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kvp/arena.hpp"
#include "kvp/index_common.hpp"
#include "kvp/key_view.hpp"
#include "kvp/top_k.hpp"

namespace kvp::index {

inline std::uint64_t mix64(std::uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// Children of the nodes of one level, in chunks; each chunk belongs to one node. For
// level 2 the children are keys and a chunk is a page.
struct Chunks {
  Chunks(Arena& arena, std::int64_t capacity_, std::int64_t projections_)
      : capacity(capacity_),
        padded(round_up(capacity_, kPanel)),
        projections(projections_),
        count(arena),
        next(arena),
        owner(arena),
        child(arena),
        norm2(arena),
        lift(arena),
        raw(arena) {}

  std::int64_t size() const { return count.size(); }

  std::int64_t capacity;  // children per chunk
  std::int64_t padded;  // the same, rounded up to whole vectors
  std::int64_t projections;
  Array<std::int32_t> count;  // children in the chunk
  Array<std::int32_t> next;  // next chunk of the node, or -1
  Array<std::int32_t> owner;  // the chunk's node
  Array<std::int32_t> child;  // [chunk][capacity], number at the level below
  Array<float> norm2, lift;  // [chunk][padded]
  Array<float> raw;  // [chunk][projection][padded], <u, k>
};

// The promoted keys of one level; each is the point of one node.
struct Level {
  Level(Arena& arena, std::int64_t chunk_capacity, std::int64_t projections)
      : key(arena),
        rows(arena),
        norm2(arena),
        parent(arena),
        first(arena),
        last(arena),
        num_children(arena),
        mean(arena),
        members(arena),
        chunks(arena, chunk_capacity, projections) {}

  std::int64_t size() const { return key.size(); }

  Array<std::int32_t> key;  // slot of the key; ascending
  Array<float> rows;  // [point][row_stride]: key, lift, zeros
  Array<float> norm2;
  Array<std::int32_t> parent;  // point of the level above; -1 at the top
  Array<std::int32_t> first, last;  // first and last chunk of the node; -1: none
  Array<std::int32_t> num_children;
  Array<float> mean;  // [point][row_stride] of the node's keys; level 2
  Array<std::int32_t> members;  // keys in the mean; level 2
  Chunks chunks;  // children, at the level below
  std::int64_t attached_at = 0;  // number of keys when parents were last chosen for
  // the whole level, because a level above appeared
};

// The state after one append: keys [0, end) exist, squared norms are up to c2.
struct Batch {
  std::int64_t end;
  float c2;
};

class DciTree {
 public:
  static constexpr std::int64_t kMaxLevel = 12;  // enough for r = 1/2, 4096
  static constexpr std::int64_t kInnerChunk = 32;  // children, above the leaves
  static constexpr std::int64_t kKeysAtOnce = 128;  // read and assigned together

  DciTree(Arena& arena, const Settings& settings, const Kernels& kernels,
          std::int64_t head);

  std::int64_t num_keys() const { return place_.size(); }
  std::int64_t num_pages() const { return pages().size(); }
  std::int64_t place(std::int64_t slot) const { return place_[slot]; }
  std::int64_t num_levels() const {  // including level 1, the keys
    return 1 + static_cast<std::int64_t>(levels_.size());
  }

  // Adds keys at slots [0, n) of the view as the next n keys. Returns false and changes
  // nothing if a key cannot be indexed (measure_keys); bad_slot is then its slot.
  //
  // Cost: O(n * (r * num_keys) * head_dim) multiply-adds, blocked.
  bool append(const KeyView& keys, std::int64_t n, std::int64_t* bad_slot);

  // Pushes the best keys into top and returns how many it visited. See dci_query.hpp.
  std::int64_t query(const KeyView& keys, bool by_page, const float* query,
                     const QueryOptions& options, Scratch& scratch, TopK& top) const;

  // 8K keys, 256 visits: 45 us; 128K keys, 1218 visits: 144 us (docs/research/key-index.md,
  // the CPU with AVX2).
  std::int64_t query_ns(const QueryOptions& options) const {
    const std::int64_t n = num_keys(), limit = options.max_visits;
    const std::int64_t visits = limit > 0 && limit < n ? limit : n;
    return 20'000 + rows_ns(visits, settings_.head_dim, 100);
  }
  // Every key looks for its parent: 8K keys take 11 ms, 128K 1.4 s.
  std::int64_t append_ns(std::int64_t n) const {
    return rows_ns(n, settings_.head_dim, 1000 + (num_keys() + n) / 13);
  }

  // Empty if the tree is consistent, else its first fault.
  // Cost: as building, in double precision.
  std::string integrity(const KeyView& keys, bool by_page) const;

 private:
  friend struct TreeChecker;
  friend struct TreeBreaker;  // tests damage a tree to see that the checks report it

  // Points to become children of nodes: keys of one call, or promoted keys of a level.
  struct Points {
    std::int64_t first;  // number of the first point at its level
    std::int64_t n;
    std::vector<float> norm2;  // [n]
    std::vector<float> raw;  // [projection][n], <u, k>
    std::vector<std::int32_t> parent;  // [n], node
  };

  // Building: dci_build.hpp.
  void make_directions();
  std::int64_t level_of(std::int64_t slot) const;
  float lift(float norm2) const;
  void grow_norm(float norm2);
  void promote(const KeyView& keys, std::int64_t first, std::int64_t n);
  void attach_level(std::size_t level, std::int64_t first);
  void add_to_means(const float* rows, const std::int32_t* nodes, std::int64_t n);
  void attach_keys(const KeyView& keys, std::int64_t first, std::int64_t n);
  Points make_points(std::int64_t first, std::int64_t n) const;
  void set_points(const float* rows, std::int64_t at, std::int64_t n,
                  const std::vector<float>& panels, const std::vector<float>& bias,
                  Points& points) const;
  void make_panels(const Level& nodes, std::vector<float>& panels,
                   std::vector<float>& bias) const;
  void add_children(Level& nodes, const Points& points, std::int32_t* places);
  void order_compactly(const Points& points, std::int32_t* begin, std::int32_t* end,
                       std::int64_t chunk) const;
  void append_child(Level& nodes, std::int32_t node, const Points& points,
                    std::int32_t i, std::int32_t* places);

  // Searching: dci_query.hpp.
  struct Search;
  void find_nodes(Search& search) const;
  void descend(Search& search, std::size_t level) const;
  void rank_level(Search& search, const Level& level) const;
  void rank(Search& search, const Level& level) const;
  float bound_children(Search& search, const Level& nodes, std::int32_t node,
                       bool leaves) const;
  void list_children(Search& search, const Level& nodes, std::int32_t node,
                     const Level* below) const;
  std::int64_t scan_nodes(Search& search) const;
  void flush(Search& search) const;

  const Chunks& pages() const { return levels_.front().chunks; }
  const float* row(const Level& level, std::int64_t point) const {
    return level.rows.data() + point * row_stride_;
  }
  const float* direction(std::int64_t p) const {
    return directions_.data() + p * row_stride_;
  }

  Arena* arena_;
  Settings settings_;
  const Kernels* kernels_;
  std::uint64_t seed_;  // specific to the head
  std::int64_t row_stride_;  // head_dim + 1, rounded up
  float c2_ = 0.0f;  // square of the largest norm
  std::vector<Level> levels_;  // levels_[0] is level 2
  Array<float> directions_;  // [projection][row_stride_], unit, head_dim + 1
  Array<float> last_;  // [projection], last coordinate of each direction
  Array<std::int32_t> place_;  // of each key
  std::vector<Batch> batches_;
};

}  // namespace kvp::index

#include "kvp/dci_build.hpp"
#include "kvp/dci_check.hpp"
#include "kvp/dci_query.hpp"
