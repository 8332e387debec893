// Finds the best keys by codes of one byte per dimension.
//
// Short contexts are scanned: codes take a quarter of the bytes of float32 keys, lie in
// order, and are read once for all queries of a KV head. Long contexts are divided into
// pages of sixteen similar keys, segment by segment as keys arrive. A query scans the codes
// of the pages' means (if there are many, only in the best groups of pages), visits the
// best pages, and scans the keys behind the last segment.
//
//     rows   [ segment 0: pages | segment 1: pages | ... | keys not in pages yet ]
//              in the order of pages, within a segment      in the order of arrival
//
// Scores are those of codes. Keys themselves are read only when they are added, or where a
// query asks for all keys exactly. Results depend on the keys alone, and above kMergedKeys
// on how they were split over calls.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kvp/arena.hpp"
#include "kvp/brute_force.hpp"
#include "kvp/code_pages.hpp"
#include "kvp/index_common.hpp"
#include "kvp/key_codes.hpp"
#include "kvp/key_view.hpp"
#include "kvp/rank_kernels.hpp"
#include "kvp/top_k.hpp"

namespace kvp::index {

class CodeIndex {
 public:
  // So many first keys measure the space of codes, however they arrive; fewer are scanned
  // exactly.
  static constexpr std::int64_t kFitKeys = 128;
  static constexpr std::int64_t kSample = 256;

  CodeIndex(Arena& arena, const Settings& settings, const Kernels& kernels,
            std::int64_t head)
      : settings_(settings),
        code_kernels_(&select_kernels<CodeKernels>()),
        rank_kernels_(&select_kernels<RankKernels>()),
        exact_(arena, settings, kernels, head),
        first_rows_(arena),
        codes_(arena),
        means_(arena),
        groups_(arena),
        starts_(arena) {}

  std::int64_t num_keys() const { return exact_.num_keys(); }
  std::int64_t num_pages() const { return exact_.num_pages(); }
  std::int64_t place(std::int64_t slot) const { return exact_.place(slot); }
  const BruteForce& exact() const { return exact_; }
  // Keys that are in pages.
  std::int64_t paged() const { return paged_; }

  bool append(const KeyView& keys, std::int64_t n, std::int64_t* bad_slot) {
    if (!exact_.append(keys, n, bad_slot)) return false;
    std::vector<float> rows(
        static_cast<std::size_t>(std::min(n, kRowsAtATime) * settings_.head_dim));
    for (std::int64_t first = 0; first < n; first += kRowsAtATime) {
      const std::int64_t count = std::min(n - first, kRowsAtATime);
      read_keys(keys, first, count, settings_.head_dim, rows.data());
      add_rows(rows.data(), count);
    }
    if (num_keys() >= settings_.flat_keys && !space_.empty()) divide(n >= kManyKeys);
    return true;
  }

  // Whether codes answer these queries. Otherwise all keys are scored exactly.
  bool coded(const QueryOptions& options) const {
    return options.max_visits > 0 && !space_.empty();
  }

  // Pushes the best keys into top. Returns the keys whose codes were scored.
  std::int64_t query(const KeyView& keys, bool by_page, const float* query,
                     const QueryOptions& options, Scratch& scratch, TopK& top) const {
    if (!coded(options)) {
      return exact_.query(keys, by_page, query, options, scratch, top);
    }
    const std::int64_t visits = find(query, 1, options, top.limit(), scratch.codes);
    push_found(0, scratch.codes, top);
    return visits;
  }

  // 1K keys, all of which are scored: 23 us. 32K keys, of which 2,400 and their means are:
  // 30 us (docs/research/key-index.md, the CPU with AVX2).
  std::int64_t query_ns(const QueryOptions& options) const {
    if (!coded(options)) return exact_.query_ns(options);
    std::int64_t scored = num_keys();
    if (paged() > 0) {
      const std::int64_t means = means_.size();
      scored = std::max(options.max_visits, options.count) + num_keys() - paged() +
               (means < kGroupedPages ? means : groups_.size() + means / kGroupShare);
    }
    return 12'000 + rows_ns(scored, settings_.head_dim, 8);
  }

  // 8K keys, with their pages: 12 ms; 1K keys, without: 0.5 ms.
  std::int64_t append_ns(std::int64_t n) const {
    const std::int64_t dims = settings_.head_dim, after = num_keys() + n;
    std::int64_t in_new_pages = 0;
    if (after >= settings_.flat_keys) {
      in_new_pages = (after - paged()) / settings_.segment * settings_.segment;
    }
    return rows_ns(n, dims, 500) + rows_ns(in_new_pages, dims, 1000);
  }

  // Sets scratch.slots to the keys that are among the best of any query, in no order.
  //
  // Args: queries [group][head_dim]; wanted: keys that each query is to find.
  // Returns the number of keys whose codes were scored.
  std::int64_t find(const float* queries, std::int64_t group,
                    const QueryOptions& options, std::int64_t wanted,
                    CodeScratch& scratch) const {
    encode_queries(space_, queries, group, scratch);
    const std::int32_t* list = nullptr;
    std::int64_t blocks = codes_.blocks(), visits = num_keys();
    if (paged() > 0) {
      choose_pages(group, std::max(options.max_visits, wanted), scratch);
      visits = static_cast<std::int64_t>(scratch.blocks.size()) * kCodeBlock +
               num_keys() - paged();
      for (std::int64_t b = paged() / kCodeBlock; b < codes_.blocks(); ++b) {
        scratch.blocks.push_back(static_cast<std::int32_t>(b));
      }
      list = scratch.blocks.data();
      blocks = static_cast<std::int64_t>(scratch.blocks.size());
    }
    collect_best(codes_, group, list, blocks, visits, wanted, scratch);
    scratch.slots.resize(scratch.found.size());
    for (std::size_t i = 0; i < scratch.found.size(); ++i) {
      const auto at = static_cast<std::uint32_t>(scratch.found[i]);
      const std::uint32_t entry = at / kCodeBlock;
      const std::int64_t block = list != nullptr ? list[entry] : entry;
      scratch.slots[i] = static_cast<std::int32_t>(
          first_slot(block) + codes_.label(scratch.memory[entry], at % kCodeBlock));
    }
    return visits;
  }

  // logits[i] = query g . key scratch.slots[i], as found by `find`.
  static void found_logits(std::int64_t g, const CodeScratch& scratch, float* logits) {
    const auto at = static_cast<std::size_t>(g);
    const float* scores = scratch.scores.data() + g * scratch.stride;
    for (std::size_t i = 0; i < scratch.found.size(); ++i) {
      logits[i] = scratch.steps[at] * scores[scratch.found[i]] + scratch.offsets[at];
    }
  }

  // logits of a sample of the keys whose scores are below the threshold of query g. Each
  // stands for rest_step keys. Returns their number.
  static std::int64_t rest_logits(std::int64_t g, CodeScratch& scratch) {
    const auto at = static_cast<std::size_t>(g);
    const float* scores = scratch.scores.data() + g * scratch.stride;
    const std::int64_t step = rest_step(scratch);
    float* logits = at_least(scratch.sample, scratch.scored / step + 1);
    std::int64_t n = 0;
    for (std::int64_t i = 0; i < scratch.scored; i += step) {
      logits[n] = scratch.steps[at] * scores[i] + scratch.offsets[at];
      n += scores[i] < scratch.thresholds[at];
    }
    return n;
  }
  static std::int64_t rest_step(const CodeScratch& scratch) {
    return std::max<std::int64_t>(scratch.scored / kSample, 1);
  }

  // Pushes what `find` found for query g into an empty top.
  void push_found(std::int64_t g, CodeScratch& scratch, TopK& top) const {
    const auto at = static_cast<std::size_t>(g);
    const auto found = static_cast<std::int64_t>(scratch.found.size());
    const float* scores = scratch.scores.data() + g * scratch.stride;
    const float threshold = scratch.thresholds[at];
    float* logits = at_least(scratch.sample, found);
    std::int32_t* slots = at_least(scratch.candidates, found);
    std::int64_t n = 0;
    for (std::int64_t i = 0; i < found; ++i) {
      const float score = scores[scratch.found[static_cast<std::size_t>(i)]];
      logits[n] = scratch.steps[at] * score + scratch.offsets[at];
      slots[n] = scratch.slots[static_cast<std::size_t>(i)];
      n += score >= threshold;
    }
    if (n > kRanked) {
      top.push_all(logits, slots, 0, n);
      return;
    }
    Scored sorted[kRanked];
    std::int32_t* ranks = at_least(scratch.ranks, n);
    rank_kernels_->rank(logits, n, ranks);
    for (std::int64_t i = 0; i < n; ++i) sorted[ranks[i]] = {logits[i], slots[i]};
    // Of equal logits, the lower slot comes first. There are few.
    for (std::int64_t i = 1; i < n; ++i) {
      for (std::int64_t j = i; j > 0 && better(sorted[j], sorted[j - 1]); --j) {
        std::swap(sorted[j], sorted[j - 1]);
      }
    }
    top.assign(sorted, n);
  }

  // Empty, or the first fault: pages hold each key of their segment once, and codes are as
  // close to the keys as they can be.
  std::string integrity(const KeyView& keys, bool by_page) const {
    const std::string fault = exact_.integrity(keys, by_page);
    if (!fault.empty() || space_.empty()) return fault;
    if (codes_.size() != num_keys()) return "codes are missing";
    const std::int64_t dims = settings_.head_dim;
    std::vector<bool> seen(static_cast<std::size_t>(paged()));
    std::vector<float> key(static_cast<std::size_t>(dims)), code(key);
    for (std::int64_t row = 0; row < num_keys(); ++row) {
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

  static constexpr std::int64_t kRowsAtATime = 1024;
  // Segments are merged only when as many keys arrive together, because it takes long for
  // one step of generation, and only in long contexts: in shorter ones, keys that are near
  // each other make better pages.
  static constexpr std::int64_t kManyKeys = 256, kMergedKeys = 32768;
  static constexpr std::int64_t kMerged = 4, kLargestSegment = 32768;
  // From so many pages on, a quarter of the groups of sixteen pages is looked into.
  static constexpr std::int64_t kGroupedPages = 4096, kGroupShare = 4;
  static constexpr std::int64_t kRanked = 128;  // more candidates are sorted otherwise

  // What the labels of a block are relative to.
  std::int64_t first_slot(std::int64_t block) const {
    const std::int64_t row = block * kCodeBlock;
    if (row >= paged()) return row;
    return starts_[segment_of(block)];
  }
  // The segment of a block that is in pages.
  std::int64_t segment_of(std::int64_t block) const {
    const std::int64_t *first = starts_.data(), *stop = first + starts_.size();
    return std::upper_bound(first, stop, block * kCodeBlock) - first - 1;
  }
  std::int64_t slot_of(std::int64_t row) const {
    return first_slot(row / kCodeBlock) + codes_.label(row);
  }

  // Keeps the first keys until they can measure the space, then encodes.
  void add_rows(const float* rows, std::int64_t n) {
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

  std::int64_t segment_stop(std::int64_t i) const {
    return i + 1 < starts_.size() ? starts_[i + 1] : paged_;
  }
  std::int64_t segment_size(std::int64_t i) const {
    return segment_stop(i) - starts_[i];
  }

  // Puts the keys behind the last segment into pages, `segment` keys at a time.
  void divide(bool may_merge) {
    const std::int64_t had = paged_;
    while (codes_.size() - paged_ >= settings_.segment) {
      starts_.push(paged_);
      paged_ += settings_.segment;
    }
    std::int64_t changed = had;
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
    PageDivider().divide(rows.data(), n, padded, order);
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

  // Sets scratch.blocks to the pages whose means are best for any query. Of many pages,
  // only those in the best groups are scored.
  void choose_pages(std::int64_t group, std::int64_t max_visits,
                    CodeScratch& scratch) const {
    const std::int64_t pages = (max_visits + kCodeBlock - 1) / kCodeBlock;
    std::int64_t blocks = means_.blocks(), n = means_.size();
    const std::int32_t* list = nullptr;
    if (n >= kGroupedPages) {
      const std::int64_t groups = groups_.size(),
                         wanted = std::max(groups / kGroupShare, pages);
      collect_best(groups_, group, nullptr, groups_.blocks(), groups, wanted, scratch);
      // A group is a block of means. The last block may have no group yet.
      scratch.groups.swap(scratch.found);
      n = static_cast<std::int64_t>(scratch.groups.size()) * kCodeBlock;
      if (blocks > groups) {
        scratch.groups.push_back(static_cast<std::int32_t>(groups));
        n += means_.size() - groups * kCodeBlock;
      }
      list = scratch.groups.data();
      blocks = static_cast<std::int64_t>(scratch.groups.size());
    }
    collect_best(means_, group, list, blocks, n, pages, scratch);
    scratch.blocks.swap(scratch.found);
    if (list == nullptr) return;
    for (std::int32_t& page : scratch.blocks) {
      page = list[page / kCodeBlock] * static_cast<std::int32_t>(kCodeBlock) +
             page % static_cast<std::int32_t>(kCodeBlock);
    }
  }

  // Scores the first n rows of the listed blocks. Sets scratch.found to those that are among
  // the best `enough` of any query, or a little behind.
  void collect_best(const KeyCodes& codes, std::int64_t group, const std::int32_t* list,
                    std::int64_t blocks, std::int64_t n, std::int64_t enough,
                    CodeScratch& scratch) const {
    const std::int64_t stride = scratch.stride = blocks * kCodeBlock;
    scratch.scored = n;
    float* scores = at_least(scratch.scores, group * stride);
    const std::uint8_t** memory = at_least(scratch.memory, blocks);
    codes.point(list, blocks, memory);
    code_kernels_->score(codes.run(scratch, group, memory, blocks, scores, stride));
    scratch.found.resize(static_cast<std::size_t>(n + kPadding));
    scratch.thresholds.resize(static_cast<std::size_t>(group));
    scratch.counts.resize(static_cast<std::size_t>(group));
    for (std::int64_t g = 0; g < group; ++g) {
      scratch.thresholds[static_cast<std::size_t>(g)] =
          threshold_of(*rank_kernels_, scores + g * stride, n, enough, scratch.sample);
    }
    const std::int64_t found =
        rank_kernels_->collect({scores, stride, n, group, scratch.thresholds.data(),
                                scratch.found.data(), scratch.counts.data()});
    scratch.found.resize(static_cast<std::size_t>(found));
  }

  Settings settings_;
  const CodeKernels* code_kernels_;
  const RankKernels* rank_kernels_;
  BruteForce exact_;
  CodeSpace space_;
  Array<float> first_rows_;  // until there are kFitKeys
  KeyCodes codes_;  // of all keys
  KeyCodes means_;  // of all pages
  KeyCodes groups_;  // means of sixteen pages each
  Array<std::int64_t> starts_;  // first row of each segment
  std::int64_t paged_ = 0;
};

}  // namespace kvp::index
