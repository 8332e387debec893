// CUDA twins of the loops in page_copy.hpp: one launch per call, on plain
// pointers, a stream and sizes.
//
// Nothing is checked on the host, because the indices live on the device and
// reading them would wait for the stream. An index out of range traps instead:
// the launch fails with an error and no memory is corrupted. Duplicate
// destinations are not detected.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kvp/device_pages.cuh"
#include "kvp/launch.cuh"
#include "kvp/token_rows.hpp"

namespace kvp::cuda {

// The tables are device pointers, so whoever made them says whether keys and values
// are rows, as far apart.
struct DeviceLayout {
  std::int64_t block_size;
  std::int64_t head_dim;
  const std::int32_t* k_offsets;
  const std::int32_t* v_offsets;
  std::int64_t key_base, value_base;
  std::int64_t slot_stride;  // 0: as the tables say
};

inline bool at_chunk(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % sizeof(Chunk) == 0;
}

// Whether so many elements of one size are whole chunks, each number of them.
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

// Whether rows of pages can be copied in chunks.
template <typename Element>
bool rows_in_chunks(const Element* heap_data, DeviceHeap heap,
                    const DeviceLayout& layout) {
  return layout.slot_stride > 0 && at_chunk(heap_data) &&
         in_chunks<Element>(heap.page_stride, layout.slot_stride, layout.key_base,
                            layout.value_base, layout.head_dim);
}

// Layout and heap with all sizes in chunks instead of elements.
template <typename Element>
void to_chunks(DeviceHeap& heap, DeviceLayout& layout) {
  heap.page_stride = chunks_of<Element>(heap.page_stride);
  layout.head_dim = chunks_of<Element>(layout.head_dim);
  layout.slot_stride = chunks_of<Element>(layout.slot_stride);
  layout.key_base = chunks_of<Element>(layout.key_base);
  layout.value_base = chunks_of<Element>(layout.value_base);
}

// Position of token `token`'s page in units of `Unit` elements of the heap.
__device__ inline std::int64_t page_start(const std::int64_t* pages,
                                          const std::int64_t* slots, std::int64_t token,
                                          DeviceHeap heap, std::int64_t block_size) {
  require_below(pages[token], heap.num_pages);
  require_below(slots[token], block_size);
  return pages[token] * heap.page_stride;
}

enum class Direction { kGather, kScatter };

// Rows <-> pages through the offset tables; a thread per (token, dimension).
template <typename Element, Direction kDirection>
__global__ void copy_elements(Element* heap_data, DeviceHeap heap,
                              const std::int64_t* pages, const std::int64_t* slots,
                              std::int64_t n, DeviceLayout layout, Element* keys,
                              Element* values) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  const std::int64_t total = n * layout.head_dim;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < total;
       i += step) {
    const std::int64_t token = i / layout.head_dim;
    Element* page =
        heap_data + page_start(pages, slots, token, heap, layout.block_size);
    const std::int64_t entry =
        slots[token] * layout.head_dim + (i - token * layout.head_dim);
    if constexpr (kDirection == Direction::kGather) {
      keys[i] = page[layout.k_offsets[entry]];
      values[i] = page[layout.v_offsets[entry]];
    } else {
      page[layout.k_offsets[entry]] = keys[i];
      page[layout.v_offsets[entry]] = values[i];
    }
  }
}

// The same where keys and values are rows; a thread per 16 bytes of a row. All sizes
// are in chunks (to_chunks).
template <Direction kDirection>
__global__ void copy_chunks(Chunk* heap_data, DeviceHeap heap,
                            const std::int64_t* pages, const std::int64_t* slots,
                            std::int64_t n, DeviceLayout layout, Chunk* keys,
                            Chunk* values) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  const std::int64_t total = n * layout.head_dim;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < total;
       i += step) {
    const std::int64_t token = i / layout.head_dim;
    Chunk* row = heap_data + page_start(pages, slots, token, heap, layout.block_size) +
                 slots[token] * layout.slot_stride + (i - token * layout.head_dim);
    Chunk* key = row + layout.key_base;
    Chunk* value = row + layout.value_base;
    if constexpr (kDirection == Direction::kGather) {
      keys[i] = *key;
      values[i] = *value;
    } else {
      *key = keys[i];
      *value = values[i];
    }
  }
}

// Rows of one token that are fetched: out of the host's memory, which must be pinned,
// mapped, and at the same address, and must not change until the kernel is over.
template <typename Unit>
struct FetchedRow {
  const Unit* key;
  const Unit* value;
};

template <typename Unit>
__device__ FetchedRow<Unit> row_of(const TokenRows<Unit>& from, std::int64_t token,
                                   std::int64_t row_units) {
  const std::int64_t key = from.keys[token], value = from.values[token];
  require_below(key, from.num_rows);
  require_below(value, from.num_rows);
  return {from.data + key * row_units, from.data + value * row_units};
}

// Rows of the host to their slots through the offset tables; a thread per (token,
// dimension).
template <typename Element>
__global__ void fetch_elements(Element* heap_data, DeviceHeap heap,
                               const std::int64_t* pages, const std::int64_t* slots,
                               std::int64_t n, DeviceLayout layout,
                               TokenRows<Element> from) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  const std::int64_t total = n * layout.head_dim;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < total;
       i += step) {
    const std::int64_t token = i / layout.head_dim;
    const std::int64_t dim = i - token * layout.head_dim;
    const FetchedRow<Element> row = row_of(from, token, layout.head_dim);
    Element* page =
        heap_data + page_start(pages, slots, token, heap, layout.block_size);
    const std::int64_t entry = slots[token] * layout.head_dim + dim;
    // Both are on their way before either is waited for.
    const Element key = row.key[dim], value = row.value[dim];
    page[layout.k_offsets[entry]] = key;
    page[layout.v_offsets[entry]] = value;
  }
}

// The same where slots are rows too; a thread per 16 bytes. All sizes are in chunks.
static __global__ void fetch_chunks(Chunk* heap_data, DeviceHeap heap,
                                    const std::int64_t* pages,
                                    const std::int64_t* slots, std::int64_t n,
                                    DeviceLayout layout, TokenRows<Chunk> from) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  const std::int64_t total = n * layout.head_dim;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < total;
       i += step) {
    const std::int64_t token = i / layout.head_dim;
    const std::int64_t chunk = i - token * layout.head_dim;
    const FetchedRow<Chunk> row = row_of(from, token, layout.head_dim);
    Chunk* to = heap_data + page_start(pages, slots, token, heap, layout.block_size) +
                slots[token] * layout.slot_stride + chunk;
    const Chunk key = row.key[chunk], value = row.value[chunk];
    to[layout.key_base] = key;
    to[layout.value_base] = value;
  }
}

template <typename Element>
__global__ void move_elements(Element* heap_data, DeviceHeap heap,
                              const std::int64_t* src_pages,
                              const std::int64_t* src_slots,
                              const std::int64_t* dst_pages,
                              const std::int64_t* dst_slots, std::int64_t n,
                              DeviceLayout layout) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  const std::int64_t total = n * layout.head_dim;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < total;
       i += step) {
    const std::int64_t token = i / layout.head_dim;
    const std::int64_t dim = i - token * layout.head_dim;
    const Element* from =
        heap_data + page_start(src_pages, src_slots, token, heap, layout.block_size);
    Element* to =
        heap_data + page_start(dst_pages, dst_slots, token, heap, layout.block_size);
    const std::int64_t source = src_slots[token] * layout.head_dim + dim;
    const std::int64_t target = dst_slots[token] * layout.head_dim + dim;
    to[layout.k_offsets[target]] = from[layout.k_offsets[source]];
    to[layout.v_offsets[target]] = from[layout.v_offsets[source]];
  }
}

static __global__ void move_chunks(Chunk* heap_data, DeviceHeap heap,
                                   const std::int64_t* src_pages,
                                   const std::int64_t* src_slots,
                                   const std::int64_t* dst_pages,
                                   const std::int64_t* dst_slots, std::int64_t n,
                                   DeviceLayout layout) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  const std::int64_t total = n * layout.head_dim;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < total;
       i += step) {
    const std::int64_t token = i / layout.head_dim;
    const std::int64_t chunk = i - token * layout.head_dim;
    const Chunk* from =
        heap_data + page_start(src_pages, src_slots, token, heap, layout.block_size) +
        src_slots[token] * layout.slot_stride + chunk;
    Chunk* to = heap_data +
                page_start(dst_pages, dst_slots, token, heap, layout.block_size) +
                dst_slots[token] * layout.slot_stride + chunk;
    to[layout.key_base] = from[layout.key_base];
    to[layout.value_base] = from[layout.value_base];
  }
}

// Unpacks planes of whole pages; a thread per element.
template <typename Element>
__global__ void unpack_elements(const Element* heap_data, DeviceHeap heap,
                                const std::int64_t* page_table, std::int64_t n,
                                std::int64_t plane_elems, const std::int32_t* offsets,
                                Element* out) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  const std::int64_t total = n * plane_elems;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < total;
       i += step) {
    const std::int64_t entry = i / plane_elems;
    const std::int64_t inside = i - entry * plane_elems;
    require_below(page_table[entry], heap.num_pages);
    const Element* page = heap_data + page_table[entry] * heap.page_stride;
    out[i] = page[offsets[inside]];
  }
}

// The same for planes of rows; sizes in chunks.
static __global__ void unpack_chunks(const Chunk* heap_data, DeviceHeap heap,
                                     const std::int64_t* page_table, std::int64_t n,
                                     std::int64_t plane_elems, std::int64_t row_elems,
                                     DeviceRows rows, Chunk* out) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  const std::int64_t total = n * plane_elems;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < total;
       i += step) {
    const std::int64_t entry = i / plane_elems;
    const std::int64_t inside = i - entry * plane_elems;
    const std::int64_t slot = inside / row_elems;
    require_below(page_table[entry], heap.num_pages);
    out[i] = heap_data[page_table[entry] * heap.page_stride + rows.base +
                       slot * rows.slot_stride + (inside - slot * row_elems)];
  }
}

template <typename Element, Direction kDirection>
void copy_tokens(Element* heap_data, DeviceHeap heap, const std::int64_t* pages,
                 const std::int64_t* slots, std::int64_t n, DeviceLayout layout,
                 Element* keys, Element* values, cudaStream_t stream) {
  if (n * layout.head_dim == 0) return;
  if (rows_in_chunks(heap_data, heap, layout) && at_chunk(keys) && at_chunk(values)) {
    to_chunks<Element>(heap, layout);
    launch(copy_chunks<kDirection>, blocks_for(n * layout.head_dim), kThreads, stream,
           reinterpret_cast<Chunk*>(heap_data), heap, pages, slots, n, layout,
           reinterpret_cast<Chunk*>(keys), reinterpret_cast<Chunk*>(values));
    return;
  }
  launch(copy_elements<Element, kDirection>, blocks_for(n * layout.head_dim), kThreads,
         stream, heap_data, heap, pages, slots, n, layout, keys, values);
}

template <typename Element>
void gather_tokens(const Element* heap_data, DeviceHeap heap, const std::int64_t* pages,
                   const std::int64_t* slots, std::int64_t n, DeviceLayout layout,
                   Element* keys_out, Element* values_out, cudaStream_t stream) {
  // The gather direction only reads the heap.
  copy_tokens<Element, Direction::kGather>(const_cast<Element*>(heap_data), heap, pages,
                                           slots, n, layout, keys_out, values_out,
                                           stream);
}

template <typename Element>
void scatter_tokens(Element* heap_data, DeviceHeap heap, const std::int64_t* pages,
                    const std::int64_t* slots, std::int64_t n, DeviceLayout layout,
                    const Element* keys, const Element* values, cudaStream_t stream) {
  // The scatter direction only reads the rows.
  copy_tokens<Element, Direction::kScatter>(heap_data, heap, pages, slots, n, layout,
                                            const_cast<Element*>(keys),
                                            const_cast<Element*>(values), stream);
}

// See kvp::fetch_tokens.
template <typename Element>
void fetch_tokens(Element* heap_data, DeviceHeap heap, const std::int64_t* pages,
                  const std::int64_t* slots, std::int64_t n, DeviceLayout layout,
                  const TokenRows<Element>& from, cudaStream_t stream) {
  if (n * layout.head_dim == 0) return;
  if (rows_in_chunks(heap_data, heap, layout) && at_chunk(from.data)) {
    to_chunks<Element>(heap, layout);
    const TokenRows<Chunk> chunks{reinterpret_cast<const Chunk*>(from.data),
                                  from.num_rows, from.keys, from.values};
    launch(fetch_chunks, blocks_for(n * layout.head_dim), kThreads, stream,
           reinterpret_cast<Chunk*>(heap_data), heap, pages, slots, n, layout, chunks);
    return;
  }
  launch(fetch_elements<Element>, blocks_for(n * layout.head_dim), kThreads, stream,
         heap_data, heap, pages, slots, n, layout, from);
}

template <typename Element>
void move_tokens(Element* heap_data, DeviceHeap heap, const std::int64_t* src_pages,
                 const std::int64_t* src_slots, const std::int64_t* dst_pages,
                 const std::int64_t* dst_slots, std::int64_t n, DeviceLayout layout,
                 cudaStream_t stream) {
  if (n * layout.head_dim == 0) return;
  if (rows_in_chunks(heap_data, heap, layout)) {
    to_chunks<Element>(heap, layout);
    launch(move_chunks, blocks_for(n * layout.head_dim), kThreads, stream,
           reinterpret_cast<Chunk*>(heap_data), heap, src_pages, src_slots, dst_pages,
           dst_slots, n, layout);
    return;
  }
  launch(move_elements<Element>, blocks_for(n * layout.head_dim), kThreads, stream,
         heap_data, heap, src_pages, src_slots, dst_pages, dst_slots, n, layout);
}

// See kvp::gather_plane. `rows` says where a plane of rows lies, `offsets` where any.
template <typename Element>
void gather_plane(const Element* heap_data, DeviceHeap heap,
                  const std::int64_t* page_table, std::int64_t n,
                  std::int64_t block_size, std::int64_t head_dim,
                  const std::int32_t* offsets, DeviceRows rows, Element* out,
                  cudaStream_t stream) {
  const std::int64_t plane_elems = block_size * head_dim;
  if (n * plane_elems == 0) return;
  // Rows without gaps are one long row.
  const std::int64_t row_elems = rows.slot_stride == head_dim ? plane_elems : head_dim;
  if (rows.slot_stride == head_dim) rows.slot_stride = plane_elems;
  if (rows.slot_stride > 0 && at_chunk(heap_data) && at_chunk(out) &&
      in_chunks<Element>(heap.page_stride, row_elems, rows.base, rows.slot_stride)) {
    heap.page_stride = chunks_of<Element>(heap.page_stride);
    rows = {chunks_of<Element>(rows.base), chunks_of<Element>(rows.slot_stride)};
    const std::int64_t chunks = chunks_of<Element>(plane_elems);
    launch(unpack_chunks, blocks_for(n * chunks), kThreads, stream,
           reinterpret_cast<const Chunk*>(heap_data), heap, page_table, n, chunks,
           chunks_of<Element>(row_elems), rows, reinterpret_cast<Chunk*>(out));
    return;
  }
  launch(unpack_elements<Element>, blocks_for(n * plane_elems), kThreads, stream,
         heap_data, heap, page_table, n, plane_elems, offsets, out);
}

}  // namespace kvp::cuda
