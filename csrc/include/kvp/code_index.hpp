// Finds the best keys by codes of one byte per dimension.
//
// Short contexts are scanned: codes take a quarter of the bytes of float32 keys, lie in
// order, and are read once for all queries of a KV head. Long contexts are divided into
// pages of sixteen similar keys, segment by segment as keys arrive. A query scans the codes
// of the pages' means (if there are many, only in the best groups of pages), visits the
// best pages, and scans the keys behind the last segment.
//
// Scores are those of codes. Keys themselves are read only when they are added, or where a
// query asks for all keys exactly.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kvp/arena.hpp"
#include "kvp/brute_force.hpp"
#include "kvp/index_common.hpp"
#include "kvp/key_view.hpp"
#include "kvp/rank_kernels.hpp"
#include "kvp/segmented_codes.hpp"
#include "kvp/top_k.hpp"

namespace kvp::index {

// Blocks whose keys are scored, and the number of these keys: all but the padding of the
// last block.
struct BlockList {
  const std::int32_t* list;  // null: all blocks
  std::int64_t count, keys;

  std::int64_t block(std::int64_t i) const { return list != nullptr ? list[i] : i; }
};

class CodeIndex {
 public:
  static constexpr std::int64_t kSample = 256;

  CodeIndex(Arena& arena, const Settings& settings, const Kernels& kernels,
            std::int64_t head)
      : settings_(settings),
        code_kernels_(&select_kernels<CodeKernels>()),
        rank_kernels_(&select_kernels<RankKernels>()),
        exact_(arena, settings, kernels, head),
        codes_(arena, settings) {}

  std::int64_t num_keys() const { return exact_.num_keys(); }
  std::int64_t num_pages() const { return exact_.num_pages(); }
  std::int64_t place(std::int64_t slot) const { return exact_.place(slot); }
  const BruteForce& exact() const { return exact_; }
  // Keys that are in pages.
  std::int64_t paged() const { return codes_.paged(); }
  // The key of a row below paged(); later rows are in the order of arrival.
  std::int64_t slot_of(std::int64_t row) const { return codes_.slot_of(row); }

  bool append(const KeyView& keys, std::int64_t n, std::int64_t* bad_slot) {
    if (!exact_.append(keys, n, bad_slot)) return false;
    std::vector<float> rows(
        static_cast<std::size_t>(std::min(n, kRowsAtATime) * settings_.head_dim));
    for (std::int64_t first = 0; first < n; first += kRowsAtATime) {
      const std::int64_t count = std::min(n - first, kRowsAtATime);
      read_keys(keys, first, count, settings_.head_dim, rows.data());
      codes_.append(rows.data(), count);
    }
    codes_.divide(n);
    return true;
  }

  // Whether codes answer these queries. Otherwise all keys are scored exactly.
  bool coded(const QueryOptions& options) const {
    return options.max_visits > 0 && !codes_.empty();
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
      const std::int64_t means = codes_.means().size();
      scored = std::max(options.max_visits, options.count) + num_keys() - paged() +
               (means < kGroupedPages ? means
                                      : codes_.groups().size() + means / kGroupShare);
    }
    return 12'000 + rows_ns(scored, settings_.head_dim, 8);
  }

  // 8K keys, with their pages: 12 ms; 1K keys, without: 0.5 ms.
  std::int64_t append_ns(std::int64_t n) const {
    const std::int64_t dims = settings_.head_dim;
    return rows_ns(n, dims, 500) + rows_ns(codes_.newly_paged(n), dims, 1000);
  }

  // Sets scratch.slots to the keys that are among the best of any query, in no order.
  //
  // Args: queries [group][head_dim]; wanted: keys that each query is to find.
  // Returns the number of keys whose codes were scored.
  std::int64_t find(const float* queries, std::int64_t group,
                    const QueryOptions& options, std::int64_t wanted,
                    CodeScratch& scratch) const {
    const BlockList listed = score(queries, group, options, wanted, scratch);
    collect(group, listed.keys, wanted, scratch);
    scratch.slots.resize(scratch.found.size());
    for (std::size_t i = 0; i < scratch.found.size(); ++i) {
      const auto at = static_cast<std::uint32_t>(scratch.found[i]);
      const std::uint32_t entry = at / kCodeBlock;
      scratch.slots[i] = static_cast<std::int32_t>(
          codes_.first_slot(listed.block(entry)) +
          codes_.codes().label(scratch.memory[entry], at % kCodeBlock));
    }
    return listed.keys;
  }

  // Sets scratch.scores [group][scratch.stride] to the scores of the keys of some blocks:
  // of the best pages, and of the keys that are in no page yet, in the order of arrival.
  //
  // Args: wanted: keys that each query is to find.
  BlockList score(const float* queries, std::int64_t group, const QueryOptions& options,
                  std::int64_t wanted, CodeScratch& scratch) const {
    encode_queries(codes_.space(), queries, group, scratch);
    BlockList listed{nullptr, codes_.codes().blocks(), num_keys()};
    if (paged() > 0) {
      choose_pages(group, std::max(options.max_visits, wanted), scratch);
      listed.keys = static_cast<std::int64_t>(scratch.blocks.size()) * kCodeBlock +
                    num_keys() - paged();
      for (std::int64_t b = paged() / kCodeBlock; b < codes_.codes().blocks(); ++b) {
        scratch.blocks.push_back(static_cast<std::int32_t>(b));
      }
      listed.list = scratch.blocks.data();
      listed.count = static_cast<std::int64_t>(scratch.blocks.size());
    }
    score_blocks(codes_.codes(), group, listed, scratch);
    return listed;
  }

  // logits[i] = query g . key i of the scored blocks, of which there are n keys.
  static void scored_logits(std::int64_t g, std::int64_t n, const CodeScratch& scratch,
                            float* logits) {
    const auto at = static_cast<std::size_t>(g);
    const float* scores = scratch.scores.data() + g * scratch.stride;
    const float step = scratch.steps[at], offset = scratch.offsets[at];
    for (std::int64_t i = 0; i < n; ++i) logits[i] = step * scores[i] + offset;
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

  // Empty, or the first fault.
  std::string integrity(const KeyView& keys, bool by_page) const {
    const std::string fault = exact_.integrity(keys, by_page);
    if (!fault.empty() || codes_.empty()) return fault;
    if (codes_.codes().size() != num_keys()) return "codes are missing";
    return codes_.integrity(keys);
  }

 private:
  friend struct CodeBreaker;  // tests damage an index to see that the checks report it

  static constexpr std::int64_t kRowsAtATime = 1024;
  // From so many pages on, a quarter of the groups of sixteen pages is looked into.
  static constexpr std::int64_t kGroupedPages = 4096, kGroupShare = 4;
  static constexpr std::int64_t kRanked = 128;  // more candidates are sorted otherwise

  // Sets scratch.blocks to the pages whose means are best for any query. Of many pages,
  // only those in the best groups are scored.
  void choose_pages(std::int64_t group, std::int64_t max_visits,
                    CodeScratch& scratch) const {
    const std::int64_t pages = (max_visits + kCodeBlock - 1) / kCodeBlock;
    std::int64_t blocks = codes_.means().blocks(), n = codes_.means().size();
    const std::int32_t* list = nullptr;
    if (n >= kGroupedPages) {
      const std::int64_t groups = codes_.groups().size(),
                         wanted = std::max(groups / kGroupShare, pages);
      score_blocks(codes_.groups(), group, {nullptr, codes_.groups().blocks(), groups},
                   scratch);
      collect(group, groups, wanted, scratch);
      // A group is a block of means. The last block may have no group yet.
      scratch.groups.swap(scratch.found);
      n = static_cast<std::int64_t>(scratch.groups.size()) * kCodeBlock;
      if (blocks > groups) {
        scratch.groups.push_back(static_cast<std::int32_t>(groups));
        n += codes_.means().size() - groups * kCodeBlock;
      }
      list = scratch.groups.data();
      blocks = static_cast<std::int64_t>(scratch.groups.size());
    }
    score_blocks(codes_.means(), group, {list, blocks, n}, scratch);
    collect(group, n, pages, scratch);
    scratch.blocks.swap(scratch.found);
    if (list == nullptr) return;
    for (std::int32_t& page : scratch.blocks) {
      page = list[page / kCodeBlock] * static_cast<std::int32_t>(kCodeBlock) +
             page % static_cast<std::int32_t>(kCodeBlock);
    }
  }

  // Sets scratch.scores [group][scratch.stride] to the scores of the listed blocks.
  void score_blocks(const KeyCodes& codes, std::int64_t group, const BlockList& listed,
                    CodeScratch& scratch) const {
    const std::int64_t stride = scratch.stride = listed.count * kCodeBlock;
    scratch.scored = listed.keys;
    float* scores = at_least(scratch.scores, group * stride);
    const std::uint8_t** memory = at_least(scratch.memory, listed.count);
    codes.point(listed.list, listed.count, memory);
    code_kernels_->score(
        codes.run(scratch, group, memory, listed.count, scores, stride));
  }

  // Sets scratch.found to the scored rows, n, that are among the best `enough` of any
  // query, or a little behind.
  void collect(std::int64_t group, std::int64_t n, std::int64_t enough,
               CodeScratch& scratch) const {
    const std::int64_t stride = scratch.stride;
    const float* scores = scratch.scores.data();
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
  SegmentedCodes codes_;
};

}  // namespace kvp::index
