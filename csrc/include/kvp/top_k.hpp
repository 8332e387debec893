// The k best of a stream of scored slots. Larger scores are better; of equal scores the
// lower slot is better, whatever the order of arrival.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvp::index {

struct Scored {
  float score;
  std::int32_t slot;
};

inline bool better(const Scored& a, const Scored& b) {
  return a.score > b.score || (a.score == b.score && a.slot < b.slot);
}

// Collects candidates and discards the worse half whenever there are 2k. A push takes one
// comparison, or O(1) on average if the candidate is kept.
class TopK {
 public:
  explicit TopK(std::int64_t k) : k_(static_cast<std::size_t>(k)) {
    kept_.reserve(2 * k_);
  }

  void clear() {
    kept_.clear();
    full_ = in_order_ = false;
  }

  // Replaces everything by n candidates, best first, of which the first k stay.
  void assign(const Scored* candidates, std::int64_t n) {
    const auto kept = std::min(k_, static_cast<std::size_t>(n));
    kept_.assign(candidates, candidates + kept);
    full_ = kept == k_;
    if (full_) worst_ = kept_.back();
    in_order_ = true;
  }

  void push(Scored candidate) {
    if (full_ && !better(candidate, worst_)) return;
    kept_.push_back(candidate);
    in_order_ = false;
    if (kept_.size() == 2 * k_) shrink();
  }

  // Scores of slots[0..n), or of slots first, first + 1, ... if slots is null.
  void push_all(const float* scores, const std::int32_t* slots, std::int32_t first,
                std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) {
      if (full_ && scores[i] < worst_.score) continue;
      push({scores[i],
            slots != nullptr ? slots[i] : first + static_cast<std::int32_t>(i)});
    }
  }

  std::int64_t limit() const { return static_cast<std::int64_t>(k_); }

  // Whether k candidates were pushed; from then on scores below floor() are rejected.
  bool full() const { return full_; }
  float floor() const { return worst_.score; }

  // At least the k best so far, in the order of arrival: all candidates, if at most 2k
  // were pushed.
  const std::vector<Scored>& unsorted() const { return kept_; }

  // The k best so far, best first. Candidates may be pushed afterwards.
  const std::vector<Scored>& sorted() {
    if (in_order_) return kept_;
    if (kept_.size() > k_) shrink();
    std::sort(kept_.begin(), kept_.end(), better);
    in_order_ = true;
    return kept_;
  }

 private:
  void shrink() {
    std::nth_element(kept_.begin(), kept_.begin() + static_cast<std::ptrdiff_t>(k_ - 1),
                     kept_.end(), better);
    kept_.resize(k_);
    worst_ = kept_.back();
    full_ = true;
  }

  std::size_t k_;
  bool full_ = false, in_order_ = false;
  Scored worst_ = {};
  std::vector<Scored> kept_;
};

}  // namespace kvp::index
