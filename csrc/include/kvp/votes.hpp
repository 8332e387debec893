// The tokens that a group of queries attends to most.
//
// Every query of the group distributes one vote over the keys that were scored for it,
// by its softmax. The votes of a key add up over the queries. If all keys are scored,
// votes are the attention restricted to these keys.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kvp/brute_force.hpp"
#include "kvp/bucket_sort.hpp"
#include "kvp/code_index.hpp"
#include "kvp/dci_tree.hpp"
#include "kvp/index_common.hpp"
#include "kvp/rank_kernels.hpp"
#include "kvp/top_k.hpp"
#include "kvp/vote_kernels.hpp"

namespace kvp::index {

// Logits of keys that get no vote but take attention; each stands for `weight` keys. They
// are overwritten.
struct Rest {
  float* logits = nullptr;
  std::int64_t n = 0;
  float weight = 0.0f;
};

// logits[i] becomes its softmax. Scale is >= 0. No logit of the rest is above all others.
inline void softmax_in_place(float* logits, std::int64_t n, float scale,
                             const Rest& rest = {}) {
  static const VoteKernels& kernels = select_kernels<VoteKernels>();
  const float peak = select_kernels<RankKernels>().range(logits, n).most;
  float sum = kernels.exponentials(logits, n, scale, peak);
  if (rest.n > 0) {
    sum += rest.weight * kernels.exponentials(rest.logits, rest.n, scale, peak);
  }
  const float share = 1.0f / sum;
  for (std::int64_t i = 0; i < n; ++i) logits[i] *= share;
}

// Votes of one KV head. Buffers only grow; a thread uses it for one head after another.
class Votes {
 public:
  // Starts a head with keys 0 to num_keys - 1.
  void begin(std::int64_t num_keys) {
    listed_ = nullptr;
    for (const std::int32_t slot : touched_) votes_[static_cast<std::size_t>(slot)] = 0;
    touched_.clear();
    if (votes_.size() < static_cast<std::size_t>(num_keys)) {
      votes_.resize(static_cast<std::size_t>(num_keys), 0.0f);
    }
  }

  // One query's scores of some keys, each at most once.
  void add(const std::vector<Scored>& scored, float scale) {
    const auto n = static_cast<std::int64_t>(scored.size());
    if (n == 0) return;
    float* logits = at_least(logits_, n);
    for (std::int64_t i = 0; i < n; ++i) {
      logits[i] = scored[static_cast<std::size_t>(i)].score;
    }
    softmax_in_place(logits, n, scale);
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int32_t slot = scored[static_cast<std::size_t>(i)].slot;
      float& vote = votes_[static_cast<std::size_t>(slot)];
      if (vote == 0.0f) touched_.push_back(slot);
      vote += logits[i];
    }
  }

  // Starts a head whose queries all score the same keys. The list must outlive the votes.
  void begin_listed(const std::vector<std::int32_t>& slots) {
    listed_ = &slots;
    sums_.assign(slots.size() + kPadding, 0.0f);
  }

  // One query's scores of the listed keys; overwrites them.
  void add_listed(float* scores, float scale, const Rest& rest) {
    const auto n = static_cast<std::int64_t>(listed_->size());
    if (n == 0) return;
    softmax_in_place(scores, n, scale, rest);
    for (std::int64_t i = 0; i < n; ++i) {
      sums_[static_cast<std::size_t>(i)] += scores[i];
    }
  }

  // One query's scores of keys 0 to n - 1; overwrites them.
  void add_all(float* scores, std::int64_t n, float scale) {
    if (n == 0) return;
    softmax_in_place(scores, n, scale);
    const bool first = touched_.empty();
    for (std::int64_t i = 0; i < n; ++i)
      votes_[static_cast<std::size_t>(i)] += scores[i];
    if (!first) return;
    touched_.resize(static_cast<std::size_t>(n));
    for (std::int64_t i = 0; i < n; ++i) {
      touched_[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(i);
    }
  }

  // Writes the `count` keys with the most votes, best first; of equal keys the lower slot
  // first. Fills the rest with -1 if fewer keys have votes. Returns the number of keys.
  //
  // Votes are positive, so their bits are ordered like the votes. Counting the keys per
  // range of bits finds the range of the last place; keys below it are not compared.
  std::int64_t best(std::int64_t count, std::int64_t* slots) {
    if (listed_ != nullptr) return best_listed(count, slots);
    std::int32_t in_range[kRanges] = {};
    for (const std::int32_t slot : touched_) ++in_range[range_of(bits_of(slot))];
    std::int64_t above = 0;  // keys in ranges above `last`
    std::uint32_t last = kRanges - 1;
    while (last > 0 && above + in_range[last] < count) above += in_range[last--];
    candidates_.clear();
    for (const std::int32_t slot : touched_) {
      const std::uint32_t bits = bits_of(slot);
      if (range_of(bits) < last) continue;
      candidates_.push_back(candidate(bits, slot));
    }
    return sorted(count, slots);
  }

 private:
  // Ranges of votes: eight per power of two from 2^-112 to 2^16, a few thousand
  // groups at most; smaller votes share the first, larger ones the last.
  static constexpr std::uint32_t kRanges = 1024, kFirst = (127u - 112u) << 3;

  // Larger is better: more votes, then the lower slot.
  static std::uint64_t candidate(std::uint32_t bits, std::int32_t slot) {
    return std::uint64_t{bits} << 32 | (0xffffffffu - static_cast<std::uint32_t>(slot));
  }

  // The best of candidates_.
  std::int64_t sorted(std::int64_t count, std::int64_t* slots) {
    const auto found =
        std::min<std::int64_t>(count, static_cast<std::int64_t>(candidates_.size()));
    sort_largest_first(candidates_, sorting_);
    for (std::int64_t i = 0; i < found; ++i) {
      slots[i] = 0xffffffffu -
                 static_cast<std::uint32_t>(candidates_[static_cast<std::size_t>(i)]);
    }
    std::fill(slots + found, slots + count, std::int64_t{-1});
    return found;
  }

  // The best of the listed keys: a threshold finds those that matter.
  std::int64_t best_listed(std::int64_t count, std::int64_t* slots) {
    candidates_.clear();
    const auto n = static_cast<std::int64_t>(listed_->size());
    if (n > 0) {
      static const RankKernels& kernels = select_kernels<RankKernels>();
      std::int32_t* room = at_least(room_, n + kPadding);
      const float threshold = threshold_of(kernels, sums_.data(), n, count, logits_);
      std::int64_t unused = 0;
      const std::int64_t reach =
          kernels.collect({sums_.data(), n, n, 1, &threshold, room, &unused});
      for (std::int64_t i = 0; i < reach; ++i) {
        const auto at = static_cast<std::size_t>(room[i]);
        candidates_.push_back(candidate(index::bits_of(sums_[at]), (*listed_)[at]));
      }
    }
    return sorted(count, slots);
  }

  std::uint32_t bits_of(std::int32_t slot) const {
    return index::bits_of(votes_[static_cast<std::size_t>(slot)]);
  }
  static std::uint32_t range_of(std::uint32_t bits) {
    const std::uint32_t range = bits >> 20;
    return range < kFirst ? 0 : std::min(range - kFirst, kRanges - 1);
  }

  std::vector<float> votes_;
  std::vector<std::int32_t> touched_;  // slots with a vote
  std::vector<std::uint64_t> candidates_, sorting_;
  std::vector<float> logits_;
  const std::vector<std::int32_t>* listed_ = nullptr;
  std::vector<float> sums_;  // of listed keys
  std::vector<std::int32_t> room_;
};

// Votes of one KV head on stored pages: eight keys that lie next to each other, half a page
// of codes. Every query distributes one vote over the keys that were scored for it. A page
// has the votes of its keys; all pages have as many keys, so this ranks them by attention
// per token.
class PageVotes {
 public:
  // Starts a head whose queries all score the keys of these blocks.
  void begin(const BlockList& listed) {
    listed_ = listed;
    sums_.assign(static_cast<std::size_t>(listed.keys / kStoredKeys), 0.0f);
  }

  // One query's logits of the listed keys; overwrites them. Keys behind the last full page
  // take attention, but have no page.
  void add(float* logits, float scale) {
    if (listed_.keys == 0) return;
    softmax_in_place(logits, listed_.keys, scale);
    for (std::size_t i = 0; i < sums_.size(); ++i) {
      const float* page = logits + static_cast<std::int64_t>(i) * kStoredKeys;
      for (std::int64_t j = 0; j < kStoredKeys; ++j) sums_[i] += page[j];
    }
  }

  // Writes the `count` pages with the most votes, best first; of equal pages the lower
  // number first. Fills the rest with -1 if there are fewer.
  void best(std::int64_t count, std::int64_t* pages) {
    ranked_.clear();
    for (std::size_t i = 0; i < sums_.size(); ++i) {
      const auto at = static_cast<std::int64_t>(i);
      const std::int64_t page = listed_.block(at / kHalves) * kHalves + at % kHalves;
      ranked_.push_back({sums_[i], static_cast<std::int32_t>(page)});
    }
    const auto kept = std::min(static_cast<std::size_t>(count), ranked_.size());
    std::partial_sort(ranked_.begin(),
                      ranked_.begin() + static_cast<std::ptrdiff_t>(kept),
                      ranked_.end(), better);
    for (std::size_t i = 0; i < kept; ++i) pages[i] = ranked_[i].slot;
    std::fill(pages + kept, pages + count, std::int64_t{-1});
  }

 private:
  static constexpr std::int64_t kHalves = kCodeBlock / kStoredKeys;

  BlockList listed_{};
  std::vector<float> sums_;
  std::vector<Scored> ranked_;
};

// Per-thread scratch of a vote.
struct VoteScratch {
  Scratch search;
  Votes votes;
  PageVotes pages;
  std::vector<float> scores;
};

// Lets queries [group, head_dim] of a KV head vote on the keys that a tree finds:
// about options.max_visits for each query.
inline void vote(const DciTree& tree, const KeyView& keys, bool by_page,
                 const float* queries, std::int64_t group, std::int64_t head_dim,
                 float scale, const QueryOptions& options, VoteScratch& scratch) {
  scratch.votes.begin(tree.num_keys());
  // Room for all visited keys: the sum of the votes matters, not the best of each query.
  TopK all(std::max<std::int64_t>(
      options.max_visits > 0 ? options.max_visits : tree.num_keys(), 1));
  for (std::int64_t g = 0; g < group; ++g) {
    all.clear();
    tree.query(keys, by_page, queries + g * head_dim, options, scratch.search, all);
    scratch.votes.add(all.unsorted(), scale);
  }
}

// The scores of all keys, [group][num_keys]. Each block of keys is read once for the whole
// group.
inline float* score_all(const BruteForce& scan, const KeyView& keys,
                        const float* queries, std::int64_t group, std::int64_t head_dim,
                        VoteScratch& scratch) {
  const std::int64_t n = scan.num_keys();
  float* scores = at_least(scratch.scores, group * n);
  float* rows = at_least(scratch.search.rows, BruteForce::kBlock * head_dim);
  for (std::int64_t first = 0; first < n; first += BruteForce::kBlock) {
    const std::int64_t count = std::min(n - first, BruteForce::kBlock);
    score_run(scan.kernels(), keys, queries, group, first, count, rows, scores + first,
              n);
  }
  return scores;
}

// The same as above over all keys.
inline void vote(const BruteForce& scan, const KeyView& keys, bool /*by_page*/,
                 const float* queries, std::int64_t group, std::int64_t head_dim,
                 float scale, const QueryOptions& /*options*/, VoteScratch& scratch) {
  const std::int64_t n = scan.num_keys();
  scratch.votes.begin(n);
  float* scores = score_all(scan, keys, queries, group, head_dim, scratch);
  for (std::int64_t g = 0; g < group; ++g) {
    scratch.votes.add_all(scores + g * n, n, scale);
  }
}

// Lets the queries vote on pages of keys that lie in the order of pages in memory.
inline void vote_pages(const BruteForce& scan, const KeyView& keys,
                       const float* queries, std::int64_t group, std::int64_t head_dim,
                       float scale, const QueryOptions& /*options*/,
                       VoteScratch& scratch) {
  const std::int64_t n = scan.num_keys();
  scratch.pages.begin({nullptr, (n + kCodeBlock - 1) / kCodeBlock, n});
  float* scores = score_all(scan, keys, queries, group, head_dim, scratch);
  for (std::int64_t g = 0; g < group; ++g) scratch.pages.add(scores + g * n, scale);
}

// The same with codes, which are in the order of pages anyway: of the best pages, about
// options.max_visits keys. Options.count is the number of keys that the caller takes.
inline void vote_pages(const CodeIndex& codes, const KeyView& keys,
                       const float* queries, std::int64_t group, std::int64_t head_dim,
                       float scale, const QueryOptions& options, VoteScratch& scratch) {
  if (!codes.coded(options)) {
    vote_pages(codes.exact(), keys, queries, group, head_dim, scale, options, scratch);
    return;
  }
  CodeScratch& scored = scratch.search.codes;
  const BlockList listed = codes.score(queries, group, options, options.count, scored);
  scratch.pages.begin(listed);
  float* logits = at_least(scratch.scores, listed.keys);
  for (std::int64_t g = 0; g < group; ++g) {
    CodeIndex::scored_logits(g, listed.keys, scored, logits);
    scratch.pages.add(logits, scale);
  }
}

// The same over the keys that codes find for any query. A sample of the other keys that were
// scored tells how much attention they take.
inline void vote(const CodeIndex& codes, const KeyView& keys, bool by_page,
                 const float* queries, std::int64_t group, std::int64_t head_dim,
                 float scale, const QueryOptions& options, VoteScratch& scratch) {
  if (!codes.coded(options)) {
    vote(codes.exact(), keys, by_page, queries, group, head_dim, scale, options,
         scratch);
    return;
  }
  CodeScratch& found = scratch.search.codes;
  // More than are taken: a key that no query ranks first may have the most votes.
  codes.find(queries, group, options, options.count * 5 / 4 + 6, found);
  scratch.votes.begin_listed(found.slots);
  float* logits =
      at_least(scratch.scores, static_cast<std::int64_t>(found.slots.size()));
  for (std::int64_t g = 0; g < group; ++g) {
    CodeIndex::found_logits(g, found, logits);
    const std::int64_t rest = CodeIndex::rest_logits(g, found);
    scratch.votes.add_listed(
        logits, scale,
        {found.sample.data(), rest, static_cast<float>(CodeIndex::rest_step(found))});
  }
}

// Calls take(g, top, visits) with the best keys of each query of a KV head.
template <typename Tree, typename Take>
void query_group(const Tree& tree, const KeyView& keys, bool by_page,
                 const float* queries, std::int64_t group, std::int64_t head_dim,
                 const QueryOptions& options, Scratch& scratch, TopK& top,
                 const Take& take) {
  for (std::int64_t g = 0; g < group; ++g) {
    top.clear();
    const std::int64_t visits =
        tree.query(keys, by_page, queries + g * head_dim, options, scratch, top);
    take(g, top, visits);
  }
}

// All queries read the codes once.
template <typename Take>
void query_group(const CodeIndex& codes, const KeyView& keys, bool by_page,
                 const float* queries, std::int64_t group, std::int64_t head_dim,
                 const QueryOptions& options, Scratch& scratch, TopK& top,
                 const Take& take) {
  if (!codes.coded(options)) {
    query_group(codes.exact(), keys, by_page, queries, group, head_dim, options,
                scratch, top, take);
    return;
  }
  const std::int64_t visits =
      codes.find(queries, group, options, top.limit(), scratch.codes);
  for (std::int64_t g = 0; g < group; ++g) {
    top.clear();
    codes.push_found(g, scratch.codes, top);
    take(g, top, visits);
  }
}

}  // namespace kvp::index
