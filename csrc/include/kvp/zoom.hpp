// Chooses the spans that a query sees token by token, and updates the entries that it
// attends to (SeKV, section 3.3).
//
// One row is one KV head of one request, with its own run of entries:
//
//     entry   [ 0 .. spans )              [ spans .. spans + room )
//             a span's mean:              a token of a zoomed span:
//             bias log|S|, or             bias 0, owner = the span; or free:
//             -inf while it is zoomed     bias -inf, owner = -1
//
// choose() only reads, so that its result can be checked before apply() writes.
//
// Plain pointers and sizes; arguments are trusted.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kvp/low_rank.hpp"

namespace kvp::zoom {

using svd::Index;

constexpr float kOff = -std::numeric_limits<float>::infinity();

// Entries below which one thread serves all rows: a fifth of a millisecond.
constexpr Index kParallelEntries = 1 << 16;

struct Row {
  const float* gates;      // [spans], larger = sooner; -inf or NaN = never
  const Index* sizes;      // [spans], tokens, positive
  const float* log_sizes;  // [spans]
  Index spans, room;
  float* bias;   // [spans + room]
  Index* owner;  // [spans + room]; undefined for means
};

// The change of one row in a step.
struct Choice {
  std::vector<char> chosen;    // [spans]
  std::vector<Index> fresh;    // chosen spans that were not zoomed before, ascending
  std::vector<Index> slots;    // entries that receive their tokens, ascending
  Index zoomed_tokens = 0;             // tokens of all chosen spans, new or not
  bool fits = true;  // whether the free entries suffice for the fresh spans
  std::vector<Index> candidates;  // scratch: a heap of spans
};

inline bool was_zoomed(const Row& row, Index span) { return row.bias[span] == kOff; }

// Chooses the best spans that fit together: in decreasing order of gates, until one
// does not fit into the remaining room. Spans larger than the whole room are skipped.
// Ties go to the lower number.
//
// Cost: O(spans), and O(log spans) per span that is chosen.
inline void choose(const Row& row, Choice& choice) {
  const auto worse = [&](Index a, Index b) {  // whether b is better than a
    return row.gates[a] != row.gates[b] ? row.gates[a] < row.gates[b] : a > b;
  };
  choice.chosen.assign(static_cast<std::size_t>(row.spans), 0);
  choice.candidates.clear();
  for (Index s = 0; s < row.spans; ++s) {
    if (row.gates[s] > kOff && row.sizes[s] <= row.room) choice.candidates.push_back(s);
  }
  std::make_heap(choice.candidates.begin(), choice.candidates.end(), worse);
  choice.zoomed_tokens = 0;
  while (!choice.candidates.empty()) {
    const Index span = choice.candidates.front();
    if (row.sizes[span] > row.room - choice.zoomed_tokens) break;
    choice.zoomed_tokens += row.sizes[span];
    choice.chosen[static_cast<std::size_t>(span)] = 1;
    std::pop_heap(choice.candidates.begin(), choice.candidates.end(), worse);
    choice.candidates.pop_back();
  }
  choice.fresh.clear();
  Index free = row.room;
  for (Index e = row.spans; e < row.spans + row.room; ++e) {
    const Index owner = row.owner[e];
    free -= owner >= 0 && choice.chosen[static_cast<std::size_t>(owner)];
  }
  for (Index s = 0; s < row.spans; ++s) {
    if (choice.chosen[static_cast<std::size_t>(s)] && !was_zoomed(row, s)) {
      choice.fresh.push_back(s);
      free -= row.sizes[s];
    }
  }
  choice.fits = free >= 0;  // false only if owners and biases contradict each other
}

// Frees the entries of spans that are no longer chosen, assigns the first free entries
// to the tokens of new spans, and sets every bias. The caller reconstructs the tokens.
inline void apply(const Row& row, Choice& choice) {
  for (Index e = row.spans; e < row.spans + row.room; ++e) {
    const Index owner = row.owner[e];
    if (owner < 0 || choice.chosen[static_cast<std::size_t>(owner)]) continue;
    row.owner[e] = -1;
    row.bias[e] = kOff;
  }
  choice.slots.clear();
  Index at = row.spans;
  for (const Index span : choice.fresh) {
    for (Index left = row.sizes[span]; left > 0; ++at) {
      if (row.owner[at] >= 0) continue;
      row.owner[at] = span;
      row.bias[at] = 0.0f;
      choice.slots.push_back(at);
      --left;
    }
  }
  for (Index s = 0; s < row.spans; ++s) {
    row.bias[s] = choice.chosen[static_cast<std::size_t>(s)] ? kOff : row.log_sizes[s];
  }
}

// Reconstructs one matrix into entries [.., head_dim]: token t into slots[t].
template <typename Element, typename Factor>
void reconstruct_entries(const svd::Kernels& kernels, const svd::Record<Factor>& shape,
                         const Factor* record, const Index* slots, Element* entries,
                         svd::Workspace& work) {
  svd::make_rows(
      kernels, shape, record, entries,
      [&](Index t) { return slots[t] * shape.head_dim; }, work);
}

}  // namespace kvp::zoom
