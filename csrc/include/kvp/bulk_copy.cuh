// Bulk copies on CUDA: one launch per call, on plain pointers and a stream.
//
// As in page_copy.cuh, the host checks nothing: a page out of range traps, duplicate
// targets go undetected.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kvp/launch.cuh"

namespace kvp::cuda {

// One side of a copy; sizes in bytes for callers, in units inside the kernel.
struct PageList {
  std::int64_t num_pages;
  std::int64_t stride;
  const std::int64_t* ids;  // null: 0, 1, 2, ...
};

__device__ inline std::int64_t start_of(const PageList& list, std::int64_t i) {
  const std::int64_t page = list.ids != nullptr ? list.ids[i] : i;
  require_below(page, list.num_pages);
  return page * list.stride;
}

// A block per page: its index is read once, and no thread divides.
template <typename Unit>
__global__ void copy_whole_pages(Unit* target, PageList to, const Unit* source,
                                 PageList from, std::int64_t n,
                                 std::int64_t page_units) {
  for (std::int64_t i = blockIdx.x; i < n; i += gridDim.x) {
    Unit* into = target + start_of(to, i);
    const Unit* out_of = source + start_of(from, i);
    for (std::int64_t unit = threadIdx.x; unit < page_units; unit += blockDim.x) {
      into[unit] = out_of[unit];
    }
  }
}

template <typename Unit>
bool in_units(const void* pointer, const PageList& list, std::int64_t page_bytes) {
  const auto size = static_cast<std::int64_t>(sizeof(Unit));
  return reinterpret_cast<std::uintptr_t>(pointer) % sizeof(Unit) == 0 &&
         list.stride % size == 0 && page_bytes % size == 0;
}

template <typename Unit>
void launch_copy(void* target, PageList to, const void* source, PageList from,
                 std::int64_t n, std::int64_t page_bytes, cudaStream_t stream) {
  const auto size = static_cast<std::int64_t>(sizeof(Unit));
  to.stride /= size;
  from.stride /= size;
  launch(copy_whole_pages<Unit>, at_most_blocks(n), kThreads, stream,
         static_cast<Unit*>(target), to, static_cast<const Unit*>(source), from, n,
         page_bytes / size);
}

// See bulk::copy_pages. Copies units of 16 bytes if all addresses allow it, otherwise of
// 4, otherwise single bytes.
inline void copy_pages(void* target, const PageList& to, const void* source,
                       const PageList& from, std::int64_t n, std::int64_t page_bytes,
                       cudaStream_t stream) {
  if (n * page_bytes == 0) return;
  if (in_units<Chunk>(target, to, page_bytes) &&
      in_units<Chunk>(source, from, page_bytes)) {
    launch_copy<Chunk>(target, to, source, from, n, page_bytes, stream);
  } else if (in_units<std::uint32_t>(target, to, page_bytes) &&
             in_units<std::uint32_t>(source, from, page_bytes)) {
    launch_copy<std::uint32_t>(target, to, source, from, n, page_bytes, stream);
  } else {
    launch_copy<std::uint8_t>(target, to, source, from, n, page_bytes, stream);
  }
}

}  // namespace kvp::cuda
