// Checks of index arguments. Callers of page_copy.hpp run them once per call, because
// the copies trust their arguments.
//
// Every check returns a Status: the first fault, its position and the wrong value. The
// caller writes the message.
#pragma once

#include <cstdint>

namespace kvp {

enum class Fault {
  kNone,
  kPageOutOfRange,        // value: the page id
  kSlotOutOfRange,        // value: the slot
  kOffsetOutOfRange,      // value: the offset
  kDuplicateDestination,  // value: page * block_size + slot
  kSourceIsDestination,   // value: page * block_size + slot
  kLengthOutOfRange,      // value: the length
  kRunOutOfRange,         // value: the start
  kBiasNotFinite,         // no value
};

struct Status {
  Fault fault = Fault::kNone;
  std::int64_t index = -1;  // position in the checked array
  std::int64_t value = 0;

  bool ok() const { return fault == Fault::kNone; }
};

// First entry of values[n] outside [0, limit), reported as `fault`.
template <typename Int>
Status check_range(const Int* values, std::int64_t n, std::int64_t limit, Fault fault) {
  // One flag for the whole array keeps the loop free of branches, so it vectorizes. The
  // position is searched only after a fault.
  bool bad = false;
  for (std::int64_t i = 0; i < n; ++i) {
    bad |= (values[i] < 0) | (static_cast<std::int64_t>(values[i]) >= limit);
  }
  if (!bad) return {};
  std::int64_t i = 0;
  while (values[i] >= 0 && static_cast<std::int64_t>(values[i]) < limit) ++i;
  return {fault, i, static_cast<std::int64_t>(values[i])};
}

inline Status check_pages(const std::int64_t* pages, std::int64_t n,
                          std::int64_t num_pages) {
  return check_range(pages, n, num_pages, Fault::kPageOutOfRange);
}

inline Status check_slots(const std::int64_t* slots, std::int64_t n,
                          std::int64_t block_size) {
  return check_range(slots, n, block_size, Fault::kSlotOutOfRange);
}

inline Status check_offsets(const std::int32_t* offsets, std::int64_t n,
                            std::int64_t page_elems) {
  return check_range(offsets, n, page_elems, Fault::kOffsetOutOfRange);
}

// The pages that a list of destinations spans. Callers size the scratch bitmap
// of the checks below from it, so that a small move in a large heap stays cheap.
struct PageSpan {
  std::int64_t first = 0;
  std::int64_t last = -1;

  std::int64_t bitmap_words(std::int64_t block_size) const {
    return last < first ? 0 : ((last - first + 1) * block_size + 63) / 64;
  }
};

inline PageSpan span_of(const std::int64_t* pages, std::int64_t n) {
  if (n == 0) return {};
  PageSpan span{pages[0], pages[0]};
  for (std::int64_t i = 1; i < n; ++i) {
    span.first = pages[i] < span.first ? pages[i] : span.first;
    span.last = pages[i] > span.last ? pages[i] : span.last;
  }
  return span;
}

// Whether all destinations differ. Pages and slots must be in range already.
//
//   bitmap: span.bitmap_words(block_size) zeroed words. On success it holds one
//           bit per destination, which check_disjoint reads.
inline Status check_distinct(const std::int64_t* dst_pages,
                             const std::int64_t* dst_slots, std::int64_t n,
                             std::int64_t block_size, PageSpan span,
                             std::uint64_t* bitmap) {
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t bit = (dst_pages[i] - span.first) * block_size + dst_slots[i];
    std::uint64_t& word = bitmap[bit >> 6];
    const std::uint64_t mask = std::uint64_t{1} << (bit & 63);
    if (word & mask) {
      return {Fault::kDuplicateDestination, i,
              dst_pages[i] * block_size + dst_slots[i]};
    }
    word |= mask;
  }
  return {};
}

// The same for whole pages: `bitmap` has span.bitmap_words(1) zeroed words.
inline Status check_distinct_pages(const std::int64_t* pages, std::int64_t n,
                                   PageSpan span, std::uint64_t* bitmap) {
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t bit = pages[i] - span.first;
    std::uint64_t& word = bitmap[bit >> 6];
    const std::uint64_t mask = std::uint64_t{1} << (bit & 63);
    if (word & mask) return {Fault::kDuplicateDestination, i, pages[i]};
    word |= mask;
  }
  return {};
}

// Whether no source is a destination; `bitmap` as check_distinct left it.
inline Status check_disjoint(const std::int64_t* src_pages,
                             const std::int64_t* src_slots, std::int64_t n,
                             std::int64_t block_size, PageSpan span,
                             const std::uint64_t* bitmap) {
  for (std::int64_t i = 0; i < n; ++i) {
    if (src_pages[i] < span.first || src_pages[i] > span.last) continue;
    const std::int64_t bit = (src_pages[i] - span.first) * block_size + src_slots[i];
    if ((bitmap[bit >> 6] >> (bit & 63)) & 1) {
      return {Fault::kSourceIsDestination, i, src_pages[i] * block_size + src_slots[i]};
    }
  }
  return {};
}

}  // namespace kvp
