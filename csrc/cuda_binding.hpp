// Helpers of the CUDA bindings.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>

#include <cstdint>

#include <cuda_runtime.h>

#include "binding.hpp"

namespace kvp::binding {

using torch::stable::accelerator::DeviceGuard;

// torch's current stream on the device of a tensor.
inline cudaStream_t stream_of(const Tensor& tensor) {
  void* stream = nullptr;
  // torch 2.11 has no STABLE_TORCH_ERROR_CODE_CHECK
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

// Checks that the rows that a caller describes are within a page.
inline void require_rows_inside(const char* op, const char* name, const HeapView& view,
                                std::int64_t base, std::int64_t slot_stride) {
  const std::int64_t page_elems = 2 * view.plane_elems;
  const std::int64_t room = page_elems - view.head_dim - base;
  if (base >= 0 && slot_stride >= 0 && room >= 0 &&
      (slot_stride == 0 || room / slot_stride >= view.block_size - 1)) {
    return;
  }
  fail(op, name, " and slot_stride must name rows within a page of ", page_elems,
       " elements, got ", base, " and ", slot_stride);
}

}  // namespace kvp::binding
