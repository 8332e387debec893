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

#include "kvp/launch.cuh"

namespace kvp::cuda {

// The tables are device pointers, so whoever made them says whether the layout
// is natural (keys at 0, values at block_size * head_dim, a row per slot).
struct DeviceLayout {
  std::int64_t block_size;
  std::int64_t head_dim;
  const std::int32_t* k_offsets;
  const std::int32_t* v_offsets;
  bool natural;
};

struct DeviceHeap {
  std::int64_t num_pages;
  std::int64_t page_stride;  // elements
};

// Bytes that one thread copies at a time; 16 where sizes and addresses allow.
using Chunk = uint4;

inline bool in_chunks(const void* pointer, std::int64_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % sizeof(Chunk) == 0 &&
         bytes % static_cast<std::int64_t>(sizeof(Chunk)) == 0;
}

// Position of token `token`'s page in units of `Unit` elements of the heap.
__device__ inline std::int64_t page_start(const std::int64_t* pages,
                                          const std::int64_t* slots,
                                          std::int64_t token, DeviceHeap heap,
                                          std::int64_t block_size) {
  require_below(pages[token], heap.num_pages);
  require_below(slots[token], block_size);
  return pages[token] * heap.page_stride;
}

enum class Direction { kGather, kScatter };

// Rows <-> pages through the offset tables; a thread per (token, dimension).
template <typename Element, Direction kDirection>
__global__ void copy_elements(Element* heap_data, DeviceHeap heap,
                              const std::int64_t* pages,
                              const std::int64_t* slots, std::int64_t n,
                              DeviceLayout layout, Element* keys,
                              Element* values) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  const std::int64_t total = n * layout.head_dim;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
       i < total; i += step) {
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

// The same for the natural layout; a thread per 16 bytes of a row. All sizes
// are in chunks: page_stride of `heap`, row_chunks = bytes of a row / 16.
template <Direction kDirection>
__global__ void copy_chunks(Chunk* heap_data, DeviceHeap heap,
                            const std::int64_t* pages,
                            const std::int64_t* slots, std::int64_t n,
                            std::int64_t block_size, std::int64_t row_chunks,
                            Chunk* keys, Chunk* values) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  const std::int64_t total = n * row_chunks;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
       i < total; i += step) {
    const std::int64_t token = i / row_chunks;
    Chunk* key = heap_data + page_start(pages, slots, token, heap, block_size) +
                 slots[token] * row_chunks + (i - token * row_chunks);
    Chunk* value = key + block_size * row_chunks;
    if constexpr (kDirection == Direction::kGather) {
      keys[i] = *key;
      values[i] = *value;
    } else {
      *key = keys[i];
      *value = values[i];
    }
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
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
       i < total; i += step) {
    const std::int64_t token = i / layout.head_dim;
    const std::int64_t dim = i - token * layout.head_dim;
    const Element* from = heap_data + page_start(src_pages, src_slots, token,
                                                 heap, layout.block_size);
    Element* to = heap_data + page_start(dst_pages, dst_slots, token, heap,
                                         layout.block_size);
    const std::int64_t source = src_slots[token] * layout.head_dim + dim;
    const std::int64_t target = dst_slots[token] * layout.head_dim + dim;
    to[layout.k_offsets[target]] = from[layout.k_offsets[source]];
    to[layout.v_offsets[target]] = from[layout.v_offsets[source]];
  }
}

static __global__ void move_chunks(
    Chunk* heap_data, DeviceHeap heap, const std::int64_t* src_pages,
    const std::int64_t* src_slots, const std::int64_t* dst_pages,
    const std::int64_t* dst_slots, std::int64_t n, std::int64_t block_size,
    std::int64_t row_chunks) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  const std::int64_t total = n * row_chunks;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
       i < total; i += step) {
    const std::int64_t token = i / row_chunks;
    const std::int64_t chunk = i - token * row_chunks;
    const Chunk* from = heap_data +
                        page_start(src_pages, src_slots, token, heap,
                                   block_size) +
                        src_slots[token] * row_chunks + chunk;
    Chunk* to = heap_data +
                page_start(dst_pages, dst_slots, token, heap, block_size) +
                dst_slots[token] * row_chunks + chunk;
    const std::int64_t to_values = block_size * row_chunks;
    to[0] = from[0];
    to[to_values] = from[to_values];
  }
}

// Unpacks planes of whole pages; a thread per element. A negative natural_base
// means that `offsets` says where the elements lie.
template <typename Element>
__global__ void unpack_elements(const Element* heap_data, DeviceHeap heap,
                                const std::int64_t* page_table, std::int64_t n,
                                std::int64_t plane_elems,
                                const std::int32_t* offsets,
                                std::int64_t natural_base, Element* out) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  const std::int64_t total = n * plane_elems;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
       i < total; i += step) {
    const std::int64_t entry = i / plane_elems;
    const std::int64_t inside = i - entry * plane_elems;
    require_below(page_table[entry], heap.num_pages);
    const Element* page = heap_data + page_table[entry] * heap.page_stride;
    out[i] = page[natural_base >= 0 ? natural_base + inside : offsets[inside]];
  }
}

template <typename Element, Direction kDirection>
void copy_tokens(Element* heap_data, DeviceHeap heap, const std::int64_t* pages,
                 const std::int64_t* slots, std::int64_t n, DeviceLayout layout,
                 Element* keys, Element* values, cudaStream_t stream) {
  const std::int64_t row_bytes = layout.head_dim * std::int64_t{sizeof(Element)};
  const std::int64_t stride_bytes =
      heap.page_stride * std::int64_t{sizeof(Element)};
  if (n * layout.head_dim == 0) return;
  if (layout.natural && in_chunks(heap_data, stride_bytes) &&
      in_chunks(keys, row_bytes) && in_chunks(values, row_bytes)) {
    const std::int64_t row_chunks = row_bytes / std::int64_t{sizeof(Chunk)};
    heap.page_stride = stride_bytes / std::int64_t{sizeof(Chunk)};
    launch(copy_chunks<kDirection>, blocks_for(n * row_chunks), kThreads, stream,
           reinterpret_cast<Chunk*>(heap_data), heap, pages, slots, n,
           layout.block_size, row_chunks, reinterpret_cast<Chunk*>(keys),
           reinterpret_cast<Chunk*>(values));
    return;
  }
  launch(copy_elements<Element, kDirection>, blocks_for(n * layout.head_dim),
         kThreads, stream, heap_data, heap, pages, slots, n, layout, keys, values);
}

template <typename Element>
void gather_tokens(const Element* heap_data, DeviceHeap heap,
                   const std::int64_t* pages, const std::int64_t* slots,
                   std::int64_t n, DeviceLayout layout, Element* keys_out,
                   Element* values_out, cudaStream_t stream) {
  // The gather direction only reads the heap.
  copy_tokens<Element, Direction::kGather>(const_cast<Element*>(heap_data), heap,
                                           pages, slots, n, layout, keys_out,
                                           values_out, stream);
}

template <typename Element>
void scatter_tokens(Element* heap_data, DeviceHeap heap,
                    const std::int64_t* pages, const std::int64_t* slots,
                    std::int64_t n, DeviceLayout layout, const Element* keys,
                    const Element* values, cudaStream_t stream) {
  // The scatter direction only reads the rows.
  copy_tokens<Element, Direction::kScatter>(
      heap_data, heap, pages, slots, n, layout, const_cast<Element*>(keys),
      const_cast<Element*>(values), stream);
}

template <typename Element>
void move_tokens(Element* heap_data, DeviceHeap heap,
                 const std::int64_t* src_pages, const std::int64_t* src_slots,
                 const std::int64_t* dst_pages, const std::int64_t* dst_slots,
                 std::int64_t n, DeviceLayout layout, cudaStream_t stream) {
  const std::int64_t row_bytes = layout.head_dim * std::int64_t{sizeof(Element)};
  const std::int64_t stride_bytes =
      heap.page_stride * std::int64_t{sizeof(Element)};
  if (n * layout.head_dim == 0) return;
  if (layout.natural && in_chunks(heap_data, stride_bytes) &&
      in_chunks(heap_data, row_bytes)) {
    const std::int64_t row_chunks = row_bytes / std::int64_t{sizeof(Chunk)};
    heap.page_stride = stride_bytes / std::int64_t{sizeof(Chunk)};
    launch(move_chunks, blocks_for(n * row_chunks), kThreads, stream,
           reinterpret_cast<Chunk*>(heap_data), heap, src_pages, src_slots,
           dst_pages, dst_slots, n, layout.block_size, row_chunks);
    return;
  }
  launch(move_elements<Element>, blocks_for(n * layout.head_dim), kThreads, stream,
         heap_data, heap, src_pages, src_slots, dst_pages, dst_slots, n, layout);
}

template <typename Element>
void gather_plane(const Element* heap_data, DeviceHeap heap,
                  const std::int64_t* page_table, std::int64_t n,
                  std::int64_t plane_elems, const std::int32_t* offsets,
                  std::int64_t natural_base, Element* out,
                  cudaStream_t stream) {
  if (n * plane_elems == 0) return;
  constexpr std::int64_t kPerChunk = sizeof(Chunk) / sizeof(Element);
  const std::int64_t size = sizeof(Element);
  if (natural_base >= 0 && in_chunks(heap_data, heap.page_stride * size) &&
      in_chunks(out, plane_elems * size) && natural_base % kPerChunk == 0) {
    heap.page_stride /= kPerChunk;
    const std::int64_t chunks = plane_elems / kPerChunk;
    launch(unpack_elements<Chunk>, blocks_for(n * chunks), kThreads, stream,
           reinterpret_cast<const Chunk*>(heap_data), heap, page_table, n, chunks,
           offsets, natural_base / kPerChunk, reinterpret_cast<Chunk*>(out));
    return;
  }
  launch(unpack_elements<Element>, blocks_for(n * plane_elems), kThreads, stream,
         heap_data, heap, page_table, n, plane_elems, offsets, natural_base, out);
}

}  // namespace kvp::cuda
