// Adding keys to a DCI-tree: promotion, parents, pages. Part of dci_tree.hpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "kvp/dci_tree.hpp"

namespace kvp::index {

inline DciTree::DciTree(Arena& arena, const Settings& settings, const Kernels& kernels,
                        std::int64_t head)
    : arena_(&arena),
      settings_(settings),
      kernels_(&kernels),
      seed_(mix64(settings.seed ^ mix64(static_cast<std::uint64_t>(head)))),
      row_stride_(round_up(settings.head_dim + 1, kPanel)),
      directions_(arena),
      last_(arena),
      place_(arena) {
  levels_.reserve(kMaxLevel);
  levels_.emplace_back(arena, settings.page_size, settings.projections());
  make_directions();
}

// Uniformly distributed unit vectors in head_dim + 1 dimensions: normalized Gaussians.
inline void DciTree::make_directions() {
  const std::int64_t projections = settings_.projections();
  const std::int64_t dims = settings_.head_dim + 1;
  directions_.resize(projections * row_stride_);
  last_.resize(projections);
  std::uint64_t state = mix64(seed_ ^ 0x646972656374ULL);
  const auto uniform = [&state] {  // in (0, 1]
    state = mix64(state);
    return (static_cast<double>(state >> 11) + 1.0) * 0x1.0p-53;
  };
  std::vector<double> drawn(static_cast<std::size_t>(dims));
  for (std::int64_t p = 0; p < projections; ++p) {
    double norm2 = 0.0;
    for (double& x : drawn) {
      const double radius = std::sqrt(-2.0 * std::log(uniform()));
      x = radius * std::cos(6.283185307179586 * uniform());
      norm2 += x * x;
    }
    float* out = directions_.data() + p * row_stride_;
    for (std::int64_t d = 0; d < dims; ++d) {
      out[d] =
          static_cast<float>(drawn[static_cast<std::size_t>(d)] / std::sqrt(norm2));
    }
    last_[p] = out[settings_.head_dim];
  }
}

// Geometric: level l >= 1 with probability r^(l-1) - r^l (appendix B.1).
inline std::int64_t DciTree::level_of(std::int64_t slot) const {
  std::uint64_t state = mix64(seed_ + static_cast<std::uint64_t>(slot));
  std::int64_t level = slot == 0 ? 2 : 1;  // level 2 must not be empty
  while (level < kMaxLevel) {
    state = mix64(state);
    if (static_cast<double>(state >> 11) * 0x1.0p-53 >= settings_.promotion) break;
    ++level;
  }
  return level;
}

// The last coordinate of T_K, times c.
inline float DciTree::lift(float norm2) const {
  return std::sqrt(std::max(c2_ - norm2, 0.0f));
}

// A new largest norm changes every lift and nothing else that is stored.
inline void DciTree::grow_norm(float norm2) {
  if (norm2 <= c2_) return;
  c2_ = norm2;
  for (Level& level : levels_) {
    for (std::int64_t i = 0; i < level.size(); ++i) {
      level.rows[i * row_stride_ + settings_.head_dim] = lift(level.norm2[i]);
    }
    Chunks& chunks = level.chunks;
    for (std::int64_t chunk = 0; chunk < chunks.size(); ++chunk) {
      for (std::int64_t i = 0; i < chunks.count[chunk]; ++i) {
        const std::int64_t at = chunk * chunks.padded + i;
        chunks.lift[at] = lift(chunks.norm2[at]);
      }
    }
  }
}

inline bool DciTree::append(const KeyView& keys, std::int64_t n,
                            std::int64_t* bad_slot) {
  if (n == 0) return true;
  float peak = 0.0f;
  if (!measure_keys(keys, n, &peak, bad_slot)) return false;
  grow_norm(peak);
  const std::int64_t first = num_keys();
  const std::size_t levels_before = levels_.size();
  place_.resize(first + n);
  promote(keys, first, n);
  for (std::size_t level = levels_.size() - 1; level-- > 0;) {
    // Points below a new level have no parent yet.
    const bool is_new = level + 1 >= levels_before;
    if (is_new) levels_[level].attached_at = first + n;
    attach_level(level, is_new ? 0 : first);
  }
  attach_keys(keys, first, n);
  batches_.push_back({first + n, c2_});
  return true;
}

// Adds the promoted keys among the new ones to their levels, without parents.
inline void DciTree::promote(const KeyView& keys, std::int64_t first, std::int64_t n) {
  std::vector<float> row(static_cast<std::size_t>(row_stride_));
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t top = level_of(first + i);
    if (top == 1) continue;
    read_key(keys, keys.offset(i), row.data());
    const float norm2 = squared_norm(row.data(), settings_.head_dim);
    row[static_cast<std::size_t>(settings_.head_dim)] = lift(norm2);
    for (std::int64_t l = 2; l <= top; ++l) {
      const auto at = static_cast<std::size_t>(l - 2);
      if (at == levels_.size()) {
        levels_.emplace_back(*arena_, kInnerChunk, settings_.projections());
      }
      Level& level = levels_[at];
      const std::int64_t point = level.size();
      level.rows.resize((point + 1) * row_stride_);
      std::copy(row.begin(), row.end(), level.rows.data() + point * row_stride_);
      level.norm2.push(norm2);
      level.parent.push(-1);
      level.first.push(-1);
      level.last.push(-1);
      level.num_children.push(0);
      if (settings_.by_mean && l == 2) {
        level.mean.resize((point + 1) * row_stride_);
        level.members.push(0);
      }
      level.key.push(static_cast<std::int32_t>(first + i));
    }
  }
}

// Chooses parents for the points of a level whose keys are in slots from `first` on.
inline void DciTree::attach_level(std::size_t level, std::int64_t first) {
  Level& below = levels_[level];
  Level& nodes = levels_[level + 1];
  const std::int32_t* keys = below.key.data();
  const std::int64_t start = std::lower_bound(keys, keys + below.size(), first) - keys;
  if (start == below.size()) return;
  std::vector<float> panels, bias;
  make_panels(nodes, panels, bias);
  Points points = make_points(start, below.size() - start);
  set_points(row(below, start), 0, points.n, panels, bias, points);
  for (std::int64_t i = 0; i < points.n; ++i) {
    below.parent[start + i] = points.parent[static_cast<std::size_t>(i)];
  }
  add_children(nodes, points, nullptr);
}

inline void DciTree::attach_keys(const KeyView& keys, std::int64_t first,
                                 std::int64_t n) {
  std::vector<float> panels, bias;
  make_panels(levels_.front(), panels, bias);
  Points points = make_points(first, n);
  std::vector<float> rows(static_cast<std::size_t>(kKeysAtOnce * row_stride_));
  for (std::int64_t at = 0; at < n; at += kKeysAtOnce) {
    const std::int64_t count = std::min(kKeysAtOnce, n - at);
    read_keys(keys, at, count, row_stride_, rows.data());
    for (std::int64_t i = 0; i < count; ++i) {
      float* row = rows.data() + i * row_stride_;
      row[settings_.head_dim] = lift(squared_norm(row, settings_.head_dim));
    }
    set_points(rows.data(), at, count, panels, bias, points);
    if (settings_.by_mean) add_to_means(rows.data(), points.parent.data() + at, count);
  }
  add_children(levels_.front(), points, place_.data() + first);
}

inline void DciTree::add_to_means(const float* rows, const std::int32_t* nodes,
                                  std::int64_t n) {
  Level& level = levels_.front();
  for (std::int64_t i = 0; i < n; ++i) {
    const float share = 1.0f / static_cast<float>(++level.members[nodes[i]]);
    float* mean = level.mean.data() + nodes[i] * row_stride_;
    const float* key = rows + i * row_stride_;
    for (std::int64_t d = 0; d < settings_.head_dim; ++d) {
      mean[d] += (key[d] - mean[d]) * share;
    }
  }
}

inline DciTree::Points DciTree::make_points(std::int64_t first, std::int64_t n) const {
  const auto size = static_cast<std::size_t>(n);
  const auto projections = static_cast<std::size_t>(settings_.projections());
  return {first, n, std::vector<float>(size), std::vector<float>(projections * size),
          std::vector<std::int32_t>(size)};
}

// Sets parent, projections and norm of points [at, at + n) from their rows with lifts.
inline void DciTree::set_points(const float* rows, std::int64_t at, std::int64_t n,
                                const std::vector<float>& panels,
                                const std::vector<float>& bias, Points& points) const {
  kernels_->nearest(rows, row_stride_, n, settings_.head_dim + 1, panels.data(),
                    bias.data(), static_cast<std::int64_t>(bias.size()),
                    points.parent.data() + at);
  for (std::int64_t p = 0; p < settings_.projections(); ++p) {
    kernels_->score(direction(p), settings_.head_dim, rows, nullptr, row_stride_, n,
                    points.raw.data() + p * points.n + at);
  }
  for (std::int64_t i = 0; i < n; ++i) {
    points.norm2[static_cast<std::size_t>(at + i)] =
        squared_norm(rows + i * row_stride_, settings_.head_dim);
  }
}

// Transposes the rows of a level for Kernels::nearest.
inline void DciTree::make_panels(const Level& nodes, std::vector<float>& panels,
                                 std::vector<float>& bias) const {
  const std::int64_t dims = settings_.head_dim + 1;
  const std::int64_t lanes = round_up(nodes.size(), 2 * kPanel);
  bias.assign(static_cast<std::size_t>(lanes), -std::numeric_limits<float>::infinity());
  panels.assign(static_cast<std::size_t>(lanes * dims), 0.0f);
  for (std::int64_t i = 0; i < nodes.size(); ++i) {
    bias[static_cast<std::size_t>(i)] = 0.0f;
    float* lane = panels.data() + i / kPanel * dims * kPanel + i % kPanel;
    for (std::int64_t d = 0; d < dims; ++d) lane[d * kPanel] = row(nodes, i)[d];
  }
}

// Adds points to the chunks of their parents, in the order of their numbers. Points of a
// node that gets more than a chunk at once are ordered so that its chunks are compact.
inline void DciTree::add_children(Level& nodes, const Points& points,
                                  std::int32_t* places) {
  std::vector<std::int32_t> end(static_cast<std::size_t>(nodes.size()) + 1);
  for (std::int32_t parent : points.parent) ++end[static_cast<std::size_t>(parent) + 1];
  for (std::size_t node = 1; node < end.size(); ++node) end[node] += end[node - 1];
  // Until `order` is filled in, end[node] is where the node's points begin.
  std::vector<std::int32_t> order(static_cast<std::size_t>(points.n));
  for (std::int64_t i = 0; i < points.n; ++i) {
    const std::int32_t parent = points.parent[static_cast<std::size_t>(i)];
    const std::int32_t at = end[static_cast<std::size_t>(parent)]++;
    order[static_cast<std::size_t>(at)] = static_cast<std::int32_t>(i);
  }
  std::int32_t begin = 0;
  for (std::int64_t node = 0; node < nodes.size(); ++node) {
    const std::int32_t stop = end[static_cast<std::size_t>(node)];
    order_compactly(points, order.data() + begin, order.data() + stop,
                    nodes.chunks.capacity);
    for (; begin < stop; ++begin) {
      append_child(nodes, static_cast<std::int32_t>(node), points,
                   order[static_cast<std::size_t>(begin)], places);
    }
  }
}

// Orders points so that every run of `chunk` points is compact: splits them at the median
// of the projection in which they spread most, recursively. Only the last run may be
// partly full.
inline void DciTree::order_compactly(const Points& points, std::int32_t* begin,
                                     std::int32_t* end, std::int64_t chunk) const {
  const std::int64_t n = end - begin;
  if (n > chunk && settings_.projections() > 0) {
    const float* widest = nullptr;
    float width = -1.0f;
    for (std::int64_t p = 0; p < settings_.projections(); ++p) {
      const float* values = points.raw.data() + p * points.n;
      float low = values[*begin], high = low;
      for (const std::int32_t* i = begin; i < end; ++i) {
        low = std::min(low, values[*i]);
        high = std::max(high, values[*i]);
      }
      if (high - low > width) width = high - low, widest = values;
    }
    std::int32_t* middle = begin + round_up(n / 2, chunk);
    std::nth_element(begin, middle, end, [widest](std::int32_t a, std::int32_t b) {
      return widest[a] < widest[b] || (widest[a] == widest[b] && a < b);
    });
    order_compactly(points, begin, middle, chunk);
    order_compactly(points, middle, end, chunk);
  } else {
    std::sort(begin, end);
  }
}

inline void DciTree::append_child(Level& nodes, std::int32_t node, const Points& points,
                                  std::int32_t i, std::int32_t* places) {
  Chunks& chunks = nodes.chunks;
  std::int32_t chunk = nodes.last[node];
  if (chunk < 0 || chunks.count[chunk] == chunks.capacity) {
    const auto added = static_cast<std::int32_t>(chunks.size());
    chunks.count.push(0);
    chunks.next.push(-1);
    chunks.owner.push(node);
    chunks.child.resize((added + 1) * chunks.capacity);
    chunks.norm2.resize((added + 1) * chunks.padded);
    chunks.lift.resize((added + 1) * chunks.padded);
    chunks.raw.resize((added + 1) * chunks.projections * chunks.padded);
    if (chunk < 0) {
      nodes.first[node] = added;
    } else {
      chunks.next[chunk] = added;
    }
    nodes.last[node] = chunk = added;
  }
  const std::int64_t slot = chunks.count[chunk]++;
  const float norm2 = points.norm2[static_cast<std::size_t>(i)];
  chunks.child[chunk * chunks.capacity + slot] =
      static_cast<std::int32_t>(points.first + i);
  chunks.norm2[chunk * chunks.padded + slot] = norm2;
  chunks.lift[chunk * chunks.padded + slot] = lift(norm2);
  for (std::int64_t p = 0; p < chunks.projections; ++p) {
    chunks.raw[(chunk * chunks.projections + p) * chunks.padded + slot] =
        points.raw[static_cast<std::size_t>(p * points.n + i)];
  }
  ++nodes.num_children[node];
  if (places != nullptr) {
    places[i] = static_cast<std::int32_t>(chunk * chunks.capacity + slot);
  }
}

}  // namespace kvp::index
