// The copies of page_copy.hpp on CUDA: one launch per call, on plain pointers, a
// stream and sizes. Planes come from device_plane(): offset tables are on the device.
//
// The host checks nothing, because the indices are on the device and reading them
// would wait for the stream. An index out of range traps instead: the launch fails
// with an error and no memory is corrupted. Duplicate destinations go undetected.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kvp/launch.cuh"
#include "kvp/paged_kv.hpp"

namespace kvp::cuda {

inline bool at_chunk(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % sizeof(Chunk) == 0;
}

// Whether every given number of elements is a multiple of the chunk size.
template <typename Element, typename... Counts>
bool in_chunks(Counts... counts) {
  constexpr auto kPerChunk = static_cast<std::int64_t>(sizeof(Chunk) / sizeof(Element));
  return ((counts % kPerChunk == 0) && ...);
}

// The same sizes in chunks.
template <typename Element>
std::int64_t chunks_of(std::int64_t elements) {
  return elements / static_cast<std::int64_t>(sizeof(Chunk) / sizeof(Element));
}

// Whether keys and values are rows at equal distances that can be copied in chunks.
template <typename Element>
bool rows_in_chunks(const PagedKV<Element>& kv) {
  const Plane &keys = kv.layout.keys, &values = kv.layout.values;
  return keys.kind == PlaneKind::kRows && values.kind == PlaneKind::kRows &&
         keys.slot_stride == values.slot_stride && at_chunk(kv.pages) &&
         in_chunks<Element>(kv.page_stride, keys.slot_stride, keys.base, values.base,
                            kv.head_dim());
}

template <typename Element>
Plane plane_in_chunks(const Plane& plane) {
  return {plane.offsets, plane.kind, chunks_of<Element>(plane.base),
          chunks_of<Element>(plane.slot_stride)};
}

// The same pages with all sizes in chunks instead of elements.
template <typename Element>
PagedKV<Chunk> to_chunks(const PagedKV<Element>& kv) {
  return {reinterpret_cast<Chunk*>(kv.pages),
          kv.num_pages,
          chunks_of<Element>(kv.page_stride),
          {kv.block_size(), chunks_of<Element>(kv.head_dim()),
           plane_in_chunks<Element>(kv.layout.keys),
           plane_in_chunks<Element>(kv.layout.values)}};
}

// The page of a token, checked.
template <typename Unit>
__device__ inline Unit* page_of(const PagedKV<Unit>& kv, const TokenSlots& tokens,
                                std::int64_t token) {
  require_below(tokens.pages[token], kv.num_pages);
  require_below(tokens.slots[token], kv.block_size());
  return kv.page(tokens.pages[token]);
}

// The key of a token in pages of rows. Its value is values.base - keys.base elements
// later.
template <typename Unit>
__device__ inline Unit* row_of(const PagedKV<Unit>& kv, const TokenSlots& tokens,
                               std::int64_t token) {
  return page_of(kv, tokens, token) + tokens.slots[token] * kv.layout.keys.slot_stride;
}

// Calls body(token, dim) for each token and each unit of its row; a thread per pair.
template <typename Body>
__device__ inline void for_each_unit(std::int64_t n, std::int64_t row_units,
                                     const Body& body) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
       i < n * row_units; i += step) {
    const std::int64_t token = i / row_units;
    body(token, i - token * row_units);
  }
}

enum class Direction { kGather, kScatter };

// Copies between rows and pages through the offset tables; a thread per element.
template <typename Element, Direction kDirection>
__global__ void copy_elements(PagedKV<Element> kv, TokenSlots tokens, Element* keys,
                              Element* values) {
  const std::int64_t dims = kv.head_dim();
  for_each_unit(tokens.n, dims, [&](std::int64_t token, std::int64_t dim) {
    Element* page = page_of(kv, tokens, token);
    const std::int64_t entry = tokens.slots[token] * dims + dim;
    const std::int64_t i = token * dims + dim;
    if constexpr (kDirection == Direction::kGather) {
      keys[i] = page[kv.layout.keys.offsets[entry]];
      values[i] = page[kv.layout.values.offsets[entry]];
    } else {
      page[kv.layout.keys.offsets[entry]] = keys[i];
      page[kv.layout.values.offsets[entry]] = values[i];
    }
  });
}

// The same for keys and values that are rows; a thread per 16 bytes of a row. All sizes
// are in chunks (to_chunks).
template <Direction kDirection>
__global__ void copy_chunks(PagedKV<Chunk> kv, TokenSlots tokens, Chunk* keys,
                            Chunk* values) {
  const std::int64_t units = kv.head_dim();
  for_each_unit(tokens.n, units, [&](std::int64_t token, std::int64_t unit) {
    Chunk* row = row_of(kv, tokens, token) + unit;
    Chunk* key = row + kv.layout.keys.base;
    Chunk* value = row + kv.layout.values.base;
    const std::int64_t i = token * units + unit;
    if constexpr (kDirection == Direction::kGather) {
      keys[i] = *key;
      values[i] = *value;
    } else {
      *key = keys[i];
      *value = values[i];
    }
  });
}

// The key and value rows of a fetched token. They are in host memory that is pinned,
// mapped at the same address, and unchanged until the kernel has finished.
template <typename Unit>
struct FetchedRow {
  const Unit* key;
  const Unit* value;
};

template <typename Unit>
__device__ FetchedRow<Unit> fetched_row(const TokenRows<Unit>& from, std::int64_t token,
                                        std::int64_t row_units) {
  const std::int64_t key = from.key_rows[token], value = from.value_rows[token];
  require_below(key, from.num_rows);
  require_below(value, from.num_rows);
  return {from.data + key * row_units, from.data + value * row_units};
}

// Copies host rows to slots through the offset tables; a thread per element.
template <typename Element>
__global__ void fetch_elements(PagedKV<Element> kv, TokenSlots tokens,
                               TokenRows<Element> from) {
  const std::int64_t dims = kv.head_dim();
  for_each_unit(tokens.n, dims, [&](std::int64_t token, std::int64_t dim) {
    const FetchedRow<Element> row = fetched_row(from, token, dims);
    Element* page = page_of(kv, tokens, token);
    const std::int64_t entry = tokens.slots[token] * dims + dim;
    // Issue both loads before waiting for either.
    const Element key = row.key[dim], value = row.value[dim];
    page[kv.layout.keys.offsets[entry]] = key;
    page[kv.layout.values.offsets[entry]] = value;
  });
}

// The same for slots that are rows; a thread per 16 bytes. All sizes are in chunks.
static __global__ void fetch_chunks(PagedKV<Chunk> kv, TokenSlots tokens,
                                    TokenRows<Chunk> from) {
  const std::int64_t units = kv.head_dim();
  for_each_unit(tokens.n, units, [&](std::int64_t token, std::int64_t unit) {
    const FetchedRow<Chunk> row = fetched_row(from, token, units);
    Chunk* to = row_of(kv, tokens, token) + unit;
    const Chunk key = row.key[unit], value = row.value[unit];
    to[kv.layout.keys.base] = key;
    to[kv.layout.values.base] = value;
  });
}

template <typename Element>
__global__ void move_elements(PagedKV<Element> kv, TokenSlots from, TokenSlots to) {
  const std::int64_t dims = kv.head_dim();
  const Plane &keys = kv.layout.keys, &values = kv.layout.values;
  for_each_unit(from.n, dims, [&](std::int64_t token, std::int64_t dim) {
    const Element* source = page_of(kv, from, token);
    Element* target = page_of(kv, to, token);
    const std::int64_t source_entry = from.slots[token] * dims + dim;
    const std::int64_t target_entry = to.slots[token] * dims + dim;
    target[keys.offsets[target_entry]] = source[keys.offsets[source_entry]];
    target[values.offsets[target_entry]] = source[values.offsets[source_entry]];
  });
}

static __global__ void move_chunks(PagedKV<Chunk> kv, TokenSlots from, TokenSlots to) {
  const Plane &keys = kv.layout.keys, &values = kv.layout.values;
  for_each_unit(from.n, kv.head_dim(), [&](std::int64_t token, std::int64_t unit) {
    const Chunk* source = row_of(kv, from, token) + unit;
    Chunk* target = row_of(kv, to, token) + unit;
    target[keys.base] = source[keys.base];
    target[values.base] = source[values.base];
  });
}

// Entry `entry` of a page table, checked.
template <typename Unit>
__device__ inline const Unit* listed_page(const PagedKV<const Unit>& kv,
                                          const PageTable<std::int64_t>& table,
                                          std::int64_t entry) {
  require_below(table.ids[entry], kv.num_pages);
  return kv.page(table.ids[entry]);
}

// Unpacks a plane of all listed pages; a thread per element.
template <typename Element>
__global__ void unpack_elements(PagedKV<const Element> kv, Plane plane,
                                PageTable<std::int64_t> table, Element* out) {
  const std::int64_t plane_elems = kv.block_size() * kv.head_dim();
  for_each_unit(table.rows * table.pages_per_row, plane_elems,
                [&](std::int64_t entry, std::int64_t inside) {
                  out[entry * plane_elems + inside] =
                      listed_page(kv, table, entry)[plane.offsets[inside]];
                });
}

// The same for planes of rows of row_units each; all sizes are in chunks.
static __global__ void unpack_chunks(PagedKV<const Chunk> kv, Plane plane,
                                     PageTable<std::int64_t> table,
                                     std::int64_t row_units, Chunk* out) {
  const std::int64_t plane_units = kv.block_size() * kv.head_dim();
  for_each_unit(
      table.rows * table.pages_per_row, plane_units,
      [&](std::int64_t entry, std::int64_t inside) {
        const std::int64_t slot = inside / row_units;
        out[entry * plane_units + inside] = listed_page(
            kv, table,
            entry)[plane.base + slot * plane.slot_stride + (inside - slot * row_units)];
      });
}

template <typename Element, Direction kDirection>
void copy_tokens(const PagedKV<Element>& kv, const TokenSlots& tokens, Element* keys,
                 Element* values, cudaStream_t stream) {
  if (tokens.n * kv.head_dim() == 0) return;
  if (rows_in_chunks(kv) && at_chunk(keys) && at_chunk(values)) {
    const PagedKV<Chunk> chunks = to_chunks(kv);
    launch(copy_chunks<kDirection>, blocks_for(tokens.n * chunks.head_dim()), kThreads,
           stream, chunks, tokens, reinterpret_cast<Chunk*>(keys),
           reinterpret_cast<Chunk*>(values));
    return;
  }
  launch(copy_elements<Element, kDirection>, blocks_for(tokens.n * kv.head_dim()),
         kThreads, stream, kv, tokens, keys, values);
}

// See kvp::gather_tokens.
template <typename Element>
void gather_tokens(const PagedKV<const Element>& kv, const TokenSlots& tokens,
                   Element* keys_out, Element* values_out, cudaStream_t stream) {
  // The gather direction only reads the pages.
  const PagedKV<Element> pages{const_cast<Element*>(kv.pages), kv.num_pages,
                               kv.page_stride, kv.layout};
  copy_tokens<Element, Direction::kGather>(pages, tokens, keys_out, values_out, stream);
}

// See kvp::scatter_tokens.
template <typename Element>
void scatter_tokens(const PagedKV<Element>& kv, const TokenSlots& tokens,
                    const Element* keys, const Element* values, cudaStream_t stream) {
  // The scatter direction only reads the rows.
  copy_tokens<Element, Direction::kScatter>(kv, tokens, const_cast<Element*>(keys),
                                            const_cast<Element*>(values), stream);
}

// See kvp::fetch_tokens.
template <typename Element>
void fetch_tokens(const PagedKV<Element>& kv, const TokenSlots& tokens,
                  const TokenRows<Element>& from, cudaStream_t stream) {
  if (tokens.n * kv.head_dim() == 0) return;
  if (rows_in_chunks(kv) && at_chunk(from.data)) {
    const PagedKV<Chunk> chunks = to_chunks(kv);
    const TokenRows<Chunk> rows{reinterpret_cast<const Chunk*>(from.data),
                                from.num_rows, from.key_rows, from.value_rows};
    launch(fetch_chunks, blocks_for(tokens.n * chunks.head_dim()), kThreads, stream,
           chunks, tokens, rows);
    return;
  }
  launch(fetch_elements<Element>, blocks_for(tokens.n * kv.head_dim()), kThreads,
         stream, kv, tokens, from);
}

// See kvp::move_tokens.
template <typename Element>
void move_tokens(const PagedKV<Element>& kv, const TokenSlots& from,
                 const TokenSlots& to, cudaStream_t stream) {
  if (from.n * kv.head_dim() == 0) return;
  if (rows_in_chunks(kv)) {
    const PagedKV<Chunk> chunks = to_chunks(kv);
    launch(move_chunks, blocks_for(from.n * chunks.head_dim()), kThreads, stream,
           chunks, from, to);
    return;
  }
  launch(move_elements<Element>, blocks_for(from.n * kv.head_dim()), kThreads, stream,
         kv, from, to);
}

// See kvp::gather_plane.
template <typename Element>
void gather_plane(const PagedKV<const Element>& kv, Plane plane,
                  const PageTable<std::int64_t>& table, Element* out,
                  cudaStream_t stream) {
  const std::int64_t plane_elems = kv.layout.plane_elems();
  const std::int64_t pages = table.rows * table.pages_per_row;
  if (pages * plane_elems == 0) return;
  // Rows without gaps are one long row.
  const bool one_row = plane.is_matrix(kv.head_dim());
  const std::int64_t row_elems = one_row ? plane_elems : kv.head_dim();
  if (one_row) plane.slot_stride = plane_elems;
  if (plane.kind == PlaneKind::kRows && at_chunk(kv.pages) && at_chunk(out) &&
      in_chunks<Element>(kv.page_stride, row_elems, plane.base, plane.slot_stride,
                         plane_elems)) {
    // Only the product of block size and head_dim counts in this kernel.
    const PagedKV<const Chunk> chunks{reinterpret_cast<const Chunk*>(kv.pages),
                                      kv.num_pages,
                                      chunks_of<Element>(kv.page_stride),
                                      {1, chunks_of<Element>(plane_elems), {}, {}}};
    launch(unpack_chunks, blocks_for(pages * chunks.head_dim()), kThreads, stream,
           chunks, plane_in_chunks<Element>(plane), table,
           chunks_of<Element>(row_elems), reinterpret_cast<Chunk*>(out));
    return;
  }
  launch(unpack_elements<Element>, blocks_for(pages * plane_elems), kThreads, stream,
         kv, plane, table, out);
}

}  // namespace kvp::cuda
