// Copies between pages and rows of tokens, and between slots of pages.
//
// Element is an unsigned integer of the element's size: all copies are bit for bit.
// The functions trust their index arguments (page_check.hpp checks them). Results do
// not depend on the number of threads: iterations write disjoint elements.
#pragma once

#include <cstdint>
#include <cstring>

#include "kvp/elements.hpp"
#include "kvp/for_all.hpp"
#include "kvp/paged_kv.hpp"
#include "kvp/transpose.hpp"

namespace kvp {

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

// Plane element (slot + i, d) = rows[i * head_dim + d], for `count` slots.
template <typename Element>
inline void store_rows(Element* page, const Plane& plane, std::int64_t slot,
                       std::int64_t count, std::int64_t block_size,
                       std::int64_t head_dim, const Element* rows) {
  if (plane.kind == PlaneKind::kTransposed) {
    transpose_into(rows, count, head_dim, page + plane.base + slot, block_size);
    return;
  }
  for (std::int64_t i = 0; i < count; ++i) {
    store_row(page, plane, slot + i, block_size, head_dim, rows + i * head_dim);
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

// The work of copying the keys and values of n tokens.
template <typename Element>
constexpr Work copy_work(std::int64_t n, std::int64_t head_dim) {
  return Work::bytes(2 * n * head_dim * std::int64_t{sizeof(Element)});
}

// Reads the keys and values of tokens into keys_out and values_out [n, head_dim],
// which must not overlap the pages.
//
// Cost: 4 * n * head_dim elements of traffic.
template <typename Element>
void gather_tokens(const PagedKV<const Element>& kv, const TokenSlots& tokens,
                   Element* keys_out, Element* values_out) {
  const std::int64_t head_dim = kv.head_dim(), block_size = kv.block_size();
  [[maybe_unused]] const Work work = copy_work<Element>(tokens.n, head_dim);
#pragma omp parallel for schedule(static) if (work.parallel())
  for (std::int64_t i = 0; i < tokens.n; ++i) {
    const Element* page = kv.page(tokens.pages[i]);
    load_row(page, kv.layout.keys, tokens.slots[i], block_size, head_dim,
             keys_out + i * head_dim);
    load_row(page, kv.layout.values, tokens.slots[i], block_size, head_dim,
             values_out + i * head_dim);
  }
}

// Writes tokens whose rows begin at key_of(i) and value_of(i). The (page, slot) pairs
// must be distinct.
template <typename Element, typename KeyOf, typename ValueOf>
void store_tokens(const PagedKV<Element>& kv, const TokenSlots& tokens,
                  const KeyOf& key_of, const ValueOf& value_of) {
  const std::int64_t head_dim = kv.head_dim(), block_size = kv.block_size();
  [[maybe_unused]] const Work work = copy_work<Element>(tokens.n, head_dim);
#pragma omp parallel for schedule(static) if (work.parallel())
  for (std::int64_t i = 0; i < tokens.n; ++i) {
    Element* page = kv.page(tokens.pages[i]);
    const std::int64_t slot = tokens.slots[i];
    store_row(page, kv.layout.keys, slot, block_size, head_dim, key_of(i));
    store_row(page, kv.layout.values, slot, block_size, head_dim, value_of(i));
  }
}

// Writes keys and values [n, head_dim] of tokens; the inverse of gather_tokens.
template <typename Element>
void scatter_tokens(const PagedKV<Element>& kv, const TokenSlots& tokens,
                    const Element* keys, const Element* values) {
  const std::int64_t dim = kv.head_dim();
  store_tokens(
      kv, tokens, [=](std::int64_t i) { return keys + i * dim; },
      [=](std::int64_t i) { return values + i * dim; });
}

// Like scatter_tokens, for rows anywhere in a matrix.
template <typename Element>
void fetch_tokens(const PagedKV<Element>& kv, const TokenSlots& tokens,
                  const TokenRows<Element>& from) {
  const std::int64_t dim = kv.head_dim();
  store_tokens(
      kv, tokens, [=](std::int64_t i) { return from.data + from.key_rows[i] * dim; },
      [=](std::int64_t i) { return from.data + from.value_rows[i] * dim; });
}

// Copies token i of `from` to token i of `to`. The destinations must be distinct and
// no destination may be a source: no iteration then reads what another one writes,
// and the order does not matter.
template <typename Element>
void move_tokens(const PagedKV<Element>& kv, const TokenSlots& from,
                 const TokenSlots& to) {
  const std::int64_t head_dim = kv.head_dim(), block_size = kv.block_size();
  [[maybe_unused]] const Work work = copy_work<Element>(from.n, head_dim);
#pragma omp parallel for schedule(static) if (work.parallel())
  for (std::int64_t i = 0; i < from.n; ++i) {
    const Element* source = kv.page(from.pages[i]);
    Element* target = kv.page(to.pages[i]);
    move_row(source, from.slots[i], target, to.slots[i], kv.layout.keys, block_size,
             head_dim);
    move_row(source, from.slots[i], target, to.slots[i], kv.layout.values, block_size,
             head_dim);
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

// Unpacks one plane of all pages of a table. `plane` is layout.keys or layout.values.
//
//   out: [rows, pages_per_row * block_size, head_dim], must not overlap the pages
//
// Rows follow each other without gaps in the table and in `out`, so the loop runs over
// a flat list of rows * pages_per_row pages.
template <typename Element>
void gather_plane(const PagedKV<const Element>& kv, const Plane& plane,
                  const PageTable<std::int64_t>& table, Element* out) {
  const std::int64_t n = table.rows * table.pages_per_row;
  const std::int64_t plane_elems = kv.layout.plane_elems();
  [[maybe_unused]] const Work work =
      Work::bytes(n * plane_elems * std::int64_t{sizeof(Element)});
#pragma omp parallel for schedule(static) if (work.parallel())
  for (std::int64_t i = 0; i < n; ++i) {
    unpack_plane(kv.page(table.ids[i]), plane, kv.block_size(), kv.head_dim(),
                 out + i * plane_elems);
  }
}

}  // namespace kvp
