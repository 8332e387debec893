// Checks of page layouts and of (page, slot) lists, and their messages.
#pragma once

#include <cstdlib>
#include <memory>
#include <new>

#include "binding.hpp"
#include "kvp/page_check.hpp"

namespace kvp::binding {

inline void require_ok(const char* op, const char* name, const Status& status,
                       std::int64_t limit) {
  const std::int64_t i = status.index;
  const std::int64_t value = status.value;
  switch (status.fault) {
    case Fault::kNone:
      return;
    case Fault::kPageOutOfRange:
      fail(op, name, "[", i, "] is page ", value, ", but the heap has pages 0 to ",
           limit - 1);
    case Fault::kSlotOutOfRange:
      fail(op, name, "[", i, "] is slot ", value, ", but pages have slots 0 to ",
           limit - 1);
    case Fault::kOffsetOutOfRange:
      fail(op, name, "[", i, "] is offset ", value, ", but pages have elements 0 to ",
           limit - 1);
    case Fault::kDuplicateDestination:
      fail(op, "destination ", i, " (page ", value / limit, ", slot ", value % limit,
           ") repeats an earlier one; destinations must differ");
    case Fault::kSourceIsDestination:
      fail(op, "source ", i, " (page ", value / limit, ", slot ", value % limit,
           ") is also a destination; move through a free page instead");
    case Fault::kLengthOutOfRange:
      fail(op, name, "[", i, "] is ", value, ", but page lists have room for 0 to ",
           limit, " tokens");
    case Fault::kRunOutOfRange:
      fail(op, name, "[", i, "] is ", value, ", but a run must lie within the ", limit,
           " entries");
    case Fault::kBiasNotFinite:
      fail(op, name, "[", i, "] must be finite, or -infinity for an entry that is off");
  }
}

inline const std::int32_t* checked_offsets(const char* op, const char* name,
                                           const Tensor& heap, const HeapView& view,
                                           const Tensor& table) {
  const std::int32_t* offsets =
      Argument{op, name, table}.offsets(heap, view.plane_elems);
  const std::int64_t page_elems = 2 * view.plane_elems;
  require_ok(op, name, check_offsets(offsets, view.plane_elems, page_elems),
             page_elems);
  return offsets;
}

inline PageLayout checked_layout(const char* op, const Tensor& heap,
                                 const HeapView& view, const Tensor& k_offsets,
                                 const Tensor& v_offsets) {
  return make_layout(checked_offsets(op, "k_offsets", heap, view, k_offsets),
                     checked_offsets(op, "v_offsets", heap, view, v_offsets),
                     view.block_size, view.head_dim);
}

// (page, slot) pairs in range. A negative size accepts any number of tokens.
inline TokenSlots checked_tokens(const char* op, const char* pages_name,
                                 const char* slots_name, const Tensor& heap,
                                 const HeapView& view, const Tensor& pages,
                                 const Tensor& slots, std::int64_t size) {
  const std::int64_t* page = Argument{op, pages_name, pages}.indices(heap, size);
  const std::int64_t n = pages.size(0);
  const std::int64_t* slot = Argument{op, slots_name, slots}.indices(heap, n);
  require_ok(op, pages_name, check_pages(page, n, view.num_pages), view.num_pages);
  require_ok(op, slots_name, check_slots(slot, n, view.block_size), view.block_size);
  return {page, slot, n};
}

// Checks that destinations differ and, if sources are given, that none of them
// is a destination. Cost: two bit operations per token. calloc does not map the parts of
// the bitmap that no destination touches.
inline void check_writes(const char* op, const HeapView& view, const TokenSlots& to,
                         const TokenSlots* from) {
  const PageSpan span = span_of(to.pages, to.n);
  const std::int64_t words = span.bitmap_words(view.block_size);
  if (words == 0) return;
  std::unique_ptr<std::uint64_t, decltype(&std::free)> bitmap(
      static_cast<std::uint64_t*>(
          std::calloc(static_cast<std::size_t>(words), sizeof(std::uint64_t))),
      &std::free);
  if (!bitmap) throw std::bad_alloc();
  require_ok(
      op, "destination",
      check_distinct(to.pages, to.slots, to.n, view.block_size, span, bitmap.get()),
      view.block_size);
  if (from == nullptr) return;
  require_ok(op, "source",
             check_disjoint(from->pages, from->slots, from->n, view.block_size, span,
                            bitmap.get()),
             view.block_size);
}

}  // namespace kvp::binding
