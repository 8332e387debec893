// Finds the best keys by codes of one byte per dimension.
//
// Short contexts are scanned: codes take a quarter of the bytes of float32 keys, lie in
// order, and are read once for all queries of a KV head. Long contexts are divided into
// pages of sixteen similar keys, segment by segment as keys arrive. A query scans the codes
// of the pages' means, visits the best pages, and scans the keys behind the last segment.
//
//     rows   [ segment 0: pages | segment 1: pages | ... | keys not in pages yet ]
//              in the order of pages, within a segment      in the order of arrival
//
// Scores are those of codes. Keys themselves are read only when they are added, or where a
// query asks for all keys exactly. Results depend on the keys alone, and on how the first
// kFitKeys of them were split over calls.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "kvp/arena.hpp"
#include "kvp/brute_force.hpp"
#include "kvp/code_pages.hpp"
#include "kvp/index_common.hpp"
#include "kvp/key_codes.hpp"
#include "kvp/key_view.hpp"
#include "kvp/top_k.hpp"

namespace kvp::index {

class CodeIndex {
 public:
  // The first keys measure the space of codes; fewer are scanned exactly.
  static constexpr std::int64_t kFitKeys = 64;
  static constexpr std::int64_t kSample = 256;

  CodeIndex(Arena& arena, const Settings& settings, const Kernels& kernels,
            std::int64_t head)
      : settings_(settings),
        code_kernels_(&select_kernels<CodeKernels>()),
        exact_(arena, settings, kernels, head),
        first_rows_(arena),
        codes_(arena),
        means_(arena),
        slots_(arena) {}

  std::int64_t num_keys() const { return exact_.num_keys(); }
  std::int64_t num_pages() const { return exact_.num_pages(); }
  std::int64_t place(std::int64_t slot) const { return exact_.place(slot); }
  const BruteForce& exact() const { return exact_; }
  // Keys that are in pages.
  std::int64_t paged() const { return slots_.size(); }

  bool append(const KeyView& keys, std::int64_t n, std::int64_t* bad_slot) {
    if (!exact_.append(keys, n, bad_slot)) return false;
    std::vector<float> rows(
        static_cast<std::size_t>(std::min(n, kRowsAtATime) * settings_.head_dim));
    for (std::int64_t first = 0; first < n; first += kRowsAtATime) {
      const std::int64_t count = std::min(n - first, kRowsAtATime);
      read_keys(keys, first, count, settings_.head_dim, rows.data());
      add_rows(rows.data(), count);
    }
    while (num_keys() >= settings_.flat_keys && !space_.empty() &&
           codes_.size() - paged() >= settings_.segment) {
      divide_segment();
    }
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
      choose_pages(group, options.max_visits, scratch);
      visits = static_cast<std::int64_t>(scratch.blocks.size()) * kCodeBlock +
               num_keys() - paged();
      for (std::int64_t b = paged() / kCodeBlock; b < codes_.blocks(); ++b) {
        scratch.blocks.push_back(static_cast<std::int32_t>(b));
      }
      list = scratch.blocks.data();
      blocks = static_cast<std::int64_t>(scratch.blocks.size());
    }
    collect_best(codes_, group, list, blocks, visits, wanted, scratch);
    scratch.slots.clear();
    for (const std::int32_t at : scratch.found) {
      const std::int64_t row =
          list != nullptr ? list[at / kCodeBlock] * kCodeBlock + at % kCodeBlock : at;
      scratch.slots.push_back(static_cast<std::int32_t>(slot_of(row)));
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
  // stands for scratch.step keys. Returns their number.
  static std::int64_t rest_logits(std::int64_t g, CodeScratch& scratch) {
    const auto at = static_cast<std::size_t>(g);
    const float* scores = scratch.scores.data() + g * scratch.stride;
    float* logits = at_least(scratch.sample, scratch.scored / scratch.step + 1);
    std::int64_t n = 0;
    for (std::int64_t i = 0; i < scratch.scored; i += scratch.step) {
      logits[n] = scratch.steps[at] * scores[i] + scratch.offsets[at];
      n += scores[i] < scratch.thresholds[at];
    }
    return n;
  }

  // Pushes what `find` found for query g.
  static void push_found(std::int64_t g, CodeScratch& scratch, TopK& top) {
    const auto n = static_cast<std::int64_t>(scratch.slots.size());
    float* logits = at_least(scratch.sample, n);
    found_logits(g, scratch, logits);
    top.push_all(logits, scratch.slots.data(), 0, n);
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
        if (slots_[row] >= settings_.segment) {
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
      if (largest > 0.501f * peak / kLargestCode + 1e-6f * peak) {
        return "the code of key " + std::to_string(slot) + " is not that key";
      }
    }
    return "";
  }

 private:
  friend struct CodeBreaker;  // tests damage an index to see that the checks report it

  static constexpr std::int64_t kRowsAtATime = 1024;

  std::int64_t slot_of(std::int64_t row) const {
    if (row >= paged()) return row;
    return row / settings_.segment * settings_.segment + slots_[row];
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
    space_.fit(rows, n, dims);
    codes_.append(space_, rows, n);
    first_rows_.clear();
  }

  // Puts the next `segment` keys into pages.
  void divide_segment() {
    const std::int64_t dims = settings_.head_dim, first = paged(),
                       n = settings_.segment;
    std::vector<float> rows(static_cast<std::size_t>(n * dims));
    for (std::int64_t i = 0; i < n; ++i) {
      codes_.decode(space_, first + i, rows.data() + i * dims);
    }
    std::vector<std::int32_t> order;
    PageDivider().divide(rows.data(), n, dims, order);
    std::vector<float> mean(static_cast<std::size_t>(dims));
    for (std::int64_t page = 0; page < n; page += kCodeBlock) {
      std::copy_n(space_.center(), dims, mean.data());
      for (std::int64_t i = page; i < page + kCodeBlock; ++i) {
        const float* row = rows.data() + order[static_cast<std::size_t>(i)] * dims;
        for (std::int64_t d = 0; d < dims; ++d) {
          mean[static_cast<std::size_t>(d)] += row[d] / static_cast<float>(kCodeBlock);
        }
      }
      means_.append(space_, mean.data(), 1);
    }
    slots_.resize(first + n);
    for (std::int64_t i = 0; i < n; ++i) {
      std::int32_t& row = order[static_cast<std::size_t>(i)];
      slots_[first + i] = static_cast<std::uint16_t>(row);
      row += static_cast<std::int32_t>(first);
    }
    codes_.permute(space_, first, order.data(), n);
  }

  // Sets scratch.blocks to the pages whose means are best for any query.
  void choose_pages(std::int64_t group, std::int64_t max_visits,
                    CodeScratch& scratch) const {
    const std::int64_t pages = (max_visits + kCodeBlock - 1) / kCodeBlock;
    collect_best(means_, group, nullptr, means_.blocks(), means_.size(), pages,
                 scratch);
    scratch.blocks.swap(scratch.found);
  }

  // Scores the first n rows of the listed blocks. Sets scratch.found to those that are among
  // the best `enough` of any query, or a little behind. A sample of the scores gives the
  // thresholds; they fall until enough rows reach them.
  void collect_best(const KeyCodes& codes, std::int64_t group, const std::int32_t* list,
                    std::int64_t blocks, std::int64_t n, std::int64_t enough,
                    CodeScratch& scratch) const {
    const std::int64_t stride = scratch.stride = blocks * kCodeBlock;
    float* scores = at_least(scratch.scores, group * stride);
    code_kernels_->score(codes.run(scratch, group, list, blocks, scores, stride));
    const std::int64_t step = std::max<std::int64_t>(n / kSample, 1);
    scratch.step = step;
    scratch.scored = n;
    const std::int64_t sampled = (n + step - 1) / step;
    scratch.ranks.assign(static_cast<std::size_t>(group), enough * 5 / (4 * step) + 6);
    scratch.thresholds.resize(static_cast<std::size_t>(group));
    scratch.counts.assign(static_cast<std::size_t>(group), 0);
    scratch.found.resize(static_cast<std::size_t>(n));
    const std::int64_t least = std::min(enough, n);
    std::int64_t found = 0;
    for (bool done = false; !done;) {
      for (std::int64_t g = 0; g < group; ++g) {
        const auto at = static_cast<std::size_t>(g);
        if (scratch.counts[at] >= least) continue;
        scratch.thresholds[at] = sampled_score(scores + g * stride, step, sampled,
                                               scratch.ranks[at], scratch.sample);
        scratch.ranks[at] *= 2;
      }
      found =
          code_kernels_->collect({scores, stride, n, group, scratch.thresholds.data(),
                                  scratch.found.data(), scratch.counts.data()});
      done = true;
      for (std::int64_t g = 0; g < group; ++g) {
        const auto at = static_cast<std::size_t>(g);
        done =
            done && (scratch.counts[at] >= least || scratch.ranks[at] >= 2 * sampled);
      }
    }
    scratch.found.resize(static_cast<std::size_t>(found));
  }

  // The score at a rank (1 is the best) of every step-th score.
  static float sampled_score(const float* scores, std::int64_t step,
                             std::int64_t sampled, std::int64_t rank,
                             std::vector<float>& sample) {
    if (rank >= sampled) return -std::numeric_limits<float>::infinity();
    float* values = at_least(sample, sampled);
    for (std::int64_t i = 0; i < sampled; ++i) values[i] = scores[i * step];
    std::nth_element(values, values + rank - 1, values + sampled, std::greater<>());
    return values[rank - 1];
  }

  Settings settings_;
  const CodeKernels* code_kernels_;
  BruteForce exact_;
  CodeSpace space_;
  Array<float> first_rows_;  // until there are kFitKeys
  KeyCodes codes_;  // of all keys
  KeyCodes means_;  // of all pages
  Array<std::uint16_t> slots_;  // of the rows in pages, within their segment
};

}  // namespace kvp::index
