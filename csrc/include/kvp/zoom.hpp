// Chooses the spans that a query sees token by token, and updates the entries that it
// attends to (SeKV, section 3.3).
//
// One row is one KV head of one request, with its own run of entries:
//
//     entry   [ 0 .. spans )              [ spans .. spans + room )
//             a span's mean;              tokens of zoomed spans;
//             bias log|S|, or             bias 0 and the span as owner, or
//             -inf: it is zoomed          -inf and -1: free
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

// Entries below which one thread decides for all rows: a fifth of a millisecond.
constexpr Index kParallelEntries = 1 << 16;

struct Row {
  const float* gates;      // [spans], larger = sooner; -inf or NaN = not at all
  const Index* sizes;      // [spans], tokens, positive
  const float* log_sizes;  // [spans]
  Index spans, room;
  float* bias;   // [spans + room]
  Index* owner;  // [spans + room]; those of means mean nothing
};

// What a step changes in one row.
struct Choice {
  std::vector<char> chosen;    // [spans]
  std::vector<Index> fresh;    // spans that were not zoomed, ascending
  std::vector<Index> slots;    // entries that receive their tokens, ascending
  Index shown = 0;             // tokens of all chosen spans
  bool fits = true;            // whether there are free entries for the fresh spans
  std::vector<Index> waiting;  // a heap of spans
};

inline bool was_zoomed(const Row& row, Index span) { return row.bias[span] == kOff; }

// Chooses the best spans that fit together: in decreasing order of gates, until one
// does not fit into the remaining room. Spans larger than the whole room are skipped.
// Ties go to the lower number.
//
// Cost: O(spans), and O(log spans) per span that is chosen.
inline void choose(const Row& row, Choice& choice) {
  const auto before = [&](Index a, Index b) {  // whether a comes after b
    return row.gates[a] != row.gates[b] ? row.gates[a] < row.gates[b] : a > b;
  };
  choice.chosen.assign(static_cast<std::size_t>(row.spans), 0);
  choice.waiting.clear();
  for (Index s = 0; s < row.spans; ++s) {
    if (row.gates[s] > kOff && row.sizes[s] <= row.room) choice.waiting.push_back(s);
  }
  std::make_heap(choice.waiting.begin(), choice.waiting.end(), before);
  choice.shown = 0;
  while (!choice.waiting.empty()) {
    const Index span = choice.waiting.front();
    if (row.sizes[span] > row.room - choice.shown) break;
    choice.shown += row.sizes[span];
    choice.chosen[static_cast<std::size_t>(span)] = 1;
    std::pop_heap(choice.waiting.begin(), choice.waiting.end(), before);
    choice.waiting.pop_back();
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
  choice.fits = free >= 0;  // it is, unless owners and biases contradict each other
}

// Frees the entries of spans that are not chosen any more, takes the first free ones
// for new ones, and sets every bias. The tokens themselves are still to be made.
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

// Writes the rows of one matrix to entries of [.., head_dim], token t to slots[t].
template <typename Element, typename Factor>
void make_entries(const svd::Kernels& kernels, const svd::Record<Factor>& shape,
                  const Factor* record, const Index* slots, Element* entries,
                  svd::Workspace& work) {
  svd::make_rows(
      kernels, shape, record, entries,
      [&](Index t) { return slots[t] * shape.head_dim; }, work);
}

}  // namespace kvp::zoom
