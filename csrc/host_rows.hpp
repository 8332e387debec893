// The check of fetch_tokens' host rows, shared by its CPU and CUDA bindings.
#pragma once

#include "binding.hpp"

namespace kvp::binding {

// The rows are on the host, whatever the device of the heap.
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
