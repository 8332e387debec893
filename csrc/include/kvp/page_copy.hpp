// Copies between pages and token rows, and between slots of pages.
//
// Element is an unsigned integer of the element's size: every copy is of bits.
// All index arguments are trusted (page_check.hpp checks them). Results do not
// depend on the number of threads: iterations write disjoint elements.
#pragma once

#include <cstdint>
#include <cstring>

#include "kvp/page_layout.hpp"
#include "kvp/token_rows.hpp"
#include "kvp/transpose.hpp"

namespace kvp {

// Below this many bytes a parallel region costs more than it saves.
constexpr std::int64_t kParallelBytes = 256 * 1024;

// row[d] = plane element (slot, d).
template <typename Element>
inline void load_row(const Element* page, const Plane& plane, std::int64_t slot,
                     std::int64_t block_size, std::int64_t head_dim, Element* row) {
  if (plane.kind == PlaneKind::kRows) {
    std::memcpy(row, page + plane.base + slot * plane.slot_stride,
                static_cast<std::size_t>(head_dim) * sizeof(Element));
  } else if (plane.kind == PlaneKind::kTransposed) {
    const Element* column = page + plane.base + slot;
    for (std::int64_t d = 0; d < head_dim; ++d) row[d] = column[d * block_size];
  } else {
    const std::int32_t* offsets = plane.offsets + slot * head_dim;
    for (std::int64_t d = 0; d < head_dim; ++d) row[d] = page[offsets[d]];
  }
}

// Plane element (slot, d) = row[d].
template <typename Element>
inline void store_row(Element* page, const Plane& plane, std::int64_t slot,
                      std::int64_t block_size, std::int64_t head_dim,
                      const Element* row) {
  if (plane.kind == PlaneKind::kRows) {
    std::memcpy(page + plane.base + slot * plane.slot_stride, row,
                static_cast<std::size_t>(head_dim) * sizeof(Element));
  } else if (plane.kind == PlaneKind::kTransposed) {
    Element* column = page + plane.base + slot;
    for (std::int64_t d = 0; d < head_dim; ++d) column[d * block_size] = row[d];
  } else {
    const std::int32_t* offsets = plane.offsets + slot * head_dim;
    for (std::int64_t d = 0; d < head_dim; ++d) page[offsets[d]] = row[d];
  }
}

// Plane element (to_slot, d) of `to` = plane element (from_slot, d) of `from`.
template <typename Element>
inline void move_row(const Element* from, std::int64_t from_slot, Element* to,
                     std::int64_t to_slot, const Plane& plane, std::int64_t block_size,
                     std::int64_t head_dim) {
  if (plane.kind == PlaneKind::kRows) {
    std::memcpy(to + plane.base + to_slot * plane.slot_stride,
                from + plane.base + from_slot * plane.slot_stride,
                static_cast<std::size_t>(head_dim) * sizeof(Element));
  } else if (plane.kind == PlaneKind::kTransposed) {
    const Element* source = from + plane.base + from_slot;
    Element* target = to + plane.base + to_slot;
    for (std::int64_t d = 0; d < head_dim; ++d) {
      target[d * block_size] = source[d * block_size];
    }
  } else {
    const std::int32_t* source = plane.offsets + from_slot * head_dim;
    const std::int32_t* target = plane.offsets + to_slot * head_dim;
    for (std::int64_t d = 0; d < head_dim; ++d) to[target[d]] = from[source[d]];
  }
}

// Reads the keys and values of n tokens.
//
//   heap:    pages of page_elems elements, page_stride elements apart
//   pages, slots:   [n], where token i lies
//   keys_out, values_out:  [n, head_dim], must not overlap the heap
//
// Cost: 4 * n * head_dim elements of traffic.
template <typename Element>
void gather_tokens(const Element* heap, std::int64_t page_stride,
                   const std::int64_t* pages, const std::int64_t* slots, std::int64_t n,
                   const PageLayout& layout, Element* keys_out, Element* values_out) {
  const std::int64_t head_dim = layout.head_dim;
  const std::int64_t block_size = layout.block_size;
  [[maybe_unused]] const bool parallel =
      2 * n * head_dim * std::int64_t{sizeof(Element)} >= kParallelBytes;
#pragma omp parallel for schedule(static) if (parallel)
  for (std::int64_t i = 0; i < n; ++i) {
    const Element* page = heap + pages[i] * page_stride;
    load_row(page, layout.keys, slots[i], block_size, head_dim,
             keys_out + i * head_dim);
    load_row(page, layout.values, slots[i], block_size, head_dim,
             values_out + i * head_dim);
  }
}

// Writes n tokens, whose rows begin at key_of(i) and value_of(i). The (page, slot) pairs
// must be distinct.
template <typename Element, typename KeyOf, typename ValueOf>
void store_tokens(Element* heap, std::int64_t page_stride, const std::int64_t* pages,
                  const std::int64_t* slots, std::int64_t n, const PageLayout& layout,
                  const KeyOf& key_of, const ValueOf& value_of) {
  const std::int64_t head_dim = layout.head_dim;
  const std::int64_t block_size = layout.block_size;
  [[maybe_unused]] const bool parallel =
      2 * n * head_dim * std::int64_t{sizeof(Element)} >= kParallelBytes;
#pragma omp parallel for schedule(static) if (parallel)
  for (std::int64_t i = 0; i < n; ++i) {
    Element* page = heap + pages[i] * page_stride;
    store_row(page, layout.keys, slots[i], block_size, head_dim, key_of(i));
    store_row(page, layout.values, slots[i], block_size, head_dim, value_of(i));
  }
}

// Writes the keys and values of n tokens; the inverse of gather_tokens.
template <typename Element>
void scatter_tokens(Element* heap, std::int64_t page_stride, const std::int64_t* pages,
                    const std::int64_t* slots, std::int64_t n, const PageLayout& layout,
                    const Element* keys, const Element* values) {
  const std::int64_t dim = layout.head_dim;
  store_tokens(
      heap, page_stride, pages, slots, n, layout,
      [=](std::int64_t i) { return keys + i * dim; },
      [=](std::int64_t i) { return values + i * dim; });
}

// The same of rows that lie anywhere.
template <typename Element>
void fetch_tokens(Element* heap, std::int64_t page_stride, const std::int64_t* pages,
                  const std::int64_t* slots, std::int64_t n, const PageLayout& layout,
                  const TokenRows<Element>& from) {
  const std::int64_t dim = layout.head_dim;
  store_tokens(
      heap, page_stride, pages, slots, n, layout,
      [=](std::int64_t i) { return from.data + from.keys[i] * dim; },
      [=](std::int64_t i) { return from.data + from.values[i] * dim; });
}

// Copies token i from (src_pages[i], src_slots[i]) to (dst_pages[i],
// dst_slots[i]). The destinations must be distinct and none may be a source:
// then no iteration reads what another writes, and the order does not matter.
template <typename Element>
void move_tokens(Element* heap, std::int64_t page_stride, const std::int64_t* src_pages,
                 const std::int64_t* src_slots, const std::int64_t* dst_pages,
                 const std::int64_t* dst_slots, std::int64_t n,
                 const PageLayout& layout) {
  const std::int64_t head_dim = layout.head_dim;
  const std::int64_t block_size = layout.block_size;
  [[maybe_unused]] const bool parallel =
      2 * n * head_dim * std::int64_t{sizeof(Element)} >= kParallelBytes;
#pragma omp parallel for schedule(static) if (parallel)
  for (std::int64_t i = 0; i < n; ++i) {
    const Element* from = heap + src_pages[i] * page_stride;
    Element* to = heap + dst_pages[i] * page_stride;
    move_row(from, src_slots[i], to, dst_slots[i], layout.keys, block_size, head_dim);
    move_row(from, src_slots[i], to, dst_slots[i], layout.values, block_size, head_dim);
  }
}

// Unpacks one plane of one page to natural order: rows[s * head_dim + d].
template <typename Element>
inline void unpack_plane(const Element* page, const Plane& plane,
                         std::int64_t block_size, std::int64_t head_dim,
                         Element* rows) {
  const std::int64_t n = block_size * head_dim;
  if (plane.is_matrix(head_dim)) {
    std::memcpy(rows, page + plane.base, static_cast<std::size_t>(n) * sizeof(Element));
  } else if (plane.kind == PlaneKind::kRows) {
    for (std::int64_t s = 0; s < block_size; ++s) {
      load_row(page, plane, s, block_size, head_dim, rows + s * head_dim);
    }
  } else if (plane.kind == PlaneKind::kTransposed) {
    transpose(page + plane.base, head_dim, block_size, rows);
  } else {
    for (std::int64_t i = 0; i < n; ++i) rows[i] = page[plane.offsets[i]];
  }
}

// Unpacks one plane of whole pages.
//
//   page_table: [rows, pages_per_row] page ids
//   out:        [rows, pages_per_row * block_size, head_dim], not in the heap
//
// Rows follow each other without gaps in both, so a flat list of
// rows * pages_per_row pages is all that the loop needs.
template <typename Element>
void gather_plane(const Element* heap, std::int64_t page_stride,
                  const std::int64_t* page_table, std::int64_t rows,
                  std::int64_t pages_per_row, const Plane& plane,
                  std::int64_t block_size, std::int64_t head_dim, Element* out) {
  const std::int64_t n = rows * pages_per_row;
  const std::int64_t plane_elems = block_size * head_dim;
  [[maybe_unused]] const bool parallel =
      n * plane_elems * std::int64_t{sizeof(Element)} >= kParallelBytes;
#pragma omp parallel for schedule(static) if (parallel)
  for (std::int64_t i = 0; i < n; ++i) {
    unpack_plane(heap + page_table[i] * page_stride, plane, block_size, head_dim,
                 out + i * plane_elems);
  }
}

template <typename Element>
void gather_keys(const Element* heap, std::int64_t page_stride,
                 const std::int64_t* page_table, std::int64_t rows,
                 std::int64_t pages_per_row, const PageLayout& layout, Element* out) {
  gather_plane(heap, page_stride, page_table, rows, pages_per_row, layout.keys,
               layout.block_size, layout.head_dim, out);
}

template <typename Element>
void gather_values(const Element* heap, std::int64_t page_stride,
                   const std::int64_t* page_table, std::int64_t rows,
                   std::int64_t pages_per_row, const PageLayout& layout, Element* out) {
  gather_plane(heap, page_stride, page_table, rows, pages_per_row, layout.values,
               layout.block_size, layout.head_dim, out);
}

}  // namespace kvp
