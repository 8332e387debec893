// The codes of all keys of one KV head, in segments, and the means of their pages.
//
// Keys arrive at the end. As soon as a segment is full, its keys are divided into pages of
// sixteen similar ones.
//
//     rows   [ segment 0: pages | segment 1: pages | ... | keys not in pages yet ]
//              in the order of pages, within a segment      in the order of arrival
//
// A row is a place of a code, a slot the number of a key. Whoever stores keys and values in
// the order of rows has the keys of a page next to each other.
//
// Results depend on the keys alone, and above kMergedKeys on how they were split over calls.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "kvp/arena.hpp"
#include "kvp/code_pages.hpp"
#include "kvp/index_common.hpp"
#include "kvp/key_codes.hpp"
#include "kvp/key_view.hpp"

namespace kvp::index {

class SegmentedCodes {
 public:
  // So many first keys measure the space of codes, however they arrive; until then there
  // are no codes.
  static constexpr std::int64_t kFitKeys = 128;

  SegmentedCodes(Arena& arena, const Settings& settings)
      : settings_(settings),
        first_rows_(arena),
        codes_(arena),
        means_(arena),
        groups_(arena),
        starts_(arena) {}

  const CodeSpace& space() const { return space_; }
  const KeyCodes& codes() const { return codes_; }
  // Of all pages.
  const KeyCodes& means() const { return means_; }
  // Means of sixteen pages each.
  const KeyCodes& groups() const { return groups_; }
  bool empty() const { return space_.empty(); }
  // Keys that are in pages.
  std::int64_t paged() const { return paged_; }
  // Keys that n more would put into new pages.
  std::int64_t newly_paged(std::int64_t n) const {
    const std::int64_t after = codes_.size() + n;
    if (after < settings_.flat_keys) return 0;
    return (after - paged_) / settings_.segment * settings_.segment;
  }

  // Adds keys [n][head_dim] behind the others. Keeps the first ones until they can measure
  // the space, then encodes.
  void append(const float* rows, std::int64_t n) {
    const std::int64_t dims = settings_.head_dim;
    if (!space_.empty()) {
      codes_.append(space_, rows, n);
      return;
    }
    const std::int64_t had = first_rows_.size();
    if (had > 0 || n < kFitKeys) {
      first_rows_.resize(had + n * dims);
      std::copy_n(rows, n * dims, first_rows_.data() + had);
      rows = first_rows_.data();
      n = first_rows_.size() / dims;
    }
    if (n < kFitKeys) return;
    space_.fit(rows, kFitKeys, dims);
    codes_.append(space_, rows, n);
    first_rows_.clear();
  }

  // Puts the keys behind the last segment into pages, after a call that added n keys.
  void divide(std::int64_t n) {
    if (codes_.size() >= settings_.flat_keys && !empty()) divide_rest(n >= kManyKeys);
  }

  // What the labels of a block are relative to.
  std::int64_t first_slot(std::int64_t block) const {
    const std::int64_t row = block * kCodeBlock;
    if (row >= paged()) return row;
    return starts_[segment_of(block)];
  }
  // The key of a row.
  std::int64_t slot_of(std::int64_t row) const {
    return first_slot(row / kCodeBlock) + codes_.label(row);
  }

  // Empty, or the first fault: pages hold each key of their segment once, and codes are as
  // close to the keys as they can be.
  std::string integrity(const KeyView& keys) const {
    const std::int64_t dims = settings_.head_dim;
    std::vector<bool> seen(static_cast<std::size_t>(paged()));
    std::vector<float> key(static_cast<std::size_t>(dims)), code(key);
    for (std::int64_t row = 0; row < codes_.size(); ++row) {
      const std::int64_t slot = slot_of(row);
      if (row < paged()) {
        if (slot >= segment_stop(segment_of(row / kCodeBlock))) {
          return "row " + std::to_string(row) + " has no key of its segment";
        }
        if (seen[static_cast<std::size_t>(slot)]) {
          return "key " + std::to_string(slot) + " is in two pages";
        }
        seen[static_cast<std::size_t>(slot)] = true;
      }
      read_keys(keys, slot, 1, dims, key.data());
      codes_.decode(space_, row, code.data());
      float peak = 0.0f, largest = 0.0f;
      for (std::int64_t d = 0; d < dims; ++d) {
        const auto at = static_cast<std::size_t>(d);
        const float exact = (key[at] - space_.center()[d]) / space_.width(d);
        peak = std::max(peak, std::fabs(exact));
        largest = std::max(largest, std::fabs(exact - code[at] / space_.width(d)));
      }
      // The scale of a code is at most 1/128 above the smallest one.
      if (largest > 0.505f * peak / kLargestCode + 1e-6f * peak + kLeastPeak) {
        return "the code of key " + std::to_string(slot) + " is not that key";
      }
    }
    return "";
  }

 private:
  friend struct CodeBreaker;  // tests damage an index to see that the checks report it

  // Segments are merged only when as many keys arrive together, because it takes long for
  // one step of generation, and only in long contexts: in shorter ones, keys that are near
  // each other make better pages.
  static constexpr std::int64_t kManyKeys = 256, kMergedKeys = 32768;
  static constexpr std::int64_t kMerged = 4, kLargestSegment = 32768;

  // The segment of a block that is in pages.
  std::int64_t segment_of(std::int64_t block) const {
    const std::int64_t *first = starts_.data(), *stop = first + starts_.size();
    return std::upper_bound(first, stop, block * kCodeBlock) - first - 1;
  }
  std::int64_t segment_stop(std::int64_t i) const {
    return i + 1 < starts_.size() ? starts_[i + 1] : paged_;
  }
  std::int64_t segment_size(std::int64_t i) const {
    return segment_stop(i) - starts_[i];
  }

  // Puts the keys behind the last segment into pages, `segment` keys at a time.
  void divide_rest(bool may_merge) {
    const std::int64_t had = paged_;
    while (codes_.size() - paged_ >= settings_.segment) {
      starts_.push(paged_);
      paged_ += settings_.segment;
    }
    std::int64_t changed = had;
    may_merge = may_merge && !settings_.stores_pages;
    if (may_merge && paged_ > kMergedKeys) changed = std::min(had, merge(had));
    for (std::int64_t i = starts_.size(); i-- > 0 && starts_[i] >= changed;) {
      divide_segment(starts_[i], segment_size(i));
    }
    if (changed < paged_) update_means(changed);
  }

  // Four segments of one size become one, up to kLargestSegment, until there are no four.
  // Fewer pages then hold the best keys if similar keys are far apart.
  //
  // Args: had: keys that are in pages. Returns the first row of the first merged segment;
  // from there on, the keys are in the order of arrival.
  std::int64_t merge(std::int64_t had) {
    const std::vector<std::int64_t> old(starts_.data(),
                                        starts_.data() + starts_.size());
    std::int64_t changed = paged_;
    for (std::int64_t i = 0; i + kMerged <= starts_.size();) {
      if (!four_equal(i)) {
        ++i;
        continue;
      }
      changed = std::min(changed, starts_[i]);
      std::copy(starts_.data() + i + kMerged, starts_.data() + starts_.size(),
                starts_.data() + i + 1);
      starts_.resize(starts_.size() - (kMerged - 1));
      i = std::max<std::int64_t>(i - (kMerged - 1), 0);
    }
    for (std::size_t i = 0; i < old.size(); ++i) {
      if (old[i] < changed || old[i] >= had) continue;
      codes_.restore_order(old[i], (i + 1 < old.size() ? old[i + 1] : paged_) - old[i]);
    }
    return changed;
  }

  bool four_equal(std::int64_t first) const {
    const std::int64_t size = segment_size(first);
    bool equal = kMerged * size <= kLargestSegment;
    for (std::int64_t i = first + 1; i < first + kMerged; ++i) {
      equal = equal && segment_size(i) == size;
    }
    return equal;
  }

  // Puts keys that are in the order of arrival into pages.
  void divide_segment(std::int64_t first, std::int64_t n) {
    const std::int64_t padded = round_up(settings_.head_dim, kDivideLanes);
    std::vector<float> rows(static_cast<std::size_t>(n * padded));
    for (std::int64_t i = 0; i < n; ++i) {
      codes_.decode(space_, first + i, rows.data() + i * padded);
    }
    std::vector<std::int32_t> order;
    PageDivider().divide(rows.data(), n, padded, order,
                         settings_.stores_pages ? kStoredKeys : kCodeBlock);
    for (std::int32_t& row : order) row += static_cast<std::int32_t>(first);
    codes_.permute(first, order.data(), n);
  }

  // Means of the pages from a row on, and of the groups of these pages.
  void update_means(std::int64_t first) {
    for (std::int64_t page = first / kCodeBlock; page < paged_ / kCodeBlock; ++page) {
      put_mean(codes_, page, means_);
    }
    for (std::int64_t i = first / (kCodeBlock * kCodeBlock);
         (i + 1) * kCodeBlock <= means_.size(); ++i) {
      put_mean(means_, i, groups_);
    }
  }

  // Row `block` of `means` becomes the mean of a block of codes.
  void put_mean(const KeyCodes& codes, std::int64_t block, KeyCodes& means) const {
    const auto dims = static_cast<std::size_t>(settings_.head_dim);
    std::vector<float> mean(space_.center(), space_.center() + dims), row(dims);
    for (std::int64_t i = 0; i < kCodeBlock; ++i) {
      codes.decode(space_, block * kCodeBlock + i, row.data());
      for (std::size_t d = 0; d < dims; ++d) {
        mean[d] += row[d] / static_cast<float>(kCodeBlock);
      }
    }
    means.put(space_, block, mean.data());
  }

  Settings settings_;
  CodeSpace space_;
  Array<float> first_rows_;  // until there are kFitKeys
  KeyCodes codes_, means_, groups_;
  Array<std::int64_t> starts_;  // first row of each segment
  std::int64_t paged_ = 0;
};

}  // namespace kvp::index
