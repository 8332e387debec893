// The array of rows of fetch_tokens, checked alike for heaps on the CPU and on CUDA.
#pragma once

#include "binding.hpp"

namespace kvp::binding {

// It lies on the host, wherever the heap is.
inline void require_host_rows(const char* op, const HeapView& view, const Tensor& heap,
                              const Tensor& rows) {
  const Argument argument{op, "rows", rows};
  argument.require_dim(2);
  argument.require_type(heap.scalar_type());
  argument.require_contiguous();
  if (!rows.is_cpu() || rows.size(1) != view.head_dim) {
    fail(op, "rows must be [n, ", view.head_dim, "] on the CPU, got ", shape_of(rows));
  }
}

}  // namespace kvp::binding
