// Searching a DCI-tree (algorithms 3 and 4). Part of dci_tree.hpp.
//
// From the top level down: rank the reached points by their inner product with the query,
// open the best until `max_visits` children are reached, and continue with these. At level
// 1 the children are keys, and the k best are kept. A level of at most max_visits points
// is scanned completely instead of reached from above, which loses nothing. Points without
// children are skipped, so that few visits still find a key. (Equal keys all become
// children of one of their points.)
//
// The search visits only a share `visit_ratio` of the children of an opened node: those
// that prioritized DCI would visit first. Prioritized DCI keeps cursors and a priority
// queue per composite index. Nodes of this tree have tens of children: computing all lower
// bounds and taking the smallest is faster and selects the same children.
//
// Without a limit (max_visits 0, any visit_ratio) the search visits every key. The result
// equals the exact scan's, ties included: both score keys with one function.
//
// Differs from algorithm 4, where every visited node yields k children, however many it
// has: if k exceeds the size of a node, that opens the whole tree.
#pragma once

#include <algorithm>
#include <cmath>

#include "kvp/dci_tree.hpp"

namespace kvp::index {

struct DciTree::Search {
  const KeyView& keys;
  bool by_page;
  const float* query;
  std::int64_t budget;
  double visit_ratio;
  Scratch& scratch;
  TopK& top;
  double query_norm = 0.0;
  std::vector<Scored> ranked = {};  // nodes of a level, a heap: best first
  std::int64_t pending =
      0;  // keys in scratch.offsets and .slots that are not scored yet

  static constexpr std::int64_t kFlush = 256;
};

inline std::int64_t DciTree::query(const KeyView& keys, bool by_page,
                                   const float* query, const QueryOptions& options,
                                   Scratch& scratch, TopK& top) const {
  if (num_keys() == 0) return 0;
  const std::int64_t budget = options.max_visits > 0 ? options.max_visits : num_keys();
  const double ratio = options.max_visits > 0 ? options.visit_ratio : 1.0;
  Search search{keys, by_page, query, budget, ratio, scratch, top};
  if (ratio < 1.0) {
    // c * <u, T_Q(q)>, eq. 3; a query of zeros has no direction and gets zeros.
    search.query_norm = std::sqrt(squared_norm(query, settings_.head_dim));
    const double scale =
        search.query_norm > 0.0 ? std::sqrt(c2_) / search.query_norm : 0.0;
    const std::int64_t projections = settings_.projections();
    float* targets = at_least(scratch.targets, projections);
    kernels_->score(query, settings_.head_dim, directions_.data(), nullptr, row_stride_,
                    projections, targets);
    for (std::int64_t p = 0; p < projections; ++p) {
      targets[p] = static_cast<float>(targets[p] * scale);
    }
  }
  find_nodes(search);
  const std::int64_t visits = scan_nodes(search);
  if (visits > 0) return visits;
  // None of the reached nodes has keys: rank all nodes of level 2 instead.
  rank_level(search, levels_.front());
  return scan_nodes(search);
}

// Sets `ranked` to the nodes of level 2 that the search reaches.
inline void DciTree::find_nodes(Search& search) const {
  std::size_t level = 0;
  while (level + 1 < levels_.size() && levels_[level].size() > search.budget) {
    ++level;
  }
  rank_level(search, levels_[level]);
  while (level > 0) descend(search, level--);
}

// Ranks all points of a level that have children.
inline void DciTree::rank_level(Search& search, const Level& level) const {
  std::vector<std::int32_t>& points = search.scratch.nodes;
  points.clear();
  for (std::int32_t node = 0; node < level.size(); ++node) {
    if (level.num_children[node] > 0) points.push_back(node);
  }
  rank(search, level);
}

// Scores the points listed in scratch.nodes and makes a heap of them.
inline void DciTree::rank(Search& search, const Level& level) const {
  Scratch& scratch = search.scratch;
  const auto n = static_cast<std::int64_t>(scratch.nodes.size());
  std::int64_t* offsets = at_least(scratch.offsets, n);
  float* scores = at_least(scratch.scores, n);
  for (std::int64_t i = 0; i < n; ++i) {
    offsets[i] = scratch.nodes[static_cast<std::size_t>(i)] * row_stride_;
  }
  const bool by_mean = settings_.by_mean && &level == &levels_.front();
  kernels_->score(search.query, settings_.head_dim,
                  by_mean ? level.mean.data() : level.rows.data(), offsets, 0, n,
                  scores);
  search.ranked.resize(static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < search.ranked.size(); ++i) {
    search.ranked[i] = {scores[i], scratch.nodes[i]};
  }
  std::make_heap(search.ranked.begin(), search.ranked.end(),
                 [](const Scored& a, const Scored& b) { return better(b, a); });
}

// Removes and returns the best ranked node; false if none is left.
inline bool take_best(std::vector<Scored>& ranked, std::int32_t* node) {
  if (ranked.empty()) return false;
  std::pop_heap(ranked.begin(), ranked.end(),
                [](const Scored& a, const Scored& b) { return better(b, a); });
  *node = ranked.back().slot;
  ranked.pop_back();
  return true;
}

// Replaces the ranked nodes of a level by ranked points of the level below.
inline void DciTree::descend(Search& search, std::size_t level) const {
  search.scratch.nodes.clear();
  const auto budget = static_cast<std::size_t>(search.budget);
  std::int32_t node;
  while (search.scratch.nodes.size() < budget && take_best(search.ranked, &node)) {
    list_children(search, levels_[level], node, &levels_[level - 1]);
  }
  rank(search, levels_[level - 1]);
}

// Writes lower bounds for a node's children to scratch.bounds, chunk by chunk. Returns
// the largest bound at which a child is visited.
inline float DciTree::bound_children(Search& search, const Level& nodes,
                                     std::int32_t node, bool leaves) const {
  const Chunks& chunks = nodes.chunks;
  const std::int64_t n = nodes.num_children[node];
  std::int64_t room = 0;
  for (std::int32_t c = nodes.first[node]; c >= 0; c = chunks.next[c]) {
    room += chunks.padded;
  }
  float* bounds = at_least(search.scratch.bounds, 2 * room);
  float* packed = bounds + room;
  for (std::int32_t c = nodes.first[node]; c >= 0; c = chunks.next[c]) {
    kernels_->lower_bounds(chunks.raw.data() + c * chunks.projections * chunks.padded,
                           chunks.padded, chunks.lift.data() + c * chunks.padded,
                           last_.data(), search.scratch.targets.data(),
                           settings_.composite, settings_.simple, chunks.count[c],
                           bounds);
    packed = std::copy(bounds, bounds + chunks.count[c], packed);
    bounds += chunks.padded;
  }
  packed -= n;
  const auto visit =
      static_cast<std::int64_t>(std::ceil(search.visit_ratio * static_cast<double>(n)));
  const std::int64_t nth = std::clamp<std::int64_t>(visit, 1, n) - 1;
  std::nth_element(packed, packed + nth, packed + n);
  if (!leaves || !search.top.full() || search.query_norm == 0.0) return packed[nth];
  // A key further away than the k-th best cannot be among the best. Distances are those of
  // transformed vectors, times c, with a margin for rounding.
  const double c = std::sqrt(static_cast<double>(c2_));
  const double far2 = 2.0 * c * c - 2.0 * c * search.top.floor() / search.query_norm;
  const double far = std::sqrt(std::max(far2, 0.0)) + 1e-3 * c;
  return std::min(packed[nth], static_cast<float>(far));
}

// Appends the children of a node that the search visits: points of the level below to
// scratch.nodes, or keys, if no level is below, to the pending ones.
inline void DciTree::list_children(Search& search, const Level& nodes,
                                   std::int32_t node, const Level* below) const {
  const bool leaves = below == nullptr;
  const Chunks& chunks = nodes.chunks;
  Scratch& scratch = search.scratch;
  const bool choose = search.visit_ratio < 1.0 && settings_.projections() > 0 &&
                      nodes.num_children[node] > 0;
  const float cut = choose ? bound_children(search, nodes, node, leaves) : 0.0f;
  const float* bounds = scratch.bounds.data();
  for (std::int32_t c = nodes.first[node]; c >= 0; c = chunks.next[c]) {
    const std::int32_t* child = chunks.child.data() + c * chunks.capacity;
    for (std::int64_t i = 0; i < chunks.count[c]; ++i) {
      if (choose && bounds[i] > cut) continue;
      if (!leaves) {
        if (below->num_children[child[i]] > 0) scratch.nodes.push_back(child[i]);
        continue;
      }
      scratch.slots[static_cast<std::size_t>(search.pending)] = child[i];
      scratch.offsets[static_cast<std::size_t>(search.pending)] =
          search.keys.offset(search.by_page ? c * chunks.capacity + i : child[i]);
      if (++search.pending == Search::kFlush) flush(search);
    }
    if (choose) bounds += chunks.padded;
  }
}

// Opens ranked nodes until the budget of keys is spent. Returns the keys visited.
inline std::int64_t DciTree::scan_nodes(Search& search) const {
  Scratch& scratch = search.scratch;
  at_least(scratch.slots, Search::kFlush);
  at_least(scratch.offsets, Search::kFlush);
  at_least(scratch.scores, Search::kFlush);
  at_least(scratch.rows, Search::kFlush * settings_.head_dim);
  scratch.visits = 0;
  std::int32_t node;
  while (scratch.visits + search.pending < search.budget &&
         take_best(search.ranked, &node)) {
    list_children(search, levels_.front(), node, nullptr);
  }
  flush(search);
  return scratch.visits;
}

// Scores the pending keys and pushes them into the top k.
inline void DciTree::flush(Search& search) const {
  Scratch& scratch = search.scratch;
  if (search.pending == 0) return;
  score_keys(*kernels_, search.keys, search.query, scratch.offsets.data(),
             search.pending, scratch.rows.data(), scratch.scores.data());
  search.top.push_all(scratch.scores.data(), scratch.slots.data(), 0, search.pending);
  scratch.visits += search.pending;
  search.pending = 0;
}

}  // namespace kvp::index
